"""Rewards of users' functions, which may do anything, also to their own process."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from extensions.rollouts.made_rounds import make_round
from transformers import AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.make_rounds import score
from llama_ft.extensions.rollouts.rewards.flags import RewardFlags
from llama_ft.extensions.rollouts.rewards.pool import RewardPool, Scored, parse_reward

FUNCTIONS = '''
import os, signal, sys, time

def score(prompt, answer, sample):
    """Do what the answer says."""
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr, flush=True)
    if answer == "raise": return 1 / 0
    if answer == "exit": sys.exit(3)
    if answer == "hang": time.sleep(1000)
    if answer == "loop":
        while True: pass
    if answer == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if answer == "quit": os._exit(7)
    if answer == "close": os.closerange(0, 100)
    if answer == "memory": return len(bytearray(2**33))
    if answer == "fork":
        if os.fork() == 0: return 100
        return 5
    if answer == "hanging fork":
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
    if answer == "wrong reply":
        for number in range(3, 40):
            try: os.write(number, bytes([0, 0, 0, 2]) + b"[]")
            except OSError: pass
        os._exit(5)
    if answer == "input": return len(input())
    if answer == "none": return None
    if answer == "numpy":
        import numpy
        return numpy.float32(0.5)
    values = {"text": "1", "nan": float("nan"), "infinite": float("-inf"), "list": [1], "empty": {},
              "name": {"a b": 1}, "part": {"a": None}, "true": True, "whole": 3,
              "negative": -2.5, "large": 1e39}
    return values[answer]

def parts(prompt, answer, sample):
    return {"length": len(answer), "asked": len(prompt)}
def of_first(prompt, answer, sample): return 1 if answer == "first" else None
def constant(prompt, answer, sample): return 2
def from_sample(prompt, answer, sample): return sample["n"] if sample["day"] == "2026-01-02" else None
def environment(prompt, answer, sample): return os.getpid()
def two(prompt, answer): return 0
def named(prompt, completion, **kwargs): return 0
async def later(prompt, answer, sample): return 0
value = 3
'''
NO_REWARD = {
    "raise": ("error", "functions.py:8: ZeroDivisionError: division by zero"),
    "exit": ("error", "functions.py:9: SystemExit: 3"),
    "wrong reply": ("crash", "exit code 5"),
    "large": ("value", "1e+39 (float)"),  # more than float32 has
    "kill": ("crash", "SIGKILL"),
    "quit": ("crash", "exit code 7"),
    "memory": ("memory", "MemoryError"),
    "hanging fork": ("crash", "exit code 0"),
    "input": ("error", "EOFError"),
    "none": ("none", "returned None"),
    "text": ("value", "'1' (str)"),
    "nan": ("value", "nan (float)"),
    "infinite": ("value", "-inf (float)"),
    "list": ("value", "[1] (list)"),
    "empty": ("value", "{} (dict)"),
    "name": ("value", "the name 'a b' (str)"),
    "part": ("value", "None (NoneType)"),
}
REWARDS = {"true": 1.0, "whole": 3.0, "numpy": 0.5, "negative": -2.5, "fork": 5.0}
FLAGS = RewardFlags(reward_timeout=1000, reward_memory="2GB", reward_processes=3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def scored(file: Path) -> Iterator[tuple[RewardPool, list[str], list[Scored]]]:
    """All answers, in one call."""
    answers = [*NO_REWARD, *REWARDS] * 2
    with RewardPool([parse_reward(f"{file}:score")], FLAGS) as pool:
        yield pool, answers, pool.score([("prompt", answer, {}) for answer in answers])


def test_a_call_without_a_number_gives_no_reward_and_never_0(
    scored: tuple[RewardPool, list[str], list[Scored]],
) -> None:
    _, answers, results = scored
    for answer, result in zip(answers, results, strict=True):
        if answer in REWARDS:
            assert result == Scored({"score": REWARDS[answer]}, REWARDS[answer])
            continue
        kind, text = NO_REWARD[answer]
        assert (result.total, result.values) == (None, {"score": None}), answer
        [failure] = result.failures
        assert (failure.function, failure.kind) == ("score", kind), (answer, failure)
        assert text in failure.text and text in result.problem


def test_failures_are_counted_by_kind_and_shown_with_the_first_one(
    scored: tuple[RewardPool, list[str], list[Scored]],
) -> None:
    pool, answers, results = scored
    first, *others = pool.describe(results, num_generations=len(answers) // 2).splitlines()
    mean = sum(REWARDS.values()) / len(REWARDS)
    assert first == f"rewards: 10 of 44 answers, mean {mean:.4g}"
    assert [line.split()[0] for line in others] == ["6", "8", "16", "2", "2"]
    replied = list(NO_REWARD).index("wrong reply") + 1
    assert others[1] == (
        "  8 answers without a reward: score ended its process; "
        f"the first: answer {replied} to prompt 1 (exit code 5)"
    )


def test_no_process_and_no_fork_of_one_is_left(
    scored: tuple[RewardPool, list[str], list[Scored]],
) -> None:
    pool, _, _ = scored
    sessions = {worker.process.pid for worker in pool._workers}
    # a process that has ended is replaced when it is needed: there may be fewer than 3
    assert _alive(sessions)
    pool.close()
    _wait_for_the_end_of(sessions)


def test_several_functions_have_weights_and_names(file: Path) -> None:
    functions = [parse_reward(f"{file}:parts=0.5"), parse_reward(f"{file}:constant=-3")]
    with RewardPool(functions, RewardFlags(reward_processes=1)) as pool:
        results = pool.score([("ab", "c", {}), ("ab", "cdef", {})])
        rewards = pool.rewards(results)
        described = pool.describe(results, 2)
    assert [result.values for result in results] == [
        {"parts.length": 1, "parts.asked": 2, "constant": 2},
        {"parts.length": 4, "parts.asked": 2, "constant": 2},
    ]
    assert [result.total for result in results] == [0.5 * 3 - 6, 0.5 * 6 - 6]
    assert [(one.name, one.weight, one.function) for one in rewards] == [
        ("parts.length", 0.5, "parts"),
        ("parts.asked", 0.5, "parts"),
        ("constant", -3, "constant"),
    ]
    assert described == (
        "rewards: 2 of 2 answers, mean -3.75 (parts.length 2.5, parts.asked 2, constant 2)"
    )


def test_one_function_without_a_number_leaves_no_reward(file: Path) -> None:
    functions = [parse_reward(f"{file}:score"), parse_reward(f"{file}:constant")]
    with RewardPool(functions, RewardFlags(reward_processes=1)) as pool:
        [bad, good] = pool.score([("", "none", {}), ("", "whole", {})])
    assert (bad.values, bad.total) == ({"score": None, "constant": 2}, None)
    assert (good.values, good.total) == ({"score": 3, "constant": 2}, 5)


def test_training_needs_a_prompt_with_two_rewards(file: Path, tiny_model: Path) -> None:
    """A round for other purposes does not."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    one = make_round([[None, None], [None, None]], tokenizer)
    with RewardPool([parse_reward(f"{file}:of_first")], RewardFlags(reward_processes=1)) as pool:
        texts = [["first", ""], ["", "first"]]
        answers = [
            [replace(answer, text=text) for answer, text in zip(group, own, strict=True)]
            for group, own in zip(one.answers, texts, strict=True)
        ]
        lonely = replace(one, answers=answers)
        scored = score(lonely, pool)
        assert [[answer.total for answer in group] for group in scored.answers] == [
            [1, None],
            [None, 1],
        ]
        with pytest.raises(UserError, match="no prompt of round 1 has two answers with a reward"):
            score(lonely, pool, is_training=True)


