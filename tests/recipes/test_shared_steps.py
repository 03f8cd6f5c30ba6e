"""One optimizer step of ranks that share packed sequences: its loss and all gradients are those of one
process. Cuts are inside samples, and some ranks have no token in the loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("shared_step_job.py")
TOLERANCE = 2e-6  # of the largest gradient of a tensor: sums in another order
FULL = "--activation_checkpointing full"
CASES = {
    "full": "--activation_checkpointing off --gradient_clipping",
    "checkpointed": FULL,
    "selective": "--activation_checkpointing selective",
    "unsharded": "--activation_checkpointing off --sharding_strategy SHARD_GRAD_OP --accumulate_unsharded",
    "offloaded weights": f"--fsdp_cpu_offload {FULL}",
    "tiles": f"--tiled_mlp 16 {FULL}",
    "tiles, offloaded weights": f"--tiled_mlp 16 --fsdp_cpu_offload {FULL}",
    "tiles, nf4": f"--tiled_mlp 16 --use_peft --quantization 4bit {FULL}",
    "lora": f"--use_peft {FULL}",
    "dora": f"--use_peft --use_dora {FULL}",
    "nf4": f"--use_peft --quantization 4bit {FULL}",
    "int8": f"--use_peft --quantization 8bit {FULL}",
    "dpo, adapter off": f"--objective dpo --use_peft {FULL}",
    "dpo, nf4": f"--objective dpo --use_peft --quantization 4bit {FULL}",
    "dpo": f"--objective dpo --rpo_alpha 0.3 {FULL}",
    "ipo": f"--objective ipo {FULL}",
    "orpo": f"--objective orpo {FULL}",
    "kto, adapter off": f"--objective kto --use_peft {FULL}",
    "kto": f"--objective kto {FULL}",
    "reward": f"--objective reward --center_rewards_coefficient 0.1 {FULL}",
    "distill": f"--objective distill --distill_top_k 5 {FULL}",
}
# ranks, how many share a sequence, and how many share a copy of the model
LAUNCHES = {"2": (2, "2"), "4": (4, "4"), "2 groups of 2": (4, "2"), "2 replicas": (4, "2", "2")}
# Its estimate of the divergence is over the micro-batches that ranks compute at the same time.
OF_ALL_RANKS = ("kto, adapter off", "kto")


@pytest.fixture(scope="module")
def folder(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case in one process."""
    folder = tmp_path_factory.mktemp("steps")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)  # for blocks of 64
    common = f"--model_name {folder}/base --precision fp32 --context_length 256 --dataset demo"
    common += f" --lora_dropout 0 --enable_fsdp --output_dir {folder}/run"
    cases = {}
    for name, flags in CASES.items():
        teacher = f"--teacher_model {folder}/base" if name == "distill" else ""
        cases[name] = f"{common} {flags} {teacher}".split()
    (folder / "cases.json").write_text(json.dumps(cases))
    run(folder, (1, "1"))
    return folder


def run(folder: Path, launch: tuple[Any, ...]) -> None:
    ranks, *arguments = launch
    finished = forked(JOB, folder, *arguments, ranks=ranks, timeout=900)
    assert finished.exit_code == 0, finished.output


LARGE = ("2 groups of 2", "2 replicas")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.large] if name in LARGE else []) for name in LAUNCHES
    ],
)
def launch(request: pytest.FixtureRequest, folder: Path) -> str:
    """All cases in one launch of ranks."""
    run(folder, LAUNCHES[request.param])
    ranks, *arguments = LAUNCHES[request.param]
    return f"{ranks} ranks, {' '.join(arguments)}"


@pytest.mark.parametrize("name", CASES)
def test_a_step_over_shared_sequences_has_the_gradients_of_one_process(
    name: str, folder: Path, launch: str
) -> None:
    if name in OF_ALL_RANKS and launch.startswith("4 ranks, 2"):
        pytest.skip("other micro-batches at the same time")
    alone = torch.load(folder / f"{name}, 1 ranks, 1.pt")
    shared = torch.load(folder / f"{name}, {launch}.pt")
    assert shared["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
    assert shared["norm"] == pytest.approx(alone["norm"], rel=TOLERANCE)
    assert shared["logged"] == pytest.approx(alone["logged"], rel=1e-5, abs=1e-6)
    assert shared["gradients"].keys() == alone["gradients"].keys()
    assert len(alone["gradients"]) > 7
    for key, expected in alone["gradients"].items():
        scale = expected.abs().max()
        assert scale > 0, key
        difference = (shared["gradients"][key] - expected).abs().max()
        assert difference <= TOLERANCE * scale, key


@pytest.mark.parametrize(("tiled", "whole"), [("tiles", "checkpointed"), ("tiles, nf4", "nf4")])
def test_tiles_have_the_gradients_of_whole_mlps(tiled: str, whole: str, folder: Path) -> None:
    pieces = torch.load(folder / f"{tiled}, 1 ranks, 1.pt")["gradients"]
    expected = torch.load(folder / f"{whole}, 1 ranks, 1.pt")["gradients"]
    assert pieces.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (pieces[key] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), key
