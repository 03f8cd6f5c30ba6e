"""Write the files of a model or adapter other than its weights: config.json, tokenizer, generation
config, processor and license.

Transformers 5 renames settings when it saves them: `rope_theta` and `rope_scaling` become
`rope_parameters`, `torch_dtype` becomes `dtype`, and many tokenizer classes `TokenizersBackend`.
Transformers 4, and what is built on it, reads only the old names and computes something else without
them. So a file holds the base model's own settings with what the run changed, and in addition what
Transformers 5 writes:

    base        run                   written
    old: a      reads it as new: a    old: a, new: a
    old: a      changes it to b       new: b, and old: b if it has the same name
    -           new: a                new: a, and old: a if Transformers 5 reads it back as new: a
"""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from llama_ft.config.paths import MODEL_PATTERNS, RUN_ENTRIES
from llama_ft.data import stop_token_ids
from llama_ft.errors import UserError, reason
from llama_ft.masking import mask_secrets
from llama_ft.runtime import log

Settings = dict[str, Any]  # of a JSON file

# Copied from the base model's directory. The processor reads images for the parts that are not
# fine-tuned.
LEGACY_TEMPLATE = "chat_template.json"
GENERATION_CONFIG = "generation_config.json"
COPIED = (GENERATION_CONFIG, "*processor_config.json", LEGACY_TEMPLATE)
SENTENCEPIECE = "tokenizer.model"
# Copied, too, if they are small and hold no secret.
COPIED_TEXTS = ("LICEN[CS]E*", "COPYING*", "*NOTICE*", "*POLICY*")
COPIED_SETTINGS = ("*chat_template*.jinja", "configuration.json")  # the latter of ModelScope
TEXT_SUFFIXES = ("", ".txt", ".md", ".rst")
COPIED_BYTES = 2**20
# Files of secrets are recognized by their content, too.
NEVER_COPIED = re.compile(
    r"\.|.*(secret|credential|passw|api_?key|licen[cs]e_?key|auth|token\b)", re.IGNORECASE
)
# Settings that say where a file was, which is nobody's business.
PRIVATE_SETTINGS = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file")
# Settings of tokenizers that Transformers 5 writes on its own
ADDED_BY_5 = ("backend", "is_local", "local_files_only")
# Settings of rotary embeddings before Transformers 5, apart from rope_scaling: Gemma 3 has a
# frequency for local layers, ModernBERT and GPT-NeoX have other names.
OLD_THETA = (
    "rope_theta",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "rotary_emb_base",
)
OLD_SHARE = ("partial_rotary_factor", "rotary_pct")
ROPE = "rope_parameters"
# Stood next to rope_scaling, not within it.
SCALED_BY_NAME = ("rope_theta", "partial_rotary_factor")
ABSENT = object()


def check_export(
    model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: Path
) -> None:
    """Write the files other than the weights into a temporary directory. So a run that could not
    save its final model fails before training. For the arguments see write_model_settings."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_model_settings(Path(folder), model_config, None, tokenizer, source)
        except Exception as error:  # of any library that writes one of these files
            raise UserError(
                f"{source}: its config or tokenizer cannot be saved: {reason(error)}"
            ) from error


def write_model_settings(
    folder: Path,
    model_config: PretrainedConfig,
    dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
) -> None:
    """Write the files other than the weights: config.json, tokenizer, processor, generation config
    and code.

    Args:
        folder: directory of the weights.
        model_config: the model's config; it is not changed.
        dtype: of the weights, for config.json.
        tokenizer: with the chat template of the run.
        source: directory of the base model, from which small files are copied.
    """
    config = copy.deepcopy(model_config)
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for part in (config, *parts):
        if part is not None:
            part.dtype = dtype  # the dtype of the model on the meta device has no meaning
    base = json.loads((source / "config.json").read_text(), object_hook=_float)
    _write_config(folder / "config.json", config, base)
    write_tokenizer(folder, tokenizer)
    for file in _files_to_copy(source):
        # Transformers rejects a legacy template together with several new ones.
        if not (file.name == LEGACY_TEMPLATE and (folder / "additional_chat_templates").exists()):
            shutil.copy(file, folder / file.name)
    _set_legacy_template(folder / LEGACY_TEMPLATE, tokenizer.chat_template)
    _write_stop_tokens(folder, tokenizer, folder)


def write_adapter_settings(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Write the files of an adapter other than its weights and settings: the tokenizer, and the
    generation config, which a server takes in place of the base model's.

    Args:
        folder: directory of the adapter.
        tokenizer: with the chat template of the run.
        source: directory of the base model.
    """
    write_tokenizer(folder, tokenizer)
    file = source / GENERATION_CONFIG
    if file.is_file():
        shutil.copy(file, folder / file.name)
    if (source / "config.json").is_file():
        _write_stop_tokens(folder, tokenizer, source)


