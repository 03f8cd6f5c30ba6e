"""recipes/evaluate.py as users run it, on one and two processes. Losses are compared with those of
the runs and of plain Transformers, tasks with those of lm-evaluation-harness' own loading."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERS, QUESTIONS, REPOSITORY, run_cases, series, write_jsonl
from plain_losses import load_model, loss_tokens, mean_loss, read_jsonl, write_tokenized

CASES = REPOSITORY / "tests" / "evaluate_cases.py"
Results = dict[str, dict[str, Any]]  # name of a model -> what was found


def evaluated(folder: Path, cases: dict[str, list[str]], ranks: int = 0) -> dict[str, Results]:
    """Cases of the recipe in one launch: case -> model -> results."""
    folder.mkdir()
    flags = [
        [*case, "--device", "cpu", "--output", f"{folder}/{name}.json"]
        for name, case in cases.items()
    ]
    run_cases(folder, flags, ranks, script=CASES)
    found = dict[str, Results]()
    for name in cases:
        models = json.loads((folder / f"{name}.json").read_text())["models"]
        found[name] = {model["name"]: model for model in models}
    return found


@pytest.fixture(scope="module")
def place(
    save_model: Callable[..., Path], rows70: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a model, rows that are tokens, tasks, and four runs, evaluated after each of
    two steps."""
    folder = tmp_path_factory.mktemp("evaluated")
    save_model(folder / "base", hidden_size=64, intermediate_size=128, tied=True)
    base = ["--model_name", f"{folder}/base"]
    common = ["--dataset", str(rows70), "--validation", "0.3", "--precision", "fp32"]
    common += "--device cpu --max_train_step 2 --save_steps 1 --eval_steps 1 --lr 1e-2".split()
    common += ["--context_length", "96", "--batch_size_training", "2"]
    lora = "--use_peft --target_modules all-linear --quantization 4bit --quant_type fp4".split()
    grown = ["--chat_template", "chatml", "--resize_embeddings", "--output_dir", f"{folder}/grown"]
    flags = [[*base, *common, "--output_dir", f"{folder}/full"]]
    flags += [[*base, *common, *lora, "--output_dir", f"{folder}/lora"], [*base, *common, *grown]]
    # a base without a tokenizer, and a chat template that is another than that of the others
    shutil.copytree(
        folder / "base", folder / "base-alone", ignore=shutil.ignore_patterns("*token*")
    )
    (folder / "turns.jinja").write_text(
        "{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"
    )
    other = ["--tokenizer_name", f"{folder}/base", "--chat_template", f"{folder}/turns.jinja"]
    flags.append(
        [*common, *other, "--model_name", f"{folder}/base-alone", "--output_dir", f"{folder}/other"]
    )
    write_tokenized(folder / "tokens.jsonl", [6 + 5 * n for n in range(5)], seed=0)
    write_tasks(folder)
    run_cases(folder, flags)
    return folder


