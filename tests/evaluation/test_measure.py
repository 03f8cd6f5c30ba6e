import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUESTIONS, build_model
from huggingface_hub import constants

from llama_ft.errors import UserError
from llama_ft.evaluation.flags import EvaluateFlags
from llama_ft.evaluation.measure import find_tasks, run_tasks
from llama_ft.evaluation.results import Evaluated, describe, write_json
from llama_ft.inference.load import open_model
from llama_ft.runtime import Ranks


@pytest.fixture
def ask(tmp_path: Path, runtime: Ranks) -> Callable[..., Any]:
    """Ask a model a task of four questions; its YAML and the flags differ as is asked."""
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"question": question}) + "\n" for question in QUESTIONS)
    )
    data = {
        "data_files": {"test": str(tmp_path / "questions.jsonl")},
        "cache_dir": str(tmp_path / "cache"),
    }
    task = {"task": "mine", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    task |= {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
    }
    metric = {
        "metric": "byte_perplexity",
        "aggregation": "weighted_perplexity",
        "higher_is_better": False,
    }
    file = tmp_path / "mine.yaml"

    def asked(place: Path, changed: dict[str, Any] | None = None, **flags: Any) -> Any:
        # JSON is YAML
        file.write_text(json.dumps(task | {"metric_list": [metric]} | (changed or {})))
        options = EvaluateFlags(
            **{"tasks": [str(file)], "batch_size": 2, "precision": "fp32", **flags}
        )
        tasks = find_tasks(options.tasks or [], runtime)
        opened = open_model(str(place), options, runtime, build_model())
        return run_tasks(tasks, opened.model, opened.tokenizer, options, runtime), opened.tokenizer

    return asked


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, marks=pytest.mark.slow),
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 300]},
    ],
    ids=["LoRA on the head", "trained tokens"],
)
def test_a_tied_model_with_an_adapter_on_its_embedding_is_evaluated(
    adapter: dict[str, Any], tied_model: Path, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapter)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    found, tokenizer = ask(tmp_path / "adapter")
    total = 0.0
    for question in QUESTIONS:
        ids = torch.tensor(
            [[tokenizer.bos_token_id, *tokenizer.encode(question, add_special_tokens=False)]]
        )
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    expected = math.exp(total / len("".join(QUESTIONS)))
    assert found["mine"]["byte_perplexity"]["value"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # lm_eval lists its thousands of tasks
def test_tasks_of_a_hub_that_does_not_answer_fail_without_retries(
    tied_model: Path, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    # of `datasets` while it is offline; otherwise it would be about the connection
    with pytest.raises(UserError, match="--tasks hellaswag: cannot be loaded .*OfflineMode"):
        ask(tied_model, tasks=["hellaswag"])
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.slow  # lm_eval lists its thousands of tasks
def test_a_task_that_cannot_be_found_is_reported(tied_model: Path, ask: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="--tasks helaswag: cannot be loaded"):
        ask(tied_model, tasks=["helaswag"])


def test_tasks_that_cannot_be_loaded_or_run_are_reported(
    tied_model: Path, ask: Callable[..., Any], tmp_path: Path
) -> None:
    absent = str(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match=f"--tasks {absent}: cannot be loaded"):
        ask(tied_model, tasks=[absent])
    long = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["</s>"], "max_gen_toks": 256},
    }
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"apply_chat_template": True}, "chat.template"),
        (long, {}, r"\(256\) must be"),
        ({"unsafe_code": True}, {}, "unsafe"),
    ]
    for changed, flags, part in cases:
        with pytest.raises(
            UserError, match=f"^error: --tasks: lm-evaluation-harness cannot ask them: .*{part}"
        ):
            ask(tied_model, changed, **flags)


def model(name: str, loss: float, right: float, base: Evaluated | None = None) -> Evaluated:
    tasks = {
        "sums": {"acc": {"value": right, "stderr": 0.05}, "seconds": {"value": 3.0, "stderr": None}}
    }
    return Evaluated(name, f"{name}, fp32", {"loss": loss, "target_tokens": 1234}, tasks, base)


BASE = model("base: m", 3.0, 0.5)


def test_models_are_listed_in_columns_with_their_differences() -> None:
    shown = describe([BASE, model("run", 2.5, 0.75, BASE)], "all samples of a.jsonl", 20)
    title, *lines = shown.splitlines()
    assert (
        title.startswith("Loss on all samples of a.jsonl, ")
        and "--limit 20: not for comparison" in title
    )
    assert [line.split() for line in lines] == [
        ["metric", "base:", "m", "run", "difference"],
        ["loss", "3.0000", "2.5000", "-0.5000"],
        ["target_tokens", "1,234", "1,234", "+0"],
        ["sums", "acc", "0.5000", "±", "0.0500", "0.7500", "±", "0.0500", "+0.2500"],
        ["sums", "seconds", "3.0000", "3.0000", "+0.0000"],
    ]


def test_json_names_the_base_and_has_null_for_values_that_are_not_finite() -> None:
    models = [BASE, model("run", 2.5, 0.75, BASE), model("bad", math.nan, math.inf, BASE)]
    base, run, bad = json.loads(write_json(models, "rows", {"limit": None}))["models"]
    assert (base["base"], run["base"]) == (None, "base: m") and base["held_out"]["loss"] == 3.0
    assert run["tasks"]["sums"]["acc"] == {"value": 0.75, "stderr": 0.05}
    assert bad["held_out"] == {"loss": None, "target_tokens": 1234}
