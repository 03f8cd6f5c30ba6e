"""benchmarks/gpu_check.py, whose small parts run on the CPU: the command that is to prove CUDA has
so been run."""

import json
import sys
from pathlib import Path

import pytest
from forked import REPOSITORY, forked

SCRIPT = REPOSITORY / "benchmarks" / "gpu_check.py"
RUNS_THE_RECIPES = "waits,resume,ends,lora8b,quant8b,full,fixes,profile,inference,cases"


def check(parts: str, output: Path, timeout: float) -> list[dict[str, str]]:
    """The table's lines of some parts, all of which hold, as gpu_check.jsonl has them."""
    flags = ["--only", parts, "--seconds", str(timeout), "--output", str(output)]
    finished = forked(SCRIPT, *flags, timeout=timeout + 60)
    assert finished.exit_code == 0, finished.output
    rows = [json.loads(line) for line in (output / "gpu_check.jsonl").read_text().splitlines()]
    assert {row["check"] for row in rows} == set(parts.split(","))
    assert not [row for row in rows if "left out" in row["found"]]
    return rows


def test_kernels_and_shards_hold_on_the_cpu(tmp_path: Path) -> None:
    rows = check("start,attention,quantized,sharded", tmp_path, 200)
    found = {row["claim"]: row["found"] for row in rows}
    assert {
        found[f"torch.{dtype} gathered"] for dtype in ("int8", "uint8", "int32", "bfloat16")
    } == {"equal"}


@pytest.mark.slow
def test_every_part_that_runs_a_recipe_holds_on_the_cpu(tmp_path: Path) -> None:
    found = {row["claim"]: row["found"] for row in check(RUNS_THE_RECIPES, tmp_path, 1200)}
    assert found.keys() >= {
        "SIGTERM",
        "kill -9",
        "losses after step 3",
        "LoRA, nf4",
        "lora: tokens/s",
    }
    assert float(found["qlora: tokens/s"].split(",")[0]) > 0
    assert float(found["qlora: planned / anonymous_peak_bytes"].split()[0]) > 0


@pytest.mark.slow
def test_a_step_that_waits_is_a_line_of_the_table(tmp_path: Path) -> None:
    """SGD's update asks on the host whether the step has failed."""
    sys.path.insert(0, str(SCRIPT.parent))
    from gpu_bench import Bench, last_line  # type: ignore[import-not-found]

    bench = Bench(tmp_path, 200)
    case = {
        "SGD": [*bench.tiny(), "--max_train_step", "3", "--optimizer", "SGD", "--device", "cpu"]
    }
    failed = bench.run(case, toggle="fail at waits")
    assert "the host waits for the device: _local_scalar_dense" in last_line(failed["SGD"])
