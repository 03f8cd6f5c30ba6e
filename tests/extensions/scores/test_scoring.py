"""Scores of generated answers, against plain Transformers: one prompt at a time, rendered by the chat
template from the samples themselves."""

import ast
import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ANSWERS, QUESTIONS, REPOSITORY, metrics, run_cases, write_jsonl
from plain_losses import load_model
from transformers import AutoTokenizer

from llama_ft.config import DataConfig, TrainConfig
from llama_ft.data import BatchLayout, DataRequest, prepare
from llama_ft.errors import UserError
from llama_ft.extensions.scores.scoring import (
    AnswerScores,
    contains,
    exact,
    find_questions,
    same_json,
)
from llama_ft.models import BuiltModel

EVALUATE = REPOSITORY / "tests" / "evaluate_cases.py"
OWN = '''
def same_characters(prompt, answer, reference):
    """The share of the reference's characters that are at the same place of the answer."""
    assert prompt.startswith("### Instruction:") and prompt.endswith("### Response:"), prompt
    return sum(a == b for a, b in zip(answer, reference)) / len(reference)
def fails(prompt, answer, reference): return 1 / 0
def text(prompt, answer, reference): return "0.5"
def nothing(prompt, answer, reference): pass
def infinite(prompt, answer, reference): return float("inf")
def counted(prompt, answer, reference): return answer.count("a")
'''
TOKENS = 6
STEPS = 16  # each is an epoch, and evaluated
CODE = [{"tag": "row"}, {"tag": "shard"}, {"tag": "rank", "n": 1}]


