"""Settings that fit: what is planned, and that the answers are recipes which do."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from model_shapes import write_config

from llama_ft.config import Config, load, to_yaml
from llama_ft.plan.fit import SHARDED, Ladder, changed, cheap_changes, last_resorts, training_changes
from llama_ft.plan.gpus import CUDA_CONTEXT_BYTES, device_bytes
from llama_ft.plan.predict import predict
from llama_ft.plan.types import PlanRequest


@pytest.fixture(scope="module")
def shallow_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 narrow layers with 8,000 words: logits are most of it."""
    folder = tmp_path_factory.mktemp("fit") / "model"
    return save_model(folder, hidden_size=64, intermediate_size=128, vocab_size=8000, max_position_embeddings=512)


def request_for(line: str, world: int = 2, device: str = "cuda", folder: Path = Path("m")) -> PlanRequest:
    config, _ = load(["--model_name", str(folder), "--dataset", "demo", *line.split()], paths=False)
    return PlanRequest(config, folder, world, min(8, world), device)  # type: ignore[arg-type]


def global_batch(config: Config) -> int:
    return config.train.batch_size_training * config.train.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("line", "world", "device"),
    [
        ("--batch_size_training 4 --gradient_accumulation_steps 3", 16, "cuda"),
        ("--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 4 --use_peft", 16, "cuda"),
        ("--enable_fsdp --activation_checkpointing every_k --activation_checkpointing_k 3", 8, "cuda"),
        ("--use_peft --quantization 8bit --int8_threshold 3 --val_batch_size 8", 1, "cuda"),
        ("--device cpu --freeze_layers --num_freeze_layers 2", 2, "cpu"),
    ],
)
def test_every_change_is_a_recipe_that_loads_with_the_same_global_batch(
    line: str, world: int, device: str, shallow_model: Path, tmp_path: Path
) -> None:
    request = request_for(line, world, device, shallow_model)
    seen, free = set(), dict[str, Any]()
    for change in cheap_changes(request):
        free |= change.settings
        for other in [{}, *(it.settings for it in [*training_changes(request.config), *last_resorts(request)])]:
            if (config := changed(request.config, free | other, device)) is not None:
                seen.add(to_yaml(config))
                assert global_batch(config) == global_batch(request.config)
    for number, text in enumerate(sorted(seen)[:5]):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert to_yaml(load([f"--config={tmp_path}/{number}.yaml"], paths=False)[0]) == text
    assert len(seen) > 2


def climb(request: PlanRequest, finetuning: ModuleType, room: int, quick: bool = True) -> tuple[Ladder, list[str]]:
    """The answer, and what was planned for it."""
    told = list[str]()
    planned = predict(request, finetuning.build_model, quick)
    ladder = Ladder(request, finetuning.build_model, room, planned, quick, told.append)
    ladder.climb()
    return ladder, told


@pytest.mark.parametrize(
    ("name", "line", "gpu"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "--target_modules all-linear --peft.r 16", "rtx4090"),
        pytest.param(
            "meta-llama/Llama-3.3-70B-Instruct", "--quantization 4bit --target_modules all-linear", "h100",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_lora_on_a_large_model_fits_with_activation_checkpointing_alone(
    name: str, line: str, gpu: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", name)
    request = request_for(f"--use_peft {line} --context_length 2048", 1, folder=folder)
    ladder, told = climb(request, finetuning, device_bytes(gpu))
    assert [it.flags for it in ladder.fits] == [["--activation_checkpointing full"]]
    assert len(told) == 1 and "1. --activation_checkpointing full" in ladder.describe()


@pytest.mark.parametrize("quick", [True, False])
def test_changes_that_keep_the_training_add_up_until_it_fits(
    finetuning: ModuleType, shallow_model: Path, quick: bool
) -> None:
    request = request_for("--batch_size_training 4 --context_length 512 --use_peft", 1, folder=shallow_model)
    planned = predict(request, finetuning.build_model)
    room = planned.outside_bytes + (planned.device_bytes - planned.outside_bytes) * 3 // 5
    ladder, told = climb(request, finetuning, room, quick)
    [fit] = ladder.fits
    assert (fit.config.train.activation_checkpointing, fit.config.train.batch_size_training) == ("full", 1)
    assert global_batch(fit.config) == 4 and fit.config.peft.use_peft and fit.config.quantization.mode == "none"
    assert fit.plan.device_bytes <= room < planned.device_bytes and len(told) == 2
    alone = predict(dataclasses.replace(request, config=fit.config), finetuning.build_model)
    assert alone.device_bytes <= room


def test_smaller_activations_are_not_planned_where_states_alone_are_too_much(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    request = request_for("--batch_size_training 2 --context_length 256", 1, folder=shallow_model)
    weights = 1_100_000  # of 16 bytes in full fine-tuning, of 10 with AdamW8bit
    _, told = climb(request, finetuning, CUDA_CONTEXT_BYTES + 12 * weights)
    assert "--optimizer AdamW8bit" in told[0]


def test_more_ranks_are_an_answer_where_states_are_too_much(finetuning: ModuleType, shallow_model: Path) -> None:
    request = request_for("--context_length 256 --batch_size_training 1 --device cpu", 1, "cpu", shallow_model)
    planned = predict(request, finetuning.build_model)
    ladder, _ = climb(request, finetuning, planned.device_bytes * 3 // 4)
    assert ladder.enough_ranks in (2, 4, 8)
    ranks = dataclasses.replace(request, world_size=ladder.enough_ranks, local_world_size=ladder.enough_ranks)
    config = changed(request.config, {**SHARDED, "activation_checkpointing": "full"}, "cpu")
    assert config is not None
    plan = predict(dataclasses.replace(ranks, config=config), finetuning.build_model)
    assert plan.device_bytes <= ladder.device_bytes < planned.device_bytes


def test_nothing_fits_into_a_megabyte(finetuning: ModuleType, shallow_model: Path) -> None:
    request = request_for("--batch_size_training 2 --context_length 512 --device cpu", 2, "cpu", shallow_model)
    ladder, _ = climb(request, finetuning, 10**6)
    assert ladder.to_json() == {"fits_as_it_is": False, "fits": [], "fits_on_ranks": None}
