import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUESTIONS

from llama_ft.errors import UserError
from llama_ft.evaluation.tasks import Tasks, find_tasks
from llama_ft.inference.load import open_model
from llama_ft.runtime import Runtime


@pytest.fixture
def find(tmp_path: Path, runtime: Runtime) -> Callable[..., Tasks]:
    """Find a task that reads four questions; its YAML and the flags differ as is asked."""
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"question": it}) + "\n" for it in QUESTIONS))
    data = {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = {"task": "mine", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    metric = {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}

    def found(flags: dict[str, Any] | None = None, **changed: Any) -> Tasks:
        file = tmp_path / "mine.yaml"
        file.write_text(json.dumps(task | {"metric_list": [metric]} | changed))  # JSON is YAML
        options = {"tasks": [str(file)], "limit": None, "num_fewshot": None, "batch_size": 2}
        return find_tasks(Namespace(**{**options, "apply_chat_template": False, **(flags or {})}), runtime)

    return found


def opened(place: Path, runtime: Runtime) -> Any:
    settings: dict[str, Any] = {"base_model": None, "tokenizer_name": None, "quantization": None, "precision": "fp32"}
    return open_model(str(place), **settings, trust_remote_code=False, enable_fsdp=False, job=runtime)


@pytest.mark.parametrize(
    "adapter",
    [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 300]}],
    ids=["beside the head", "rows of its own"],
)
def test_a_tied_model_with_an_adapter_beside_its_embedding_is_asked(
    adapter: dict[str, Any], tied_model: Path, tmp_path: Path, find: Callable[..., Tasks], runtime: Runtime
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapter)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ours = opened(tmp_path / "adapter", runtime)
    found = find().ask(ours.model, ours.tokenizer, False, runtime)
    total = 0.0
    for question in QUESTIONS:
        ids = torch.tensor([[ours.tokenizer.bos_token_id, *ours.tokenizer.encode(question, add_special_tokens=False)]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    assert found is not None
    expected = math.exp(total / len("".join(QUESTIONS)))
    assert found["mine"]["byte_perplexity"]["value"] == pytest.approx(expected, rel=1e-5)


def test_a_task_that_is_not_there_is_named_before_a_model_is_loaded(find: Callable[..., Tasks]) -> None:
    with pytest.raises(UserError, match="--tasks helaswag: lm-evaluation-harness has no such task"):
        find({"tasks": ["helaswag", "arc_e*"]})


def test_what_lm_eval_cannot_ask_a_model_is_reported(
    tied_model: Path, find: Callable[..., Tasks], runtime: Runtime
) -> None:
    ours = opened(tied_model, runtime)
    with pytest.raises(UserError, match="^error: --apply_chat_template: this model's tokenizer has no chat template."):
        find({"apply_chat_template": True}).ask(ours.model, ours.tokenizer, False, runtime)
    long = {"output_type": "generate_until", "generation_kwargs": {"until": ["</s>"], "max_gen_toks": 256}}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, long, r"\(256\) must be"),
        ({}, {"unsafe_code": True}, "unsafe"),
        ({}, {"doc_to_image": "question"}, "multimodal"),
        ({"num_fewshot": 10}, {}, ""),
    ]
    for flags, task, part in cases:
        with pytest.raises(UserError, match=f"^error: --tasks: lm-evaluation-harness cannot ask them: .*{part}"):
            find(flags, **task).ask(ours.model, ours.tokenizer, False, runtime)
