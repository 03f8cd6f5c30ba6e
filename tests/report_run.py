"""A run's directory, written by what runs write it with."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llama_ft.config import load, to_yaml
from llama_ft.data.tokenize.statistics import SplitStatistics
from llama_ft.observe.run_log import MetricsLog
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.plan.types import Peak, Plan
from llama_ft.runtime.ends.exit import RunStatus

MARKUP = '<script>alert("x")</script><img src=https://example.com/x.png>'
SECRET = "hf_" + "kW3xT9" * 5
LAYERS = 6
MIB = 2**20
ROWS = "https://example.com/rows.jsonl"


def plan() -> Plan:
    """For two GPUs."""
    activations = {"activations": 130 * MIB, "unsharded units": 40 * MIB}
    peaks = [
        Peak("load", 60 * MIB, {"sharded parameters": 60 * MIB}),
        Peak("backward", 230 * MIB, {"sharded parameters": 60 * MIB, **activations}),
        Peak(
            "optimizer step",
            120 * MIB,
            {"sharded parameters": 60 * MIB, "optimizer state": 60 * MIB},
        ),
    ]
    names = "reserved outside host_load host_save checkpoint result".split()
    sizes: dict[str, Any] = {f"{name}_bytes": MIB for name in names} | {
        "tokens": 4096,
        "is_quick": False,
    }
    return Plan("cuda", 2, peaks, **sizes)


def write_run(
    folder: Path, state: Any = "finished", steps: int = 60, lr: str = "3e-4", scale: float = 1.0
) -> Path:
    """Everything a report can show, with markup and secrets wherever text may come from outside."""
    folder.mkdir()
    config, _ = load(["--model_name", "demo", "--dataset", ROWS, "--lr", lr], paths=False)
    # A password in a setting is refused, but was not always.
    (folder / "config.yaml").write_text(
        to_yaml(config).replace(ROWS, ROWS.replace("//", "//me:hunter2hunter2@"))
    )
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(steps + 1):
        held_out = (
            {"eval/loss": scale * (3 - step / 40), "eval/perplexity": 9.0} if step % 20 == 0 else {}
        )
        trained = {
            "epoch": step / steps,
            "train/loss": scale * (3.1 - step / 40 + 0.2 * (step % 3)),
            "train/lr": 1e-3 / (step + 1),
            "train/grad_norm": float("nan") if step == 7 else 1.0 + step % 5,
            "perf/tokens_per_second": 900.0 + step,
            "perf/mfu": 0.4 + step / 1000,
            "perf/matmul_utilization": 0.6 + step / 1000,
            "perf/step_seconds": 0.5 + step % 2,
            "memory/host_peak_bytes": [900 * MIB, 880 * MIB],
            "memory/device_peak_bytes": [235 * MIB, (236 if step > 30 else 230) * MIB],
        }
        log.write({"step": step, **(trained if step else {}), **held_out})
    log.close()
    status = RunStatus(folder)
    status.step = steps
    status.write(
        state,
        1 if state == "failed" else 0,
        f"error: no good. {MARKUP}" if state == "failed" else "",
    )
    plan().save(folder)
    write_facts(folder)
    RunMetadata(folder).add(ended="2026-11-29T04:12:10+00:00")
    return folder


def write_facts(folder: Path) -> None:
    facts = RunMetadata(folder)
    training = SplitStatistics(samples=60, tokens=6000, target_tokens=3000, longest=200)
    validation = replace(training, samples=7)
    facts.add(
        data={
            "summary": [f"training {MARKUP}"],
            "train": asdict(training),
            "validation": asdict(validation),
        }
    )
    attempt = {"step": 0, "time": "2026-11-29T04:00:00+00:00", "ranks": 2, "changed": {}}
    facts.add(attempts=[attempt])
    facts.add(
        environment={
            "command": f"recipes/finetuning.py --dataset {MARKUP} HF_TOKEN={SECRET}",
            "GPUs": "2 x NVIDIA H100 80GB HBM3, CUDA 13.0",
        }
    )
    layers = [f"model.layers.{n}" for n in range(LAYERS)]
    facts.add(
        units=[
            {"name": n, "kind": "Layer", "parameters": 10**6, "bytes": 2 * 10**6} for n in layers
        ]
    )
    answer = {"question": f"What? {MARKUP}", "answer": f"{MARKUP} \udc80", "reference": SECRET}
    facts.add_samples("before fine-tuning", [answer])
    facts.add_samples("after fine-tuning", [{**answer, "answer": "That."}])
    for step in range(8):
        scored = {**answer, "answer": MARKUP * step, "score": step / 7}
        facts.add_samples(f"step {step}, a_long_name", [scored], "scored")
    peaks = {"backward": [{"device_peak_bytes": 235 * MIB, "device_reserved_bytes": 250 * MIB}] * 2}
    held = {"sharded parameters": 60 * MIB, "optimizer state": 60 * MIB}
    holders = [held, {**held, "optimizer state": 80 * MIB}]
    facts.add(memory={"phases": peaks, "holders": holders, "warnings": [MARKUP]})
