"""A tiny model that takes images (Qwen3-VL) and chats for gpu_check.py, made from a seed."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_models import TINY

MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
IDS = {mark: 256 + number for number, mark in enumerate(MARKS)}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": TINY["hidden_size"],
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
}
SIZES = [(60, 40), (30, 90), (56, 56), (100, 28)]  # pixels of the images


def make_image_model(folder: Path) -> Path:
    """Write the model with its processor, unless `folder` has it."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    if (folder / "preprocessor_config.json").exists():  # written last
        return folder
    text = TINY | {"rope_parameters": ROPE, "tie_word_embeddings": False}
    text |= {"pad_token_id": IDS["<|im_end|>"], "eos_token_id": IDS["<|im_end|>"]}
    ids = {
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=VISION, **ids)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    kind = {"processor_class": "Qwen3VLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(kind))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def _save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes with the marks of images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as in ByteLevel
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + number): byte for number, byte in enumerate(others)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(MARKS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def make_chats(folder: Path, count: int) -> Path:
    """Write chats about images, every third one without any."""
    from PIL import Image

    file = folder / "chats.jsonl"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for number, (width, height) in enumerate(SIZES):
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    rows = []
    for number in range(count):
        text = {"type": "text", "text": f"What is number {number}?"}
        image = {"type": "image", "image": f"{number % len(SIZES)}.png"}
        content = [text] if number % 3 == 2 else [image, text]
        answer = "Noise, " * (1 + number % 5)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
