"""An out-of-memory error says where it happened, what was held, what was planned, and what would fit."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import RECIPE, Finished, run
from forked import forked
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.config import Config
from llama_ft.plan.explain import ask_planner, capacity, compare, describe_device, describe_fits
from llama_ft.plan.killed import about_host, last_end
from llama_ft.plan.record import Peak, Plan
from llama_ft.plan.where import first_local, frames_of, held_now, module_at_work
from llama_ft.runtime import Runtime
from llama_ft.runtime.out_of_memory import KILLED

JOB = Path(__file__).with_name("out_of_memory_job.py")
MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


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


def step(model: nn.Module) -> BaseException:
    """The error of a step that runs out of memory, as the recipe gets it: with the model among its locals."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(16).view(2, 8)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return raised.value


def where(error: BaseException) -> str:
    frames = frames_of(error.__traceback__)
    assert isinstance(first_local(frames, torch.optim.Optimizer), torch.optim.AdamW)
    return module_at_work(frames, first_local(frames, nn.Module))


def test_the_innermost_module_is_named_in_the_forward_pass(sharded: LlamaForCausalLM) -> None:
    sharded.model.layers[1].mlp.register_forward_pre_hook(ask_for_too_much)
    assert where(step(sharded)) == "model.layers.1.mlp"


def test_the_unit_whose_backward_began_last_is_named_in_the_backward_pass(sharded: LlamaForCausalLM) -> None:
    """Autograd's own operators have no frame of Python's; a hook on a gradient has none of a module's."""
    sharded.model.layers[1].mlp.register_forward_hook(
        lambda _, __, output: output.register_hook(ask_for_too_much) and None
    )
    assert where(step(sharded)) == "model.layers.1"


def test_a_module_that_is_recomputed_is_named_in_the_backward_pass(sharded: LlamaForCausalLM) -> None:
    sharded.gradient_checkpointing_enable({"use_reentrant": False})
    sharded.train()
    passes = []

    def second_time(*_: object) -> None:
        passes.append(1)
        if len(passes) == 2:
            ask_for_too_much()

    sharded.model.layers[2].self_attn.register_forward_pre_hook(second_time)
    assert where(step(sharded)) == "model.layers.2.self_attn"


def test_what_is_held_is_counted_while_a_unit_is_gathered(sharded: LlamaForCausalLM) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters())
    tokens = torch.arange(16).view(2, 8)
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights = sum(parameter.numel() for parameter in sharded.parameters())
    steps = 4 * len(list(sharded.parameters()))
    before = held_now(sharded, optimizer, CPU)
    assert before["sharded parameters"] == before["gradients"] == 4 * weights
    assert before["optimizer state"] == 8 * weights + steps
    assert before["gathered units"] == before["quantized parts"] == 0
    optimizer.zero_grad()
    seen = []
    layer = sharded.model.layers[1]
    of_layer = sum(parameter.numel() for parameter in layer.parameters())
    of_root = weights - 3 * of_layer
    layer.mlp.register_forward_hook(lambda *_: seen.append(held_now(sharded, optimizer, CPU)))
    with torch.no_grad():
        sharded(input_ids=tokens)
    [now] = seen
    assert now["gathered units"] == 2 * (of_layer + of_root)  # bf16; the root stays gathered
    assert now["sharded parameters"] == 4 * weights and now["gradients"] == 0


def plan_of(**peaks: int) -> Plan:
    shares = {"sharded parameters": 3, "activations": 6, "temporaries": 1}
    made = [
        Peak(phase, 10 * size, {holder: part * size for holder, part in shares.items()}, "model.layers.0")
        for phase, size in peaks.items()
    ]
    return Plan("cuda", 2, 0, made, [], 20 * GIB, GIB, 0, 0, 0, 0, {}, "", 0, 512, True, 1.0)


def test_the_plan_of_the_phase_stands_beside_what_is_held() -> None:
    held = {"sharded parameters": 3 * GIB, "gradients": GIB}
    lines = compare(plan_of(forward=GIB, backward=2 * GIB), "forward", held, 14 * GIB, 1)
    cells = [line.split("  ") for line in lines]
    assert lines[0] == "Rank 1's memory and the plan for the peak of its forward phase:"
    rows = {words[0]: words[1:] for words in ([cell.strip() for cell in line if cell.strip()] for line in cells[2:])}
    assert rows == {
        "sharded parameters": ["3.00 GiB", "3.00 GiB"],
        "gradients": ["0.0 MiB", "1.00 GiB"],
        "activations and the rest": ["7.00 GiB", "10.00 GiB"],
        "together": ["10.00 GiB", "14.00 GiB"],
    }
    assert len({len(line) for line in lines[1:]}) == 1
    assert "no plan" in compare(None, "forward", held, 14 * GIB, 1)[0]


