"""The embedded demo: a small Llama and a real dataset, built on this machine without a network.

What is built is an ordinary Hugging Face folder with sharded safetensors and two .jsonl files, so that from here on
the demo is loaded like any model and any data.
"""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ft.data.cache import build_once
from llama_ft.data.demo_rows import write_demo_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERSION = 3
VOCABULARY_SIZE = 8192
SEED = 0
BOS, END_OF_TURN, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, END_OF_TURN, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

# The generation block is what is trained on: the answer and the token that ends the turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Demo:
    """Where the demo lies, and a line about its model and one about its rows for people."""

    model_dir: Path
    train_file: Path
    validation_file: Path
    about_model: str
    about_rows: str


def build_demo(cache: Path) -> Demo:
    """Build the demo's model and data under the folder `cache`, once for each Python version."""
    version = platform.python_version()
    folder = build_once(cache / f"demo-py{version}-v{VERSION}", _build)
    facts = json.loads((folder / "demo.json").read_text())
    about_model = f"demo model: a Llama of {facts['parameters'] / 1e6:.1f} M parameters in {folder / 'model'}"
    about_rows = (
        f"demo rows: {facts['train']:,} training and {facts['validation']:,} validation rows from the docstrings of "
        f"Python {version}'s standard library in {folder / 'train.jsonl'}"
    )
    return Demo(folder / "model", folder / "train.jsonl", folder / "validation.jsonl", about_model, about_rows)


def _build(folder: Path) -> None:
    facts = write_demo_rows(folder)
    tokenizer = _train_tokenizer(folder / "train.jsonl")
    facts["parameters"] = _save_model(folder / "model", tokenizer)
    tokenizer.save_pretrained(folder / "model")
    (folder / "demo.json").write_text(json.dumps(facts))


def _train_tokenizer(train_file: Path) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer trained on the training rows alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # a set's order would differ from run to run
        show_progress=False,
    )
    with open(train_file, encoding="utf-8") as lines:
        tokenizer.train_from_iterator(("\n".join(json.loads(line).values()) for line in lines), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        extra_special_tokens=SPECIAL_TOKENS[3:],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _save_model(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> int:
    """Save a freshly initialised Llama with grouped-query attention in fp32; return its parameter count."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.04,  # 0.02, the default, suits wider layers and learns more slowly here
        tie_word_embeddings=False,
        dtype="float32",
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**token_ids)
    # transformers saves on rank 0 only, but every node with a disk of its own needs the files.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[method-assign]
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="8MB")  # 26 MB in all: several shards, as big models have
    if shown:
        logging.enable_progress_bar()
    return sum(parameter.numel() for parameter in model.parameters())
