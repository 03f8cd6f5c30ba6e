"""What a server does with an adapter: what it would ignore or reject, and how it is started."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llama_ft.extensions.serving.adapter_files import BaseFiles, SavedAdapter
from llama_ft.models.base.source import listed

EXPERTS = ".experts"


@dataclass(frozen=True)
class Problem:
    """Something that a server would ignore, reject or compute differently.

    Attributes:
        what: as a sentence.
        instead: what would train an adapter that it can serve; empty if nothing would.
    """

    what: str
    instead: str = ""


@dataclass
class AdapterVerdict:
    """The judgment about one adapter and one version of a server.

    Attributes:
        title: the server and its version.
        problems: in the way of serving it as an adapter.
        can_be_merged: whether the server would serve the merged model.
        renames: layer -> the name under which the server finds it.
        settings: changes of adapter_config.json that the server needs.
        flags: further flags of the command that starts the server.
        is_3d: whether stacked experts must be announced.
        notes: for the log.
    """

    title: str
    problems: list[Problem] = field(default_factory=list)
    can_be_merged: bool = True
    renames: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    is_3d: bool = False
    notes: list[str] = field(default_factory=list)

    def refuse(self, what: str, instead: str = "") -> None:
        """Add a problem."""
        self.problems.append(Problem(what, instead))

    def refusal(self, merge: str) -> str:
        """Return the problems and the ways out. `merge`: the command that writes a merged model."""
        lines = [f"{self.title} cannot serve this adapter as it was trained:"]
        lines += [f"  {problem.what}" for problem in self.problems]
        if self.can_be_merged:
            lines.append(f"Serve the merged model: {merge}")
        instead = list(
            dict.fromkeys(problem.instead for problem in self.problems if problem.instead)
        )
        if instead:
            lines.append(f"Or train with {', '.join(instead)}.")
        return "\n".join(lines)


# Settings of PEFT that change what an adapter computes: value that changes nothing -> how a message
# calls the setting, and what to train with instead.
METHOD_SETTINGS: Mapping[str, tuple[str, str]] = {
    "use_dora": ("DoRA", "--peft.use_dora false"),
    "lora_bias": ("biases of LoRA's B", "--peft.lora_bias false"),
    "alora_invocation_tokens": ("activated LoRA", ""),
    "layer_replication": ("replicated layers", ""),
    "use_bdlora": ("block-diagonal LoRA", ""),
    "use_qalora": ("QALoRA", ""),
    "arrow_config": ("a router of adapters", ""),
    "kasa_config": ("KaSA", ""),
    "monteclora_config": ("MonteCLoRA", ""),
}
# They only choose the first values of A and B.
KEPT_BASE = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def check_method(verdict: AdapterVerdict, adapter: SavedAdapter) -> None:
    """Refuse adapters that are more than A and B for each layer."""
    settings = adapter.settings
    kind = str(settings.get("peft_type", "LORA"))
    if kind != "LORA":
        verdict.refuse(f"{kind} adapters are not LoRA.", "--peft.peft_method lora")
    for name, (title, instead) in METHOD_SETTINGS.items():
        if settings.get(name):
            verdict.refuse(f"{title} ({name}).", instead)
    first = settings.get("init_lora_weights")
    if isinstance(first, str) and first.lower() not in KEPT_BASE:
        verdict.refuse(
            f"init_lora_weights {first} changes the base model.", "--peft.init_lora_weights true"
        )
    if settings.get("bias", "none") != "none":
        verdict.refuse(f"trained biases (bias {settings['bias']}).", "--peft.bias none")
    if settings.get("modules_to_save"):
        names = listed(list(settings["modules_to_save"]))
        verdict.refuse(
            f"whole layers trained with the adapter (modules_to_save {names}).",
            "--peft.modules_to_save none",
        )
    rows = [name for name in adapter.other_tensors if "trainable_tokens" in name]
    if settings.get("trainable_token_indices") or rows:
        verdict.refuse(
            "trained embeddings of single tokens (--resize_embeddings).",
            "--resize_embeddings false, with tokens of the base model",
        )
    others = [
        name
        for name in adapter.other_tensors
        if name not in rows and not settings.get("modules_to_save") and "bias" not in name
    ]
    if others:
        verdict.refuse(f"tensors other than LoRA's: {listed(others, 2)}.")


def flag_without(adapter: SavedAdapter, refused: Iterable[str]) -> str:
    """Return the flag that trains an adapter of the other layers; "" if none are left.

    Args:
        adapter: what was trained.
        refused: names of layers, or their last parts. Stacked experts are always left out.
    """
    left_out = {module.rpartition(".")[2] for module in refused}
    trained = {module.rpartition(".")[2] for module in adapter.modules if EXPERTS not in module}
    others = sorted(trained - left_out)
    return f"--peft.target_modules {','.join(others)}" if others else ""


def shares_embedding(base: BaseFiles) -> bool:
    """Return whether the LM head is the embedding."""
    return not any(name.endswith("lm_head.weight") for name in base.names)
