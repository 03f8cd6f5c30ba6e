"""Files of a run: its directory and complete checkpoints, also in an object store."""

from llama_ft.checkpoint.attempts import attempts_of
from llama_ft.checkpoint.host_block import HostBlock
from llama_ft.checkpoint.reader import Checkpoint, checkpoint_errors, complete_checkpoints
from llama_ft.checkpoint.resume import (
    check_same_run,
    describe_run,
    find_checkpoint,
    finished_result,
    global_batch,
    open_best,
    resolve_precision,
    result_step,
)
from llama_ft.checkpoint.run_directory import (
    create_run_directory,
    removed_if_unused,
    unfinished_directory,
)
from llama_ft.checkpoint.state import own_state, restore, restore_weights
from llama_ft.checkpoint.store.disks import find_disks
from llama_ft.checkpoint.store.fetch import fetch_to_each_disk, open_store
from llama_ft.checkpoint.store.object_store import ObjectStore, is_uploaded
from llama_ft.checkpoint.store.uploads import Uploads, open_uploads, upload_grace_seconds
from llama_ft.checkpoint.writer import CheckpointWriter, SaveHooks
