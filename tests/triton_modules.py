"""Modules with kernels in Triton, for tests without a GPU: to interpret them, or to compile them."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is missing")
# A100, 3090, 4090, H100, B200 and 5090
TARGETS = (80, 86, 89, 90, 100, 120)


def import_kernels(path: str | Path) -> Any:
    """Return a new copy of a module of llama_ft, or of another file. Triton decides on import whether it
    interprets."""
    file = REPOSITORY / "src" / "llama_ft" / path
    spec = spec_from_file_location(f"copy_of_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_interpreted(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a copy of a module whose kernels run in Triton's interpreter, on the CPU."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def multiply_wide(self: Any, first: Any, second: Any, *others: Any) -> Any:
        """The interpreter would multiply the bits of bf16 as integers. Products of bf16 are exact in fp32."""
        wide = []
        for factor in (first, second):
            if factor.dtype.scalar == tl.bfloat16:
                bits = factor.data.astype(np.uint32) << 16
                factor = TensorHandle(bits.view(np.float32), tl.float32)
            wide.append(factor)
        return multiply(self, *wide, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_wide)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return import_kernels(path)