def greedy(folder: Path, questions: list[str]) -> list[str]:
    """Return how plain Transformers continues the prompt, up to five tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in questions:
        tokens = tokenizer(question, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            new = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)[
                0, tokens.shape[1] :
            ]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def write_tasks(folder: Path) -> None:
    """One task of each kind, on the same rows; half of the answers asked for are what the base
    model says."""
    said = greedy(folder / "base", QUESTIONS)
    rows = [
        {
            "question": question,
            "choices": ANSWERS,
            "right": n,
            "said": said[n] if n % 2 else "something else",
        }
        for n, question in enumerate(QUESTIONS)
    ]
    write_jsonl(folder / "questions.jsonl", rows)
    data = {
        "data_files": {"test": str(folder / "questions.jsonl")},
        "cache_dir": str(folder / "cache"),
    }
    common = {
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
    }
    say = {
        "output_type": "generate_until",
        "doc_to_target": "said",
        "metric_list": [metric("exact_match", "mean")],
    }
    say["generation_kwargs"] = {"until": ["</s>"], "max_gen_toks": 5}
    read = {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "doc_to_text": "",
    }
    read["metric_list"] = [metric("byte_perplexity", "weighted_perplexity")]
    choose["metric_list"] = [metric("acc", "mean"), metric("acc_norm", "mean")]
    for name, task in {"choose": choose, "say": say, "read": read}.items():
        # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))


def metric(name: str, aggregation: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": True}


def tasks_of(folder: Path) -> list[str]:
    return [
        "--tasks",
        ",".join(f"{folder}/{name}.yaml" for name in ("choose", "say", "read")),
        "--batch_size",
        "2",
    ]


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Results]:
    """Cases on one process."""
    full = f"{place}/full"
    lora = f"{place}/lora"
    places = [full, f"{full}/checkpoints/step-000001", lora, f"{lora}/checkpoints/step-000001"]
    tokens = ["--dataset", f"{place}/tokens.jsonl", "--precision", "fp32", "--val_batch_size", "2"]
    return evaluated(
        place / "alone",
        {
            "runs": [*places, f"{place}/grown", f"{place}/other", "--base"],
            "first": [full, "--max_eval_step", "1"],
            "packed": [f"{place}/base", *tokens],
            "padded": [f"{place}/base", *tokens, "--batching_strategy", "padding"],
            "tasks": [f"{place}/base", *tasks_of(place), "--precision", "fp32"],
        },
    )


@pytest.fixture(scope="module")
def together(place: Path) -> dict[str, Results]:
    """Cases on two ranks: sharing one model, and each with a whole one."""
    cases = {
        "sharded": [f"{place}/full", "--base", "--enable_fsdp"],
        "checkpoint": [f"{place}/full/checkpoints/step-000001", "--enable_fsdp"],
    }
    return evaluated(place / "together", cases, ranks=2)


@pytest.fixture(scope="module")
def tasks_together(place: Path) -> dict[str, Results]:
    """Tasks on two ranks, each of which imports lm-evaluation-harness, and at the end of a run."""
    words = (place / "full" / "config.yaml", place / "tasked")
    run_cases(
        place, [["--config", str(words[0]), *run_tasks(place), "--output_dir", str(words[1])]]
    )
    base = [f"{place}/base", "--precision", "fp32", *tasks_of(place)]
    cases = {
        "sharded": [f"{place}/full", "--base", "--enable_fsdp", *tasks_of(place)],
        "few": [*base, "--limit", "1"],
    }
    return evaluated(place / "tasks-together", cases, ranks=2)


def run_tasks(folder: Path) -> list[str]:
    return ["--eval_tasks", f"{folder}/choose.yaml,{folder}/say.yaml"]


def own(run: Path) -> list[float]:
    """What a run has logged after 0, 1 and 2 steps."""
    return series(run, "eval/loss")


def test_the_loss_equals_the_validation_loss_of_the_run_after_the_same_step(
    place: Path, alone: dict[str, Results]
) -> None:
    first, whole = (
        alone[case][f"{place}/full"]["held_out"]["target_tokens"] for case in ("first", "runs")
    )
    assert 0 < first < whole  # --max_eval_step 1
    for run in ("full", "lora"):
        before, after_one, after_two = own(place / run)
        assert len({round(loss, 4) for loss in (before, after_one, after_two)}) == 3
        checkpoint = alone["runs"][f"{place}/{run}/checkpoints/step-000001"]["held_out"]
        result = alone["runs"][f"{place}/{run}"]["held_out"]
        assert checkpoint["loss"] == pytest.approx(after_one, rel=1e-6)
        assert result["loss"] == pytest.approx(after_two, rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(after_two), rel=1e-5)


def test_the_base_model_is_evaluated_with_the_settings_of_the_run(
    place: Path, alone: dict[str, Results]
) -> None:
    found = json.loads((place / "alone" / "runs.json").read_text())["models"]
    bases = [model for model in found if model["name"].startswith("base: ")]
    assert [model["base"] for model in found if model not in bases] == [
        bases[n]["name"] for n in (0, 0, 1, 1, 2, 3)
    ]
    assert [base["held_out"]["loss"] for base in bases] == pytest.approx(
        [own(place / run)[0] for run in ("full", "lora", "grown", "other")], rel=1e-6
    )
    assert "4bit" in bases[1]["about"] and "4bit" not in bases[0]["about"]
    # chatml's, not alpaca's
    assert bases[2]["held_out"]["target_tokens"] != bases[0]["held_out"]["target_tokens"]


def test_the_loss_of_a_model_directory_equals_that_of_plain_transformers(
    place: Path, alone: dict[str, Results]
) -> None:
    file = place / "tokens.jsonl"
    expected = mean_loss(load_model(place / "base"), file)
    count = sum(loss_tokens(sample) for sample in read_jsonl(file))
    for case in ("packed", "padded"):
        found = alone[case][f"{place}/base"]["held_out"]
        assert found["target_tokens"] == count
        assert found["loss"] == pytest.approx(expected, rel=1e-6)


def check_tasks(place: Path, ours: Results, limit: int | None) -> dict[tuple[str, str], float]:
    """Compare the base model's tasks with those of lm-evaluation-harness. Return the values."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {
        "pretrained": str(place / "base"),
        "dtype": "float32",
        "device": "cpu",
        "batch_size": 1,
    }
    files: list[Any] = [f"{place}/{name}.yaml" for name in ("choose", "say", "read")]
    theirs = simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=files,
        log_samples=False,
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
    )
    assert theirs is not None
    found = ours[f"{place}/base"]["tasks"]
    numbers = {(task, name): found[task][name]["value"] for task in found for name in found[task]}
    expected = {key: theirs["results"][key[0]][f"{key[1]},none"] for key in numbers}
    assert numbers == pytest.approx(expected, rel=1e-5)
    assert len(numbers) == 4
    if limit is None:
        error = found["choose"]["acc"]["stderr"]
        assert error == pytest.approx(theirs["results"]["choose"]["acc_stderr,none"])
    return numbers


