"""Settings that fit: what is planned, and that the answers are recipes which do."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from model_shapes import write_config

from llama_ft.config import Config, load, to_yaml
from llama_ft.config.wording.messages import size_text
from llama_ft.phases import MEMORY_CATEGORIES, Phase
from llama_ft.plan import fit as fitting
from llama_ft.plan.changes import SAVINGS, apply_changes, ladder
from llama_ft.plan.fit import (
    USABLE,
    Fit,
    as_started,
    choose_checkpointing,
    choose_settings,
    describe_fits,
    find_fits,
    gives_up_more,
)
from llama_ft.plan.flags import device_bytes
from llama_ft.plan.preflight import resolve_checkpointing
from llama_ft.plan.types import Peak, Plan, PlanRequest


@pytest.fixture(scope="module")
def shallow_model(
    save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Llama of 2 narrow layers with 8,000 words: its logits take the most memory."""
    folder = tmp_path_factory.mktemp("fit") / "model"
    return save_model(
        folder, hidden_size=64, intermediate_size=128, vocab_size=8000, max_position_embeddings=512
    )


pytestmark = pytest.mark.usefixtures("same_plans")


def request_for(
    line: str, world: int = 2, device: str = "cuda", folder: Path = Path("m")
) -> PlanRequest:
    config, _ = load(["--model_name", str(folder), "--dataset", "demo", *line.split()], paths=False)
    return PlanRequest(config, folder, world, min(8, world), device)  # type: ignore[arg-type]


def peak_of(phase: Phase, gib: float) -> Peak:
    nbytes = round(gib * 2**30)
    return Peak(phase, nbytes, dict.fromkeys(MEMORY_CATEGORIES, 0) | {"activations": nbytes})


@pytest.mark.parametrize(
    ("kept_gib", "free_gib", "is_kept"),
    [
        (39, math.inf, True),  # no more than the forward pass
        (39, 10, True),
        (50, 80, True),
        (50, 75, False),  # two thirds are 50
        (50, math.inf, False),
    ],
)
def test_units_are_kept_for_answers_if_the_plan_has_room(
    kept_gib: float, free_gib: float, is_kept: bool
) -> None:
    peaks = [peak_of("forward", 40), peak_of("evaluation", 20)]
    plan = Plan(
        device="cuda",
        world_size=8,
        peaks=peaks,
        reserved_bytes=round(1.03 * peaks[0].bytes),
        outside_bytes=2**30,
        host_load_bytes=0,
        host_save_bytes=0,
        checkpoint_bytes=0,
        result_bytes=0,
        tokens=1,
        is_quick=False,
        kept_peaks=[peak_of("evaluation", kept_gib)],
    )
    found = fitting._keep_units(plan, free_gib * 2**30)
    assert found.keeps_units == is_kept
    assert found.peaks == ([peaks[0], *plan.kept_peaks] if is_kept else peaks)
    highest = max(40, kept_gib) if is_kept else 40
    assert found.reserved_bytes == pytest.approx(1.03 * highest * 2**30, abs=2)
    # what --fit and auto settings ask
    assert fitting.has_room(found, free_gib * 2**30) == fitting.has_room(plan, free_gib * 2**30)


def global_batch(config: Config) -> float:
    """Per rank; ranks that share sequences have it together."""
    samples = config.train.batch_size_training * config.train.gradient_accumulation_steps
    return samples / config.fsdp.sequence_parallel_size


