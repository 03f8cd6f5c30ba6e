"""What a run imports."""

import sys
from pathlib import Path

from conftest import RECIPE, run

AND_LIST_MODULES = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
AND_LIST_MODULES += "print('modules:', *sys.modules)"
# For plots, trackers, other frameworks; and torch's compiler, which only --compile needs. Not here: scipy, which no
# requirement brings but transformers' models import where something else has (loss/loss_for_object_detection.py).
NOT_NEEDED = {"matplotlib", "tensorboard", "wandb", "mlflow", "sklearn", "tensorflow", "jax", "IPython", "torchvision"}
COMPILER = {"torch._inductor.compile_fx", "torch._inductor.lowering", "torch._functorch.aot_autograd"}


def test_a_run_imports_no_package_that_it_does_not_need(tiny_model: Path, rows16: Path, tmp_path: Path) -> None:
    """Quantized LoRA is what needs most: peft imports bitsandbytes, and bitsandbytes by itself torch's compiler."""
    flags = ["--model_name", str(tiny_model), "--dataset", str(rows16), "--output_dir", str(tmp_path / "run")]
    flags += ["--use_peft", "--quantization", "8bit", "--context_length", "128", "--max_train_step", "1"]
    finished = run([sys.executable, "-c", AND_LIST_MODULES, str(RECIPE), *flags])
    assert finished.exit_code == 0, finished.output
    imported = set(finished.output.rpartition("modules:")[2].split())
    assert {"torch", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes"} <= imported
    assert not imported & (NOT_NEEDED | COMPILER)
    assert "kernels-community" not in finished.output  # what bitsandbytes says on CPUs with AVX512-BF16