def test_tasks_have_the_values_of_lm_evaluation_harness(
    place: Path, alone: dict[str, Results]
) -> None:
    numbers = check_tasks(place, alone["tasks"], None)
    assert numbers["say", "exact_match"] == 0.5  # as the rows were made


@pytest.mark.slow
def test_a_limit_and_two_ranks_have_the_values_of_lm_evaluation_harness(
    place: Path, alone: dict[str, Results], tasks_together: dict[str, Results]
) -> None:
    check_tasks(place, tasks_together["few"], 1)
    base = alone["tasks"][f"{place}/base"]["tasks"]
    found = tasks_together["sharded"][f"base: {place}/base"]["tasks"]
    assert found.keys() == base.keys()
    for task, values in base.items():
        for name, value in values.items():
            assert found[task][name]["value"] == pytest.approx(value["value"], rel=1e-5)


@pytest.mark.slow
def test_tasks_at_the_end_of_a_run_have_the_results_of_evaluate(
    place: Path, tasks_together: dict[str, Results]
) -> None:
    """Trained with packing, in one process; evaluated from its files, on two ranks."""
    [found] = json.loads((place / "tasked" / "tasks.json").read_text())["models"]
    expected = tasks_together["sharded"][f"{place}/full"]["tasks"]
    assert found["tasks"].keys() == {"choose", "say"}
    for task, metrics in found["tasks"].items():
        for name, metric in metrics.items():
            assert metric["value"] == pytest.approx(expected[task][name]["value"], rel=1e-5)


def test_two_ranks_have_the_losses_of_one_process(
    place: Path, together: dict[str, Results]
) -> None:
    sharded = together["sharded"]
    for name in (f"{place}/full", f"base: {place}/base"):
        after = own(place / "full")[2 if name.endswith("full") else 0]
        assert sharded[name]["held_out"]["loss"] == pytest.approx(after, rel=1e-6)
        assert "sharded across 2 ranks" in sharded[name]["about"]
    [checkpoint] = together["checkpoint"].values()
    assert checkpoint["held_out"]["loss"] == pytest.approx(own(place / "full")[1], rel=1e-6)


@pytest.mark.slow
def test_the_task_in_configs_loads_without_a_network(place: Path) -> None:
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_defaults=False).load(
        [str(REPOSITORY / "configs" / "tasks" / "python_docs.yaml")]
    )
    task = loaded["tasks"]["python_docs"]
    docs = task.eval_docs
    assert isinstance(docs, Dataset) and len(docs) > 200
    assert {len(set(doc["choices"])) for doc in docs} == {4}
    assert {doc["answer"] for doc in docs} == {0, 1, 2, 3}
