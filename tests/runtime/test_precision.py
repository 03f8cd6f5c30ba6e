from typing import Any

import pytest
import torch

from llama_ft.errors import UserError
from llama_ft.runtime import advise_precision
from llama_ft.runtime.devices import matmul_slowdown

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "dtype"), [("bf16_mixed", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_precision_advice_follows_the_measured_speed_of_this_cpu(
    asked: Any, dtype: torch.dtype
) -> None:
    chosen, note = advise_precision(asked, True, CPU)
    unchanged, warning = advise_precision(asked, False, CPU)
    assert unchanged == asked, "the setting of the user is kept"
    if matmul_slowdown(dtype) > 2:
        assert chosen == "fp32" and "slower than fp32" in note and "--precision fp32" in warning
    else:
        assert chosen in (asked, "fp32") and (chosen == "fp32") == bool(note)
    assert advise_precision("fp32", True, CPU) == ("fp32", "")


@pytest.mark.parametrize("has_bf16", [False, True])
def test_bf16_on_a_gpu_without_bf16_is_rejected_and_the_demo_runs_in_fp32(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert advise_precision("fp16", False, GPU) == ("fp16", "")
    assert advise_precision("bf16_mixed", True, GPU)[0] == ("bf16_mixed" if has_bf16 else "fp32")
    if not has_bf16:
        with pytest.raises(UserError, match="--precision bf16_pure"):
            advise_precision("bf16_pure", False, GPU)
