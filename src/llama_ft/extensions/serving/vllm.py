"""Which adapters vLLM serves, and which it would ignore without a word.

vLLM puts A and B of an adapter into its own layers by name, and skips names that none of its layers
has. Its layers have the names of the published checkpoint, with the renames of the model's class.
So an adapter is applied if each of its layers has, after the renames, the name of a stored weight.
Sources: vllm/lora/model_manager.py, lora_model.py, utils.py and peft_helper.py of the versions in
rules.json.
"""

from typing import Any

from llama_ft.extensions.serving.adapter_files import BaseFiles, SavedAdapter
from llama_ft.extensions.serving.judgment import (
    EXPERTS,
    AdapterVerdict,
    check_method,
    flag_without,
    shares_embedding,
)
from llama_ft.extensions.serving.rules import VllmVersion, renamed
from llama_ft.models.base.source import listed

INNER = ".base_layer"  # of PEFT's two wrappers of stacked experts, the one of gate_up_proj
LARGEST_VOCABULARY = 258_048  # lora/layers/logits_processor.py
A_PART = ".lora_A.weight"
# in place of names, of models that vLLM computes with Transformers' classes: each of their linear layers
ALL_LINEAR = "linear"
NOT_LINEAR = ("lm_head", "embed_out", "embed_in", "wte")  # embed_tokens is taken, too


def check_vllm(version: VllmVersion, adapter: SavedAdapter, base: BaseFiles) -> AdapterVerdict:
    """Judge an adapter."""
    verdict = AdapterVerdict(f"vLLM {version.name}")
    rules = _rules(verdict, version, base)
    if rules is None:
        return verdict
    check_method(verdict, adapter)
    _check_rank(verdict, version, adapter)
    names = _Names(version, rules, base)
    rejected = list[str]()
    ignored = list[str]()
    for module in adapter.modules:
        if EXPERTS in module and module.rpartition(".")[2] != "gate":
            continue
        if not names.finds(module):
            new_name = names.find_other(module)
            if new_name is None:
                ignored.append(module)
                continue
            verdict.renames[module] = new_name
        if not _has_lora(rules, names.last_part(module)):
            rejected.append(module)
    instead = flag_without(adapter, rejected + ignored)
    if rejected:
        verdict.refuse(f"it has no LoRA for layers such as {listed(rejected, 2)}.", instead)
    if ignored:
        verdict.refuse(
            f"it has no layers of the names {listed(ignored, 2)}, and would ignore them.", instead
        )
    _check_experts(verdict, adapter, names, rules)
    _check_heads(verdict, adapter, base, rules)
    return verdict


def _has_lora(rules: dict[str, Any], name: str) -> bool:
    """Return whether vLLM takes adapters of layers whose names end so."""
    if rules["modules"] == ALL_LINEAR:
        return name not in NOT_LINEAR
    return name in rules["modules"]


def _rules(verdict: AdapterVerdict, version: VllmVersion, base: BaseFiles) -> dict[str, Any] | None:
    architecture = base.architecture
    if architecture not in version.architectures:
        verdict.can_be_merged = False
        verdict.refuse(f"it has no class for {architecture}. Transformers and PEFT serve it.")
        return None
    rules = version.architectures[architecture]
    if rules is None:
        verdict.refuse(f"it has no LoRA for {architecture}.")
    elif "unread" in rules:
        verdict.refuse(
            f"whether it applies adapters of {architecture} is not known: this class was not read."
        )
        return None
    return rules


def _check_rank(verdict: AdapterVerdict, version: VllmVersion, adapter: SavedAdapter) -> None:
    fitting = [rank for rank in version.ranks if rank >= adapter.rank]
    if fitting:
        verdict.flags += ["--max-lora-rank", str(fitting[0])]
    else:
        most = version.ranks[-1]
        verdict.refuse(f"rank {adapter.rank} is above {most}.", f"--peft.r {most}")


