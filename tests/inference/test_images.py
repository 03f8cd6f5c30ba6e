"""Answers to prompts with images are those of plain Transformers, one prompt at a time."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, build_model, write_jsonl
from forked import forked
from image_models import (
    FAMILIES,
    model_of,
    plain_prompt,
    save_image_model,
    write_samples,
)

from llama_ft.errors import UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answerer
from llama_ft.inference.load import open_media, open_model
from llama_ft.inference.prompts import read_prompts
from llama_ft.runtime import Ranks

LONGEST = 12
INFERENCE = REPOSITORY / "recipes" / "inference.py"
FAST = ("Qwen2.5-VL", "Qwen3-VL", "Gemma 3", "LLaVA")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image answers")
    write_samples(folder / "data")
    for family in FAMILIES:
        save_image_model(folder / family, family)
    return folder


def by_transformers(folder: Path, data: Path) -> list[str]:
    """Greedy answers to the prompts of the chats, each alone."""
    model = model_of(folder)
    answers = []
    for line in data.read_text().splitlines():
        processor, inputs = plain_prompt(folder, data.parent, json.loads(line)["messages"][:-1])
        with torch.no_grad():
            tokens = model.generate(
                **inputs, max_new_tokens=LONGEST, do_sample=False, pad_token_id=258
            )
        width = inputs["input_ids"].shape[1]
        answers.append(processor.tokenizer.decode(tokens[0, width:], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES],
)
def test_answers_in_a_batch_with_and_without_images_are_those_of_transformers(
    family: str, work: Path, runtime: Ranks
) -> None:
    data = work / "data" / "chats.jsonl"
    options = InferenceFlags(precision="fp32", temperature=0, max_new_tokens=LONGEST)
    opened = open_model(
        str(work / family), options, runtime, build_model(), open_media=partial(open_media)
    )
    answerer = Answerer(opened, options, runtime)
    prompts = [answerer.tokens(asked) for _, asked in read_prompts(str(data))]
    found = [answer.text for answer in answerer.answer(prompts)]
    assert found == by_transformers(work / family, data)
    assert len(set(found)) > 2


def test_the_recipe_answers_about_an_image_and_names_errors(work: Path) -> None:
    data = work / "data"
    common = ["--device", "cpu", "--precision", "fp32", "--max_new_tokens", str(LONGEST)]

    def answered(*flags: str, ranks: int = 0) -> Any:
        return forked(INFERENCE, work / "LLaVA", *common, *flags, ranks=ranks)

    images = [str(data / "1.png"), str(data / "2.png")]
    parts = [{"type": "image", "image": image} for image in images]
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    rows = write_jsonl(
        data / "prompts.jsonl",
        [
            {"messages": [*chat, {"role": "assistant", "content": "-"}]},
            {
                "messages": [
                    {"role": "user", "content": "Who?"},
                    {"role": "assistant", "content": "-"},
                ]
            },
        ],
    )
    [with_images, text_only] = by_transformers(work / "LLaVA", rows)

    one = answered("--prompt", "What?", "--image", ",".join(images))
    assert one.exit_code == 0, one.output
    assert f"{with_images}\n" in one.output

    # also on two ranks, of which one has a prompt without an image
    prompts = write_jsonl(
        data / "columns.jsonl",
        [{"prompt": "What?", "images": ["1.png", "2.png"]}, {"prompt": "Who?"}],
    )
    for ranks in (0, 2):
        output = work / f"answers of {ranks}.jsonl"
        sharded = ["--enable_fsdp"] if ranks else []
        many = answered("--prompts", str(prompts), "--output", str(output), *sharded, ranks=ranks)
        assert many.exit_code == 0, many.output
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["answer"] for line in lines] == [with_images, text_only]
        assert lines[0]["images"] == ["1.png", "2.png"]

    (data / "broken.png").write_text("no image")
    broken = answered("--prompt", "What?", "--image", str(data / "broken.png"))
    assert broken.exit_code == 2 and "broken.png cannot be read as an image" in broken.output
    missing = answered("--prompt", "What?", "--image", str(data / "none.png"))
    assert missing.exit_code == 2 and "none.png" in missing.output


def test_images_for_a_model_of_text_are_an_error(tiny_model: Path, runtime: Ranks) -> None:
    with pytest.raises(UserError, match="the prompt has images, but a llama model takes text only"):
        open_model(str(tiny_model), InferenceFlags(), runtime, build_model(), open_media=open_media)
