"""Runs of recipes/finetuning.py, one after the other, started by torchrun for benchmarks/planner/plan.py.
Their tensors are counted by phase.

On the CPU torch's allocator is replaced by one that counts (tensor_bytes.cpp): exact bytes, on all
threads, including those of gloo and autograd. The profiler's memory events miss threads that it
does not know (1.2% difference on one rank). On CUDA it is torch.cuda.max_memory_allocated. Counting
begins with the construction of the model.
"""

import ctypes
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "src"))

import torch

from llama_ft import observe, training
from llama_ft.config.reading.parse import as_keywords
from llama_ft.phases import Phase
from llama_ft.plan import spare_memory

FRAMES = 6  # of a stack, in a dump
DUMPED = 40  # places, the largest first


class TensorBytes(Protocol):
    """What is allocated for tensors on a device."""

    def now(self) -> int: ...

    def peak(self) -> int:
        """The most since `reset`."""

    def reset(self) -> None: ...


class HostBytes:
    """Tensors in host memory, of whichever thread. The library stays loaded, and its allocator
    torch's, to the end."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("tensor_bytes_now", "tensor_bytes_peak"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.tensor_bytes_install()
        self._callback: Any = None

    def now(self) -> int:
        return int(self._library.tensor_bytes_now())

    def peak(self) -> int:
        return int(self._library.tensor_bytes_peak())

    def reset(self) -> None:
        self._library.tensor_bytes_reset()

    def tell(self, listener: Callable[[int, int, int], None] | None) -> None:
        """From now on `listener` hears of every allocation and release: (order, address, bytes or
        0)."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
        former = self._callback
        self._callback = kind(listener) if listener else kind()
        self._library.tensor_bytes_tell(self._callback)
        del former


class DeviceBytes:
    """Tensors on this process' GPU. Others may reset the peak, as the recipe does: `before_reset`
    runs before."""

    def __init__(self, before_reset: Callable[[], None]) -> None:
        self._reset = torch.cuda.reset_peak_memory_stats

        def reset(device: Any = None) -> None:
            before_reset()
            self._reset(device)

        torch.cuda.reset_peak_memory_stats = reset

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        self._reset()


class Phases:
    """Peaks of one run by phase and step, in bytes beyond those at its beginning."""

    def __init__(self) -> None:
        self.counter: TensorBytes
        self.peaks: dict[str, dict[int, int]] = {}
        # with a dump: which phase began after which allocation
        self.marks: list[tuple[str, int]] = []
        self.keeps_units = False  # for the length of an answer
        self.phase = ""
        self.step = 0
        self.baseline = 0
        # with a dump: of allocations, so far and when the model was begun
        self.order = self.first_order = 0

    def begin(self) -> None:
        self.counter.reset()
        self.peaks = {}
        self.marks = []
        self.phase = "load"
        self.step = 0
        self.baseline = self.counter.now()
        self.first_order = self.order

    def note(self) -> None:
        """Of the phase at work, what its peak is so far."""
        if self.phase:
            steps = self.peaks.setdefault(self.phase, {})
            steps[self.step] = max(steps.get(self.step, 0), self.counter.peak() - self.baseline)

    def enter(self, phase: str) -> None:
        self.note()
        self.counter.reset()
        self.phase = phase
        self.marks.append((phase, self.order))


def watch_recipe(finetuning: Any, phases: Phases) -> None:
    """From now on every run's phases are marked where the recipe tells its own watch of them. Its
    ranks share no memory: a plan is of runs that have no room for what is kept."""
    build_model = finetuning.build_model
    train = finetuning.train
    check_rows = training.check_packing
    enter = observe.MemoryMonitor.enter

    def building(*given: Any, **named: Any) -> Any:
        phases.begin()
        return build_model(*given, **named)

    def training_as_planned(run: Any, built: Any, objective: Any) -> None:
        built.keeps_units = phases.keeps_units
        train(run, built, objective)

    def checking(*given: Any, **named: Any) -> Any:
        phases.enter("check")  # a small forward pass before the first step
        return check_rows(*given, **named)

    def entering(watch: observe.MemoryMonitor, phase: Phase) -> None:
        phases.step += phase == "forward"
        phases.enter(phase)
        enter(watch, phase)

    spare_memory.share_memory = lambda *_: False
    spare_memory.keep_freed_memory = lambda: False
    finetuning.build_model = building
    finetuning.train = training_as_planned
    training.check_packing = checking
    observe.MemoryMonitor.enter = entering  # type: ignore[method-assign, assignment]