def test_functions_get_the_sample_with_other_values_as_text(file: Path) -> None:
    from datetime import date

    sample = {"n": 7, "day": date(2026, 1, 2)}
    with RewardPool([parse_reward(f"{file}:from_sample")], RewardFlags()) as pool:
        assert [one.total for one in pool.score([("", "", sample)])] == [7]


def test_a_call_that_takes_too_long_gives_no_reward(file: Path) -> None:
    flags = RewardFlags(reward_timeout=0.1, reward_processes=1)
    with RewardPool([parse_reward(f"{file}:score")], flags) as pool:
        results = pool.score([("", "hang", {}), ("", "loop", {})])
        lines = pool.describe(results, num_generations=2).splitlines()
    assert [result.total for result in results] == [None, None]
    assert lines == [
        "rewards: 0 of 2 answers",
        "  2 answers without a reward: score took longer than --reward_timeout 0.1 s; "
        "the first: answer 1 to prompt 1",
    ]


def test_a_call_that_takes_too_much_cpu_time_gives_no_reward(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RewardPool([parse_reward(f"{file}:score")], FLAGS) as pool:
        pool.close()
        monkeypatch.setitem(pool._setup, "cpu_seconds", 1)
        results = pool.score([("", "loop", {}), ("", "whole", {})])
    assert [failure.kind for failure in results[0].failures] == ["cpu"]
    assert results[1].total == 3


def test_functions_of_the_same_name_are_named_by_their_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(FUNCTIONS)
    functions = [parse_reward(f"{file}:constant"), parse_reward(f"{other}:constant")]
    with RewardPool(functions, RewardFlags()) as pool:
        [result] = pool.score([("", "", {})])
    assert result.values == {"functions.constant": 2, "other.constant": 2}
    with pytest.raises(UserError, match="two functions have the name functions.constant"):
        RewardPool([functions[0], functions[0]], RewardFlags())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function missing"),
        ("value", "value is a int; expected a function"),
        ("two", r"two has the parameters \(prompt, answer\); expected \(prompt, answer, sample\)"),
        ("named", r"named has the parameters \(prompt, completion, \*\*kwargs\)"),
        ("later", "later is async or a generator"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_a_user_error(
    file: Path, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        RewardPool([parse_reward(f"{file}:{name}")], RewardFlags())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import no_such_module",
            "(?s)bad.py:1: ModuleNotFoundError: No module named .*add its directory to PYTHONPATH",
        ),
        ("raise ValueError('no\\nerror: two')", r"bad.py:1: ValueError: no error: two$"),
        ("import os; os._exit(4)", r"the import of its files ended the process \(exit code 4\)"),
        ("raise SystemExit('no')", "bad.py:1: SystemExit: no"),
        ("bytearray(2**40)", "(?s)bad.py:1: MemoryError.*--reward_memory 4GB may be too small"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_user_error(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=message):
        RewardPool([parse_reward(f"{tmp_path}/bad.py:f")], RewardFlags())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rewards.py", r"expected path/to/file\.py:function"),
        ("rewards.py:", r"expected path/to/file\.py:function"),
        ("{file}:score=", "its weight is ''; expected a number"),
        ("{file}:score=nan", "its weight is 'nan'; expected a number"),
        ("{folder}/function.py:score", "no such file. Did you mean .*functions.py"),
    ],
)
def test_wrong_values_of_the_flag_are_user_errors(file: Path, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_reward(value.format(file=file, folder=file.parent))


def test_processes_end_with_the_run(file: Path) -> None:
    """Also with a run that is killed while it scores."""
    code = (
        "import sys\n"
        "from llama_ft.extensions.rollouts.rewards.pool import *\n"
        f"pool = RewardPool([parse_reward('{file}:score')], RewardFlags(reward_timeout=1000))\n"
        "print(pool._workers[0].process.pid, flush=True)\n"
        "pool.score([('', 'hang', {})])\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    run.kill()
    run.wait()
    run.stdout.close()
    _wait_for_the_end_of({worker})


def _alive(sessions: set[int]) -> set[int]:
    """Return the sessions that have a process which is no zombie."""
    alive = set[int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if state != "Z":
            alive.add(int(session))
    return alive & sessions


def _wait_for_the_end_of(sessions: set[int]) -> None:
    deadline = time.monotonic() + 60
    while _alive(sessions) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(sessions)
