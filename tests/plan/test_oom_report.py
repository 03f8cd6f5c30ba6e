"""An out-of-memory error says where it happened, what was held, what was planned, and what would fit."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import pytest
import torch
from conftest import RECIPE, Finished
from forked import forked
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.config import Config
from llama_ft.config.messages import size_text
from llama_ft.plan.oom_report import MemoryReport, ask_planner, held_most, module_at_work
from llama_ft.runtime import Runtime
from llama_ft.runtime.out_of_memory import KILLED

JOB = Path(__file__).with_name("out_of_memory_job.py")
MIB = 2**20


@pytest.fixture
def sharded(runtime: Runtime) -> LlamaForCausalLM:
    """A model whose layers are units, in fp32, computing in bf16."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=runtime.mesh, mp_policy=policy)
    fully_shard(model, mesh=runtime.mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def ask_for_too_much(*_: object) -> None:
    torch.empty(2**46, dtype=torch.uint8)


def where(model: nn.Module) -> str:
    """The module that is named after a step that runs out of memory."""
    tokens = torch.arange(16).view(2, 8)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return module_at_work([frame for frame, _ in walk_tb(raised.value.__traceback__)], model)


def test_the_innermost_module_is_named_in_the_forward_pass(sharded: LlamaForCausalLM) -> None:
    sharded.model.layers[1].mlp.register_forward_pre_hook(ask_for_too_much)
    assert where(sharded) == "model.layers.1.mlp"


def test_a_module_that_is_recomputed_is_named_in_the_backward_pass(sharded: LlamaForCausalLM) -> None:
    sharded.gradient_checkpointing_enable({"use_reentrant": False})
    sharded.train()
    passes = []
    sharded.model.layers[2].self_attn.register_forward_pre_hook(
        lambda *_: ask_for_too_much() if passes else passes.append(1)
    )
    assert where(sharded) == "model.layers.2.self_attn"


def test_what_is_held_is_counted_also_while_units_are_gathered(sharded: LlamaForCausalLM) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters())
    tokens = torch.arange(16).view(2, 8)
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights = sum(parameter.numel() for parameter in sharded.parameters())
    states = 8 * weights + 4 * len(list(sharded.parameters()))
    rest = f"activations and the rest {size_text(6 * weights)}"
    held = [f"optimizer states {size_text(states)}", rest, f"parameters {size_text(4 * weights)}"]
    said = held_most(sharded, optimizer, torch.device("cpu"), 14 * weights + states)
    assert said == ", ".join([*held, f"gradients {size_text(4 * weights)}"])


def test_the_planner_is_a_program_of_its_own_without_gpu_and_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    fits = "[{'flags': [*os.environ], 'peak_bytes': 2**20}]"
    tell = f"import json, os; print('noise'); print(json.dumps({{'fits': {fits}, 'fits_on_ranks': 8}}))"
    said = ask_planner([sys.executable, "-c", tell])
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & set(said.split()) and "CUDA_VISIBLE_DEVICES" in said
    assert said.endswith(" (1.0 MiB) or the same training on 8 ranks")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('error: no such model')", "error: no such model"),
        ("import time; time.sleep(60)", "5 s"),
        ("print('{\"fits\": []}')", "none of the changes that were planned."),
    ],
)
def test_a_planner_without_answer_is_left(code: str, said: str) -> None:
    assert said in ask_planner([sys.executable, "-c", code], seconds=5)


@pytest.fixture
def report(runtime: Runtime) -> MemoryReport:
    return MemoryReport(Config(), runtime, Path("plan.py"))


@pytest.mark.parametrize(
    ("status", "killed"),
    [
        ({"state": "running", "step": 7}, True),
        ({"state": "failed", "step": 3, "message": f"rank 1 was {KILLED}"}, True),
        ({"state": "failed", "step": 3, "message": "error: disk full"}, False),
        ({"state": "stopped", "step": 3, "message": ""}, False),
        (None, False),
    ],
)
def test_the_next_start_says_how_the_last_run_ended(
    report: MemoryReport, tmp_path: Path, status: dict[str, object] | None, killed: bool
) -> None:
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps(status))
    line = json.dumps({"step": 1, "memory/host_peak_bytes": [100 * MIB]})
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{line}\n{{"step": 2, "memory/host_peak')
    said = report.last_end(tmp_path)
    assert bool(said) == killed
    if killed:
        assert str(tmp_path) in said and KILLED in said and "100.0 MiB" in said


# Answers as plan.py does, at once, with what it was asked.
PLANNER = """
import json, sys
recipe = open(sys.argv[sys.argv.index("--config") + 1]).read()
asked = sys.argv[3:] + (["in fp32"] if "precision: fp32" in recipe else [])
print(json.dumps({"plan": {}, "fits": [{"flags": asked, "peak_bytes": 3 * 2**20}]}))
"""


def out_of_memory(recipe: Path, folder: Path, model: Path, rows: Path, ranks: int, **variables: str) -> Finished:
    flags = ["--model_name", model, "--dataset", rows, "--run_validation", "False", "--save_model", "False"]
    flags += ["--device", "cpu", "--precision", "fp32", "--batch_size_training", "16", "--max_train_step", "4"]
    flags += ["--enable_fsdp"] if ranks else []
    return forked(JOB, recipe, *map(str, flags), "--output_dir", folder, ranks=ranks, **variables)


def test_a_rank_without_memory_ends_the_run_with_four_lines(
    tmp_path: Path, save_model: Callable[..., Path], rows70: Path
) -> None:
    """The allocator really fails, on one of two ranks."""
    model = save_model(tmp_path / "model", vocab_size=150_000)
    recipe = shutil.copy(RECIPE, tmp_path)
    (tmp_path / "plan.py").write_text(PLANNER)
    run = tmp_path / "run"
    finished = out_of_memory(recipe, run, model, rows70, 2, STEP="2", MIB="4", LIMITED_RANK="1")
    assert finished.exit_code == 1
    message = finished.output[finished.output.index("error: rank 1 ran out of host memory") :].splitlines()[:4]
    assert " phase of step 2, in " in message[0] and "can't allocate memory" in message[0]
    assert all(holder in message[1] for holder in ("parameters", "optimizer states", "activations and the rest"))
    assert "Planned: " in message[2] and "available per rank: " in message[2] and "Host memory: " in message[2]
    assert "What would fit in " in message[3] and message[3].endswith("--quick --json in fp32 (3.0 MiB)")
    assert "--nproc 2 --nproc_per_node 2 --device cpu --fit " in message[3]
    assert finished.output.count("error: ") == 1 and "Traceback" not in finished.output
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 1)
    assert "ran out of host memory" in status["message"] and "What would fit" in status["message"]


@pytest.mark.slow
def test_the_message_ends_with_changes_that_fit(tmp_path: Path, save_model: Callable[..., Path], rows70: Path) -> None:
    model = save_model(tmp_path / "model", vocab_size=150_000)
    limited = {"STEP": "1", "MIB": "4", "LIMITED_RANK": "1", "LIFTED": ""}
    finished = out_of_memory(RECIPE, tmp_path / "run", model, rows70, 2, **limited)
    assert finished.exit_code == 1 and "ran out of host memory in the " in finished.output, finished.output
    [fits] = [line for line in finished.output.splitlines() if "What would fit in " in line]
    assert " per rank: --" in fits and "MiB)" in fits, finished.output