def _write_json(file: Path, settings: Settings) -> None:
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _set_legacy_template(file: Path, template: Any) -> None:
    """Put the run's template into a copied chat_template.json, which Transformers 4 may read."""
    if isinstance(template, str) and file.exists():
        settings = json.loads(file.read_text())
        if settings.get("chat_template") != template:
            _write_json(file, settings | {"chat_template": template})


def _write_stop_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, model: Path) -> None:
    """Make `generate` stop at the token that ends a message in the chat template. It may differ
    from the token at which the base model stops. `model`: the directory of config.json."""
    file = folder / GENERATION_CONFIG
    source = file if file.exists() else model / "config.json"
    try:
        settings = json.loads(source.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source.name}: {reason(error)}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{source.name}: expected settings by name")
    known = settings.get("eos_token_id")
    if isinstance(known, list):
        ids = known
    else:
        ids = [] if known is None else [known]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{file.name}: eos_token_id is {known}; expected a number or a list")
    stops = stop_token_ids(tokenizer, known)
    if stops != ids:
        own = settings if file.exists() else {"bos_token_id": settings.get("bos_token_id")}
        _write_json(file, own | {"eos_token_id": stops})


def _write_config(file: Path, config: PretrainedConfig, base: Settings) -> None:
    """Write config.json: the base's settings with the run's changes, and what Transformers 5
    writes."""
    try:
        before = _read(type(config), base)
    except Exception:  # of a config's own code; load_model_config has changed what it cannot read
        base = before = {}
    _change_both_parts(config, base, before)
    config.save_pretrained(file.parent)
    # Transformers 4 reads and writes Infinity as Python does.
    saved: Settings = json.loads(file.read_text(), object_hook=_float)
    after = _as_json(config.to_dict())
    settings = _with_base(saved, base, before, after)
    settings["model_type"] = saved["model_type"]  # Kimi K2 is read as DeepSeek V3
    _add_old_names(settings, config)
    different = _differences(after, _read(type(config), settings))
    if different:  # the base's own names contradict what the run has changed
        settings = saved
        _add_old_names(settings, config)
    _write_json(file, settings)


def _change_both_parts(config: PretrainedConfig, base: Settings, before: Settings) -> None:
    """Give the model and its text part what the run has changed in one of them: the number of
    tokens, and whether embedding and LM head are tied. Transformers 5 reads the model's
    `tie_word_embeddings`, Transformers 4 its text part's."""
    text = config.get_text_config()
    if text is config:
        return
    if before.get("tie_word_embeddings") and not config.tie_word_embeddings:
        text.tie_word_embeddings = False
    sizes = [
        part["vocab_size"]
        for part in before.values()
        if isinstance(part, dict) and part.get("model_type") == text.model_type
    ]
    if base.get("vocab_size") in sizes and vars(config).get("vocab_size") in sizes:
        config.vocab_size = text.vocab_size


def _read(kind: type[PretrainedConfig], settings: Settings) -> Settings:
    """Return all settings that Transformers reads from those of a config.json."""
    return _as_json(_config(kind, settings).to_dict())


def _config(kind: type[PretrainedConfig], settings: Settings) -> PretrainedConfig:
    """Return the config of `settings`. Transformers' own `from_dict` also makes a text of it for the
    log, which takes as long as the config, and a run reads about forty of them."""
    settings = copy.deepcopy(settings)
    of_class = next(base for base in kind.__mro__ if "from_dict" in vars(base))
    return kind(**settings) if of_class is PretrainedConfig else kind.from_dict(settings)


