"""Streamed samples: all of them once per epoch, the same on any number of ranks and from any
position."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import write_rows
from forked import forked

JOB = Path(__file__).parent / "stream_job.py"
SAMPLES = 320  # a window of 256, which are a chunk, and a small one
ENDS = 4  # runs that end after so many steps
BUFFER = 200
STEPS = 28
PADDED_STEPS = 48
BAD = 290  # samples before the bad one, which is in the second window
CASE: dict[str, Any] = {
    "file": "rows.jsonl",
    "first": 1,
    "last": STEPS,
    "position": {},
    "pack_length": 200,
}


def case(name: str, world_size: int, **changes: Any) -> dict[str, Any]:
    config = {"shuffle_buffer": BUFFER, **changes.pop("config", {})}
    return {**CASE, "name": name, "micro_batch": 8 // world_size, "config": config, **changes}


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    save_model(folder / "model")
    write_rows(folder / "rows.jsonl", SAMPLES)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "bad.jsonl").write_text(
        "\n".join([*lines[:BAD], '{"instruction": 3, "output": "x"}', *lines[BAD:]])
    )
    odd = json.dumps({"instruction": "Hi", "output": 1.0})
    (folder / "odd.jsonl").write_text("\n".join([*lines[:40], odd, odd, *lines[40:]]))
    (folder / "few.jsonl").write_text("\n".join(lines[:60]))
    long = json.dumps({"instruction": "a", "output": "word " * 220_000})
    (folder / "long.jsonl").write_text("\n".join([long, *lines]))
    return folder


def run(folder: Path, world_size: int, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What rank 0 has written down of each case; the other ranks must agree."""
    file = folder / f"cases-{world_size}-{cases[0]['name']}.json"
    file.write_text(json.dumps(cases))
    finished = forked(JOB, folder, file, ranks=world_size)
    assert finished.exit_code == 0, finished.output
    file.with_suffix(".log").write_text(finished.output)
    results = {}
    for name in (one["name"] for one in cases):
        ranks = [
            json.loads((folder / f"{name}-{world_size}-{rank}.json").read_text())
            for rank in range(world_size)
        ]
        assert all(rank == ranks[0] for rank in ranks)
        results[name] = ranks[0]
    return results


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    """Cases on one process."""
    too_long = {
        "file": "long.jsonl",
        "config": {"truncation": "drop"},
        "first_samples": True,
        "last": 3,
    }
    cases = [
        case("packed", 1),
        case("padded", 1, pack_length=None, last=PADDED_STEPS),
        case("bad", 1, file="bad.jsonl"),
        case("skipped", 1, file="bad.jsonl", config={"skip_bad_rows": True}),
        case("long", 1, **too_long),
        case("odd", 1, file="odd.jsonl", last=4),
    ]
    return run(folder, 1, cases)


@pytest.fixture(scope="module")
def together(alone: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Cases on two ranks. `from-8`: from the position of the eighth step of the whole pass."""
    steps = alone["packed"]["steps"]
    end = next(number for number, step in enumerate(steps) if step["ends_epoch"])
    # in the first window, at the end of the pass, and in the next
    stops = [7, end, end + 3]
    cases = [case(f"from-{n}", 2, first=n + 2, position=steps[n]["position"]) for n in stops]
    # every window is a whole pass, and the ranks come to the end of one at different times
    cases += [
        case(f"ends-{n}", 2, file="few.jsonl", last=n + 1, pause=0.01 * (1 + n % 4))
        for n in range(ENDS)
    ]
    cases += [
        case("packed", 2),
        case("padded", 2, pack_length=None, last=PADDED_STEPS),
        case("bad", 2, file="bad.jsonl"),
    ]
    return run(folder, 2, cases)


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_an_epoch_has_every_sample_once_in_shuffled_windows(
    alone: dict[str, dict[str, Any]], way: str
) -> None:
    steps = alone[way]["steps"]
    end = next(number for number, step in enumerate(steps) if step["ends_epoch"]) + 1
    seen = [sample for step in steps[:end] for sample in step["samples"]]
    assert sorted(seen) == list(range(1, SAMPLES + 1))
    assert end < len(steps)
    windows = {step["position"]["window"] for step in steps[:end]}
    assert len(windows) >= 2
    first = list[int]()
    for step in steps[:end]:
        if step["position"]["window"] == 0:
            first += step["samples"]
    assert BUFFER <= len(first) < SAMPLES
    assert max(first) == len(first), "the first samples of the file"
    assert first != sorted(first), "in another order"
    again = [sample for step in steps[end : 2 * end] for sample in step["samples"]]
    assert again and again[:20] != seen[:20]  # the second pass has an order of its own
    assert steps[end - 1]["epochs_seen"] == 1.0


def test_what_is_odd_in_streamed_samples_is_a_warning_once(
    alone: dict[str, dict[str, Any]], folder: Path
) -> None:
    assert alone["odd"]["steps"]
    printed = " ".join((folder / "cases-1-packed.log").read_text().split())
    assert printed.count('"output" is a whole number with .0, which is trained on') == 1
    assert f'{folder}/odd.jsonl:41: "output" is a whole number' in printed


def test_batches_do_not_depend_on_the_number_of_ranks(
    alone: dict[str, dict[str, Any]], together: dict[str, dict[str, Any]]
) -> None:
    for way in ("packed", "padded"):
        for key in ("samples", "targets"):
            assert [step[key] for step in together[way]["steps"]] == [
                step[key] for step in alone[way]["steps"]
            ]


def test_steps_after_any_position_are_the_same(
    alone: dict[str, dict[str, Any]], together: dict[str, dict[str, Any]]
) -> None:
    results = {name: result for name, result in together.items() if name.startswith("from-")}
    assert len(results) == 3
    for name, result in results.items():
        rest = alone["packed"]["steps"][int(name.partition("-")[2]) + 1 :]
        for key in ("samples", "position"):
            assert [step[key] for step in result["steps"]] == [step[key] for step in rest]


def test_the_stream_ends_wherever_the_ranks_are_in_the_next_window(
    together: dict[str, dict[str, Any]],
) -> None:
    for number in range(ENDS):
        result = together[f"ends-{number}"]
        assert len(result["steps"]) == number + 1, number
        assert result["message"] == "", number


def test_samples_that_are_too_long_at_the_beginning_do_not_end_the_stream(
    alone: dict[str, dict[str, Any]],
) -> None:
    assert alone["long"]["message"] == "" and len(alone["long"]["steps"]) == 3


def test_a_bad_sample_ends_the_stream_on_all_ranks_or_is_skipped(
    alone: dict[str, dict[str, Any]], together: dict[str, dict[str, Any]]
) -> None:
    for results in (alone, together):
        assert f"bad.jsonl:{BAD + 1}" in results["bad"]["message"]
        assert "--skip_bad_rows" in results["bad"]["message"]
    assert alone["skipped"]["message"] == ""
    skipped = {sample for step in alone["skipped"]["steps"] for sample in step["samples"]}
    assert skipped == {*range(1, SAMPLES + 2)} - {BAD + 1}
