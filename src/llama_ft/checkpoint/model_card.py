"""README.md of a final model: what it was made from and how, and how to load it, as the Hugging Face Hub shows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llama_ft.checkpoint.resume import versions
from llama_ft.config.dump import ONE_RUN_ONLY
from llama_ft.config.paths import INPUTS, looks_local
from llama_ft.config.settings import SETTINGS
from llama_ft.masking import mask_secrets

NOT_IN_RECIPE = (*ONE_RUN_ONLY, "device")
METRICS = ("epoch", "tokens", "train/loss", "eval/loss", "eval/perplexity")
PLACE = '"path/to/this/folder"'


def write_model_card(folder: Path, base_model: str, trainer: Mapping[str, Any] | None = None) -> None:
    """Write the card of a complete model or adapter directory.

    Of local paths it has only the last part: the card may go to the Hub.

    Args:
        folder: holds adapter_config.json, or else a whole model.
        base_model: the Hub name or directory of the base model, or demo.
        trainer: what is known of the run, as a checkpoint's trainer.json holds it: step, metrics, config (sections of
            settings) and versions. None if an adapter of unknown origin is merged.
    """
    run, base = trainer or {}, _without_folder(base_model)
    sections = {name: section for name, section in run.get("config", {}).items() if name != "tracking"}
    settings = {name: value for section in sections.values() for name, value in section.items()}
    is_adapter, is_lora = (folder / "adapter_config.json").exists(), settings.get("use_peft", True)
    is_on_hub = base_model != "demo" and not looks_local(base_model)
    front: dict[str, Any] = {"base_model": base_model} if is_on_hub else {}
    front |= {"library_name": "peft" if is_adapter else "transformers", "pipeline_tag": "text-generation"}
    front |= {"tags": ["llama_ft", *(["lora"] if is_lora else [])]}
    what = f"{base} with a LoRA adapter merged into it" if is_lora else f"{base}, full fine-tuning"
    load = f"model = AutoModelForCausalLM.from_pretrained({PLACE})"
    if is_adapter:
        what = f"A LoRA adapter for {base}"
        from_base = base if is_on_hub else f"path/to/{base}"
        load = f'from peft import PeftModel\nbase = AutoModelForCausalLM.from_pretrained("{from_base}")\n'
        new = run.get("new_tokens") or {"rows": 0, "stored_rows": 0}  # the base lacks their rows
        if new["rows"] > new["stored_rows"]:
            load += f"base.resize_token_embeddings({new['rows']}, mean_resizing=False)\n"
        load += f"model = PeftModel.from_pretrained(base, {PLACE})"
    if data := _without_folder(settings.get("dataset", [])):
        what += f", trained on {data if isinstance(data, str) else ', '.join(part['path'] for part in data)}"
    facts: dict[str, Any] = {"versions": run.get("versions") or versions()}
    if run:
        metrics = {name: value for name, value in run.get("metrics", {}).items() if name in METRICS}
        facts["results"] = {"optimizer steps": run["step"], "global batch": run.get("global_batch"), **metrics}
        facts["settings that differ from the defaults"] = {
            name: _without_folder(it) if name in INPUTS else it
            for name, it in settings.items()
            if name not in NOT_IN_RECIPE and not (name in SETTINGS and it == SETTINGS[name].default)
        }
    (folder / "README.md").write_text(f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {base}, fine-tuned

{what} with llama_ft.{"" if base == "demo" else " The base model's license applies to it, too."}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained({PLACE})
```

## Training

```yaml
{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}```
""")


def _without_folder(value: Any) -> Any:
    """A hub name or a relative path as it is; of an absolute path the last part; of a mixture, each part so."""
    if isinstance(value, list):
        return [{**part, "path": _without_folder(part["path"])} for part in value]
    if "://" in value:
        return mask_secrets(value)
    return Path(value).name if value.startswith(("/", "~")) else value
