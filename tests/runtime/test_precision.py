from pathlib import Path

import pytest
import torch

from llama_ft.errors import UserError
from llama_ft.runtime import advise_precision, devices
from llama_ft.runtime.devices import (
    MATMUL_FEATURES,
    PrecisionName,
    cpu_features,
    features_of,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda")


FEATURES = {
    "avx2 fma": ("fp32", "fp32"),  # Zen 3
    "avx512f avx512_bf16": ("bf16_mixed", "fp32"),  # Zen 4
    "avx512_bf16 avx512_fp16 amx_tile amx_bf16": ("bf16_mixed", "fp16"),  # Sapphire Rapids
    "asimd asimdhp": ("fp32", "fp16"),  # Graviton 2
    "asimd asimdhp bf16 svebf16": ("bf16_mixed", "fp16"),  # Graviton 3
}


@pytest.mark.parametrize("flags", FEATURES)
def test_the_precision_follows_the_features_of_the_cpu(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Features" if flags.startswith("asimd") else "flags"
    found = features_of(["processor\t: 0", f"{name}\t\t: {flags}"])
    monkeypatch.setattr(devices, "cpu_features", lambda: found)
    names: tuple[PrecisionName, PrecisionName] = ("bf16_mixed", "fp16")
    for asked, expected in zip(names, FEATURES[flags], strict=True):
        chosen, note = advise_precision(asked, True, CPU)
        assert chosen == expected
        assert (chosen == "fp32") == bool(note)
        unchanged, warning = advise_precision(asked, False, CPU)
        assert unchanged == asked, "the setting of the user is kept"
        assert bool(warning) == bool(note)
    assert advise_precision("fp32", True, CPU) == ("fp32", "")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="not Linux")
def test_torch_and_linux_name_the_same_features_of_this_cpu() -> None:
    """So all supported versions of torch choose the same precision on one machine."""
    on_linux = features_of(Path("/proc/cpuinfo").read_text().splitlines())
    for features in MATMUL_FEATURES.values():
        assert cpu_features() & set(features) == on_linux & set(features)


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
