"""Files of a run: its directory and complete checkpoints."""

from llama_ft.checkpoint.attempts import attempts_of
from llama_ft.checkpoint.host_block import HostBlock
from llama_ft.checkpoint.reader import Checkpoint, checkpoint_errors, complete_checkpoints
from llama_ft.checkpoint.remote import RemoteRun, open_remote
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
from llama_ft.checkpoint.writer import CheckpointWriter, SaveHooks
