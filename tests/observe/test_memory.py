"""Memory while a run works: phases against allocations of known size, and runs of the recipe on two
ranks, most of them broken on purpose."""

import json
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases, write_rows

from llama_ft.observe import MemoryMonitor, RunMetadata, memory_use, reset_peaks
from llama_ft.observe.memory import Held, find_differences
from llama_ft.phases import Phase
from llama_ft.runtime import Ranks

JOB = Path(__file__).with_name("memory_job.py")
CPU = torch.device("cpu")
# of the model, which a rank of memory_job.py keeps
MIB = 2**20
COPIES = 6
HIDDEN = 512
MIDDLE = 1344
LAYERS = 3
WORDS = 301
KEYS = 256
LAYER = 2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN * MIDDLE + 2 * HIDDEN
WEIGHTS = LAYERS * LAYER + 2 * WORDS * HIDDEN + HIDDEN


def touched(mebibytes: int) -> torch.Tensor:
    """Resident bytes that end with the tensor. The C library would take a tensor from pages that
    earlier tests of this process left resident, and keep it there."""
    pages = mmap.mmap(-1, mebibytes * MIB, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def test_the_host_peak_stays_after_the_allocation_until_it_is_reset() -> None:
    reset_peaks(CPU)
    before = memory_use(CPU).resident_peak
    touched(300)
    after = memory_use(CPU).resident_peak
    reset_peaks(CPU)
    fresh = memory_use(CPU)
    assert 290 * MIB < after - before < 330 * MIB
    assert fresh.resident_peak < after - 250 * MIB
    assert fresh.device == fresh.device_peak == fresh.device_reserved_peak == 0


def test_each_phase_has_the_peak_of_what_was_allocated_in_it(runtime: Ranks) -> None:
    watch = MemoryMonitor(runtime)
    level = memory_use(CPU).anonymous
    spikes: dict[Phase, int] = {"forward": 160, "backward": 320, "optimizer step": 80}
    for phase, size in spikes.items():
        watch.enter(phase)
        touched(size)
    watch.enter("forward")  # a second, smaller forward does not lower the first's
    watch.enter("evaluation")
    for phase, size in spikes.items():
        assert watch.by_phase[phase]["anonymous_peak_bytes"] - level == pytest.approx(
            size * MIB, abs=24 * MIB
        )


def test_a_memory_mapped_file_is_not_in_the_peak_of_loading(runtime: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        for _ in range(
            400
        ):  # no 400 MiB of memory, which would still be freed while it is measured
            file.write(b"\1" * MIB)
    watch = MemoryMonitor(runtime)
    watch.enter("load")
    level = memory_use(CPU).anonymous
    mapped = torch.from_file(str(path), shared=True, size=400 * MIB, dtype=torch.uint8)
    assert int(mapped.max()) == 1  # reads every page
    spike = touched(200)
    deadline = time.monotonic() + 60
    while watch._sampled < level + 190 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)  # until the thread has taken a sample
    del mapped, spike
    watch.enter("forward")
    assert watch.by_phase["load"]["anonymous_peak_bytes"] - level == pytest.approx(
        200 * MIB, abs=24 * MIB
    )


def test_freed_heap_is_not_in_the_peak_of_loading(runtime: Ranks) -> None:
    # small blocks come from the heap, which keeps them below the last block that is in use
    blocks = [b"\1" * number for number in range(64 * 1024, 68 * 1024)]
    last = b"\1" * (64 * 1024)
    del blocks
    watch = MemoryMonitor(runtime)
    before = memory_use(CPU).anonymous
    watch.enter("load")
    level = memory_use(CPU).anonymous
    watch.enter("forward")
    assert len(last) > 0 and before > level + 200 * MIB
    assert watch.by_phase["load"]["anonymous_peak_bytes"] - level == pytest.approx(0, abs=24 * MIB)


def test_the_peak_of_the_run_covers_all_phases_except_loading(
    runtime: Ranks, tmp_path: Path
) -> None:
    model = torch.nn.Linear(4, 4)
    watch = MemoryMonitor(runtime)
    watch.enter("load")
    touched(600)
    watch.begin_training(model, torch.optim.SGD(model.parameters()), RunMetadata(tmp_path))
    watch.enter("forward")
    level = memory_use(CPU)
    touched(250)
    watch.enter("backward")
    watch.enter("forward")
    assert watch.host_peak_bytes - level.anonymous - level.mapped == pytest.approx(
        250 * MIB, abs=24 * MIB
    )


def test_a_run_that_fails_records_the_phases_it_had(runtime: Ranks, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), MemoryMonitor(runtime) as watch:
        watch.enter("load")
        watch.begin_training(model, torch.optim.SGD(model.parameters()), RunMetadata(tmp_path))
        watch.enter("forward")
        touched(64)
        raise ZeroDivisionError
    phases = json.loads((tmp_path / "facts.json").read_text())["memory"]["phases"]
    assert set(phases) == {"load", "forward"}
    assert phases["forward"][0]["anonymous_peak_bytes"] - memory_use(CPU).anonymous > 50 * MIB


def ranks_with(sizes: list[int], ratio: float = 1.0, host: list[int] | None = None) -> list[Held]:
    host = [0] * len(sizes) if host is None else host
    return [
        Held(
            {"sharded parameters": size * MIB},
            {"host memory": of_host * MIB},
            4000 * MIB,
            ratio if size else 1.0,
        )
        for size, of_host in zip(sizes, host, strict=True)
    ]


def test_a_last_rank_with_fewer_rows_of_weights_gives_no_warning() -> None:
    # 9 rows over 8 ranks: four hold 2, one 1, three none; torch.chunk deals them so.
    ranks = ranks_with([200, 200, 200, 200, 100, 0, 0, 0])
    ranks[4] = ranks[4]._replace(shard_ratio=2.0)
    assert find_differences(ranks) == []


@pytest.mark.parametrize(
    ("ranks", "warning"),
    [
        (
            ranks_with([500, 500, 4000, 500]),
            "rank 2 holds 3.91 GiB of sharded parameters, the other ranks 500.0 MiB",
        ),
        (
            ranks_with([0, 0], host=[2000, 4000]),
            "rank 1 holds 3.91 GiB of host memory, the other ranks 1.95 GiB",
        ),
        (ranks_with([0, 0, 0], host=[60, 40, 70]), ""),  # Python takes some here and there
        (ranks_with([0, 0, 0], host=[4000, 4150, 4000]), ""),  # under 5 %
    ],
)
def test_a_rank_with_more_memory_than_the_others_is_named(ranks: list[Held], warning: str) -> None:
    found = find_differences(ranks)
    assert len(found) == bool(warning) and warning in "".join(found)


@pytest.fixture(scope="module")
def runs(
    save_model: Callable[..., Path], rows16: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Case -> what it printed and the memory part of its facts.json; all in one launch on two
    ranks."""
    folder = tmp_path_factory.mktemp("memory")
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "vocab_size": WORDS,
    }
    large = save_model(folder / "large", **shape)
    tiny = save_model(folder / "tiny")
    always = f"--enable_fsdp --dataset {rows16} --precision fp32 --save_model False".split()
    always += ["--batch_size_training", "1", "--no_plan"]
    always += ["--batching_strategy", "padding"]
    short = [
        "--model_name",
        str(large),
        "--max_train_step",
        "2",
        *always,
        "--run_validation",
        "False",
    ]
    steady = [
        "--model_name",
        str(tiny),
        "--max_train_step",
        "4",
        "--save_steps",
        "2",
        "--eval_steps",
        "2",
        *always,
    ]
    everything = write_rows(folder / "everything.jsonl", 31).read_text().splitlines()
    other_samples = folder / "other.jsonl"
    other_samples.write_text("\n".join(everything[16:]))  # the first 16 are those of rows16
    cases = {
        "steady": ("nothing", [*steady, "--validation", str(other_samples)]),
        "valid": ("nothing", [*short, "--low_cpu_fsdp", "--activation_checkpointing", "full"]),
        "whole": ("loading", short),
        "states": ("states", short),
    }
    listed = [
        {
            "name": name,
            "broken": broken,
            "flags": [*flags, "--lr", "1e-5", "--output_dir", str(folder / name)],
        }
        for name, (broken, flags) in cases.items()
    ]
    finished = run_cases(folder, listed, ranks=2, script=JOB)
    outputs = re.split(r"^CASE (\w+).*\n", finished.output, flags=re.MULTILINE)
    printed = dict(zip(outputs[1::2], outputs[2::2], strict=True))
    facts = {
        name: json.loads((folder / name / "facts.json").read_text())["memory"] for name in cases
    }
    return {name: (printed[name], facts[name]) for name in cases}


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning:")]


@pytest.mark.parametrize("name", ["valid", "steady"])
def test_a_valid_run_gives_no_warning(runs: dict[str, Any], name: str) -> None:
    output, facts = runs[name]
    assert warnings(output) == []
    assert facts["warnings"] == []


def test_a_copy_of_the_model_on_one_rank_is_found(runs: dict[str, Any]) -> None:
    output, facts = runs["whole"]
    (warning,) = warnings(output)
    found = re.match(
        r"warning: rank 0 holds ([\d.]+) MiB of host memory, the other ranks ([\d.]+) MiB", warning
    )
    assert found is not None
    assert float(found[1]) - float(found[2]) == pytest.approx(COPIES * 4 * WEIGHTS / MIB, rel=0.2)
    assert f"The whole model is {4 * WEIGHTS / MIB:,.1f} MiB" in warning
    assert f"warning: {facts['warnings'][0]}".startswith(warning)


def test_unsharded_optimizer_states_on_one_rank_are_named(runs: dict[str, Any]) -> None:
    whole = 4 * WEIGHTS / MIB
    sharded = 8 * WEIGHTS / 2 / MIB
    warning = warnings(runs["states"][0])[0]
    assert (
        f"rank 1 holds {whole + sharded:,.1f} MiB of optimizer state, the other ranks {sharded:,.1f} MiB"
        in warning
    )


def test_facts_have_the_phases_of_both_ranks(runs: dict[str, Any]) -> None:
    training = {"load", "forward", "backward", "optimizer step"}
    assert set(runs["steady"][1]["phases"]) == training | {"evaluation", "save"}
    phases = runs["valid"][1]["phases"]
    for rank in range(2):
        loaded, updated = (
            phases[name][rank]["anonymous_peak_bytes"] for name in ("load", "optimizer step")
        )
        # Weights are there in both; gradients and two states come with the step.
        assert updated - loaded > 0.8 * 3 * 4 * WEIGHTS / 2


def test_memory_categories_have_the_bytes_of_the_model_shape(runs: dict[str, Any]) -> None:
    for held in runs["valid"][1]["holders"]:
        share = 4 * WEIGHTS / 2
        # the last rank has a row less
        assert held["sharded parameters"] == pytest.approx(share, rel=0.01)
        assert held["gradients"] == pytest.approx(share, rel=0.01)
        assert held["optimizer state"] == pytest.approx(2 * share, rel=0.01)
