"""Architectures whose packed sequences ranks share, with numbers of heads that the ranks do not
divide evenly: losses and gradients are those of one process."""

from pathlib import Path

import pytest
import torch
from forked import forked
from models.packing import shared_architectures_job as job
from models.test_architectures import ARCHITECTURES, LLAMA_4_NEEDS_IMAGES, MULTIMODAL

pytestmark = pytest.mark.slow

NEED_MASKS = ("Falcon", "BLOOM", "GPT-J")
NAMES = (*ARCHITECTURES, *MULTIMODAL)
TOLERANCE = 2e-6  # of the largest gradient of a tensor: sums in another order
RECURRENT = dict.fromkeys(
    ("Falcon-H1", "Nemotron-H", "LFM2", "Mamba", "Lara mini", "Qwen3.5"), 2e-5
)
# Without rotary positions the softmax removes it: its gradient is 0 but for rounding.
WITHOUT_GRADIENT = {("OPT", "k_proj.bias"), ("BioGPT", "k_proj.bias")}
SMALL = 1e-4  # of the largest gradient of the model: gradients of smaller ones count as that large


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All architectures in one process."""
    folder = tmp_path_factory.mktemp("architectures")
    launch_ranks(folder, 1)
    return folder


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.large), 4])
def shared(request: pytest.FixtureRequest, alone: Path) -> int:
    """All architectures on ranks that share all sequences."""
    launch_ranks(alone, request.param)
    return int(request.param)


def launch_ranks(folder: Path, ranks: int) -> None:
    names = [name for name in NAMES if name != "Llama 4" or not LLAMA_4_NEEDS_IMAGES.args[0]]
    finished = forked(Path(job.__file__), folder, str(ranks), *names, ranks=ranks, timeout=900)
    assert finished.exit_code == 0, finished.output


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[LLAMA_4_NEEDS_IMAGES] if name == "Llama 4" else [])
        for name in NAMES
    ],
)
def test_ranks_that_share_sequences_have_the_gradients_of_one_process(
    name: str, alone: Path, shared: int
) -> None:
    found = torch.load(alone / f"{name}, {shared}.pt")
    if name in NEED_MASKS:
        assert "--sequence_parallel_size: the attention of" in found
        return
    expected = torch.load(alone / f"{name}, 1.pt")
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["count"] == expected["count"]
    gradients = expected["gradients"]
    assert found["gradients"].keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    tolerance = RECURRENT.get(name, TOLERANCE)
    for key, gradient in gradients.items():
        if (name, key[-len("k_proj.bias") :]) in WITHOUT_GRADIENT:
            assert gradient.abs().max() < 1e-6 * largest
            continue
        scale = gradient.abs().max().clamp(min=SMALL * largest)
        difference = (found["gradients"][key] - gradient).abs().max()
        assert difference <= tolerance * scale, key
