from typing import Any

import pytest
import torch

from llama_ft.errors import UserError
from llama_ft.runtime import advise_precision
from llama_ft.runtime.precision import product_slowdown

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("asked", "dtype"), [("bf16_mixed", torch.bfloat16), ("fp16", torch.float16)])
def test_the_advice_follows_what_this_cpu_measures(asked: Any, dtype: torch.dtype) -> None:
    chosen, note = advise_precision(asked, True, CPU)
    kept, told = advise_precision(asked, False, CPU)
    assert kept == asked, "what the user asked for is kept"
    if product_slowdown(dtype) > 2:
        assert chosen == "fp32" and "slower than fp32" in note
        assert "--precision fp32 is faster here" in told
    else:
        assert chosen in (asked, "fp32") and (chosen == "fp32") == bool(note)


def test_nothing_is_measured_on_a_gpu_or_for_fp32() -> None:
    assert advise_precision("bf16_mixed", True, GPU, has_bf16=lambda: True) == ("bf16_mixed", "")
    assert advise_precision("fp32", True, CPU) == ("fp32", "")


@pytest.mark.parametrize("asked", ["bf16_mixed", "bf16_pure"])
def test_bf16_on_a_gpu_without_it_is_refused_with_the_alternatives(asked: str) -> None:
    with pytest.raises(UserError, match=f"--precision {asked}: .* does not compute bf16.\n.*--precision fp16.*fp32"):
        advise_precision(asked, False, GPU, has_bf16=lambda: False)


def test_a_gpu_without_bf16_runs_the_demo_in_fp32_and_what_it_can_as_asked() -> None:
    chosen, note = advise_precision("bf16_mixed", True, GPU, has_bf16=lambda: False)
    assert chosen == "fp32" and "does not compute bf16" in note
    assert advise_precision("fp16", False, GPU, has_bf16=lambda: False) == ("fp16", "")