@pytest.mark.parametrize(
    ("line", "world", "device"),
    [
        ("--batch_size_training 4 --gradient_accumulation_steps 3", 16, "cuda"),
        (
            "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 4 --use_peft",
            16,
            "cuda",
        ),
        (
            "--enable_fsdp --activation_checkpointing every_k --activation_checkpointing_k 3",
            8,
            "cuda",
        ),
        ("--use_peft --quantization 8bit --int8_threshold 3 --val_batch_size 8", 1, "cuda"),
        ("--device cpu --freeze_layers --num_freeze_layers 1", 2, "cpu"),
    ],
)
def test_every_suggested_change_loads_as_flags_with_the_same_global_batch(
    line: str, world: int, device: str, shallow_model: Path, tmp_path: Path
) -> None:
    request = request_for(line, world, device, shallow_model)
    (base := tmp_path / "base.yaml").write_text(to_yaml(request.config))
    loaded, (cheap, others) = 0, ladder(request)
    single_process = [change for change in others if "--nproc" not in change[0]]
    for other in [[], *([change] for change in single_process)]:
        config, _, flags = apply_changes(request, [*cheap, *other])
        if config is not None:
            assert global_batch(config) == global_batch(request.config)
            assert load([f"--config={base}", *" ".join(flags).split()], paths=False)[0] == config
            loaded += 1
    assert loaded > 2


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("--use_peft --quantization 4bit", {"double_quant": True}),
        ("--use_peft", {"use_peft": True, "mode": "4bit", "double_quant": True}),
        ("--use_peft --quantization 4bit --double_quant", None),
    ],
)
def test_double_quantization_is_tried_if_it_is_off(
    line: str, change: dict[str, object] | None, shallow_model: Path
) -> None:
    _, others = ladder(request_for(line, 1, folder=shallow_model))
    tried = [settings for settings, _ in others if "double_quant" in settings]
    assert tried == ([] if change is None else [change])


def search(
    request: PlanRequest, finetuning: ModuleType, room: int, quick: bool = True
) -> tuple[list[Fit], list[str]]:
    """The answers, and what was planned for them."""
    printed = list[str]()
    planned = fitting.predict(request, finetuning.RECIPE, quick)
    return find_fits(request, finetuning.RECIPE, room, planned, quick, printed.append), printed