class _Names:
    """The names of vLLM's layers."""

    def __init__(self, version: VllmVersion, rules: dict[str, Any], base: BaseFiles) -> None:
        self._rules = rules
        self._version = version
        self._base = base.modules
        self._layers = {self._of(module, ".weight") for module in base.modules}
        if shares_embedding(base):
            self._base = self._base | {"lm_head"}
            self._layers.add(self._of("lm_head", ".weight"))
        self.experts = {
            layer.partition(EXPERTS)[0] + EXPERTS for layer in self._layers if EXPERTS in layer
        }
        # stacked experts are tensors of the layer itself
        stacked = {name for name in base.names if EXPERTS in name}
        self.experts |= {self._of(name.partition(EXPERTS)[0] + EXPERTS, A_PART) for name in stacked}
        text = rules.get("text")
        self._text = f"{text.rstrip('.')}." if text else ""

    def _of(self, module: str, end: str) -> str:
        return renamed(self._rules, module + end).removesuffix(end)

    def last_part(self, module: str) -> str:
        """The last part of the name that vLLM gives to a layer of the adapter."""
        return self._of(module, A_PART).rpartition(".")[2]

    def finds(self, module: str, layers: set[str] | None = None) -> bool:
        """Return whether vLLM applies the adapter of this layer."""
        layers = self._layers if layers is None else layers
        name = self._of(module, A_PART)
        if name in layers and name.startswith(self._text):
            return True
        if not self._version.finds_text_names or not self._text:
            return False
        without = name.removeprefix("model.")
        return f"{self._text}{name}" in layers or f"{self._text}{without}" in layers

    def find_other(self, module: str) -> str | None:
        """Return the checkpoint's name of a layer, or None if it cannot be told: the layer of the
        text part with the same number and the same last parts."""
        head, _, tail = module.rpartition("layers.")
        number, _, inside = tail.partition(".")
        within = f"layers.{number}." if head and number.isdigit() else ""
        end = inside if within else module.rpartition(".")[2]
        while end:
            names = [
                name
                for name in self._base
                if f".{name}".endswith(f".{end}") and within in name and self.finds(name)
            ]
            if names:
                return names[0] if len(names) == 1 else None
            end = end.partition(".")[2]
        return None

    def find_experts(self, module: str) -> str | None:
        """The same for the stacked experts of a layer."""
        head, _, tail = module.rpartition("layers.")
        within = f"layers.{tail.partition('.')[0]}."
        names = {
            name.partition(EXPERTS)[0] + EXPERTS
            for name in self._base
            if EXPERTS in name and within in name
        }
        fitting = [name for name in names if self.finds(name, self.experts)]
        return fitting[0] if len(fitting) == 1 else None


def _check_experts(
    verdict: AdapterVerdict, adapter: SavedAdapter, names: _Names, rules: dict[str, Any]
) -> None:
    """vLLM reads stacked experts as PEFT saves them, gate_up_proj inside of down_proj, or a LoRA for
    each expert. Its classes with 3-D weights read only the former, the others only the latter unless
    a request says otherwise."""
    modules = set(adapter.modules)
    is_3d_model = rules.get("experts") == "3d"
    stacked = {
        module.removesuffix(INNER)
        for module in modules
        if module.removesuffix(INNER).endswith(EXPERTS)
    }
    single = [module for module in modules if f"{EXPERTS}." in module and INNER not in module]
    if single and is_3d_model:
        verdict.refuse(
            f"it expects stacked experts of this model, and not {listed(sorted(single), 1)}.",
            "--peft.target_modules all-linear",
        )
    for module in sorted(stacked):
        if not {module, module + INNER} <= modules:
            verdict.refuse(
                f"{module}: it needs adapters of both gate_up_proj and down_proj.",
                "--peft.target_modules all-linear",
            )
            return
        if _is_swapped(adapter, module):
            verdict.renames |= {module: module + INNER, module + INNER: module}
        if not names.finds(module, names.experts):
            other = names.find_experts(module)
            if other is None:
                verdict.refuse(
                    f"it has no layer of the name {module}, and would ignore it.",
                    flag_without(adapter, []),
                )
                return
            for part in (module, module + INNER):
                named = verdict.renames.get(part, part)
                verdict.renames[part] = named.replace(module, other, 1)
    if stacked and not is_3d_model:
        verdict.is_3d = True
        verdict.flags.append("--enable-mixed-moe-lora-format")


def _is_swapped(adapter: SavedAdapter, module: str) -> bool:
    """Return whether the inner adapter is that of down_proj, whose output is narrower."""
    inner = adapter.shape(module + INNER, "A")
    outer_out = adapter.shape(module, "B")
    return inner is not None and outer_out is not None and inner[1] != outer_out[0]


def _check_heads(
    verdict: AdapterVerdict, adapter: SavedAdapter, base: BaseFiles, rules: dict[str, Any]
) -> None:
    ends = {module.rpartition(".")[2] for module in adapter.modules}
    vocabulary = int(base.text.get("vocab_size") or 0)
    if "lm_head" in rules["modules"] and vocabulary > LARGEST_VOCABULARY:
        verdict.refuse(
            f"it starts with adapters only for vocabularies up to {LARGEST_VOCABULARY:,}; "
            f"this one has {vocabulary:,} tokens."
        )
    if "kv_b_proj" in ends and base.text.get("kv_lora_rank"):
        verdict.refuse(
            "it multiplies kv_b_proj into other weights, and would ignore its adapter while decoding.",
            flag_without(adapter, ["kv_b_proj"]),
        )
    if "lm_head" in ends:
        verdict.notes.append("vLLM computes prompt_logprobs without the adapter of lm_head.")
