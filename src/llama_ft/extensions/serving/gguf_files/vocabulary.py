"""The tokenizer in a GGUF file: byte-level BPE, of which llama.cpp must know how it splits text into
words."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import read_json
from llama_ft.extensions.serving.gguf_files.architecture import SPARED

WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The regular expression of a tokenizer -> llama.cpp's name of this way to split text
SPLITS = {
    CONTRACTIONS + WORDS % r"\p{N}{1,3}": "llama-bpe",
    CONTRACTIONS + WORDS % r"\p{N}": "qwen2",
}


def write_vocabulary(writer: Any, folder: Path, gguf: Any) -> None:
    """Write the tokens, how they merge, the special ones and the chat template.

    Args:
        writer: of the GGUF file.
        folder: of the model, with tokenizer.json and generation_config.json.
        gguf: the package.

    Raises:
        UserError: llama.cpp would split text otherwise.
    """
    settings = read_json(folder / "tokenizer.json")
    model = settings.get("model") or {}
    split = _split(settings)
    if model.get("type") != "BPE" or model.get("byte_fallback") or split is None:
        raise UserError(
            f"{folder}: how its tokenizer splits text has no name in llama.cpp that is known here. "
            f"{SPARED} An adapter can be written: it has no tokenizer."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = int(read_json(folder / "config.json").get("vocab_size") or len(tokenizer))
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = gguf.TokenType
    tokens = []
    types = []
    for number in range(size):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        kind = kinds.NORMAL if number in by_id else kinds.UNUSED
        if number in added:
            kind = kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        types.append(kind)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    _write_special(writer, folder, tokenizer)


def _write_special(writer: Any, folder: Path, tokenizer: Any) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(bos is not None and tokenizer("")["input_ids"][:1] == [bos])
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    stops = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = stops if isinstance(stops, list) else [stops] if stops is not None else []
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else (ids or [None])[0]
    if eos is not None:
        writer.add_eos_token_id(eos)
    # the last one is what the chat template of the training writes after a response
    if ids and ids[-1] != eos:
        writer.add_eot_token_id(ids[-1])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _split(settings: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the way in which a tokenizer splits text, or None."""
    first = settings.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers") or [first]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = json.loads(json.dumps(parts[0].get("pattern", {}))).get("Regex", "")
        return SPLITS.get(pattern)
    return None
