"""What a run imports, and what it prints."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import RECIPE, run, run_cases

from llama_ft.evaluation.flags import read_evaluate_flags
from llama_ft.export_flags import read_export_flags
from llama_ft.inference.flags import read_inference_flags

# PIL cannot be imported: only images need it, and a container without a network may lack it.
AND_LIST_MODULES = (
    "import runpy, sys; sys.modules['PIL'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__'); "
)
AND_LIST_MODULES += "print('modules:', *sys.modules)"
# For plots, trackers, other frameworks; and torch's compiler, which only --compile needs. Not here:
# scipy, which no requirement brings but transformers' models import where something else has
# (loss/loss_for_object_detection.py).
NOT_NEEDED = {
    "matplotlib",
    "tensorboard",
    "wandb",
    "mlflow",
    "sklearn",
    "tensorflow",
    "jax",
    "IPython",
    "torchvision",
}
COMPILER = {
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch._functorch.aot_autograd",
}


@pytest.mark.slow
def test_a_run_imports_no_package_that_it_does_not_need(
    tiny_model: Path, rows16: Path, tmp_path: Path
) -> None:
    """Quantized LoRA is what needs most: peft imports bitsandbytes, and bitsandbytes by itself
    torch's compiler."""
    flags = [
        "--model_name",
        str(tiny_model),
        "--dataset",
        str(rows16),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    flags += (
        "--use_peft --quantization 8bit --context_length 128 --max_train_step 1 --no_plan".split()
    )
    finished = run([sys.executable, "-c", AND_LIST_MODULES, str(RECIPE), *flags])
    assert finished.exit_code == 0, finished.output
    imported = set(finished.output.rpartition("modules:")[2].split())
    assert {"torch", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes"} <= imported
    assert not imported & (NOT_NEEDED | COMPILER)
    # what bitsandbytes says on CPUs with AVX512-BF16
    assert "kernels-community" not in finished.output


def test_a_run_prints_few_lines_and_ends_with_commands_that_work(
    tiny_model: Path, rows70: Path, tmp_path: Path
) -> None:
    flags = f"--model_name {tiny_model} --dataset {rows70} --validation 0.2 --use_peft".split()
    flags += ["--max_train_step", "3", "--context_length", "256", "--device", "cpu"]
    flags += ["--precision", "fp32"]
    cases = [
        [*flags, "--output_dir", f"{tmp_path}/{name}", *more]
        for name, *more in (("a",), ("b", "--quiet"))
    ]
    finished = run_cases(tmp_path, cases, ranks=1)
    # --no_plan
    assert "Planned peak: " not in finished.output and not (tmp_path / "a" / "plan.json").exists()
    printed, quiet = re.findall(
        r"(?s)(.*?\n\nTraining ended.*?exported --merge)\n", finished.output
    )
    others = [
        line for line in printed.splitlines() if not re.match(r"step |  \S+ = .* \(default", line)
    ]
    assert len(others) <= 25, finished.output
    # three steps, and the validation losses before and after them
    assert printed.count("\nstep ") == 5
    title, best, served, *summary = printed.splitlines()[-7:]
    loss = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ][-1]["eval/loss"]
    assert re.match(
        r"Training ended after step 3 of 3: all steps are done. The run took [\d.]+ (m?s|min)",
        title,
    )
    assert served.startswith("vLLM can serve this adapter")
    assert best == f"Best validation loss: {loss:.4g} at step 3"
    assert f"adapter of step 3: {tmp_path}/a/model (report: {tmp_path}/a/report.html)" in summary[0]
    assert (tmp_path / "a" / "report.html").is_file()
    _, *chat = shlex.split(summary[1].partition(": ")[2])
    _, *evaluate = shlex.split(summary[2].partition(": ")[2])
    _, *export = shlex.split(summary[3].partition(": ")[2])
    assert [Path(words[0]).resolve() for words in (chat, evaluate, export)] == [
        RECIPE.with_name(f"{name}.py") for name in ("inference", "evaluate", "export")
    ]
    assert read_inference_flags(chat[1:], "").paths == [f"{tmp_path}/a"]
    assert read_evaluate_flags(evaluate[1:], "").models[0].base == str(tiny_model)
    assert read_export_flags(export[1:], "").merge
    left = [line for line in quiet.splitlines() if line and not line.startswith("warning: ")]
    assert [line.split(" ")[0] for line in left] == [
        "step",
        "step",
        *(line.split(" ")[0] for line in (title, best, served, *summary)),
    ]
    assert "validation loss" in left[0] and "validation loss" in left[1]
