"""The disk is full when a checkpoint is to be written: the run ends with a message, keeps what was
there before, and continues once there is room."""

import json
from pathlib import Path

from conftest import RECIPE, metrics
from forked import Finished, forked

from llama_ft.checkpoint import checkpoint_errors, complete_checkpoints

# argv: the recipe with its flags. The second rank's file of the second checkpoint is a device that
# is always full.
FULL_DISK = """
import runpy, sys
from llama_ft.checkpoint import CheckpointWriter
from llama_ft.checkpoint.reader import shard_file

save = CheckpointWriter.save

def on_a_full_disk(writer, step, *arguments, **more):
    if step == 2:
        aside = writer.run / "checkpoints" / ".writing-step-000002"
        aside.mkdir(parents=True, exist_ok=True)
        if writer._ranks.rank == 1:
            (aside / shard_file(1)).symlink_to("/dev/full")
    save(writer, step, *arguments, **more)

CheckpointWriter.save = on_a_full_disk
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(
    script: Path, run: Path, model: Path, rows: Path, *more: str | Path, ranks: int
) -> Finished:
    """3 steps with a checkpoint after each."""
    flags = "--enable_fsdp --precision fp32 --max_train_step 3 --save_steps 1 --batch_size_training 1 --keep_last 1"
    data = ["--model_name", model, "--dataset", rows, "--output_dir", run]
    return forked(script, *more, *flags.split(), *data, ranks=ranks)


def test_a_full_disk_ends_the_run_which_resumes_once_there_is_space(
    tiny_model: Path, rows16: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = tmp_path / "full_disk.py"
    job.write_text(FULL_DISK)
    finished = train(job, run, tiny_model, rows16, RECIPE, ranks=2)
    assert finished.exit_code == 1, finished.output
    assert (
        "step-000002: the checkpoint could not be written: rank 1: No space left on device"
        in finished.output
    )
    assert f"Last complete checkpoint: {run}/checkpoints/step-000001" in finished.output
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000001"}
    assert checkpoint_errors(run / "checkpoints" / "step-000001") == []
    status = json.loads((run / "status.json").read_text())
    assert (
        status["state"] == "failed"
        and "step-000002: the checkpoint could not be" in status["message"]
    )

    resumed = train(RECIPE, run, tiny_model, rows16, "--resume", "auto", ranks=0)
    assert resumed.exit_code == 0, resumed.output
    assert "step-000001, after step 1" in resumed.output
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    [newest] = complete_checkpoints(run)
    assert newest.name == "step-000003" and checkpoint_errors(newest) == []
