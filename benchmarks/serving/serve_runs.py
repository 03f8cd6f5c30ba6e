"""Do a list of runs, exports and probes for serve.py, all in one process: importing torch and
Transformers takes each 8 s of a core.

    python benchmarks/serving/serve_runs.py steps.json     # [{"do": "train", "flags": [...]}, ...]

The file gets an `error` into each step that failed.
"""

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes")]

import export as export_recipe
import finetuning

from benchmarks.serving.serve_models import write_fp8, write_model
from llama_ft import runtime
from llama_ft.config.reading.parse import as_keywords
from llama_ft.data.batches.sampler import BatchLayout
from llama_ft.export_flags import read_export_flags
from llama_ft.extensions.serving.probes.part import make_probes, score_prompts
from llama_ft.extensions.serving.probes.probes import find_probes
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import open_model
from llama_ft.inference.verdict import WEAKER
from llama_ft.models.adapters.lora import adapter_off, adapter_scaled


def train(flags: list[str]) -> None:
    """Run the recipe."""
    finetuning.main(**as_keywords([*flags, "--no_plan"]))


def export(flags: list[str]) -> None:
    """Export a checkpoint or merge an adapter."""
    export_recipe.main(read_export_flags(flags, ""))


def probe(flags: list[str]) -> None:
    """Compute the probes of an adapter again, with the unquantized base model in fp32: RUN OUT."""
    run, out = flags
    _, probes = find_probes(run)
    prompts = [list(probe.token_ids) for probe in probes.probes]
    asked = InferenceFlags(quantization="none", precision="fp32", device="cpu")
    with runtime.start("cpu", 1) as ranks:
        opened = open_model(run, asked, ranks, finetuning.build_model)
        layout = BatchLayout(data_size=1, data_rank=0, micro_batch=1)
        tuned = score_prompts(opened.built, prompts, layout, ranks)
        with adapter_off(opened.model):
            base = score_prompts(opened.built, prompts, layout, ranks)
        with adapter_scaled(opened.model, WEAKER):
            weaker = score_prompts(opened.built, prompts, layout, ranks)
    again = make_probes(opened.tokenizer, prompts, tuned, base, weaker)
    written = dataclasses.replace(probes, quantization=None, probes=again)
    Path(out, "model").mkdir(parents=True)
    written.save(Path(out, "model", "probes.json"))


def model(flags: list[str]) -> None:
    """Write a random model: FAMILY DIRECTORY."""
    family, folder = flags
    write_model(family, Path(folder))


def fp8(flags: list[str]) -> None:
    """Write a model in FP8: DIRECTORY OUT."""
    source, folder = flags
    write_fp8(Path(source), Path(folder))


STEPS: dict[str, Any] = {
    "model": model,
    "fp8": fp8,
    "train": train,
    "export": export,
    "probe": probe,
}


def main(file: Path) -> None:
    """Do all steps."""
    steps = json.loads(file.read_text())
    for step in steps:
        if "done" in step:
            continue
        print(f"== {step['do']} {' '.join(step['flags'])}", flush=True)
        try:
            STEPS[step["do"]](step["flags"])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            step["error"] = f"{type(error).__name__}: {error}"
        step["done"] = True
        file.write_text(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