def _float(settings: Settings) -> Any:
    """Transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return float(settings["__float__"]) if settings.keys() == {"__float__"} else settings


def _as_json(settings: Settings) -> Settings:
    """Return settings as they are after they were written and read."""
    read: Settings = json.loads(json.dumps(settings, default=str), object_hook=_float)
    return read


def _with_base(saved: Settings, base: Settings, before: Settings, after: Settings) -> Settings:
    """Return the base's settings with the run's changes, and what only `saved` has.

    Args:
        saved: what Transformers writes for the run's config.
        base: as its file has them.
        before: all settings of the base as Transformers reads them.
        after: all settings of the run.
    """
    merged: Settings = {}
    for name, value in base.items():
        if name in PRIVATE_SETTINGS:
            continue
        now = after.get(name, ABSENT)
        was = before.get(name, ABSENT)
        if now is ABSENT and was is ABSENT:
            merged[name] = value  # Transformers renames it or does not know it
        elif isinstance(now, dict) and isinstance(was, dict) and isinstance(value, dict):
            merged[name] = _with_base(saved.get(name) or {}, value, was, now)
        elif now is not ABSENT:
            merged[name] = value if now == was else now
    for name, value in saved.items():
        merged.setdefault(name, value)
    return merged


def _add_old_names(settings: Settings, config: PretrainedConfig) -> None:
    """Add what Transformers before version 5 reads to the settings of a config and of its parts:
    torch_dtype, other names of the same setting, and the settings of rotary embeddings."""
    if "dtype" in settings:
        settings["torch_dtype"] = settings["dtype"]
    for name, new_name in config.attribute_map.items():  # num_experts: num_local_experts
        if new_name in settings:
            settings.setdefault(name, settings[new_name])
    if settings.get(ROPE):
        for name, value in _old_rope(settings, type(config)).items():
            settings.setdefault(name, value)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        within = settings.get(name)
        if isinstance(part, PretrainedConfig) and isinstance(within, dict):
            _add_old_names(within, part)


def _old_rope(settings: Settings, kind: type[PretrainedConfig]) -> Settings:
    """Return rope_parameters in the names of Transformers 4, found by what this class reads from
    each name; {} if it reads something else from them."""
    rope = settings[ROPE]
    without = {name: value for name, value in settings.items() if name != ROPE}

    def read(names: Settings) -> Settings:
        try:
            config = _config(kind, without | names)
        except Exception:  # of a class that rejects the name or its value
            return {}
        return getattr(config, ROPE, None) or {}

    # of one rope per kind of layers, that of the layers without a window
    whole = rope.get("full_attention") or rope
    expected = dict(_leaves(rope))
    default = dict(_leaves(read({})))
    # A valid share of each head, which the class would not choose itself.
    probe = 0.25 if 0.5 in default.values() else 0.5
    # Classes with a scaling of their own (Apertus, gpt-oss) read the names only next to another one.
    unscaled = {name: value for name, value in whole.items() if name not in SCALED_BY_NAME}
    old: Settings = {}
    for name in (*OLD_THETA, *OLD_SHARE):
        for scaling in ({}, {"rope_scaling": unscaled}):
            for path, value in _leaves(read({name: probe} | scaling)):
                if value == probe and path in expected:
                    old.setdefault(name, expected[path])
    if not old:
        return {}  # younger than Transformers 5
    thetas = {value for path, value in expected.items() if path.endswith(".rope_theta")}
    for scaling in _old_scalings(whole, settings, is_share_named=bool(old.keys() & {*OLD_SHARE})):
        names = old | scaling
        reread = read(names)
        is_whole = not _differences(whole, reread.get("full_attention") or reread)
        if is_whole and (len(thetas) == 1 or not _differences(rope, reread)):
            return names
    return {}


def _old_scalings(rope: Settings, settings: Settings, is_share_named: bool) -> Iterator[Settings]:
    """Yield the forms of rope_scaling that a class of Transformers 4 may want."""
    named = SCALED_BY_NAME if is_share_named else SCALED_BY_NAME[:1]
    whole = {name: value for name, value in rope.items() if name not in named}
    scaling = dict(whole)
    length = "original_max_position_embeddings"
    if scaling.get(length) == settings.get(length, ABSENT):
        del scaling[length]
    if scaling.get("rope_type") == "longrope":  # Phi-3's class wants three settings of these names
        scaling["type"] = scaling.pop("rope_type")
    if scaling == {"rope_type": "default"}:
        yield {}
    yield {"rope_scaling": scaling}
    yield {"rope_scaling": whole}


def _leaves(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each setting within settings."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _leaves(value, f"{path}.{name}")
    else:
        yield path, settings


def _differences(expected: Settings, actual_settings: Settings) -> list[str]:
    """Return the names of settings that a file does not give back."""
    ignored = (*PRIVATE_SETTINGS, "transformers_version")
    different = []
    for name, value in expected.items():
        if name in ignored:
            continue
        actual = actual_settings.get(name, ABSENT)
        if isinstance(value, dict) and isinstance(actual, dict):
            different += [f"{name}.{within}" for within in _differences(value, actual)]
        elif value != actual:
            different.append(name)
    return different


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer: tokenizer_config.json has the base's own settings with the run's chat
    template and tokens."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    saved = json.loads(file.read_text())
    origin = Path(tokenizer.name_or_path or folder)
    has_base = (origin / file.name).is_file()
    base: Settings = json.loads((origin / file.name).read_text()) if has_base else {}
    if has_base:
        saved = {name: value for name, value in saved.items() if name not in ADDED_BY_5}
    settings = saved | {name: value for name, value in base.items() if name not in PRIVATE_SETTINGS}
    for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if _token_text(base.get(name)) != _token_text(saved.get(name)):
            settings[name] = saved.get(name)
    _set_further_tokens(settings, base, saved, tokenizer)
    if "chat_template" in base:
        settings["chat_template"] = _inline_template(tokenizer.chat_template)
    # Transformers 4 lacks the class, and reads the same files by this one.
    kind = settings.get("tokenizer_class")
    if not _is_read_as(kind, tokenizer) and not (folder / "config.json").exists():
        kind = saved["tokenizer_class"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast" if kind == "TokenizersBackend" else kind
    _write_json(file, settings)
    vocabulary = origin / SENTENCEPIECE  # llama.cpp prefers it to tokenizer.json
    copied = folder / SENTENCEPIECE
    if vocabulary.is_file() and not copied.exists() and _is_of_model(vocabulary, origin):
        shutil.copy(vocabulary, copied)


def _token_text(token: Any) -> Any:
    """Return the text of a token, which a file may hold with how it is split from other text."""
    return token.get("content") if isinstance(token, dict) else token


def _set_further_tokens(
    settings: Settings, base: Settings, saved: Settings, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write special tokens without a name as additional_special_tokens, which Transformers 4 and 5
    read, and new tokens where the base lists its own."""
    further = saved.get("extra_special_tokens")
    if isinstance(further, list):
        if isinstance(settings.get("extra_special_tokens"), list):
            del settings["extra_special_tokens"]
        known = base.get("additional_special_tokens") or []
        if [_token_text(token) for token in known] != [_token_text(token) for token in further]:
            settings["additional_special_tokens"] = further
    if "added_tokens_decoder" in base:
        listed = settings["added_tokens_decoder"] = dict(base["added_tokens_decoder"])
        for number, token in tokenizer.added_tokens_decoder.items():
            listed.setdefault(str(number), token.__getstate__())


