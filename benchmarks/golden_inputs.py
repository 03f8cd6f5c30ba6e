"""The small models and data of golden.py: random, but the same for every checkout."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.shared.text_files import write_json_lines

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # for model_shapes

VOCABULARY = 260  # 256 bytes, 3 special tokens, and a row without a token
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
    "image_size": 28,
    "patch_size": 14,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "attn_layer_indices": [1],
}
# Blocks of 128 x 128 weights have a scale each, and Transformers wants sizes that are multiples.
FP8_SIZES = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
FP8_NOTE = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
IMAGE_TOKEN = "<image>"
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
IMAGE_TEMPLATE = """{% for message in messages %}{{ message['role'] }}
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""
OPTIMIZERS = """
import os
import torch

def momentum(groups):
    return torch.optim.SGD(groups, momentum=0.9)

class FailingOnce(torch.optim.AdamW):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("the golden run fails here once")
        return super().step(closure)

def failing_once(groups):
    return FailingOnce(groups)
"""


def write_inputs(folder: Path) -> None:
    """Write models with a tokenizer of single bytes, and data for every objective."""
    _write_models(folder)
    _write_fp8(folder / "fp8")
    _write_image_chats(folder)
    _write_model_shapes(folder)
    (folder / "optimizers.py").write_text(OPTIMIZERS)
    generator = random.Random(0)
    write_json_lines(
        folder / "samples.jsonl", (_sample(generator, number) for number in range(150))
    )
    write_json_lines(folder / "chats.jsonl", (_chat(number) for number in range(120)))
    write_json_lines(folder / "pairs.jsonl", (_pair(number) for number in range(60)))
    write_json_lines(folder / "prompts.jsonl", ({"prompt": f"What is {n} + 1?"} for n in range(5)))


def _write_models(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**SIZES)
    mixture = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    images = transformers.LlavaConfig(
        text_config={"model_type": "llama", **SIZES},
        vision_config=VISION,
        image_token_index=VOCABULARY - 1,
        tie_word_embeddings=False,
    )
    hybrid = transformers.BambaConfig(
        **SIZES, **MAMBA, num_key_value_heads=2, max_position_embeddings=256
    )
    tied = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    models = {
        "model": transformers.LlamaForCausalLM(llama),
        "mixture": transformers.MixtralForCausalLM(mixture),
        "images": transformers.LlavaForConditionalGeneration(images),
        "hybrid": transformers.BambaForCausalLM(hybrid),
        "tied": transformers.LlamaForCausalLM(tied),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        _write_tokenizer(folder / name, IMAGE_TOKEN if name == "images" else None)


def _write_fp8(folder: Path) -> None:
    """Write a Llama whose linear layers are stored as FP8 in blocks, as DeepSeek V3's are."""
    import torch
    import transformers
    from safetensors.torch import save_file

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FP8_SIZES)).bfloat16()
    model.config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, tensor in model.state_dict().items():
        stored[name] = tensor.contiguous()
        if not name.endswith("_proj.weight"):
            continue
        codes = torch.randn(tensor.shape, generator=generator) * 50
        blocks = [size // 128 for size in tensor.shape]
        stored[name] = codes.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) * 1e-3 + 1e-4
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | {"quantization_config": FP8_NOTE}
    file.write_text(json.dumps(settings))
    _write_tokenizer(folder)


def _write_image_chats(folder: Path) -> None:
    """Write chats with no, one or two images, and what makes pixels and tokens of them."""
    import numpy
    from PIL import Image

    (folder / "images" / "processor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "images" / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    (folder / "image_chats.jinja").write_text(IMAGE_TEMPLATE)
    generator = numpy.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 256, (28 + 7 * number, 60 - 5 * number, 3), numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    chats = []
    for number in range(24):
        content: list[dict[str, str]] = []
        for added in range(number % 3):
            content.append({"type": "image", "image": f"{(number + added) % 5}.png"})
        content.append({"type": "text", "text": f"What is picture {number}?"})
        answer = [{"type": "text", "text": "Noise" + "!" * (number % 7)}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        chats.append({"messages": messages})
    write_json_lines(folder / "image_chats.jsonl", chats)


def _write_model_shapes(folder: Path) -> None:
    """Write config.json of the models of configs/, for plans."""
    import yaml
    from model_shapes import CONFIGS, write_config

    configs = Path(__file__).resolve().parent.parent / "configs"
    for file in configs.glob("*gb.yaml"):
        name = yaml.safe_load(file.read_text())["model"]["model_name"]
        if name in CONFIGS:
            write_config(folder / f"config-{file.stem}", name)


def _write_tokenizer(folder: Path, image_token: str | None = None) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if image_token is not None:
        special["extra_special_tokens"] = {"image_token": image_token}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _sample(generator: random.Random, number: int) -> dict[str, Any]:
    """Tokens of uneven length; the first ones are not in the loss."""
    ids = [generator.randrange(256) for _ in range(8 + number % 90)]
    masked = number % 5
    return {"input_ids": ids, "labels": [-100] * masked + ids[masked:]}


def _chat(number: int) -> dict[str, Any]:
    messages = []
    for added in range(1 + number % 3):
        messages.append({"role": "user", "content": f"What is {number} + {added}?"})
        messages.append({"role": "assistant", "content": f"{number + added}, I think."})
    return {"messages": messages}


def _pair(number: int) -> dict[str, Any]:
    return {
        "prompt": f"What is {number} + 1?",
        "chosen": f" {number + 1}" + "!" * (number % 4),
        "rejected": " I do not know" + "." * (number % 3),
    }
