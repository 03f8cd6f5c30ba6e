"""Use spare memory on the CPU to make a run faster: the C library keeps freed memory for the next
tensors, and ranks on one host exchange weights and gradients in memory that they share. Both need
memory that a plan does not count.
"""

from llama_ft.models import BuiltModel
from llama_ft.models.gloo import share_memory
from llama_ft.runtime import Ranks, log
from llama_ft.runtime.freed_memory import keep_freed_memory, return_freed_memory

# Planned share of free host memory up to which the C library keeps freed memory, which makes peaks
# higher.
SHARE_TO_KEEP = 2 / 3


def use_spare_memory(share: float | None, built: BuiltModel, ranks: Ranks) -> None:
    """On the CPU, keep freed memory and share memory between ranks if there is room, and else
    return freed memory at once. All ranks call it together, after the weights are loaded.

    Args:
        share: planned share of the free memory, the same on all ranks; None if there is no plan.
        built: the model, sharded.
        ranks: the ranks.
    """
    if ranks.device.type != "cpu" or share is None:
        return
    if share > SHARE_TO_KEEP:
        if return_freed_memory():
            log.info(
                "Freed memory is returned at once, since the plan leaves little room. Steps take longer."
            )
        return
    if keep_freed_memory():
        log.info("Freed memory is kept for the next tensors, since the plan leaves room for it.")
    if share_memory(built.model, ranks.mesh):
        log.debug("ranks of one host exchange weights and gradients in memory that they share")
