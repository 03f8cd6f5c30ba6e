"""Rounds on disk."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from conftest import REPOSITORY
from safetensors.numpy import load_file

from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Prompt,
    Reward,
    Round,
    RoundFacts,
    folder_of,
    list_rounds,
    read_round,
    write_round,
    write_unscored,
)

FILES = ("prompts.jsonl", "round.json", "samples.safetensors")


def answer(text: str, tokens: list[int], total: float | None, seed: int = 2**62 + 1) -> Answer:
    logprobs = numpy.array([-0.1 * token for token in tokens], numpy.float32)
    rewards = {"exact": total, "short": 0.5}
    ids = numpy.array(tokens, numpy.int32)
    return Answer(text, ids, logprobs, seed, len(tokens) < 3, rewards, total)


def a_round(step: int = 1) -> Round:
    facts = RoundFacts(
        step=step,
        num_generations=2,
        policy={"model": "tiny", "checksum": "1f"},
        source={"kind": "own generation"},
        sampling={"temperature": 0.7, "stop_ids": [2]},
        seed=42,
        rewards=[
            Reward("exact", 1.0, "rewards.py", "exact", "ab"),
            Reward("short", 0.1, "rewards.py", "short", "ab"),
        ],
        data={"dataset": "prompts.jsonl", "sha256": "cd"},
    )
    message = {"role": "user", "content": "Größe\u2028\ud800?"}
    prompts = [
        Prompt(0, {"prompt": "1 + 1 ="}, "1 + 1 =", "1 + 1 =", [1, 5, 6]),
        Prompt(3, {"messages": [message], "id": 7}, [message], "Größe?", [1, 9]),
    ]
    answers = [
        [answer("2", [7, 2], 1.0), answer("", [], None)],
        [answer("cm\nmm", [8, 9, 10], 0.25, seed=0), answer("m", [8, 2], 0.7)],
    ]
    return Round(facts, prompts, answers)


def test_a_directory_with_the_name_rollouts_has_the_rounds_itself(tmp_path: Path) -> None:
    folder = write_round(tmp_path / "rollouts", a_round())
    assert folder == tmp_path / "rollouts/000001"
    assert list_rounds(tmp_path / "rollouts") == list_rounds(tmp_path) == [folder]


def test_the_page_has_the_directory_that_its_command_writes() -> None:
    page = (REPOSITORY / "docs/guides/rollouts.md").read_text()
    [output_dir] = set(re.findall(r"llama-ft rollout .* --output_dir (\S+)", page))
    assert f"\n{folder_of(Path(output_dir), 1)}/\n" in page


def test_a_round_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = a_round()
    folder = write_round(tmp_path, made)
    assert folder == tmp_path / "rollouts/000001"
    found = read_round(folder)

    assert found.facts == made.facts
    assert found.prompts == made.prompts
    for group, written in zip(found.answers, made.answers, strict=True):
        for one, other in zip(group, written, strict=True):
            assert one.token_ids.dtype == numpy.int32
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.tolist() == other.logprobs.tolist()
            arrays = {"token_ids": 0, "logprobs": 0}
            assert {**vars(one), **arrays} == {**vars(other), **arrays}
    assert found.groups() == [1]  # the first prompt has one answer with a reward


def test_the_files_have_the_tensors_and_checksums_of_the_format(tmp_path: Path) -> None:
    folder = write_round(tmp_path, a_round())
    arrays = load_file(folder / "samples.safetensors")
    assert arrays["offsets"].tolist() == [0, 2, 2, 5, 7]
    assert arrays["tokens"].tolist() == [7, 2, 8, 9, 10, 8, 2]
    assert arrays["seeds"].tolist() == [2**62 + 1, 2**62 + 1, 0, 2**62 + 1]
    assert arrays["has_ended"].tolist() == [1, 1, 0, 1]
    assert numpy.isnan(arrays["rewards"][1]).tolist() == [True, False]
    assert numpy.isnan(arrays["totals"]).tolist() == [False, True, False, False]
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    expected = {"tokens": "int32", "offsets": "int64", "logprobs": "float32", "rewards": "float32"}
    assert dtypes == {**expected, "totals": "float32", "seeds": "int64", "has_ended": "uint8"}
    sums = json.loads((folder / "round.json").read_text())["files"]
    for name in ("prompts.jsonl", "samples.safetensors"):
        assert sums[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_the_same_round_has_the_same_bytes(tmp_path: Path) -> None:
    folders = [write_round(tmp_path / name, a_round()) for name in "ab"]
    for name in FILES:
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second


@pytest.mark.parametrize("name", FILES)
def test_each_flipped_byte_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    folder = write_round(tmp_path, a_round())
    file = folder / name
    content = file.read_bytes()
    step = max(1, len(content) // 60)
    for place in range(0, len(content), step):
        if content[place : place + 1].isspace():  # those of JSON's layout mean nothing
            continue
        changed = bytes([content[place] ^ 1])
        file.write_bytes(content[:place] + changed + content[place + 1 :])
        with pytest.raises(UserError) as error:
            read_round(folder)
        assert str(error.value).startswith(f"error: {file}: is missing or corrupted (")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_short_is_named(tmp_path: Path, name: str) -> None:
    folder = write_round(tmp_path, a_round())
    file = folder / name
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match=name):
        read_round(folder)
    file.unlink()
    with pytest.raises(UserError, match=f"{name}: is missing or corrupted .no such file"):
        read_round(folder)


def test_the_leftover_of_a_kill_is_no_round_and_is_replaced(tmp_path: Path) -> None:
    aside = tmp_path / "rollouts/.000001.tmp"
    aside.mkdir(parents=True)
    (aside / "prompts.jsonl").write_text("{")
    (tmp_path / "rollouts/notes").mkdir()
    assert list_rounds(tmp_path) == []
    folder = write_round(tmp_path, a_round())
    assert list_rounds(tmp_path) == [folder]
    assert not aside.exists()


def test_answers_that_were_kept_make_the_same_round_when_they_are_scored(tmp_path: Path) -> None:
    scored = a_round()
    groups = []
    for group in scored.answers:
        groups.append([replace(one, rewards={}, total=None) for one in group])
    facts = replace(scored.facts, rewards=[])
    kept = write_unscored(tmp_path / "kept", Round(facts, scored.prompts, groups))
    assert kept == tmp_path / "kept/rollouts/unscored-000001"
    assert list_rounds(tmp_path / "kept") == []
    found = read_round(kept)
    groups = []
    for group, others in zip(found.answers, scored.answers, strict=True):
        pairs = zip(group, others, strict=True)
        groups.append([replace(one, rewards=o.rewards, total=o.total) for one, o in pairs])
    facts = replace(found.facts, rewards=scored.facts.rewards)
    folder = write_round(tmp_path / "kept", Round(facts, found.prompts, groups))
    assert not kept.exists()
    expected = write_round(tmp_path / "at-once", scored)
    for name in FILES:
        assert (folder / name).read_bytes() == (expected / name).read_bytes()


def test_rounds_are_listed_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (2, 10, 1):
        write_round(tmp_path, a_round(step))
    names = [folder.name for folder in list_rounds(tmp_path)]
    assert names == ["000001", "000002", "000010"]
    assert list_rounds(tmp_path / "rollouts") == list_rounds(tmp_path)


def test_a_round_is_never_replaced(tmp_path: Path) -> None:
    folder = write_round(tmp_path, a_round())
    before = (folder / "round.json").read_bytes()
    other = replace(a_round(), facts=replace(a_round().facts, seed=1))
    with pytest.raises(UserError, match="the round exists already"):
        write_round(tmp_path, other)
    assert (folder / "round.json").read_bytes() == before


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(UserError, match="rollouts/000001: cannot be written"):
        write_round(tmp_path, a_round())


def test_answers_that_do_not_fit_together_are_not_written(tmp_path: Path) -> None:
    made = a_round()
    few = replace(made, answers=[made.answers[0][:1], made.answers[1]])
    with pytest.raises(ValueError, match="2 answers to each prompt"):
        write_round(tmp_path, few)
    first = made.answers[0][0]
    wrong = replace(first, logprobs=first.logprobs[:1])
    with pytest.raises(ValueError, match="one log-probability per token"):
        write_round(tmp_path, replace(made, answers=[[wrong, first], made.answers[1]]))
    assert list_rounds(tmp_path) == []