def test_fragmentation_is_named_where_it_would_have_been_enough() -> None:
    whole = describe_device(80 * GIB, 80 * GIB, GIB, 76 * GIB, 77 * GIB, asked=2 * GIB)
    assert "tensors hold 76.00 GiB, torch keeps 1.00 GiB" in whole and "hold 2.00 GiB, and 1.00 GiB are free" in whole
    assert "expandable_segments" not in whole
    assert "expandable_segments:True" in describe_device(80 * GIB, 80 * GIB, GIB, 66 * GIB, 77 * GIB, asked=2 * GIB)
    assert "may take 40.00 GiB" in describe_device(40 * GIB, 80 * GIB, 41 * GIB, 38 * GIB, 38 * GIB, asked=3 * GIB)


def test_other_programs_leave_less_to_fit_in() -> None:
    assert capacity(80 * GIB, 80 * GIB, 2 * GIB, 77 * GIB, outside=GIB) == 80 * GIB
    assert capacity(80 * GIB, 80 * GIB, 2 * GIB, 47 * GIB, outside=GIB) == 50 * GIB
    assert capacity(40 * GIB, 80 * GIB, 2 * GIB, 40 * GIB, outside=GIB) == 41 * GIB


def test_the_first_changes_are_told_with_their_peaks() -> None:
    fit = {
        "flags": ["--activation_checkpointing full"],
        "gives_up": "25 % speed",
        "peak_bytes": GIB,
    }
    more = [{**fit, "flags": [f"--batch_size_training {n}", "--use_peft"]} for n in (2, 3, 4)]
    text = describe_fits({"fits": [fit, *more]}, "", 2 * GIB)
    assert "fit in 2.00 GiB" in text and "--activation_checkpointing full     1.00 GiB\n" in text
    assert "gives up: 25 % speed" in text
    assert "--batch_size_training 3 --use_peft" in text and "--batch_size_training 4" not in text
    assert "on 8 ranks the same training does" in describe_fits({"fits": [], "fits_on_ranks": 8}, "", GIB)
    assert describe_fits(None, "it took over 90 s", GIB) == "What would fit was not found out: it took over 90 s."


def test_the_planner_is_a_program_of_its_own_without_gpu_and_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    tell = "import json, os; print('noise'); print(json.dumps(dict(os.environ)))"
    answer, problem = ask_planner([sys.executable, "-c", tell], threading.Event())
    assert answer is not None and problem == ""
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & answer.keys() and answer["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("code", "told", "problem"),
    [
        (
            "raise SystemExit('error: no such model')",
            False,
            "recipes/plan.py ended with exit code 1 (error: no such model)",
        ),
        ("import time; time.sleep(60)", False, "it took over 0.5 s"),
        ("import time; time.sleep(60)", True, "this process was told to end"),
    ],
)
def test_a_planner_without_answer_is_told_and_left(code: str, told: bool, problem: str) -> None:
    to_end = threading.Event()
    if told:
        to_end.set()
    started = time.monotonic()
    assert ask_planner([sys.executable, "-c", code], to_end, seconds=0.5 if "sleep" in code else 30) == (None, problem)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("status", "age_seconds", "says"),
    [
        ({"state": "running", "step": 7}, 0, "ended after step 7 without a word, as when killed (exit code -9)"),
        ({"state": "running", "step": 7}, 10**9, "it may have lost power"),
        (
            {"state": "failed", "step": 3, "message": "rank 1 was killed (exit code -9)"},
            0,
            "one of its ranks was killed",
        ),
        ({"state": "failed", "step": 3, "message": "error: disk full"}, 0, ""),
        ({"state": "stopped", "step": 3, "message": ""}, 0, ""),
        (None, 0, ""),
    ],
)
def test_the_next_start_says_how_the_last_run_ended(
    tmp_path: Path, status: dict[str, object] | None, age_seconds: int, says: str
) -> None:
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps(status))
        written = time.time() - age_seconds
        os.utime(tmp_path / "status.json", (written, written))
    end = last_end(tmp_path)
    assert says in end and bool(end) == bool(says)


