"""Which adapters SGLang serves, and which it would compute differently without a word.

SGLang finds the layers of an adapter by their number and the last part of their name. It scales all
layers by lora_alpha / r, and reads neither use_rslora nor the patterns of ranks and alphas.
Sources: sglang/srt/lora/lora.py, lora_config.py and utils.py of the version in rules.json.
"""

import math
import re

from llama_ft.extensions.serving.adapter_files import BaseFiles, SavedAdapter
from llama_ft.extensions.serving.judgment import EXPERTS, AdapterVerdict, check_method, flag_without
from llama_ft.extensions.serving.rules import known_versions, table
from llama_ft.models.base.source import listed

# Layers that SGLang computes as one -> those whose adapters it needs if one of them has one
TOGETHER = {
    ("q_proj", "k_proj", "v_proj"): ("q_proj", "v_proj"),
    ("gate_proj", "up_proj"): ("gate_proj",),
}


def _missing_layers(adapter: SavedAdapter, base: BaseFiles) -> list[str]:
    """Return the layers whose number the base model does not have."""
    count = int(base.text.get("num_hidden_layers") or 0)
    missing = []
    for module in adapter.modules:
        number = re.search(r"layers\.(\d+)\.", module)
        if number and int(number[1]) >= count > 0:
            missing.append(module)
    return missing


def check_sglang(version: str | None, adapter: SavedAdapter, base: BaseFiles) -> AdapterVerdict:
    """Judge an adapter. `version`: None: the newest one that is known."""
    name = version or known_versions("sglang")[-1]
    rules = table()["sglang"][name]
    verdict = AdapterVerdict(f"SGLang {name}")
    if base.architecture not in rules["architectures"]:
        verdict.can_be_merged = False
        verdict.refuse(f"it has no class for {base.architecture}. Transformers and PEFT serve it.")
        return verdict
    check_method(verdict, adapter)
    ends = {module.rpartition(".")[2] for module in adapter.modules}
    stacked = [module for module in adapter.modules if EXPERTS in module]
    ends -= {module.rpartition(".")[2] for module in stacked}
    unknown = sorted(ends - set(rules["modules"]))
    if stacked:
        verdict.refuse(
            f"it expects another form of adapters of experts than {listed(stacked, 1)}.",
            flag_without(adapter, unknown),
        )
    if unknown:
        verdict.refuse(
            f"it has no LoRA for {listed(unknown)}.",
            flag_without(adapter, unknown),
        )
    missing = _missing_layers(adapter, base)
    if missing:
        verdict.refuse(f"the base model has no layers of the names {listed(missing, 2)}.")
    for layers, needed in TOGETHER.items():
        is_missing = not set(needed) <= ends
        if is_missing and ends & set(layers):
            verdict.refuse(
                f"it joins {', '.join(layers)}, and needs adapters of {', '.join(needed)}.",
                f"--peft.target_modules {','.join(sorted(ends | set(needed)))}",
            )
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if adapter.settings.get(name)]
    if patterns:
        verdict.refuse(
            f"it gives all layers the same rank and scaling, and would ignore {', '.join(patterns)}.",
            "the same rank and alpha for all layers",
        )
    rank = int(adapter.settings.get("r") or 1)
    verdict.flags += ["--max-lora-rank", str(adapter.rank)]
    verdict.settings["target_modules"] = sorted(ends)  # it reads no patterns
    if adapter.settings.get("use_rslora"):
        alpha = float(adapter.settings.get("lora_alpha") or 1)
        verdict.settings |= {"use_rslora": False, "lora_alpha": alpha * math.sqrt(rank)}
    return verdict
