"""Models and samples for gpu_check.py, made from a seed: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
EIGHT_B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
THREE_B = EIGHT_B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
}
SHALLOW = EIGHT_B | {"num_hidden_layers": 4}  # layers as wide as 8B's, in files of 4 GB
# Tiny models of other architectures: what they have that a Llama has not.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 64},  # eager, with soft caps
    "mistral": {"sliding_window": 16},
    "llama": {"tie_word_embeddings": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "falcon_h1": {
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
}
# as published in 8 and in 4 bits -> architecture, and its quantization_config
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8": (
        "llama",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "MXFP4": (
        "gpt_oss",
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    ),
}


def make_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a Llama with random bf16 weights, one file per layer, unless `folder` has it."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **shape, tie_word_embeddings=False, max_position_embeddings=8192, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
        files.setdefault(file, []).append((name, parameter.shape))
    torch.manual_seed(0)
    for file, shapes in files.items():  # a layer at a time
        tensors = {}
        for name, size in shapes:
            is_norm = len(size) == 1
            value = torch.ones(size) if is_norm else torch.randn(size, device=DEVICE).mul_(0.02)
            tensors[name] = value.to(torch.bfloat16).cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # the runs are in other processes
    weight_map = {name: file for file, shapes in files.items() for name, _ in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer(folder)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def make_architecture(folder: Path, architecture: str) -> Path:
    """Write a tiny model of one of ARCHITECTURES, unless `folder` has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "tokenizer.json").exists():  # written last
        return folder
    options = TINY | {"tie_word_embeddings": False} | ARCHITECTURES[architecture]
    config = AutoConfig.for_model(architecture, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_published(folder: Path, kind: str) -> Path:
    """Write a tiny model as one of PUBLISHED, unless `folder` has it."""
    from safetensors.torch import load_file, save_file

    if (folder / "published").exists():  # written last
        return folder
    architecture, quantization = PUBLISHED[kind]
    make_architecture(folder, architecture)
    quantize = _in_fp8 if kind == "FP8" else _in_mxfp4
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        is_quantized = "_proj" in name and tensor.ndim > 1
        tensors |= quantize(name, tensor) if is_quantized else {name: tensor}
    save_file(tensors, file, {"format": "pt"})
    config = folder / "config.json"
    settings = json.loads(config.read_text()) | {"quantization_config": quantization}
    config.write_text(json.dumps(settings))
    (folder / "published").touch()
    return folder


def _in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes of a weight with a scale per 128 x 128."""
    rows, columns = tensor.shape
    codes = (tensor.float() / 0.02 * 50).to(torch.float8_e4m3fn)
    scales = torch.full((-(-rows // 128), -(-columns // 128)), 0.02 / 50)
    return {name: codes, f"{name}_scale_inv": scales}


def _in_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return random codes and exponents of stacked experts [experts, in, out]."""
    if not name.endswith("_proj"):
        return {name: tensor}
    experts, columns, rows = tensor.shape
    blocks = (experts, rows, columns // 32)
    return {
        f"{name}_blocks": torch.randint(256, (*blocks, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(115, 124, blocks, dtype=torch.uint8),
    }


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {chr(33 + n): 3 + n for n in range(200)}
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **characters}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def make_samples(file: Path, lengths: list[int], vocabulary: int = 200) -> Path:
    """Write tokenized samples of these lengths."""
    generator = torch.Generator().manual_seed(len(lengths))
    with open(file, "w") as lines:
        for length in lengths:
            ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * 4 + ids[4:]}) + "\n")
    return file


def make_pairs(file: Path, count: int) -> Path:
    """Write pairs of a chosen and a rejected response, as text."""
    generator = torch.Generator().manual_seed(count)
    with open(file, "w") as lines:
        for number in range(count):
            chosen = _text(10 + number % 30, generator)
            rejected = _text(40 - number % 30, generator)
            row = {"prompt": _text(8, generator), "chosen": chosen, "rejected": rejected}
            lines.write(json.dumps(row) + "\n")
    return file


def make_answers(file: Path, count: int, are_rated: bool = False) -> Path:
    """Write prompts with an answer each, as text; with a label each if they are rated."""
    generator = torch.Generator().manual_seed(count)
    with open(file, "w") as lines:
        for number in range(count):
            completion = _text(10 + number % 30, generator)
            row: dict[str, Any] = {"prompt": _text(8, generator), "completion": completion}
            row |= {"label": number % 2 == 0} if are_rated else {}
            lines.write(json.dumps(row) + "\n")
    return file


def _text(length: int, generator: torch.Generator) -> str:
    codes = torch.randint(0, 90, (length,), generator=generator).tolist()
    return "".join(chr(33 + code) for code in codes)
