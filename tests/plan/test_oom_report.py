"""An out-of-memory error says where it happened, what was held, what was planned, and what would
fit."""

import json
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import pytest
import torch
from conftest import RECIPE
from forked import forked
from tiny_llama import tiny_llama
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaForCausalLM

from llama_ft.config import Config
from llama_ft.config.wording.messages import size_text
from llama_ft.plan.oom_report import MemoryReport, held_most, module_at_work
from llama_ft.runtime import Ranks

JOB = Path(__file__).with_name("out_of_memory_job.py")


@pytest.fixture
def sharded(runtime: Ranks) -> LlamaForCausalLM:
    """A model whose layers are units, in fp32, computing in bf16."""
    model = tiny_llama(num_hidden_layers=3)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=runtime.mesh, mp_policy=policy)
    fully_shard(model, mesh=runtime.mesh, mp_policy=policy, reshard_after_forward=False)
    return model


@pytest.mark.parametrize(
    ("name", "recomputed"), [("model.layers.1.mlp", 0), ("model.layers.2.self_attn", 1)]
)
def test_the_innermost_module_is_named_also_with_activation_checkpointing(
    sharded: LlamaForCausalLM, name: str, recomputed: int
) -> None:
    sharded.gradient_checkpointing_enable({"use_reentrant": False})
    sharded.train()
    passes = []
    tokens = torch.arange(16).view(2, 8)

    def ask_for_too_much(*_: object) -> None:
        passes.append(1)
        if len(passes) > recomputed:
            torch.empty(2**46, dtype=torch.uint8)

    sharded.get_submodule(name).register_forward_pre_hook(ask_for_too_much)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        sharded(input_ids=tokens, labels=tokens).loss.backward()
    assert (
        module_at_work([frame for frame, _ in walk_tb(raised.value.__traceback__)], sharded) == name
    )


def test_memory_categories_are_counted_also_while_units_are_unsharded(
    sharded: LlamaForCausalLM,
) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters())
    tokens = torch.arange(16).view(2, 8)
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights = sum(parameter.numel() for parameter in sharded.parameters())
    states = 8 * weights + 4 * len(list(sharded.parameters()))
    rest = f"activations and the rest {size_text(6 * weights)}"
    held = [
        f"optimizer state {size_text(states)}",
        rest,
        f"sharded parameters {size_text(4 * weights)}",
    ]
    said = held_most(sharded, optimizer, 14 * weights + states)
    assert said == ", ".join([*held, f"gradients {size_text(4 * weights)}"])
    assert "optimizer state" not in held_most(sharded, None, 8 * weights)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import json, os; print(json.dumps({'fits': [{'flags': [*os.environ], 'peak_bytes': 2**20}]}))",
            " (1.0 MiB)",
        ),
        ("raise SystemExit('error: no such model')", "error: no such model"),
        ("import time; time.sleep(60)", "1 s"),
        ("print('{\"fits\": []}')", "none of the planned changes."),
    ],
)
def test_the_planner_runs_as_a_separate_program_without_gpu_and_process_group(
    code: str, said: str, runtime: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("llama_ft.plan.oom_report.SECONDS_TO_PLAN", 1 if "sleep" in code else 30)
    (planner := tmp_path / "plan.py").write_text(code)
    answer = MemoryReport(Config(), runtime, planner).advise(MemoryError())
    assert said in answer and not {"RANK", "TORCHELASTIC_RUN_ID"} & set(answer.split())


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_ends_the_run_with_four_lines(
    tmp_path: Path, save_model: Callable[..., Path], rows70: Path
) -> None:
    """The allocator really fails, on one of two ranks, and plan.py is asked."""
    model = save_model(tmp_path / "model", vocab_size=150_000)
    run = tmp_path / "run"
    flags = [
        "--model_name",
        model,
        "--dataset",
        rows70,
        "--run_validation",
        "False",
        "--save_model",
        "False",
    ]
    flags += "--device cpu --precision fp32 --batch_size_training 16 --max_train_step 4".split()
    # the heap keeps nothing
    limited = {"STEP": "2", "MIB": "4", "LIMITED_RANK": "1", "MALLOC_TOP_PAD_": "0"}
    finished = forked(
        JOB, RECIPE, *map(str, flags), "--enable_fsdp", "--output_dir", run, ranks=2, **limited
    )
    assert finished.exit_code == 1
    message = finished.output[
        finished.output.index("error: rank 1 ran out of host memory") :
    ].splitlines()[:4]
    assert " phase of step 2, in " in message[0] and "can't allocate memory" in message[0]
    assert all(
        holder in message[1]
        for holder in ("sharded parameters", "optimizer state", "activations and the rest")
    )
    assert "Planned: " in message[2] and "available per rank: " in message[2]
    assert (
        "What would fit in " in message[3]
        and " per rank: --" in message[3]
        and "MiB)" in message[3]
    )
    assert finished.output.count("error: ") == 1 and "Traceback" not in finished.output
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 1)
    assert "ran out of host memory" in status["message"] and "What would fit" in status["message"]