@pytest.mark.parametrize("status", [{"state": "running"}, {"state": "failed", "message": f"rank 1 was {KILLED}"}])
@pytest.mark.parametrize(("peak_bytes", "verdicts"), [(100 * MIB, 1), (10**13, 0)])
def test_who_killed_a_run_is_said_once(
    runtime: Runtime, tmp_path: Path, status: dict[str, object], peak_bytes: int, verdicts: int
) -> None:
    """By numbers where there are any; before them only who may have done it."""
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "memory/host_peak_bytes": [peak_bytes]}) + "\n")
    said = f"{last_end(tmp_path)}\n{about_host(Config(), tmp_path, runtime, 0)}"
    assert said.count("more likely") == verdicts
    assert "probably" not in said and said.count("by the kernel if host memory ran out, or by somebody's") == 1


@pytest.mark.parametrize(("saved", "says"), [(10, "after step 10 or later without"), (7, "after step 7 without")])
def test_the_newest_checkpoint_says_how_far_a_run_was_at_least(tmp_path: Path, saved: int, says: str) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 7}))
    for step in (2, saved):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert says in last_end(tmp_path)


# Answers as plan.py does, at once, with what it was asked.
PLANNER = """
import json, sys
recipe = open(sys.argv[sys.argv.index("--config") + 1]).read()
asked = " ".join(sys.argv[3:-1])
asked += " in fp32" if "precision: fp32" in recipe else ""
fit = {"flags": ["--use_peft"], "gives_up": asked, "peak_bytes": 3 * 2**20}
print(json.dumps({"plan": {}, "fits": [fit]}))
"""


def out_of_memory(recipe: Path, folder: Path, model: Path, rows: Path, ranks: int, **variables: str) -> Finished:
    flags = ["--model_name", model, "--dataset", rows, "--run_validation", "False", "--save_model", "False"]
    flags += ["--device", "cpu", "--precision", "fp32", "--batch_size_training", "16", "--max_train_step", "4"]
    flags += ["--enable_fsdp"] if ranks else []
    return forked(JOB, recipe, *map(str, flags), "--output_dir", folder, ranks=ranks, **variables)


def test_a_rank_without_memory_ends_the_run_with_one_message(
    tmp_path: Path, save_model: Callable[..., Path], rows70: Path
) -> None:
    """The allocator really fails, on one of two ranks."""
    model = save_model(tmp_path / "model", vocab_size=150_000)
    recipe = shutil.copy(RECIPE, tmp_path)
    (tmp_path / "plan.py").write_text(PLANNER)
    run = tmp_path / "run"
    finished = out_of_memory(recipe, run, model, rows70, 2, STEP="2", MIB="4", LIMITED_RANK="1")
    assert finished.exit_code == 1
    assert "error: rank 1 ran out of host memory in the " in finished.output and " of step 2, in " in finished.output
    assert "more were asked for. Host memory: " in finished.output and "(ulimit -v of each process)" in finished.output
    for holder in ("sharded parameters", "optimizer state", "activations and the rest", "together"):
        assert f"\n         {holder}" in finished.output
    assert "\n         --use_peft  3.0 MiB\n" in finished.output
    assert "gives up: --nproc 2 --nproc_per_node 2 --device cpu --quick --json --fit in fp32\n" in finished.output
    assert f"More: python recipes/plan.py --config {run}/config.yaml --nproc 2 --device cpu --fit " in finished.output
    assert "Traceback" not in finished.output and "lost contact" not in finished.output
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 1)
    assert "ran out of host memory" in status["message"] and "--use_peft" in status["message"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_message_ends_with_changes_that_fit(
    tmp_path: Path, save_model: Callable[..., Path], rows70: Path, ranks: int
) -> None:
    model = save_model(tmp_path / "model", vocab_size=150_000)
    limited = str(max(0, ranks - 1))
    finished = out_of_memory(
        RECIPE, tmp_path / "run", model, rows70, ranks, STEP="1", MIB="4", LIMITED_RANK=limited, LIFTED=""
    )
    assert finished.exit_code == 1 and "ran out of host memory in the " in finished.output, finished.output
    assert "and the plan for the peak of its" in finished.output
    assert "What would fit in " in finished.output and "gives up: " in finished.output, finished.output
    command = finished.output.split("More: python ")[1].splitlines()[0].split()
    assert run([sys.executable, *command, "--quick"], timeout=200).exit_code == 0
