"""Find out which nodes share the disk of --output_dir. With --save_to each may have its own."""

import uuid
from pathlib import Path

from llama_ft.checkpoint.run_directory import planned_directory
from llama_ft.config import CheckpointConfig
from llama_ft.config.data_names import is_url
from llama_ft.runtime import Ranks, log


def find_disks(settings: CheckpointConfig, ranks: Ranks) -> None:
    """Tell `ranks` who leads which disk. Without a store all nodes must share the disk. All ranks call it,
    before the run's directory exists.

    It writes an empty file for a moment, in the nearest existing parent of the directory.
    """
    uses_store = settings.save_to is not None or is_url(settings.resume or "")
    if not uses_store or ranks.world_size == ranks.local_world_size:
        return
    directory = (planned_directory(settings, ranks) or Path("output")).absolute()
    existing = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    # two directories that do not exist yet can have the same parent
    rest = str(directory.relative_to(existing))
    name = f".llama_ft-disk-{uuid.uuid4().hex}"

    def write() -> tuple[str, str]:
        (existing / name).touch()
        return name, rest

    try:
        main_name, main_rest = ranks.broadcast_from_rank0(write)
        sees_main = rest == main_rest and (existing / main_name).exists()
        node = ranks.rank - ranks.local_rank
        places = ranks.all_gather_floats(node, sees_main).tolist()
    finally:
        if ranks.is_main:
            (existing / name).unlink(missing_ok=True)
    leaders = list[int]()
    for first, _ in places:
        node = int(first)
        is_shared = bool(places[node][1])
        leaders.append(0 if is_shared else node)
    ranks.use_disks(leaders)
    if not ranks.shares_disk:
        count = len(set(leaders))
        log.info(
            f"The nodes have {count} disks for --output_dir: a checkpoint is complete when its upload is. "
            "The log, the report and the final model are on the first node and in the store."
        )