def _inline_template(template: Any) -> Any:
    """Return the template, or the templates by name, in the form of tokenizer_config.json."""
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template


def _is_read_as(name: str | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether Transformers makes a tokenizer of this kind of a class's name alone. Of some
    models it overrules the name by the model_type in config.json, which an adapter lacks."""
    kind = getattr(transformers, name or "", None)
    return kind is None or kind is type(tokenizer)


def _files_to_copy(source: Path) -> list[Path]:
    """Return the files of a base model's directory that an export copies: only kinds of files that
    belong to a published model, since its directory may hold others' and private ones. Python files
    are copied if a config names classes of them."""
    code = _code_files(source)
    texts = "".join(file.read_text(errors="replace") for file in code)
    files = []
    outside = []
    for file in sorted(source.iterdir()):
        name = file.name
        is_written = matches(name, MODEL_PATTERNS) or matches(name, RUN_ENTRIES)
        is_text = matches(name, COPIED_TEXTS) and file.suffix.lower() in TEXT_SUFFIXES
        is_text = is_text or matches(name, COPIED_SETTINGS)
        # The model's own code reads it.
        is_text = is_text or (file.suffix in (".json", ".txt", ".jinja") and name in texts)
        is_kept = matches(name, COPIED) or file in code
        if not is_kept and (not is_text or is_written or NEVER_COPIED.match(name)):
            continue
        if not file.is_file():
            continue
        if not _is_of_model(file, source):
            outside.append(name)
        elif is_kept or _is_small_and_public(file):
            files.append(file)
    if outside:
        log.warning(
            f"{source}: not copied, because these are links to files outside of this directory: {', '.join(outside)}"
        )
    return files


def _is_small_and_public(file: Path) -> bool:
    if file.stat().st_size > COPIED_BYTES:
        return False
    text = file.read_text(errors="replace")
    return mask_secrets(text) == text


def _code_files(source: Path) -> list[Path]:
    """Return the Python files whose classes a config of the model names, and those they import."""
    modules = set[str]()
    for file in source.glob("*config.json"):
        names = re.findall(r'"(?:[^"]*--)?(\w+)\.\w+"', _auto_map(file))
        modules |= set(names)
    files = set[Path]()
    for module in modules:
        file = source / f"{module}.py"
        if file.is_file():
            files.add(file)
            with suppress(OSError):  # a file that it imports is missing
                files |= {Path(name) for name in get_relative_import_files(file)}
    return sorted(file for file in files if file.is_file())


def _auto_map(file: Path) -> str:
    try:
        settings = json.loads(file.read_text())
        return json.dumps(settings.get("auto_map") or {})
    except (ValueError, AttributeError):
        return ""


def _is_of_model(file: Path, source: Path) -> bool:
    """Return whether a file, or what a link leads to, is in the model's directory, or where its
    config.json is. The Hub's cache has links from snapshots/REVISION to blobs."""
    places = [source.resolve(), (source / "config.json").resolve().parent]
    places += [
        place.parent.parent / "blobs" for place in places if place.parent.name == "snapshots"
    ]
    target = file.resolve()
    return any(target.is_relative_to(place) for place in places)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
