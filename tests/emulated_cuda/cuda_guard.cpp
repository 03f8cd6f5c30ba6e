// What torch asks of CUDA in C++, for a build of torch for CPUs: a device guard and hooks that name
// the GPUs of a machine and this process's own one, and do nothing. With them tensors may say that
// they are on cuda:0.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
DeviceIndex own = 0;    // the GPU of this process
DeviceIndex count = 1;  // GPUs of the machine

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device) const override { return Device(CUDA, own); }
  Device getDevice() const override { return Device(CUDA, own); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

// The autograd engine asks them for the streams of the caller.
struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return count; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return own; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return own; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return own; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

}  // namespace

extern "C" void emulate_cuda(int gpu, int gpus) {
  own = static_cast<DeviceIndex>(gpu);
  count = static_cast<DeviceIndex>(gpus);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(new Guard());
  // While it is imported, torch looks for hooks and keeps what it finds: here an object without
  // data, whose functions are replaced. LD_PRELOAD with registered hooks would be the clean way. It
  // needs a process that imports everything again, 7 s instead of 0.1 s for a fork.
  auto* found = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  new (found) Hooks();
}
