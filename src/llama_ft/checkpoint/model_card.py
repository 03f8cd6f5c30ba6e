"""README.md of a final model: what it was made from and how, and how to load it, as the Hugging Face Hub shows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llama_ft.config.paths import looks_local
from llama_ft.masking import mask_secrets

SHOWN = ("num_epochs", "lr", "optimizer", "precision", "context_length", "seed")
SHOWN_WITH_LORA = ("peft_method", "r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "mode")
PLACE = '"path/to/this/folder"'


def write_model_card(folder: Path, base_model: str, trainer: Mapping[str, Any] | None = None) -> None:
    """Write the card of a complete model or adapter directory.

    Of local paths it has only the last part: the card may go to the Hub.

    Args:
        folder: holds adapter_config.json, or else a whole model.
        base_model: the Hub name or directory of the base model, or demo.
        trainer: what is known of the run, as a checkpoint's trainer.json holds it: step, metrics, config (sections of
            settings). None if an adapter of unknown origin is merged.
    """
    run, base = trainer or {}, _without_folder(base_model)
    settings = {name: value for section in run.get("config", {}).values() for name, value in section.items()}
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
    facts = {name: settings[name] for name in (*SHOWN, *(SHOWN_WITH_LORA if is_lora else ())) if name in settings}
    if run:
        facts |= {"optimizer steps": run["step"], "validation loss": run["metrics"].get("eval/loss")}
    if data := settings.get("dataset"):
        mixture = [{"path": data}] if isinstance(data, str) else data
        what += f", trained on {', '.join(_without_folder(part['path']) for part in mixture)}"
    (folder / "README.md").write_text(f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {base}, fine-tuned

{what} with llama_ft.{"" if base == "demo" else " The base model's license applies to it, too."}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained({PLACE})
```

```yaml
{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}```
""")


def _without_folder(name: str) -> str:
    """A Hub name or a relative path as it is; of an absolute path the last part; of a URL all but its secrets."""
    if "://" in name:
        return mask_secrets(name)
    return Path(name).name if name.startswith(("/", "~")) else name