def chat(question: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with two validation sets: whole, on two ranks, and resumed."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "own.py").write_text(OWN)
    pairs = [chat(q, a.split()[0]) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    code = [chat(f"{n}?", json.dumps(value)) for n, value in enumerate(CODE)]
    write_jsonl(folder / "train.jsonl", pairs * 4)
    write_jsonl(folder / "chat.jsonl", pairs)
    write_jsonl(folder / "code.jsonl", code)
    sets = f"{{chat: {folder}/chat.jsonl, code: {folder}/code.jsonl}}"
    common = ["--model_name", str(tiny_model), "--dataset", f"{folder}/train.jsonl"]
    common += ["--validation", sets, "--precision", "fp32"]
    common += ["--score", f"{folder}/own.py:same_characters", "--score_tokens", str(TOKENS)]
    common += "--score_batch_size 2 --lr 5e-3 --lr_scheduler constant".split()
    common += f"--num_epochs {STEPS} --save_steps {STEPS // 2} --save_every_epoch false".split()
    common += ["--context_length", "96"]
    common += ["--best_by", "eval/chat/score", "--save_dtype", "float32"]
    one = [*common, "--batch_size_training", "8"]
    half = ["--resume", f"{folder}/one/checkpoints/step-{STEPS // 2:06d}"]
    run_cases(
        folder,
        [
            [*one, "--output_dir", f"{folder}/one"],
            ["--config", f"{folder}/one/config.yaml", *half, "--output_dir", f"{folder}/again"],
        ],
    )
    (folder / "two").mkdir()
    two = [*common, "--batch_size_training", "4", "--enable_fsdp", "--max_train_step", "1"]
    run_cases(folder / "two", [[*two, "--output_dir", f"{folder}/two/run"]], ranks=2)
    return folder


def evaluate(folder: Path, ranks: int) -> None:
    """recipes/evaluate.py on the result of the whole run, into a file of this number of ranks."""
    flags = [f"{folder}/one", "--device", "cpu", "--output", f"{folder}/on{ranks}.json"]
    if ranks:
        flags.append("--enable_fsdp")
    run_cases(folder, [flags], ranks=ranks, script=EVALUATE)


def plain_answers(model: Path, samples: list[dict[str, Any]]) -> list[str]:
    """Greedy answers of plain Transformers to the chats."""
    plain = load_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = []
    for sample in samples:
        prompt = tokenizer.apply_chat_template(
            sample["messages"][:1],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        new = plain.generate(
            prompt,
            attention_mask=prompt > -1,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=[tokenizer.eos_token_id, plain.config.eos_token_id],
        )[0, prompt.shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return answers


def same_characters(answer: str, reference: str) -> float:
    return sum(a == b for a, b in zip(answer, reference, strict=False)) / len(reference)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    found = {}
    for line in metrics(run):
        if "eval/loss" in line:
            found[line["step"]] = {key: line[key] for key in line if key.startswith("eval/")}
    return found


def test_scores_of_named_sets_are_those_of_plain_transformers(folder: Path) -> None:
    found = evaluations(folder / "one")[STEPS]
    sums = []
    count = 0
    for name in ("chat", "code"):
        samples = read(folder / f"{name}.jsonl")
        answers = plain_answers(folder / "one" / "model", samples)
        references = [sample["messages"][1]["content"] for sample in samples]
        scores = [same_characters(*pair) for pair in zip(answers, references, strict=True)]
        assert found[f"eval/{name}/score"] == pytest.approx(math.fsum(scores) / len(scores))
        sums += scores
        count += len(scores)
    assert found["eval/score"] == pytest.approx(math.fsum(sums) / count)
    assert found["eval/chat/score"] > evaluations(folder / "one")[0]["eval/chat/score"] + 0.3


def test_the_loss_of_all_sets_weights_each_by_its_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "one" / "model")
    model = load_model(folder / "one" / "model")
    found = evaluations(folder / "one")[STEPS]
    sums = dict[str, float]()
    counts = dict[str, int]()
    for name in ("chat", "code"):
        sums[name] = 0.0
        counts[name] = 0
        for sample in read(folder / f"{name}.jsonl"):
            whole, loss, tokens = plain_loss(model, tokenizer, sample)
            assert whole
            sums[name] += loss
            counts[name] += tokens
        assert found[f"eval/{name}/loss"] == pytest.approx(sums[name] / counts[name], rel=1e-5)
        perplexity = math.exp(sums[name] / counts[name])
        assert found[f"eval/{name}/perplexity"] == pytest.approx(perplexity, rel=1e-4)
    expected = sum(sums.values()) / sum(counts.values())
    assert found["eval/loss"] == pytest.approx(expected, rel=1e-5)


def plain_loss(model: Any, tokenizer: Any, sample: dict[str, Any]) -> tuple[bool, float, int]:
    """The loss of the response and of the token that ends it."""
    import torch

    def ids(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        )

    prompt = ids(sample["messages"][:1], True)
    whole = ids(sample["messages"], False)
    labels = torch.tensor(whole[len(prompt) :])
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].float()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    return whole[: len(prompt)] == prompt, loss, len(labels)


@pytest.mark.parametrize("ranks", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_scores_do_not_depend_on_ranks_and_are_those_of_evaluate(folder: Path, ranks: int) -> None:
    runs = [evaluations(folder / name)[0] for name in ("one", "two/run")]
    for key in ("eval/score", "eval/chat/score", "eval/code/score"):
        assert runs[0][key] == runs[1][key]
    expected = evaluations(folder / "one")[STEPS]
    evaluate(folder, ranks)
    [model] = json.loads((folder / f"on{ranks}.json").read_text())["models"]
    found = model["held_out"]
    for key in ("score", "chat/score", "code/score"):
        assert found[key] == expected[f"eval/{key}"]
    for key in ("loss", "chat/loss", "code/loss"):
        assert found[key] == pytest.approx(expected[f"eval/{key}"], rel=1e-6)


def test_several_answers_are_sampled_and_give_pass_at_k(
    tiny_model: Path, prepared: Callable[..., Any], runtime: Any, tmp_path: Path
) -> None:
    """Against a count of the subsets of the answers, which the score has written down."""
    (tmp_path / "own.py").write_text(
        "def short(prompt, answer, reference):\n"
        f"    with open('{tmp_path}/answers', 'a') as file: print(repr(answer), file=file)\n"
        "    return len(answer) < 12\n"
    )
    data, tokenizer = prepared([chat(q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    own = f"{tmp_path}/own.py:short"
    settings = TrainConfig(score=own, score_answers=3, score_tokens=5, score_batch_size=2)
    answering = AnswerScores(settings, {"": data}, tokenizer)
    model = load_model(tiny_model)
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=1)
    before = torch.random.get_rng_state()
    (tmp_path / "answers").unlink()
    scores = [answering.score(BuiltModel(model), layout, runtime)[""] for _ in range(2)]
    assert torch.random.get_rng_state().equal(before)
    lines = (tmp_path / "answers").read_text().splitlines()
    count = 3 * len(QUESTIONS)
    assert lines[:count] == lines[count:] and len(set(lines)) > len(QUESTIONS)
    is_right = [len(ast.literal_eval(line)) < 12 for line in lines[:count]]
    assert scores[0].metrics()["score"] == pytest.approx(sum(is_right) / count)
    for k in (1, 2, 3):
        shares = []
        for first in range(0, count, 3):
            subsets = list(combinations(is_right[first : first + 3], k))
            shares.append(sum(map(any, subsets)) / len(subsets))
        expected = sum(shares) / len(shares)
        assert scores[0].metrics()[f"pass_at_{k}"] == pytest.approx(expected)


def test_a_resumed_run_has_the_same_scores(folder: Path) -> None:
    whole = evaluations(folder / "one")
    again = evaluations(folder / "again")
    assert again[STEPS] == whole[STEPS]


def test_the_best_checkpoint_has_the_best_score_and_the_report_its_answers(folder: Path) -> None:
    scores = {step: one["eval/chat/score"] for step, one in evaluations(folder / "one").items()}
    best = json.loads((folder / "one" / "checkpoints" / "best.json").read_text())
    later = {step: score for step, score in scores.items() if step}  # before step 1: no checkpoint
    assert best["eval/chat/score"] == max(later.values()) == later[best["step"]]
    page = (folder / "one" / "report.html").read_text()
    assert "Scored answers" in page and f"step {STEPS}, chat" in page and "step 0, code" in page
    facts = json.loads((folder / "one" / "facts.json").read_text())["scored"]
    questions = {one["question"] for one in facts if one["when"] == f"step {STEPS}, chat"}
    assert len(questions) == 4 and any(QUESTIONS[0] in question for question in questions)


@pytest.mark.parametrize(
    ("answer", "reference", "scores"),
    [
        ("yes", "yes", (True, True, None)),
        ("oh yes!", "yes", (False, True, None)),
        ('{"b": [1, true], "a": "x"}', '{"a": "x", "b": [1.0, true]}', (False, False, True)),
        ('{"b": [1, 1], "a": "x"}', '{"a": "x", "b": [1, true]}', (False, False, False)),
        ('{"a": 1}, as asked', '{"a": 1}', (False, True, False)),
        ("", "[]", (False, False, False)),
        ("12345678901234567890", "12345678901234567891", (False, False, False)),
    ],
)
def test_exact_contains_and_json(answer: str, reference: str, scores: tuple[Any, ...]) -> None:
    found = [exact("", answer, reference), contains("", answer, reference)]
    assert found == list(scores[:2])
    if scores[2] is None:
        with pytest.raises(ValueError):
            same_json("", answer, reference)
    else:
        assert same_json("", answer, reference) == scores[2]


@pytest.fixture
def prepared(tiny_model: Path, tmp_path: Path) -> Callable[[list[Any]], tuple[Any, Any]]:
    def prepare_samples(samples: list[Any], **settings: Any) -> tuple[Any, Any]:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        file = write_jsonl(tmp_path / "my.jsonl", samples)
        request = DataRequest(context_length=96, want_validation=False)
        data = prepare(DataConfig(dataset=str(file), **settings), tokenizer, request, tmp_path)
        return data.train, tokenizer

    return prepare_samples


def test_questions_end_before_the_last_response(prepared: Callable[..., Any]) -> None:
    samples = [chat("Why", "So."), chat("Who", "Rank 0.")]
    samples[0]["messages"] += [
        {"role": "user", "content": "Really"},
        {"role": "assistant", "content": "Yes, really."},
    ]
    data, tokenizer = prepared(samples)
    found = find_questions(data, tokenizer, 0)
    assert [question.reference for question in found] == ["Yes, really.", "Rank 0."]
    for question, sample in zip(found, samples, strict=True):
        prompt = tokenizer.apply_chat_template(
            sample["messages"][:-1], add_generation_prompt=True, return_dict=False
        )
        assert question.prompt_ids == list(prompt)
    assert len(find_questions(data, tokenizer, 1)) == 1
    text, tokenizer = prepared([{"text": "What is a shard?"}])
    assert not find_questions(text, tokenizer, 0)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("own.py:fails", "own.py:6: fails: ZeroDivisionError"),
        ("own.py:text", "returned '0.5'; expected a finite number"),
        ("own.py:nothing", "returned None; expected a finite number"),
        ("own.py:infinite", "returned inf; expected a finite number"),
        ("own.py:absent", "no such function"),
        ("json", "my.jsonl:1: the reference is not JSON"),
    ],
)
def test_a_wrong_score_is_an_error_before_weights_are_loaded(
    score: str, message: str, prepared: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    data, tokenizer = prepared([{"instruction": "Why?", "output": "So."}])
    name = f"{tmp_path}/{score}" if score.startswith("own") else score
    with pytest.raises(UserError) as raised:
        AnswerScores(TrainConfig(score=name), {"": data}, tokenizer)
    assert message in str(raised.value)


def test_data_without_prompts_cannot_be_scored(prepared: Callable[..., Any]) -> None:
    data, tokenizer = prepared([{"text": "What is a shard?"}])
    with pytest.raises(UserError, match="no sample of the validation set chat has a prompt"):
        AnswerScores(TrainConfig(score="exact"), {"chat": data}, tokenizer)