@pytest.mark.slow
def test_lora_on_8b_fits_24_gb_with_activation_checkpointing_alone(
    finetuning: ModuleType, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", "meta-llama/Llama-3.1-8B-Instruct")
    line = "--use_peft --target_modules all-linear --peft.r 16 --context_length 2048"
    fits, printed = search(request_for(line, 1, folder=folder), finetuning, device_bytes("rtx4090"))
    assert [fit.flags for fit in fits] == [["--activation_checkpointing full"]]
    assert len(printed) == 1
    assert "1. --activation_checkpointing full" in describe_fits(fits[0].plan, fits, 1, ["", ""])


@pytest.mark.large
def test_qlora_is_the_first_suggestion_on_a_small_gpu(
    finetuning: ModuleType, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", "meta-llama/Llama-3.1-8B-Instruct")
    line = "--use_peft --context_length 2048 --batch_size_training 1 --activation_checkpointing full --precision fp16"
    fits, _ = search(request_for(line, 1, folder=folder), finetuning, device_bytes("t4"))
    assert fits[0].flags == ["--quantization 4bit"] and fits[0].plan.device_bytes < 9 * 2**30
    # CPU offload keeps the precision, and is the slowest: it comes last
    assert not any(fit.config.fsdp.fsdp_cpu_offload for fit in fits[:-1])


def test_only_the_rank_of_qlora_among_the_suggestions_depends_on_the_gpu(
    shallow_model: Path,
) -> None:
    request = request_for("--context_length 256", folder=shallow_model)
    (cheap, small), (_, large) = (ladder(request, device_bytes(gpu)) for gpu in ("rtx4090", "h100"))
    four_bit = {"use_peft": True, "mode": "4bit"}
    assert small[0][0] == four_bit and large[0][0]["sequence_parallel_size"] == 2 and cheap
    assert (
        small[1:] == [change for change in large if change[0] != four_bit]
        and "fsdp_cpu_offload" in small[-1][0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_changes_that_keep_the_training_add_up_until_it_fits(
    finetuning: ModuleType, shallow_model: Path, quick: bool
) -> None:
    request = request_for(
        "--batch_size_training 4 --context_length 512 --use_peft", 1, folder=shallow_model
    )
    planned = fitting.predict(request, finetuning.RECIPE)
    room = planned.outside_bytes + (planned.device_bytes - planned.outside_bytes) * 3 // 5
    [fit], printed = search(request, finetuning, room, quick)
    assert (fit.config.train.activation_checkpointing, fit.config.train.batch_size_training) == (
        "full",
        1,
    )
    assert (
        global_batch(fit.config) == 4
        and fit.config.peft.use_peft
        and fit.config.quantization.mode == "none"
    )
    assert fit.plan.device_bytes <= room < planned.device_bytes and len(printed) == 2
    alone = fitting.predict(dataclasses.replace(request, config=fit.config), finetuning.RECIPE)
    assert alone.device_bytes <= room


@pytest.mark.slow
def test_twice_the_ranks_are_suggested_if_optimizer_states_do_not_fit(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    request = request_for(
        "--context_length 256 --batch_size_training 1 --device cpu", 1, "cpu", shallow_model
    )
    planned = fitting.predict(request, finetuning.RECIPE)
    fits, _ = search(request, finetuning, planned.device_bytes * 7 // 8)
    assert 1 < len(fits) <= 3
    assert (
        fits[0].flags[-1] == "--nproc 2"
        and "--enable_fsdp" in fits[0].flags
        and fits[0].plan.world_size == 2
    )


@pytest.mark.slow
def test_ranks_share_sequences_if_activations_do_not_fit(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    line = "--context_length 512 --batch_size_training 1 --use_peft --activation_checkpointing full"
    line = f"{line} --enable_fsdp --device cpu"  # a GPU would offload them first
    request = request_for(line, 2, "cpu", shallow_model)
    planned = fitting.predict(request, finetuning.RECIPE, quick=True)
    tensors = planned.device_bytes - planned.outside_bytes
    room = int((planned.outside_bytes + 0.95 * tensors) / USABLE)
    fits, _ = search(request, finetuning, room)
    assert fits[0].flags == ["--gradient_accumulation_steps 2", "--sequence_parallel_size 2"]
    assert global_batch(fits[0].config) == 1
    assert fits[0].plan.device_bytes <= USABLE * room < planned.device_bytes


def test_larger_groups_of_ranks_give_up_more() -> None:
    two = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 2}
    assert gives_up_more({"sequence_parallel_size": 4, "gradient_accumulation_steps": 4}, two)
    assert not gives_up_more(two, two)


def test_cpu_offload_is_suggested_with_the_host_memory_it_needs(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    line = "--context_length 64 --batch_size_training 1 --activation_checkpointing off"
    request = request_for(line, 1, folder=shallow_model)
    offloaded = dataclasses.replace(
        request,
        config=request_for(
            f"{line} --enable_fsdp --fsdp_cpu_offload", 1, folder=shallow_model
        ).config,
    )
    plan = fitting.predict(offloaded, finetuning.RECIPE)
    assert plan.host_bytes > fitting.predict(request, finetuning.RECIPE).host_bytes
    fit = Fit(offloaded.config, ["--enable_fsdp", "--fsdp_cpu_offload"], "speed", plan, {})
    planned = fitting.predict(request, finetuning.RECIPE)
    text = describe_fits(planned, [fit], 1, [""])
    host = size_text(max(plan.host_load_bytes, plan.host_save_bytes))
    assert f"and {host} of host memory per rank" in text


def test_a_change_gives_up_more_if_it_has_another_one_and_more() -> None:
    four_bit = {"use_peft": True, "mode": "4bit"}
    assert gives_up_more(four_bit | {"context_length": 64}, four_bit)
    assert gives_up_more(four_bit, {"use_peft": True})
    assert gives_up_more({"enable_fsdp": True, "--nproc": 4}, {"enable_fsdp": True, "--nproc": 2})
    assert not gives_up_more(four_bit, four_bit)
    assert not gives_up_more({"optimizer": "AdamW8bit"}, four_bit)


@pytest.mark.slow
def test_no_suggestion_only_gives_up_more_than_another(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    line = "--context_length 256 --batch_size_training 1 --device cpu"
    request = request_for(line, 1, "cpu", shallow_model)
    planned = fitting.predict(request, finetuning.RECIPE)
    fits, _ = search(request, finetuning, planned.device_bytes * 7 // 8)
    changes = [fit.change for fit in fits]
    assert len(changes) > 1
    assert not any(gives_up_more(change, other) for change in changes for other in changes)


@pytest.mark.parametrize(("world", "expected"), [(1, [2, 4, 8]), (4, [8]), (8, [16])])
def test_ranks_are_doubled_up_to_8(world: int, expected: list[int], shallow_model: Path) -> None:
    _, others = ladder(request_for("--context_length 256", world, folder=shallow_model))
    alone = [change for change, _ in others if "sequence_parallel_size" not in change]
    assert [change["--nproc"] for change in alone if "--nproc" in change] == expected


@pytest.mark.slow
def test_the_choice_of_checkpointing_and_the_plan_report_the_same_size(
    finetuning: ModuleType, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=6)
    request = request_for("--context_length 64 --use_peft", 1, folder=folder)
    _, why, plan = choose_checkpointing(request, finetuning.RECIPE, math.inf, quick=False)
    assert not plan.is_quick
    assert f"off (planned: off {size_text(plan.device_bytes)};" in why
    _, _, quick_plan = choose_checkpointing(request, finetuning.RECIPE, math.inf)
    assert quick_plan.is_quick


@pytest.mark.slow
def test_one_gpu_casts_weights_once_per_step_if_that_fits(
    finetuning: ModuleType, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=3)

    def choose(room: float, flags: str = "", world: int = 1) -> tuple[str, int]:
        line = f"--context_length 64 {flags}"
        request = request_for(line, world, folder=folder)
        config, why, plan = choose_checkpointing(request, finetuning.RECIPE, room)
        assert config.train.activation_checkpointing == "off"
        strategy = config.fsdp.sharding_strategy
        assert ("weights are cast once" in why) == (strategy == "SHARD_GRAD_OP")
        return strategy, plan.device_bytes

    strategy, twice = choose(math.inf)
    assert strategy == "FULL_SHARD", "the memory is unknown"
    kept = "--context_length 64 --enable_fsdp --sharding_strategy SHARD_GRAD_OP"
    request = request_for(kept, 1, folder=folder)
    once = fitting.predict(request, finetuning.RECIPE, quick=True).device_bytes
    assert once > twice
    assert choose(twice / USABLE + 1) == ("FULL_SHARD", twice)
    assert choose(once / USABLE + 1) == ("SHARD_GRAD_OP", once)
    room = 2.0**40
    assert choose(room, "--use_peft")[0] == "FULL_SHARD"
    assert choose(room, "--precision fp32")[0] == "FULL_SHARD"
    assert choose(room, "--enable_fsdp", world=2)[0] == "FULL_SHARD"


@pytest.mark.parametrize(
    ("line", "device", "is_tried"),
    [
        ("--batch_size_training 4", "cuda", True),
        ("--activation_checkpointing full --activation_offload", "cuda", False),
        ("--device cpu", "cpu", False),
    ],
)
def test_activations_are_offloaded_from_gpus_only(
    line: str, device: str, is_tried: bool, shallow_model: Path
) -> None:
    cheap, _ = ladder(request_for(line, 1, device, shallow_model))
    assert any("activation_offload" in change for change, _ in cheap) == is_tried


def test_a_setting_that_can_be_auto_takes_each_value_of_its_saving() -> None:
    for saving in SAVINGS:
        if not saving.setting:
            continue
        assert saving.without_plan in saving.auto
        for value in saving.auto:
            config = request_for(f"--{saving.setting} {value} --enable_fsdp").config
            assert getattr(config.train, saving.setting) == value


def test_mlps_are_tiled_only_if_nothing_else_fits(
    finetuning: ModuleType, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_model(
        tmp_path / "model", hidden_size=32, intermediate_size=512, max_position_embeddings=65_536
    )
    line = "--context_length 16384 --batch_size_training 1 --precision bf16_pure"
    line += " --activation_checkpointing full"
    request = request_for(line, 1, folder=folder)
    assert request.config.train.tiled_mlp == "auto"

    def choose(room: float, device_request: PlanRequest = request) -> tuple[int | str, int]:
        config, [note], plan = choose_settings(device_request, finetuning.RECIPE, room)
        tile = config.train.tiled_mlp
        assert note.startswith(f"tiled_mlp auto: {tile} (planned: off ")
        return tile, plan.device_bytes

    tile, untiled = choose(math.inf)
    assert tile == "off"
    assert choose(untiled / USABLE + 1) == ("off", untiled)
    tile, smaller = choose(untiled / USABLE - 2**20)
    assert tile == 8192 and smaller < untiled
    tile, smallest = choose(smaller / USABLE - 2**20)
    assert tile == 2048 and smallest < smaller
    assert choose(1) == (2048, smallest)
    flags = [" ".join(fit.flags) for fit in fits_of(request, finetuning, smallest / USABLE + 1)]
    assert flags == ["--tiled_mlp 2048"]


def test_a_change_is_planned_as_the_run_with_it_chooses_what_is_auto(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    line = "--batch_size_training 8 --context_length 512 --activation_checkpointing auto"
    request = request_for(line, 1, folder=shallow_model)
    small = "--batch_size_training 1 --gradient_accumulation_steps 8 --activation_checkpointing off"
    one = request_for(f"{small} --context_length 512", 1, folder=shallow_model)
    unchecked = fitting.predict(one, finetuning.RECIPE, quick=True)
    room = math.ceil(unchecked.device_bytes / USABLE)
    chosen, _, _ = choose_settings(request, finetuning.RECIPE, room)
    assert chosen.train.activation_checkpointing == "full"
    resolved = dataclasses.replace(request, config=chosen)
    [fit], _ = search(resolved, finetuning, room)
    assert "--batch_size_training 1" in fit.flags
    assert fit.config.train.activation_checkpointing == "full"
    started = as_started(fit, request.config, resolved, finetuning.RECIPE, room, True)
    assert started.config.train.activation_checkpointing == "off"
    assert started.plan.device_bytes == unchecked.device_bytes > fit.plan.device_bytes
    assert as_started(fit, chosen, resolved, finetuning.RECIPE, room, True) is fit
    given = fit._replace(flags=["--activation_checkpointing full"])
    assert as_started(given, request.config, resolved, finetuning.RECIPE, room, True) is given


def test_a_run_that_fits_without_the_spare_memory_says_what_must_stay_free(
    finetuning: ModuleType, shallow_model: Path
) -> None:
    request = request_for("--context_length 512", 1, folder=shallow_model)
    plan = fitting.predict(request, finetuning.RECIPE, quick=True)
    first, *_ = describe_fits(plan, [], plan.device_bytes, [""]).splitlines()
    assert first.endswith(" per rank, and 3% must stay free.")
    first, *_ = describe_fits(plan, [], plan.device_bytes - 1, [""]).splitlines()
    assert first.endswith(" per rank.")


def fits_of(request: PlanRequest, finetuning: ModuleType, room: float) -> list[Fit]:
    config = dataclasses.replace(request.config.train, tiled_mlp="off", val_batch_size=1)
    untiled = dataclasses.replace(request, config=dataclasses.replace(request.config, train=config))
    planned = fitting.predict(untiled, finetuning.RECIPE, quick=True)
    return find_fits(untiled, finetuning.RECIPE, room, planned, True, lambda text: None)


def test_short_sequences_are_not_tiled_and_nothing_waits_for_it(shallow_model: Path) -> None:
    def tile(line: str) -> int | str:
        config = request_for(line, folder=shallow_model).config
        return resolve_checkpointing(config, "cuda").train.tiled_mlp

    assert tile("") == "off"
    assert tile("--context_length 4096 --batch_size_training 2") == "off"
    assert tile("--context_length 4096 --batch_size_training 4") == "auto"
    assert tile("--context_length 16384 --batch_size_training 1 --no_plan") == "off"
    sharing = "--context_length 16384 --batch_size_training 1 --enable_fsdp"
    assert tile(f"{sharing} --sequence_parallel_size 2") == "off"
    assert tile("--context_length 64 --tiled_mlp 16") == 16
