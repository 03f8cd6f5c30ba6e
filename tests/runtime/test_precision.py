import torch

from llama_ft.runtime import advise_precision
from llama_ft.runtime.precision import bf16_slowdown


def test_the_advice_follows_what_this_cpu_measures() -> None:
    cpu = torch.device("cpu")
    chosen, note = advise_precision("bf16_mixed", True, cpu)
    asked, warning = advise_precision("bf16_mixed", False, cpu)
    assert asked == "bf16_mixed", "what the user asked for is kept"
    if bf16_slowdown() > 2:
        assert chosen == "fp32" and "slower than fp32" in note and "--precision fp32" in warning
    else:
        assert chosen in ("bf16_mixed", "fp32") and (chosen == "fp32") == bool(note)


def test_nothing_is_measured_on_a_gpu_or_for_fp32() -> None:
    assert advise_precision("bf16_mixed", True, torch.device("cuda")) == ("bf16_mixed", "")
    assert advise_precision("fp32", True, torch.device("cpu")) == ("fp32", "")
