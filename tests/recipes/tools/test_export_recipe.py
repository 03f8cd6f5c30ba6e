"""recipes/export.py as users run it: from runs and checkpoints to plain models, and its
errors."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, build_model, run, run_cases
from edited_copy import OTHER_TREE
from forked import forked

from llama_ft.config.paths import RUN_MARKER

EXPORT = REPOSITORY / "recipes" / "export.py"


def export(*flags: str | Path, **environment: str) -> Finished:
    """The command; huggingface_hub reads `environment` when it is imported."""
    if not environment:
        return forked(EXPORT, *flags)
    return forked(OTHER_TREE, REPOSITORY, EXPORT, *flags, **environment)


@pytest.fixture(scope="module")
def runs(
    save_model: Callable[..., Path],
    save_tokenizer: Callable[..., Path],
    rows16: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Base models and runs of two steps: QLoRA, LoRA and a head, and all but the first layer of a
    bf16 mixture of experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("runs")
    save_model(folder / "base", hidden_size=64, intermediate_size=128)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = MixtralConfig(**shape, num_local_experts=3, num_key_value_heads=2, vocab_size=301)
    MixtralForCausalLM(experts).to(torch.bfloat16).save_pretrained(
        save_tokenizer(folder / "experts")
    )
    common = ["--dataset", str(rows16), "--model_name"]
    lora = ["--use_peft", "--precision", "fp32", "--lora_dropout", "0", "--target_modules"]
    cases = {
        "4bit": [*common, f"{folder}/base", *lora, "all-linear", "--quantization", "4bit"],
        "lora": [
            *common,
            f"{folder}/base",
            *lora,
            "q_proj,v_proj",
            "--use_dora",
            "--modules_to_save",
            "lm_head",
        ],
        "full": [*common, f"{folder}/experts", "--freeze_layers", "--max_shard_size", "60KB"],
    }
    shared = ["--device", "cpu", "--max_train_step", "2", "--lr", "1e-2"]
    flags = [[*shared, *case, "--output_dir", f"{folder}/{name}"] for name, case in cases.items()]
    run_cases(folder, flags)
    return folder


@pytest.fixture(scope="module")
def merged(runs: Path) -> tuple[Path, Finished]:
    """The merged model of the 4-bit run, and how its export went."""
    folder = runs / "merged"
    return folder, export(runs / "4bit" / "model", folder)


@pytest.mark.slow
def test_the_adapter_of_a_quantized_run_is_merged_into_the_original_weights(
    runs: Path, merged: tuple[Path, Finished]
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, finished = merged
    assert finished.exit_code == 0, finished.output
    assert f"Written: {folder}" in finished.output
    base = AutoModelForCausalLM.from_pretrained(runs / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    reference = (
        PeftModel.from_pretrained(base, runs / "4bit" / "model").merge_and_unload().state_dict()
    )
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(weights[name], before[name]) == ("_proj" not in name)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("Rank 0.").input_ids) == "Rank 0."


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the model card and the probes, which only a run writes."""
    left_out = {"README.md", "probes.json"}
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in left_out}


@pytest.mark.parametrize("name", ["full", "lora", "4bit"])
def test_the_last_checkpoint_exports_the_final_model_byte_for_byte(
    name: str, runs: Path, tmp_path: Path
) -> None:
    from llama_ft.export import Exporter, find_valid

    exporter = Exporter.prepare(
        find_valid(runs / name), build_model(), None, None, trust_remote_code=False, merge=False
    )
    if name == "full":
        exporter.write_model(tmp_path / "out", None, 60_000)
    else:
        exporter.write_adapter(tmp_path / "out", None)
    ours = contents(tmp_path / "out")
    theirs = contents(runs / name / "model")
    assert ours.keys() == theirs.keys() and len(ours) > 3
    assert [file for file in ours if ours[file] != theirs[file]] == []


def test_a_merged_checkpoint_replaces_a_model_only_with_overwrite(
    runs: Path, merged: tuple[Path, Finished]
) -> None:
    folder, _ = merged
    checkpoint = runs / "4bit" / "checkpoints" / "step-000002"
    refused = export(checkpoint, folder, "--merge", "--dtype", "bfloat16")
    assert (
        refused.exit_code == 2
        and "already holds a model" in refused.output
        and "--overwrite" in refused.output
    )
    copy = shutil.copytree(folder, folder.with_name("replaced"))
    finished = export(checkpoint, copy, "--merge", "--dtype", "bfloat16", "--overwrite")
    assert finished.exit_code == 0, finished.output
    assert f"The checkpoint: {checkpoint}, after step 2" in finished.output
    assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"
    assert "optimizer steps: 2" in (copy / "README.md").read_text()


