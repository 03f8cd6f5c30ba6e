"""The share of held-out chats that a model answers exactly, with plain Transformers and PEFT.

    python benchmarks/trl_comparison/comparison_score.py MODEL held_out.jsonl [--adapter ADAPTER]

Prints JSON: exact matches, chats, and the first answers. Answers are greedy.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 25
SHOWN = 5


def answer(model: Any, tokenizer: Any, chats: list[Any], new_tokens: int) -> list[str]:
    """Return the model's greedy answers to chats without their last message."""
    prompts = [
        tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    # the template writes a BOS token where the model has one
    inputs = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt")
    inputs = inputs.to(model.device)
    tokens = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id],
    )
    written = tokens[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]


def main(asked: argparse.Namespace) -> None:
    lines = asked.held_out.read_text(encoding="utf-8").splitlines()[: asked.limit]
    chats = [json.loads(line)["messages"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = getattr(torch, asked.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    model = model.to(asked.device).eval()
    if asked.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, asked.adapter).eval()
    expected = [chat[-1]["content"] for chat in chats]
    longest = max(len(tokenizer(text)["input_ids"]) for text in expected)
    answers = list[str]()
    with torch.no_grad():
        for first in range(0, len(chats), BATCH):
            answers += answer(model, tokenizer, chats[first : first + BATCH], longest + 5)
    exact = sum(text == right for text, right in zip(answers, expected, strict=True))
    print(json.dumps({"exact": exact, "of": len(chats), "answers": answers[:SHOWN]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--adapter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=1_000_000, help="only the first chats")
    main(parser.parse_args())
