"""A real model all the way: SmolLM2-135M-Instruct out of its Python package, fine-tuned, resumed,
exported, merged, evaluated, and reloaded in plain Transformers and PEFT. In fp32, in which numbers
can be compared."""

import importlib.util
import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, losses, metrics, series
from forked import forked

from llama_ft.data.smollm2 import FILE, MODULE, PACKAGE, build_smollm2, quickstart_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in (MODULE, "gguf")),
        reason=f"{PACKAGE} is not installed",
    ),
]
CASES = REPOSITORY / "tests" / "run_cases.py"
EVALUATE_CASES = REPOSITORY / "tests" / "evaluate_cases.py"
TASK = REPOSITORY / "configs" / "tasks" / "python_docs.yaml"
QUESTIONS = 6


def load(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Path:
    return build_smollm2(cache)


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on two ranks, another that resumes it after the second, and what is made of
    the first."""
    folder = tmp_path_factory.mktemp("smollm2")
    settings = (
        f"--config {REPOSITORY}/configs/quickstart.yaml --model_name {smollm2} --enable_fsdp"
    ).split()
    settings += (
        "--low_cpu_fsdp --precision fp32 --context_length 128 --batch_size_training 2".split()
    )
    settings += "--max_train_step 4 --save_steps 2 --sample_tokens 8".split()
    flags = [[*settings, "--output_dir", f"{folder}/run"]]
    flags.append(
        [
            *settings,
            "--output_dir",
            f"{folder}/resumed",
            "--resume",
            f"{folder}/run/checkpoints/step-000002",
        ]
    )
    (folder / "cases.json").write_text(json.dumps(flags))
    finished = forked(CASES, folder / "cases.json", ranks=2, timeout=900)
    assert finished.exit_code == 0, finished.output
    export = [f"{folder}/run", f"{folder}/merged", "--merge", "--save_dtype", "float32"]
    finished = forked(REPOSITORY / "recipes" / "export.py", *export)
    assert finished.exit_code == 0, finished.output
    evaluation = [
        f"{folder}/run",
        "--base",
        "--tasks",
        str(TASK),
        "--limit",
        str(QUESTIONS),
        "--device",
        "cpu",
    ]
    evaluation += ["--max_eval_step", "2"]  # as many as two ranks with max_eval_step 1
    (folder / "cases.json").write_text(
        json.dumps([[*evaluation, "--output", f"{folder}/found.json"]])
    )
    finished = forked(EVALUATE_CASES, folder / "cases.json", timeout=600)
    assert finished.exit_code == 0, finished.output
    return folder


def test_the_package_is_converted_into_a_plain_model_that_answers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    assert quickstart_model()[0] == str(smollm2)
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert "Apache License" in (smollm2 / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = load(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)
    packed = load(Path(str(distribution(PACKAGE).locate_file(MODULE))), gguf_file=FILE)
    with torch.no_grad():
        ours = model(**inputs).logits
        theirs = packed(**inputs).logits
    assert (ours - theirs).norm() < 0.02 * theirs.norm(), "only the rounding to bf16 differs"


@pytest.mark.large
def test_fine_tuning_lowers_the_loss_and_peft_continues_with_the_same_logits(
    folder: Path, smollm2: Path
) -> None:
    """peft on the base model, the merged model, and (by its loss) the run itself are one model."""
    from peft import PeftModel

    evaluated = {
        line["step"]: line["eval/loss"] for line in metrics(folder / "run") if "eval/loss" in line
    }
    assert evaluated[4] < evaluated[0] - 0.1
    ids = torch.arange(100, 148).view(2, 24)
    base = load(smollm2)
    with torch.no_grad():
        before = base(ids).logits
        tuned = PeftModel.from_pretrained(base, folder / "run" / "model").eval()(ids).logits
        merged = load(folder / "merged")(ids).logits
    assert (tuned - before).abs().max() > 0.5
    torch.testing.assert_close(merged, tuned, rtol=0, atol=2e-3)


@pytest.mark.large
def test_a_resumed_run_ends_with_the_same_weights(folder: Path) -> None:
    from safetensors.torch import load_file

    assert losses(folder / "resumed") == losses(folder / "run")
    weights, resumed = (
        load_file(folder / name / "model/adapter_model.safetensors") for name in ("run", "resumed")
    )
    assert weights.keys() == resumed.keys() and len(weights) == 30 * 7 * 2
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.large
def test_the_evaluation_agrees_with_the_run_and_with_the_harness(
    folder: Path, smollm2: Path
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    base, tuned = json.loads((folder / "found.json").read_text())["models"]
    evaluated = series(folder / "run", "eval/loss")
    for model, loss in (base, evaluated[0]), (tuned, evaluated[-1]):
        assert model["held_out"]["loss"] == pytest.approx(loss, abs=1e-3)
    arguments = {"pretrained": str(smollm2), "dtype": "float32", "device": "cpu", "batch_size": 1}
    settings: dict[str, Any] = {
        "model": "hf",
        "tasks": [str(TASK)],
        "limit": QUESTIONS,
        "log_samples": False,
    }
    manager = TaskManager(include_defaults=False)
    for model, own in (base, {}), (tuned, {"peft": str(folder / "run" / "model")}):
        theirs = simple_evaluate(**settings, model_args=arguments | own, task_manager=manager)
        assert theirs is not None
        for name in ("acc", "acc_norm"):
            assert (
                model["tasks"]["python_docs"][name]["value"]
                == theirs["results"]["python_docs"][f"{name},none"]
            )


# A notebook has IPython. Here its pictures are printed.
WITHOUT_A_KERNEL = """import sys
from types import ModuleType

sys.modules["IPython"] = ModuleType("IPython")
sys.modules["IPython.display"] = display = ModuleType("IPython.display")
display.SVG = str
display.display = print

"""


@pytest.mark.large
def test_the_notebook_runs_from_top_to_bottom(smollm2: Path, tmp_path: Path) -> None:
    """As a kernel would: the cells one after another, in one namespace; in a process of its own."""
    cells = json.loads((REPOSITORY / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "STEPS = 20" in code[0] and 'ROOT / "output"' in code[0]
    text = WITHOUT_A_KERNEL + (
        "\n\n".join(code)
        .replace("STEPS = 20", "STEPS = 2")
        .replace('ROOT / "output"', f"Path({str(tmp_path)!r})")
    )
    (tmp_path / "cells.py").write_text(text)
    finished = forked(tmp_path / "cells.py", timeout=900)
    assert finished.exit_code == 0, finished.output
    assert "after step 2 of 2" in finished.output and "'model.safetensors'" in finished.output
    assert "<polyline" in finished.output and "There is no GPU here: skipped." in finished.output
