"""README.md of a final model: what it was made from and how, and how to load it, as the Hugging Face Hub shows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from llama_ft.checkpoint.resume import versions
from llama_ft.config.dump import ONE_RUN_ONLY
from llama_ft.config.paths import INPUTS, looks_local
from llama_ft.config.settings import SETTINGS
from llama_ft.masking import mask_secrets

# What of a run's settings is no part of its recipe, beside what is one run's only.
NOT_IN_RECIPE = (*ONE_RUN_ONLY, "device")
METRICS = {
    "epoch": "epochs",
    "tokens": "loss tokens trained on",
    "train/loss": "training loss of the last step",
    "eval/loss": "validation loss",
    "eval/perplexity": "validation perplexity",
}
LOAD_MODEL = "model = AutoModelForCausalLM.from_pretrained({place})"
LOAD_ADAPTER = """base = AutoModelForCausalLM.from_pretrained({base})
{resize}model = PeftModel.from_pretrained(base, {place})"""
RESIZE = "base.resize_token_embeddings({rows}, mean_resizing=False)\n"


def write_model_card(folder: Path, base_model: str, trainer: Mapping[str, Any] | None = None) -> None:
    """Write the card of a complete model or adapter directory.

    Of local paths it has only the last part: the card may go to the Hub.

    Args:
        folder: holds adapter_config.json, or else a whole model.
        base_model: the Hub name or directory of the base model, or demo.
        trainer: what is known of the run, as a checkpoint's trainer.json holds it: step, metrics, config (sections of
            settings) and versions. None if an adapter of unknown origin is merged.
    """
    run = trainer or {}
    settings = {name: value for section in run.get("config", {}).values() for name, value in section.items()}
    is_adapter = (folder / "adapter_config.json").exists()
    is_lora = is_adapter or trainer is None or settings["use_peft"]
    is_on_hub = base_model != "demo" and not looks_local(base_model)
    front = ModelCardData(
        base_model=base_model if is_on_hub else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["llama_ft", *(["lora"] if is_lora else [])],
    )
    base, place = _without_folder(base_model), '"path/to/this/folder"'
    what = f"A LoRA adapter for {base}" if is_adapter else f"{base} with a LoRA adapter merged into it"
    what = what if is_lora else f"{base}, full fine-tuning"
    data = settings.get("dataset", [])
    parts = [_without_folder(part["path"]) for part in data] if isinstance(data, list) else [_without_folder(data)]
    what += f", trained on {', '.join(parts)}" if parts else ""
    new = run.get("new_tokens") or {"rows": 0, "stored_rows": 0}  # the base lacks their rows; the adapter fills them
    resize = RESIZE.format(**new) if new["rows"] > new["stored_rows"] else ""
    load = (LOAD_ADAPTER if is_adapter else LOAD_MODEL).format(
        base=f'"{base}"' if is_on_hub else f'"path/to/{base}"', place=place, resize=resize
    )
    versions_then = run.get("versions") or versions()
    (folder / "README.md").write_text(f"""---
{front.to_yaml()}
---

# {base}, fine-tuned

{what} with llama_ft.{"" if base == "demo" else " The base model's license applies to it, too."}

```python
{"from peft import PeftModel" if is_adapter else ""}
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained({place})
```
{_training(run) if run else ""}
Versions: {", ".join(f"{name} {number}" for name, number in versions_then.items())}.
""")


def _training(run: Mapping[str, Any]) -> str:
    known = {"optimizer steps": run["step"]}
    if "global_batch" in run:
        unit = "packed sequences" if run["config"]["data"]["batching_strategy"] == "packing" else "samples"
        known[f"{unit} per optimizer step"] = run["global_batch"]
    known |= {title: run["metrics"][key] for key, title in METRICS.items() if key in run.get("metrics", {})}
    rows = [f"| {name} | {f'{it:.5g}' if isinstance(it, float) else f'{it:,}'} |" for name, it in known.items()]
    recipe = yaml.safe_dump(_recipe(run["config"]), sort_keys=False, allow_unicode=True)
    return "\n".join(
        ["", "## Training", "", "| what | value |", "|---|---|", *rows, ""]
        + ["Settings that differ from the defaults:", "", f"```yaml\n{recipe}```", ""]
    )


def _recipe(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings that differ from the defaults, trackers left out."""
    told: dict[str, dict[str, Any]] = {}
    for section, settings in sections.items():
        for name, value in settings.items():
            is_default = name in SETTINGS and value == SETTINGS[name].default
            if section != "tracking" and name not in NOT_IN_RECIPE and not is_default:
                told.setdefault(section, {})[name] = _without_folder(value) if name in INPUTS else value
    return told


def _without_folder(value: Any) -> Any:
    """A hub name or a relative path as it is; of an absolute path the last part; of a mix, each part so."""
    if isinstance(value, list):
        return [{**part, "path": _without_folder(part["path"])} for part in value]
    if "://" in value:
        return mask_secrets(value)
    return Path(value).name if value.startswith(("/", "~")) else value