def test_a_checkpoint_is_pushed_to_the_hub_and_the_token_is_not_printed(
    runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    flags = [runs / "lora", out, "--push_to_hub", "me/model"]
    finished = export(*flags, **hub, HF_TOKEN="hf_of_the_environment")
    assert (
        finished.exit_code == 1
        and "Traceback" not in finished.output
        and "hf_of_the" not in finished.output
    )
    assert f"The checkpoint: {runs}/lora/checkpoints/step-000002" in finished.output
    assert f"`hf upload me/model {out}` uploads it later" in finished.output
    assert contents(out) == contents(runs / "lora" / "model")


def test_without_a_token_nothing_is_exported_to_be_pushed(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    refused = export(runs / "lora", out, "--push_to_hub", "me/model", **hub)
    assert refused.exit_code == 2
    assert "no token for http://127.0.0.1:9" in refused.output
    assert not out.exists()


LIVE = """
import runpy
import sys
from pathlib import Path

newer = [Path(name) for name in sys.argv.pop(1).split(",")]  # checkpoints, in the order of time

def delete_the_oldest(event, arguments):
    if event == "os.mkdir" and str(arguments[0]).endswith(".writing-out") and len(newer) > 1:
        newer[0].rename(newer[1])
        newer.pop(0)

sys.addaudithook(delete_the_oldest)
sys.argv.pop(0)
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("deletions", [1, 30])
def test_a_run_that_still_trains_is_exported_or_the_reason_is_printed(
    runs: Path, tmp_path: Path, deletions: int
) -> None:
    """The checkpoint disappears as soon as the export begins to write, and a newer one is there."""
    shutil.copytree(runs / "full", tmp_path / "run")
    (tmp_path / "live.py").write_text(LIVE)
    newer = [tmp_path / f"run/checkpoints/step-{step:06d}" for step in range(2, deletions + 3)]
    names = ",".join(map(str, newer))
    flags = [tmp_path / "run", tmp_path / "out", "--max_shard_size", "60KB"]
    finished = forked(tmp_path / "live.py", names, EXPORT, *flags)
    assert "step-000002 was deleted while it was read" in finished.output
    assert "Traceback" not in finished.output
    assert finished.exit_code == (0 if deletions == 1 else 1), finished.output
    assert (tmp_path / "out").exists() == (deletions == 1)
    if deletions == 1:
        assert contents(tmp_path / "out") == contents(runs / "full" / "model")
    else:
        assert "first copy a checkpoint" in finished.output


def test_a_full_disk_is_named_and_no_file_is_left(runs: Path) -> None:
    folder = runs / "full disk"
    job = runs / "limited.py"
    job.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 2**10,) * 2)\n"  # no file above 100 KiB
        f"sys.path.insert(0, {str(EXPORT.parent)!r})\n"  # it imports finetuning.py
        f"runpy.run_path({str(EXPORT)!r}, run_name='__main__')\n"
    )
    finished = forked(job, runs / "4bit" / "model", folder)
    assert (
        finished.exit_code == 1
        and f"{folder}: the model could not be written (File too large)" in finished.output
    )
    assert "Traceback" not in finished.output
    assert not folder.exists() and not list(runs.glob(".writing*"))


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from checkpoint_by_hand import save_checkpoint
from forked import REPOSITORY
from peft import LoraConfig, get_peft_model
from tiny_llama import tiny_llama
from transformers import AutoTokenizer
from llama_ft.export import Exporter, find_valid
from llama_ft.config import Config, ModelConfig

sys.path.insert(0, str(REPOSITORY / "recipes"))
from finetuning import build_model

folder, tokenizer = Path(sys.argv[1]), sys.argv[2:]
if tokenizer:
    for name, width in (("small", 64), ("large", 1024)):
        model = tiny_llama(hidden_size=width, intermediate_size=4 * width, num_key_value_heads=4, vocab_size=512)
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tokenizer[0]).save_pretrained(folder / name)
        settings = ModelConfig(model_name=str(folder / name))
        save_checkpoint(folder / f"{name}-full", dict(model.named_parameters()), Config(model=settings))
        lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, lora).save_pretrained(folder / f"{name}-adapter")
else:
    peak = 0.0

    def anonymous():
        [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        return int(line.split()[1]) / 1024

    def watch():
        global peak
        while True:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    def export(way, name):
        out = folder / f"{name}-{way}-out"
        if way == "adapter":
            adapter = folder / f"{name}-adapter"
            exporter = Exporter.of_adapter(adapter, build_model, folder / name, name, False)
            exporter.write_model(out, None, 10**10)
        else:
            checkpoint = find_valid(folder / f"{name}-full")
            exporter = Exporter.prepare(checkpoint, build_model, None, None, False, merge=True)
            exporter.write_model(out, torch.bfloat16, 10**10)

    threading.Thread(target=watch, daemon=True).start()
    for way in ("adapter", "full"):
        export(way, "small")  # imports and thread pools
        before = peak = anonymous()
        export(way, "large")
        print(f"{way} grew {peak - before:.1f} MiB")
"""


@pytest.mark.slow
def test_exporting_takes_a_fraction_of_the_models_size(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MEMORY)
    job = [sys.executable, str(tmp_path / "job.py"), str(tmp_path)]
    for arguments in ([str(tiny_model)], []):
        finished = run(
            [*job, *arguments], PYTHONPATH=f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"
        )
        assert finished.exit_code == 0, finished.output
    size = (tmp_path / "large" / "model.safetensors").stat().st_size / 2**20
    grew = {
        way: float(mib) for way, mib in re.findall(r"(\w+) grew (-?[\d.]+) MiB", finished.output)
    }
    assert size > 130 and grew.keys() == {"adapter", "full"}
    assert max(grew.values()) < 60, grew  # measured: 132, and 13 to 20


@pytest.fixture
def adapter(tmp_path: Path, tiny_model: Path) -> Path:
    """What looks like an adapter of the tiny model until its tensors are read."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "README.md").write_text("---\ntags:\n- llama_ft\n---\n")
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    step = tmp_path / "old" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    config = {"model": {"model_name": "/gone/llama"}, "peft": {"use_peft": False}}
    (step / "trainer.json").write_text(json.dumps({"config": config}))
    config["model"] = {"model_name": str(base)}
    (tmp_path / "file").touch()
    tuned = tmp_path / "tuned"
    shutil.copytree(tmp_path / "old", tuned)
    (tuned / "checkpoints" / "step-000001" / "trainer.json").write_text(
        json.dumps({"config": config})
    )
    (tuned / RUN_MARKER).touch()
    shutil.copytree(folder, tuned / "model")
    shutil.copy(base / "README.md", tuned / "model")
    second = shutil.copytree(tmp_path / "old", tmp_path / "second") / "checkpoints" / "step-000001"
    (second / "trainer.json").write_text(json.dumps({"config": config}))
    return folder


USER_ERRORS: dict[str, tuple[str, list[str]]] = {
    "nothing to export": ("@run @out", ["run: is neither a checkpoint, nor a run's directory"]),
    "a mistyped run": (
        "@tunde @out",
        ["/tunde: there is no run or model here. Did you mean ", "/tuned?"],
    ),
    "a base that is gone": (
        "@old @out",
        ["(--base_model overrides it): base model /gone/llama: no such directory"],
    ),
    "the base itself": (
        "@adapter @base --overwrite",
        ["would delete", "which its base model reads"],
    ),
    "the adapter of a run": (
        "@tuned @tuned/model --merge --overwrite",
        ["tuned/model: is a run's adapter; a merged model would replace it. Choose another OUT."],
    ),
    "a file": ("@adapter @file", ["/file: is not a directory."]),
    "the base of a run": (
        "@second @base --overwrite",
        ["would delete", "which its base model reads"],
    ),
}


@pytest.mark.parametrize("case", USER_ERRORS)
def test_user_errors_are_printed_and_nothing_is_written(
    case: str, adapter: Path, tmp_path: Path
) -> None:
    flags, expected = USER_ERRORS[case]
    words = [word.replace("@", f"{tmp_path}/") for word in flags.split()]
    before = sorted(tmp_path.rglob("*"))
    finished = export(*words)
    assert finished.exit_code == 2
    assert finished.output.startswith("error: ") and "Traceback" not in finished.output
    assert all(part in finished.output for part in expected), finished.output
    assert finished.output.count("error: ") == 1
    assert "output_dir" not in finished.output
    assert sorted(tmp_path.rglob("*")) == before
