"""The embedded demo: a small Llama and a real dataset, built on this machine without a network.

They are an ordinary Hugging Face directory and two .jsonl files. Prompts ask about Python's
standard library, and its docstrings are the responses. The sources of the running Python are
parsed, not imported.
"""

import ast
import hashlib
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ft.data.cache import build_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERSION = 3
SKIPPED = set(
    "site-packages dist-packages test tests idlelib lib2to3 turtledemo ensurepip pydoc_data".split()
)
SHORTEST_RESPONSE = 20  # characters; shorter docstrings have no content ("See above.")
VALIDATION_SHARE = 0.05
PROMPTS = (
    "What does the {kind} `{name}` do?",
    "Explain the {kind} `{name}` of Python's standard library.",
    "How does Python document the {kind} `{name}`?",
    "Describe the {kind} `{name}`.",
    "What is the {kind} `{name}` for?",
)
Documented = tuple[str, str, str, str]  # name, kind, signature and docstring
Function = ast.FunctionDef | ast.AsyncFunctionDef

SPECIAL_TOKENS = [
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Demo:
    """The paths of the demo's model and data, and a description for the log."""

    model_dir: Path
    train_file: Path
    validation_file: Path
    about_model: str
    about_data: str


def build_demo(cache: Path) -> Demo:
    """Build the demo's model and data in `cache`, once per Python version."""
    version = platform.python_version()
    folder = build_once(cache / f"demo-py{version}-v{VERSION}", _build)
    about_model = f"model demo: a Llama of 6.6 M parameters with random weights, {folder}/model"
    about_data = (
        f"dataset demo: the docstrings of Python {version}'s standard library, {folder}/train.jsonl"
    )
    return Demo(
        folder / "model",
        folder / "train.jsonl",
        folder / "validation.jsonl",
        about_model,
        about_data,
    )


def _build(folder: Path) -> None:
    for split, lines in _demo_samples().items():
        text = "".join(lines)
        # errors: a docstring may hold half a surrogate pair, which UTF-8 cannot encode
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8", errors="replace")
    tokenizer = _train_tokenizer(folder / "train.jsonl")
    _save_model(folder / "model", tokenizer)
    tokenizer.save_pretrained(folder / "model")


def _demo_samples() -> dict[str, list[str]]:
    """Return the lines of train.jsonl and validation.jsonl."""
    samples: dict[str, list[str]] = {"train": [], "validation": []}
    seen = set[str]()
    library = Path(sysconfig.get_path("stdlib"))
    documented = sorted(_documented(library), key=itemgetter(0))  # by name
    for name, kind, signature, docstring in documented:
        # posixpath and ntpath share many docstrings. The same response must not be in both splits:
        # keep the first.
        response = " ".join(docstring.lower().split())
        if len(docstring) < SHORTEST_RESPONSE or response in seen:
            continue
        seen.add(response)
        prompt = PROMPTS[_stable_hash("question " + name) % len(PROMPTS)]
        instruction = prompt.format(kind=kind, name=name)
        sample = {"instruction": instruction, "input": signature, "output": docstring}
        # A hash divided by its range is a number from 0 to 1 that depends on the name only.
        is_held_out = _stable_hash("split " + name) / 2**64 < VALIDATION_SHARE
        split = "validation" if is_held_out else "train"
        samples[split].append(json.dumps(sample, ensure_ascii=False) + "\n")
    return samples


def _documented(library: Path) -> Iterator[Documented]:
    """Yield every public object with a docstring in the Python files under `library`. Skips files
    that cannot be parsed."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED.intersection(parts) or any(map(_is_private, parts)):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old files have invalid escape sequences
                module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield from _walk(module, ".".join(parts), "module", "")


def _walk(
    node: ast.Module | ast.ClassDef | Function, name: str, kind: str, signature: str
) -> Iterator[Documented]:
    """Yield the node itself and, for modules and classes, the definitions directly inside."""
    if docstring := ast.get_docstring(node):  # cleaned up like inspect.cleandoc
        yield name, kind, signature, docstring
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    for child in node.body:
        if not isinstance(child, ast.ClassDef | Function) or _is_private(child.name):
            continue
        # A copy without body and decorators unparses to the first line of the definition.
        head: ast.ClassDef | Function
        if isinstance(child, ast.ClassDef):
            child_kind = "class"
            head = ast.ClassDef(child.name, child.bases, [], [], [])
        else:
            child_kind = "method" if isinstance(node, ast.ClassDef) else "function"
            head = type(child)(child.name, child.args, [], [], child.returns, lineno=0)
        child_signature = ast.unparse(head).removesuffix(":")
        yield from _walk(child, f"{name}.{child.name}", child_kind, child_signature)


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def _stable_hash(text: str) -> int:
    """Return a 64-bit hash that, unlike hash(), is the same in every process."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big")


def _train_tokenizer(train_file: Path) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer on the training samples only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # the order of a set would differ between runs
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    with open(train_file, encoding="utf-8") as lines:
        samples = (json.loads(line) for line in lines)
        texts = ("\n".join(sample.values()) for sample in samples)
        tokenizer.train_from_iterator(texts, trainer)
    bos, end, pad, *others = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=end,
        pad_token=pad,
        extra_special_tokens=others,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _save_model(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Save a randomly initialized Llama with grouped-query attention in fp32."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        # the default, 0.02, is for wider layers and learns more slowly here
        initializer_range=0.04,
        tie_word_embeddings=False,
        dtype="float32",
        **ids,
    )
    # The seed must not change the random numbers of the run that builds the demo.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    # Transformers saves only on rank 0, but every node with a local disk needs the files.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[method-assign]
    # 26 MB in all, so there are several shards, as in large models
    model.save_pretrained(folder, max_shard_size="8MB")
