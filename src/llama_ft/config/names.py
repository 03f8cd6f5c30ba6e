"""Names people bring from elsewhere: what llama-recipes called a thing, what others call it, and slips of the pen."""

from collections.abc import Iterator
from dataclasses import dataclass

from llama_ft.config.fields import SECTIONS, SETTINGS, Setting
from llama_ft.config.trainers import OF_FALSE, PEFT_METHOD, TRAINERS
from llama_ft.config.values import FALSE_WORDS
from llama_ft.config.wording import nearest

# llama-recipes' dotted prefixes, and the sections whose fields they may name.
LLAMA_RECIPES_PREFIXES: dict[str, tuple[str, ...]] = {
    "train_config": tuple(SECTIONS),
    "fsdp_config": ("fsdp", "train"),
    "lora_config": ("peft",),
    "quantization_config": ("quantization",),
    "wandb_config": ("tracking",),
}

# Names of the same thing that are no one trainer's, beside those in trainers.py; some stand for a setting with a value.
ALIASES: dict[str, str] = {
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "max_train_steps": "max_train_step",
    "max_eval_steps": "max_eval_step",
    "seq_len": "context_length",
    "cutoff_len": "context_length",
    "scheduler": "lr_scheduler",
    "warmup": "warmup_steps",
    "fp32": "precision fp32",
    "model": "model_name",
    "model_path": "model_name",
    "tokenizer": "tokenizer_name",
    "tokenizer_name_or_path": "tokenizer_name",
    "data": "dataset",
    "train_file": "dataset",
    "validation_file": "validation",
    "eval_dataset": "validation",
    "lora": "use_peft",
    "use_lora": "use_peft",
    "rank": "r",
    "alpha": "lora_alpha",
    "llm_int8_threshold": "int8_threshold",
    "llm_int8_skip_modules": "skip_modules",
    "cpu_offload": "fsdp_cpu_offload",
    "output": "output_dir",
    "out_dir": "output_dir",
    "overwrite_output_dir": "overwrite",
}

# llama-recipes' configurations of what does not exist here, and what takes their place.
GONE_PREFIXES: dict[str, str] = {
    "samsum_dataset": "use dataset samsum, and dataset_split",
    "grammar_dataset": "use dataset grammar, and dataset_split",
    "alpaca_dataset": "use dataset alpaca, or a file of columns instruction, input and output",
    "llamaguard_toxicchat_dataset": "use dataset path/to/file.py:function, which makes rows of it",
    "llama_adapter_config": PEFT_METHOD,
    "prefix_config": PEFT_METHOD,
}


@dataclass(frozen=True)
class Guess:
    """What an unknown name was probably meant to be: a setting, and maybe its value."""

    setting: Setting
    value: str | None

    @property
    def as_flag(self) -> str:
        return f"{self.setting.flag} {self.value}" if self.value else self.setting.flag

    @property
    def as_key(self) -> str:
        name = "quantization" if self.setting.name == "mode" else self.setting.dotted
        return f"{name}: {self.value}" if self.value else name


def known(name: str) -> Setting | None:
    """Find the setting that a plain, dotted or llama-recipes name (`lr`, `train.lr`, `lora_config.r`) stands for."""
    if name in ("quantization", "train_config.quantization"):
        return SETTINGS["mode"]
    prefix, dot, field = name.rpartition(".")
    if not dot:
        return SETTINGS.get(name)
    if prefix == "wandb_config":
        field = f"wandb_{field}"
    setting = SETTINGS.get(field)
    if setting and setting.section in (prefix, *LLAMA_RECIPES_PREFIXES.get(prefix, ())):
        return setting
    return None


def told_apart(name: str, value: str | None = None, *, as_key: bool = False) -> str | None:
    """Return what to say after an unknown name that is another trainer's; None where it is nobody's.

    Args:
        name: the name, plain or with a prefix.
        value: what it is set to, as typed: "false" is not answered with what the name says.
        as_key: name our setting as YAML does (train.lr), not as a flag.
    """
    owners, here = _elsewhere(name)
    if here is None:
        return None
    whose = " and ".join(owner + ("'" if owner.endswith("s") else "'s") for owner in owners)
    meant = _as_guess(here)
    if _is_off(here, value):
        meant = _as_guess(OF_FALSE.get(here, ""))
        if meant is None:
            return f" is {whose} name; for {value} leave it out."
    if meant is None:
        page = next((trainer.page for trainer in TRAINERS if trainer.name == owners[0]), "")
        return f", known from {' and '.join(owners)}, is not used here: {here.format(page=page)}."
    return f" is {whose} name; here it is {meant.as_key if as_key else meant.as_flag}."


def guess(name: str) -> Guess | None:
    """Guess the setting that an unknown name was meant to be: by another trainer's name, else by likeness."""
    here = _elsewhere(name)[1]
    if here is not None:
        return _as_guess(here)
    field = name.rpartition(".")[2].lower()
    others = {key: here for trainer in TRAINERS for key, here in trainer.names.items() if _as_guess(here)} | ALIASES
    meant = known(others.get(field, field).partition(" ")[0])
    match = field if meant else nearest(field, [*SETTINGS, "quantization", *others])
    return _as_guess(others.get(match, match)) if match else None


def _is_off(here: str, value: str | None) -> bool:
    """Whether a value takes back what an entry of trainers.py says: the setting's value, or what to do."""
    meant, off = _as_guess(here), (value or "").lower()
    if meant:
        return meant.value is not None and off in FALSE_WORDS
    return off == "false" and here.startswith(("use ", "name ")) and "false" not in here


def _as_guess(here: str) -> Guess | None:
    """The setting, and perhaps its value, that an entry of trainers.py names; None where it is a sentence."""
    setting_name, _, value = here.partition(" ")
    setting = known(setting_name)
    return Guess(setting, value or None) if setting and " " not in value else None


def _elsewhere(name: str) -> tuple[list[str], str | None]:
    """Which trainers have this name, and what they mean by it; where they differ, the first of them."""
    prefix, _, _ = name.rpartition(".")
    if prefix in GONE_PREFIXES:
        return ["llama-recipes"], GONE_PREFIXES[prefix]
    for form in _forms(name):
        found = {trainer.name: trainer.names[form] for trainer in TRAINERS if form in trainer.names}
        if found:
            here = next(iter(found.values()))
            return [trainer for trainer, other in found.items() if other == here], here
    return [], None


def _forms(name: str) -> Iterator[str]:
    """A name whole, without its prefix, and without the fsdp_ that accelerate writes before its own."""
    field = name.rpartition(".")[2]
    yield from (name, field, field.lower(), field.lower().removeprefix("fsdp_"))
