"""The tokenizer in a GGUF file: byte-level BPE, of which llama.cpp must know how it splits text into
words, or SentencePiece's BPE, which has spaces as ▁ and bytes for unknown characters."""

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import read_json
from llama_ft.extensions.serving.gguf_files.architecture import SPARED

WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
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
    prefix = _space_prefix(settings)
    is_sentencepiece = bool(model.get("byte_fallback"))
    scores = _scores(settings) if is_sentencepiece and prefix is not None else None
    is_known = scores is not None if is_sentencepiece else split is not None
    if model.get("type") != "BPE" or not is_known:
        raise UserError(
            f"{folder}: how its tokenizer splits text has no name in llama.cpp that is known here. "
            f"{SPARED} An adapter can be written: it has no tokenizer."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = int(read_json(folder / "config.json").get("vocab_size") or len(tokenizer))
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    if scores is None:
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(prefix)
        if tokenizer.unk_token_id is not None:
            writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_token_list(tokens)
    writer.add_token_types(_types(tokenizer, by_id, size, scores is not None, gguf))
    _write_special(writer, folder, tokenizer)


def _types(
    tokenizer: Any, by_id: dict[int, str], size: int, is_sentencepiece: bool, gguf: Any
) -> list[Any]:
    """Return the kind of each token."""
    kinds = gguf.TokenType
    added = tokenizer.added_tokens_decoder
    types = []
    for number in range(size):
        kind = kinds.NORMAL if number in by_id else kinds.UNUSED
        if number in added:
            kind = kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        if is_sentencepiece and BYTE.fullmatch(by_id.get(number, "")):
            kind = kinds.BYTE
        if is_sentencepiece and number == tokenizer.unk_token_id:
            kind = kinds.UNKNOWN
        types.append(kind)
    return types


def _scores(settings: dict[str, Any]) -> dict[str, float] | None:
    """Return the scores of merged tokens: llama.cpp joins the neighbors with the highest one. None if
    the order of merges cannot be written in this way."""
    model = settings["model"]
    added = {token["content"] for token in settings.get("added_tokens") or []}
    scores = dict[str, float]()
    last = ""
    for number, pair in enumerate(model["merges"]):
        first, second = pair if isinstance(pair, list) else pair.split(" ")
        merged = first + second
        if merged in scores and merged != last:
            return None  # two ways to this token, with another merge between them
        scores.setdefault(merged, -float(number))
        last = merged
    for token in model["vocab"]:
        is_single = len(token) == 1 or token in added or BYTE.fullmatch(token)
        if not is_single and token not in scores:
            return None  # llama.cpp would join characters to it
    return scores


def _space_prefix(settings: dict[str, Any]) -> bool | None:
    """Return whether a space is put before a text; None if spaces do not become ▁ alone."""
    normalizer = settings.get("normalizer") or {}
    steps = normalizer.get("normalizers") or ([normalizer] if normalizer else [])
    splitter = settings.get("pre_tokenizer") or {}
    kinds = [step.get("type") for step in steps]
    if splitter.get("type") == "Metaspace" and not steps and splitter.get("split") is False:
        # "first" puts none before a text that begins with one, and llama.cpp does
        return False if splitter.get("prepend_scheme") == "never" else None
    replaces = bool(steps) and steps[-1].get("pattern") == {"String": " "}
    if not replaces or steps[-1].get("content") != SPACE:
        return None
    # Gemma's splits at spaces, of which none are left
    if splitter and splitter.get("pattern") != {"String": " "}:
        return None
    if kinds == ["Replace"]:
        return False
    is_prepended = kinds == ["Prepend", "Replace"] and steps[0].get("prepend") == SPACE
    return True if is_prepended else None


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
    normalizer = (settings.get("normalizer") or {}).get("type")
    # llama.cpp normalizes nothing; texts in NFC, as nearly all are, stay as they are
    if parts[-1].get("add_prefix_space") or normalizer not in (None, "NFC"):
        return None
    has_regex = bool(parts[-1].get("use_regex"))
    if kinds == ["ByteLevel"] and has_regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and has_regex:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not has_regex:
        is_kept = parts[0].get("behavior") == "Isolated" and not parts[0].get("invert")
        pattern = str((parts[0].get("pattern") or {}).get("Regex"))
        return SPLITS.get(pattern) if is_kept else None
    return None
