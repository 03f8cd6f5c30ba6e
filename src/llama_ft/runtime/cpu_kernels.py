"""16-bit matrix products on CPUs that have none of their own.

Without AVX512-BF16 or AMX, oneDNN multiplies bf16 element by element: 19 GFLOP/s on two cores of an AMD Zen 3, where
fp32 products reach 130. Here the operands are widened to fp32 a block at a time, multiplied, and the result is rounded
once, which is what bf16 hardware computes too: 130 GFLOP/s, and what is kept stays in 16 bits.
"""

import warnings
from typing import Any

import torch

NARROW = (torch.bfloat16, torch.float16)
BLOCK = 2**22  # elements of either operand and of the result that are in fp32 at a time: 16 MiB each
ATEN = torch.ops.aten

_installed: list[torch.library.Library] = []


def is_installed() -> bool:
    """Whether `use_fp32_products` has been called in this process."""
    return bool(_installed)


def use_fp32_products() -> None:
    """From now on compute this process's bf16 and fp16 matrix products on the CPU in fp32.

    torch's own operators mm, addmm, bmm and baddbmm are given another CPU kernel, so that every model's layers and
    their backward passes use it; products of other dtypes go on to torch's kernels.
    """
    if _installed:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    _installed.append(library)


def use_own_products() -> None:
    """Undo `use_fp32_products`."""
    while _installed:
        _installed.pop()._destroy()


def workspace_bytes(func: Any, args: Any) -> int:
    """Bytes that these kernels allocate and free for a product.

    Args:
        func: the operator.
        args: its arguments.
    """
    if func._opname not in KERNELS or args[-1].dtype not in NARROW:
        return 0
    a, b = args[-2:]
    if a.ndim == 3:
        a, b = a[0], b[0]
    rows, columns = _block_of(a, b)
    rows, columns = min(rows, a.shape[0]), min(columns, b.shape[1])
    return 4 * (rows * a.shape[1] + columns * b.shape[0] + rows * columns)


def _block_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Rows of `a` and columns of `b` that are multiplied at a time."""
    columns = min(max(1, BLOCK // max(1, b.shape[0])), max(1, b.shape[1]))
    return max(1, min(BLOCK // max(1, a.shape[1]), BLOCK // columns)), columns


def _multiply(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    """out [m, n] = beta * add + alpha * a [m, k] @ b [k, n]; `add` may be `out` itself."""
    rows, columns = _block_of(a, b)
    for first_column in range(0, b.shape[1], columns):
        right = b[:, first_column : first_column + columns].float()
        for first_row in range(0, a.shape[0], rows):
            left = a[first_row : first_row + rows].float()
            block = ATEN.mm.out(left, right, out=left.new_empty(left.shape[0], right.shape[1]))
            if alpha != 1:
                block.mul_(alpha)
            place = slice(first_row, first_row + rows), slice(first_column, first_column + columns)
            if add is not None and beta != 0:
                block.add_(add[place], alpha=beta)
            out[place].copy_(block)
    return out


def _are_narrow(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether to widen them; of operands of two dtypes torch's kernels say that they are."""
    return a.dtype in NARROW and a.dtype == b.dtype


def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    out = a.new_empty(a.shape[0], b.shape[1])
    return _multiply(out, a, b, None, 0, 1) if _are_narrow(a, b) else ATEN.mm.out(a, b, out=out)


def _addmm(add: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    out = a.new_empty(a.shape[0], b.shape[1])
    if not _are_narrow(a, b):
        return ATEN.addmm.out(add, a, b, beta=beta, alpha=alpha, out=out)
    return _multiply(out, a, b, add.expand(out.shape), beta, alpha)


def _addmm_(add: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if not _are_narrow(a, b):
        return ATEN.addmm.out(add, a, b, beta=beta, alpha=alpha, out=add)
    return _multiply(add, a, b, add, beta, alpha)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> Any:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if not _are_narrow(a, b):
        return ATEN.bmm.out(a, b, out=out)
    for item, left, right in zip(out, a, b, strict=True):
        _multiply(item, left, right, None, 0, 1)
    return out


def _baddbmm(add: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if not _are_narrow(a, b):
        return ATEN.baddbmm.out(add, a, b, beta=beta, alpha=alpha, out=out)
    for item, added, left, right in zip(out, add.expand(out.shape), a, b, strict=True):
        _multiply(item, left, right, added, beta, alpha)
    return out


KERNELS = {"mm": _mm, "addmm": _addmm, "addmm_": _addmm_, "bmm": _bmm, "baddbmm": _baddbmm}
