"""Settings that fit: what is searched, and that the answers are recipes which do."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import torchrun
from forked import REPOSITORY

from llama_ft.config import Config, load, load_recipe, to_yaml
from llama_ft.config.gpus import device_for
from llama_ft.plan.changes import changed, differing, layouts, qualities, settings_of, wishes
from llama_ft.plan.fit import _prepare, advise, find_fits
from llama_ft.plan.predict import PlanRequest, predict


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
        (
            "--enable_fsdp --fsdp_cpu_offload --activation_checkpointing every_k --activation_checkpointing_k 3",
            8,
            "cuda",
        ),
        ("--use_peft --quantization 8bit --int8_threshold 3 --val_batch_size 8", 1, "cuda"),
        ("--device cpu --freeze_layers --num_freeze_layers 2", 2, "cpu"),
    ],
)
def test_every_layout_is_a_recipe_that_loads_with_the_same_global_batch(
    line: str, world: int, device: str, tmp_path: Path
) -> None:
    request = request_for(line, world, device)
    seen = set()
    for quality in qualities(request.config, 4096):
        for layout in layouts(request):
            config = changed(request.config, {**quality, **settings_of(layout, request)}, device)
            if config is None or (text := to_yaml(config)) in seen:
                continue
            seen.add(text)
            assert global_batch(config) == global_batch(request.config)
            changes = differing(request.config, config)
            assert device == "cuda" or "fsdp_cpu_offload" not in changes
    for number, text in enumerate(sorted(seen)[:: max(1, len(seen) // 5)]):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert to_yaml(load_recipe(tmp_path / f"{number}.yaml", paths=False)[0]) == text
    assert len(seen) > 5


def test_what_the_user_has_set_is_what_a_flag_names_or_a_file_sets_otherwise_than_the_default(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train:\n  optimizer: AdamW\n  activation_checkpointing: selective\n  batch_size_training: 8\n")
    config, places = load([f"--config={recipe}", "--sharding_strategy", "FULL_SHARD", "--enable_fsdp"], paths=False)
    assert wishes(config, places) == {"activation_checkpointing", "sharding_strategy", "enable_fsdp"}


def test_a_search_keeps_what_the_user_has_set_and_finds_what_a_full_plan_confirms(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    request = request_for("--batch_size_training 4 --context_length 512", folder=shallow_model)
    planned = predict(request, finetuning.build_model)
    room = device_for(f"{planned.outside_bytes + (planned.device_bytes - planned.outside_bytes) * 3 // 5}B", "cuda")
    start = _prepare(request, finetuning.build_model, room, frozenset({"activation_checkpointing"}))
    found = start.run(1)
    assert len(found) == 1 and found[0].keeps_training and not found[0].overridden
    assert found[0].config.train.activation_checkpointing == "off"
    assert found[0].config.train.batch_size_training in (1, 2) and global_batch(found[0].config) == 4
    alone = predict(dataclasses.replace(request, config=found[0].config), finetuning.build_model)
    assert alone.device_bytes <= room.bytes < planned.device_bytes


def test_advice_is_the_smallest_change_first(finetuning: ModuleType, shallow_model: Path) -> None:
    request = request_for("--batch_size_training 4 --context_length 512 --use_peft", 1, folder=shallow_model)
    planned = predict(request, finetuning.build_model)
    room = planned.outside_bytes + (planned.device_bytes - planned.outside_bytes) * 3 // 4
    changes = advise(request, finetuning.build_model, room, most=2)
    assert changes[0].flags == ["--batch_size_training 2", "--gradient_accumulation_steps 2"]
    assert changes[0].peak_bytes <= room < planned.device_bytes


def test_nothing_fits_where_one_row_is_too_much(finetuning: ModuleType, shallow_model: Path) -> None:
    request = request_for("--batch_size_training 2 --context_length 512 --device cpu", 2, "cpu", shallow_model)
    start = _prepare(request, finetuning.build_model, device_for("1MB", "cpu"), frozenset())
    assert start.run(3) == []


def peaks_measured(folder: Path, recipes: dict[str, Path], ranks: int) -> dict[str, int]:
    """Bytes of tensors on the fullest rank of real runs, counted by torch's allocator: benchmarks/plan_job.py."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from plan_job import compile_counter

    shared = ["--max_train_step=2", "--no_plan"]
    cases = [
        {"name": name, "flags": [f"--config={file}", f"--output_dir={folder / ('run-' + name)}", *shared]}
        for name, file in recipes.items()
    ]
    job = {"device": "cpu", "library": str(compile_counter(folder)), "dump": False, "cases": cases}
    (folder / "job.json").write_text(json.dumps(job))
    finished = torchrun(ranks, str(REPOSITORY / "benchmarks" / "plan_job.py"), str(folder / "job.json"))
    assert finished.exit_code == 0, finished.output
    found = {}
    for name in recipes:
        ranks_found = [json.loads((folder / f"{name}-{rank}.json").read_text())["peaks"] for rank in range(ranks)]
        found[name] = max(max(steps.values()) for peaks in ranks_found for steps in peaks.values())
    return found


@pytest.mark.slow
def test_answers_are_run_and_do_fit(
    finetuning: ModuleType, shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "finetuning", finetuning)  # forked processes find its functions by their names
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [1 + n % 250 for n in range(512)]}) + "\n" for _ in range(32)))
    line = ["--model_name", str(shallow_model), "--dataset", str(rows), "--device", "cpu", "--precision", "bf16_mixed"]
    config, places = load([*line, "--context_length", "512", "--batch_size_training", "4"])
    request = PlanRequest(config, shallow_model, 2, 2, "cpu")
    planned = predict(request, finetuning.build_model)
    room = device_for(f"{planned.device_bytes * 4 // 5}B", "cpu")
    answer = find_fits(request, finetuning.build_model, room, places, planned, False, print)
    assert not answer.fits_as_it_is and len(answer.fits) == 3 and answer.fits[0].keeps_training
    commands = answer.write(tmp_path / "fits")
    assert commands[0] == f"torchrun --nproc_per_node 2 recipes/finetuning.py --config {tmp_path}/fits/fit-1.yaml"
    (tmp_path / "asked.yaml").write_text(to_yaml(config))
    recipes = {f"fit-{number}": tmp_path / "fits" / f"fit-{number}.yaml" for number in (1, 2, 3)}
    peaks = peaks_measured(tmp_path, {"asked": tmp_path / "asked.yaml", **recipes}, 2)
    assert peaks["asked"] > room.bytes
    assert all(peaks[name] <= room.bytes for name in recipes), (room.bytes, peaks)
