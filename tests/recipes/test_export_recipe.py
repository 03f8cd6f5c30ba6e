"""recipes/export.py as users run it: from a quantized run to a plain model, in little memory, and its mistakes."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finished, recipe, run

EXPORT = REPOSITORY / "recipes" / "export.py"


def export(*flags: str | Path, **environment: str) -> Finished:
    return run([sys.executable, str(EXPORT), *map(str, flags)], **environment)


@pytest.fixture(scope="module")
def quantized_run(save_model: Callable[..., Path], rows16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and output/model, the adapter of two steps beside its 4-bit weights."""
    folder = tmp_path_factory.mktemp("quantized")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)
    settings = "--use_peft --target_modules all-linear --quantization 4bit --lr 1e-2 --max_train_step 2 --device cpu"
    files = ["--model_name", f"{folder}/base", "--dataset", str(rows16), "--output_dir", f"{folder}/output"]
    finished = recipe(*settings.split(), *files, "--precision", "fp32")
    assert finished.exit_code == 0, finished.output
    return folder


@pytest.fixture(scope="module")
def merged(quantized_run: Path) -> tuple[Path, Finished]:
    """The merged model, and how its export went."""
    folder = quantized_run / "merged"
    return folder, export("--adapter", quantized_run / "output" / "model", "--output_dir", folder)


def test_a_quantized_runs_adapter_is_merged_into_the_original_weights(
    quantized_run: Path, merged: tuple[Path, Finished]
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, finished = merged
    assert finished.exit_code == 0, finished.output
    assert f"The merged model: {folder}" in finished.output
    base = AutoModelForCausalLM.from_pretrained(quantized_run / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    reference = PeftModel.from_pretrained(base, quantized_run / "output" / "model").merge_and_unload().state_dict()
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(weights[name], before[name]) == ("_proj" not in name)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("Rank 0.").input_ids) == "Rank 0."


def test_a_merged_model_is_replaced_only_with_overwrite(quantized_run: Path, merged: tuple[Path, Finished]) -> None:
    folder, _ = merged
    adapter = quantized_run / "output" / "model"
    flags: list[Any] = ["--adapter", adapter, "--output_dir", folder, "--save_dtype", "bfloat16"]
    refused = export(*flags)
    assert refused.exit_code == 2 and "already holds a model" in refused.output and "--overwrite" in refused.output
    flags[3] = shutil.copytree(folder, folder.with_name("replaced"))
    assert export(*flags, "--overwrite").exit_code == 0
    assert json.loads((flags[3] / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_full_disk_is_named_and_leaves_nothing(quantized_run: Path) -> None:
    folder = quantized_run / "full disk"
    command = f'ulimit -f 100; exec "{sys.executable}" "{EXPORT}" "$@"'  # no file above 100 KiB
    flags = ["--adapter", f"{quantized_run}/output/model", "--output_dir", str(folder)]
    finished = run(["bash", "-c", command, "export", *flags])
    assert finished.exit_code == 1 and f"{folder}: the model could not be written (File too large)" in finished.output
    assert "Traceback" not in finished.output
    assert not folder.exists() and not list(quantized_run.glob(".writing*"))


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from llama_ft.checkpoint import merge_adapter

folder, role = Path(sys.argv[1]), sys.argv[2]
if role == "make":
    for name, width in (("small", 64), ("large", 1024)):
        config = LlamaConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2, vocab_size=512,
                             num_attention_heads=4)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder / name)
        lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, lora).save_pretrained(folder / f"{name}-adapter")
else:
    def anonymous():
        [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        return int(line.split()[1]) / 1024

    def merge(name):
        merge_adapter(folder / f"{name}-adapter", folder / name, folder / f"{name}-merged", None, 10**10, False)

    merge("small")  # imports and thread pools
    before, peak, done = anonymous(), 0.0, threading.Event()

    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    merge("large")
    done.set()
    watcher.join()
    print(f"grew {peak - before:.1f} MiB")
"""


def test_merging_takes_a_fraction_of_the_models_size(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(MEMORY))
    made = run([sys.executable, str(tmp_path / "job.py"), str(tmp_path), "make"])
    assert made.exit_code == 0, made.output
    finished = run([sys.executable, str(tmp_path / "job.py"), str(tmp_path), "merge"])
    assert finished.exit_code == 0, finished.output
    size = (tmp_path / "large-merged" / "model.safetensors").stat().st_size / 2**20
    grew = re.search(r"grew (-?[\d.]+) MiB", finished.output)
    assert size > 130 and grew and float(grew[1]) < 60, (size, finished.output)  # measured: 132 and 16


def test_help_and_mistakes_answer_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    path = f"{tmp_path}:{REPOSITORY / 'src'}"
    helped = export("--help", PYTHONPATH=path)
    assert helped.exit_code == 0 and "--base_model NAME" in helped.output
    refused = export(
        "--adaptor", "x", "--save_dtype", "bf16", "--output_dir", "a", "--output-dir", "b", PYTHONPATH=path
    )
    assert refused.exit_code == 2
    for said in ("--adaptor is not a flag. Did you mean --adapter?", "invalid choice: 'bf16'", "given twice"):
        assert said in refused.output
    assert "Traceback" not in refused.output


@pytest.fixture
def adapter(tmp_path: Path, tiny_model: Path) -> Path:
    """What looks like an adapter of the tiny model until its tensors are read."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_model)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    return folder


def test_the_commands_of_the_readme_are_understood(tmp_path: Path) -> None:
    lines = re.findall(r"^python recipes/export.py (.*)$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        adapter = re.search(r"--adapter (\S+)", line)
        assert adapter is not None
        words = line.replace(adapter[1], f"{tmp_path}/absent").split()
        assert export(*words).output == f"error: --adapter {tmp_path}/absent: no such folder.\n"


MISTAKES: dict[str, tuple[str, list[str]]] = {
    "nothing": ("", ["--adapter is needed", "--output_dir is needed"]),
    "missing adapter": ("--adapter @adapted --output_dir @out", ["adapted: no such folder. Did you mean"]),
    "no adapter": ("--adapter @run --output_dir @out", ["holds no adapter_config.json"]),
    "missing base": ("--adapter @adapter --output_dir @out --base_model @bass", ["--base_model", "no such folder"]),
    "other files": ("--adapter @adapter --output_dir @run --overwrite", ["holds more than a model (notes.txt)"]),
    "the base itself": ("--adapter @adapter --output_dir @base --overwrite", ["would delete", "--base_model reads"]),
    "a size": ("--adapter @adapter --output_dir @out --max_shard_size big", ["--max_shard_size big", "5GB"]),
    "a stray word": ("--adapter @adapter --output_dir @out now", ['"now" stands alone']),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_and_nothing_is_written(case: str, adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    flags, said = MISTAKES[case]
    words = [str(tiny_model) if word == "@base" else word.replace("@", f"{tmp_path}/") for word in flags.split()]
    before = sorted(tmp_path.rglob("*"))
    finished = export(*words)
    assert finished.exit_code == 2
    assert finished.output.startswith("error: ") and "Traceback" not in finished.output
    assert all(part in finished.output for part in said), finished.output
    assert sorted(tmp_path.rglob("*")) == before and (tiny_model / "config.json").exists()


def test_a_recorded_base_that_has_moved_is_asked_for(adapter: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"peft_type": "LORA", "base_model_name_or_path": "/gone/llama"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    finished = export("--adapter", adapter, "--output_dir", tmp_path / "out")
    assert finished.exit_code == 2
    assert "(--base_model overrides it): base model /gone/llama: no such folder" in finished.output
    assert "--base_model says what to use instead" in finished.output