class Dump:
    """Every allocation of a run with the place it was made at, to see what was alive at a peak."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._events: list[tuple[int, int, int, str]] = []

    def listen(self, order: int, address: int, nbytes: int) -> None:
        """In the thread that allocates."""
        self._phases.order = max(self._phases.order, order)
        self._events.append((order, address, nbytes, _place() if nbytes else ""))

    def largest(self) -> dict[str, list[dict[str, Any]]]:
        """Phase -> what was alive at its largest peak, summed by place, the largest first."""
        peaks = dict[str, tuple[int, int]]()  # phase -> bytes, order
        for order, phase, total, _ in self._replay():
            peaks[phase] = max(peaks.get(phase, (0, 0)), (total, order))
        wanted = {order: phase for phase, (_, order) in peaks.items()}
        found = {}
        for order, _, _, alive in self._replay():
            if order in wanted:
                found[wanted[order]] = dict(alive)
        return {phase: _by_place(tensors) for phase, tensors in found.items()}

    def _replay(self) -> Iterator[tuple[int, str, int, dict[int, tuple[int, str]]]]:
        """Order, phase, bytes and what is alive (address -> bytes, place) after every event."""
        marks = list(self._phases.marks)
        phase = "load"
        total = 0
        alive = dict[int, tuple[int, str]]()
        for order, address, nbytes, place in sorted(self._events):
            if order <= self._phases.first_order:
                continue
            while marks and order > marks[0][1]:
                phase = marks.pop(0)[0]
            if nbytes:
                alive[address] = (nbytes, place)
                total += nbytes
            elif address in alive:
                total -= alive.pop(address)[0]
            yield order, phase, total, alive


def _by_place(tensors: dict[int, tuple[int, str]]) -> list[dict[str, Any]]:
    places: dict[str, list[int]] = {}
    for nbytes, place in tensors.values():
        places.setdefault(place, []).append(nbytes)
    largest = sorted(places, key=lambda place: sum(places[place]), reverse=True)
    found = []
    for place in largest[:DUMPED]:
        sizes = places[place]
        found.append({"bytes": sum(sizes), "tensors": len(sizes), "place": place})
    return found


def _place() -> str:
    """The innermost frames, and the node of autograd at work in this thread."""
    frames = list[str]()
    frame = sys._getframe().f_back
    while frame is not None and len(frames) < FRAMES:
        if frame.f_code.co_filename != __file__:
            frames.append(_frame_text(frame))
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return (
        " < ".join(([f"[{node.name()}]"] if node is not None else []) + frames)
        or "(no Python: a thread of C++)"
    )


def _frame_text(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def compile_counter(folder: Path) -> Path:
    """tensor_bytes.cpp as a library, in 2 s."""
    if shutil.which("c++") is None:
        raise SystemExit(
            "Counting the tensors on a CPU takes a C++ compiler, and there is no c++ (Debian: g++)."
        )
    library = folder / "tensor_bytes.so"
    torch_folder = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["c++", "-O1", "-std=c++17", "-shared", "-fPIC", abi, f"-I{torch_folder}/include"]
    command += [
        str(REPOSITORY / "benchmarks" / "planner" / "tensor_bytes.cpp"),
        "-o",
        str(library),
        f"-L{torch_folder}/lib",
        "-lc10",
    ]
    subprocess.run(command, check=True)
    return library


def main(cases_file: Path) -> None:
    """Run the cases of a JSON file, [{"name", "flags", "keeps_units"}], and write their peaks next to it, one file
    per case and rank."""
    spec = importlib.util.spec_from_file_location(
        "finetuning", REPOSITORY / "recipes" / "finetuning.py"
    )
    assert spec is not None and spec.loader is not None
    finetuning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetuning)
    asked = json.loads(cases_file.read_text())
    phases = Phases()
    if asked["device"] == "cuda":
        phases.counter = DeviceBytes(phases.note)
    else:
        phases.counter = HostBytes(Path(asked["library"]))
    watch_recipe(finetuning, phases)
    rank = int(os.environ.get("RANK", 0))
    for case in asked["cases"]:
        gc.collect()
        if torch.cuda.is_initialized():
            # a case must not find what the one before it has left
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        dump = Dump(phases)
        if asked["dump"] and isinstance(phases.counter, HostBytes):
            phases.counter.tell(dump.listen)
        left = phases.counter.now()
        phases.keeps_units = case["keeps_units"]
        finetuning.main(**as_keywords(case["flags"]))
        phases.note()
        found = {"peaks": phases.peaks, "left_bytes": left, "baseline_bytes": phases.baseline}
        if asked["dump"] and isinstance(phases.counter, HostBytes):
            phases.counter.tell(None)
            found["dump"] = dump.largest()
        (cases_file.parent / f"{case['name']}-{rank}.json").write_text(json.dumps(found))
        phases.phase = ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
