"""Which adapters can be handed over to a server while they are trained."""

from pathlib import Path
from typing import Any

from llama_ft.config import Config
from llama_ft.models.adapters.adapter_config import saved_config

# vllm/config/lora.py: the highest value of --max-lora-rank
HIGHEST_RANK = 512
WITHOUT = "or leave --server out: then the model generates itself."


def find_problems(config: Config) -> list[str]:
    """Return why vLLM cannot load the adapter of a run, as messages."""
    peft = config.peft
    if not peft.use_peft:
        return [
            "--server: servers load an adapter before each step, and full fine-tuning has none. Add --use_peft, "
            f"{WITHOUT}"
        ]
    saved = peft.from_peft_checkpoint
    adapter: Any = saved_config(Path(saved)) if saved else peft
    flag = f"--from_peft_checkpoint {saved}: " if saved else "--peft."
    kind = str(getattr(adapter, "peft_type", None) or peft.peft_method)
    method = kind.rpartition(".")[2].lower()
    if method != "lora":
        name = f"{flag}{method}" if saved else f"--peft_method {method}"
        return [f"{name}: vLLM loads LoRA adapters only. Use --peft_method lora, {WITHOUT}"]
    problems = list[str]()
    if adapter.use_dora:
        problems.append(f"{flag}use_dora: vLLM has no DoRA. Leave it out, {WITHOUT}")
    if adapter.bias != "none":
        problems.append(
            f"{flag}bias {adapter.bias}: vLLM has no trained biases. Use --bias none, {WITHOUT}"
        )
    if adapter.modules_to_save:
        names = ",".join(sorted(adapter.modules_to_save))
        problems.append(
            f"{flag}modules_to_save {names}: vLLM loads no whole layers with an adapter. Leave it out, {WITHOUT}"
        )
    if config.model.resize_embeddings or getattr(adapter, "trainable_token_indices", None):
        problems.append(
            f"--resize_embeddings: vLLM loads no rows of embeddings with an adapter. Leave it out, {WITHOUT}"
        )
    rank = _highest_rank(adapter)
    if rank > HIGHEST_RANK:
        problems.append(
            f"{flag}r {rank}: vLLM has ranks up to {HIGHEST_RANK}. Use a lower one, {WITHOUT}"
        )
    return problems


def _highest_rank(adapter: Any) -> int:
    options = getattr(adapter, "options", {})
    patterns = getattr(adapter, "rank_pattern", None) or options.get("rank_pattern") or {}
    rank = max(int(adapter.r), *map(int, patterns.values()), 1)
    is_doubled = str(adapter.init_lora_weights).startswith("pissa")
    return 2 * rank if is_doubled else rank
