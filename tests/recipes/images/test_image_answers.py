"""Answers about images during training and in recipes/evaluate.py are those of plain Transformers on the
exported model, and the report shows the pictures."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, run_cases, series, write_jsonl
from forked import forked
from image_models import (
    case,
    model_of,
    plain_loss,
    plain_prompt,
    save_image_model,
    write_samples,
)
from PIL import Image

EVALUATE = REPOSITORY / "tests" / "evaluate_cases.py"
CASES = (
    ("Qwen3-VL", 2),
    pytest.param("Qwen2.5-VL", 0, marks=pytest.mark.large),
    pytest.param("Gemma 3", 2, marks=pytest.mark.large),
    pytest.param("LLaVA", 2, marks=pytest.mark.large),
    ("LLaVA", 0),
)
LONGEST = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("answered") / "data")


def answers_of(folder: Path, chats: list[list[dict[str, Any]]], images: Path) -> list[str]:
    """Greedy answers of plain Transformers, each alone."""
    model = model_of(folder)
    found = []
    for messages in chats:
        processor, inputs = plain_prompt(folder, images, messages)
        with torch.no_grad():
            tokens = model.generate(
                **inputs,
                max_new_tokens=LONGEST,
                do_sample=False,
                pad_token_id=258,
                eos_token_id=257,
            )
        new = tokens[0, inputs["input_ids"].shape[1] :]
        found.append(processor.tokenizer.decode(new, skip_special_tokens=True).strip())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks"),
    CASES,
)
def test_scored_and_sample_answers_and_evaluated_losses_are_those_of_transformers(
    data: Path, family: str, ranks: int, tmp_path: Path
) -> None:
    work = data.parent.parent
    base = save_image_model(tmp_path / family, family)
    folder = tmp_path / "run"
    flags = case(work, family, "run", ranks, "--precision", "fp32", "--num_epochs", "1")
    flags[flags.index("--model_name") + 1] = str(base)
    flags[flags.index("--output_dir") + 1] = str(folder)
    flags += ["--validation", str(data), "--batching_strategy", "padding"]
    flags += f"--score contains --score_tokens {LONGEST} --sample_tokens {LONGEST}".split()
    prompts = ["--sample_prompts", '["What is <b>it</b>?"]']
    pictured = [*prompts, "--sample_images", str(data.parent / "1.png")]
    finished = run_cases(tmp_path, [[*flags, *pictured]], ranks)
    assert "no sample answers" not in finished.output

    facts = json.loads((folder / "facts.json").read_text())
    chats = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    after = [one for one in facts["scored"] if one["when"] == f"step {facts['total_steps']}"]
    expected = answers_of(folder / "model", [chat[:-1] for chat in chats], data.parent)
    assert [one["answer"] for one in after] == expected
    assert len(set(expected)) > 1
    assert [len(one.get("images", [])) for one in after] == [1, 0, 2, 0, 1]
    part = {"type": "image", "image": "1.png"}
    asked = [[{"role": "user", "content": [part, {"type": "text", "text": "What is <b>it</b>?"}]}]]
    [sample] = [one for one in facts["samples"] if one["when"] == "after fine-tuning"]
    assert [sample["answer"]] == answers_of(folder / "model", asked, data.parent)

    # the report has the pictures in itself, and escapes the rest
    report = (folder / "report.html").read_text()
    assert "What is &lt;b&gt;it&lt;/b&gt;?" in report and "<b>it" not in report
    assert "img-src data:;" in report
    urls = re.findall(r'<img class="picture" src="data:image/jpeg;base64,([^"]+)"', report)
    assert len(urls) == 5
    sizes = {Image.open(io.BytesIO(base64.b64decode(url))).size for url in urls}
    assert sizes == {(60, 40), (30, 90), (56, 56), (100, 28)}

    # recipes/evaluate.py: the loss and the score of the run, and those of the base model
    cases = [
        [str(folder), "--base", "--output", str(tmp_path / "run.json")],
        [
            str(base),
            "--dataset",
            str(data),
            "--score",
            "exact",
            "--output",
            str(tmp_path / "base.json"),
        ],
    ]
    common = ["--device", "cpu", "--precision", "fp32"]
    common += ["--enable_fsdp"] if ranks else []
    run_cases(tmp_path, [[*one, *common] for one in cases], ranks, script=EVALUATE)
    found = json.loads((tmp_path / "run.json").read_text())["models"]
    losses = {one["name"]: one["held_out"] for one in found}
    tuned = losses[str(folder)]
    assert tuned["loss"] == pytest.approx(series(folder, "eval/loss")[-1], rel=1e-6)
    assert tuned["score"] == series(folder, "eval/score")[-1]
    with torch.no_grad():
        loss, count = plain_loss(model_of(base), base, data)
    assert losses[f"base: {base}"]["loss"] == pytest.approx(loss.item() / count, rel=1e-5)
    [alone] = json.loads((tmp_path / "base.json").read_text())["models"]
    assert alone["held_out"]["loss"] == pytest.approx(loss.item() / count, rel=1e-5)


def test_a_missing_sample_image_is_an_error(data: Path, tmp_path: Path) -> None:

    recipe = REPOSITORY / "recipes" / "finetuning.py"
    flags = ["--sample_tokens", "4", "--sample_prompts", "[What?]", "--sample_images"]
    text = write_jsonl(tmp_path / "text.jsonl", [{"instruction": "Why?", "output": "So."}])
    finished = forked(recipe, "--dataset", text, *flags, tmp_path / "none.png")
    assert finished.exit_code == 2
    assert "--sample_images" in finished.output and "none.png" in finished.output
