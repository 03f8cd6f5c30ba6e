"""Transformers 4 reads the same model from an export as Transformers 5: in an environment of its
own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_by_hand import save_checkpoint
from conftest import REPOSITORY, build_model
from transformers4_job import MODELS, TEXT, TOKENS, auto_class

from llama_ft.config import Config, ModelConfig
from llama_ft.export import Exporter, find_valid

pytestmark = pytest.mark.slow
REQUIREMENTS = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<0.23"]
JOB = REPOSITORY / "tests" / "transformers4_job.py"


@pytest.fixture(scope="session")
def transformers4() -> Path:
    """A folder with Transformers 4 for PYTHONPATH, installed the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = cache / "llama_ft-tests" / "transformers-4.57.6"
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        installed = subprocess.run([*pip, *REQUIREMENTS], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"no package index has {REQUIREMENTS[0]}: {installed.stderr[-300:]}")
        (folder / "complete").touch()
    return folder


def run_job(transformers4: Path, task: str, work: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(transformers4), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOB), task, str(work)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not finished.returncode, finished.stderr[-3000:]


def export(base: Path, out: Path) -> None:
    """Exports without any change: of a full model, of a merged adapter, and of an adapter."""
    from peft import LoraConfig, get_peft_model

    model = auto_class(base).from_pretrained(base)
    if "vision_config" not in (base / "config.json").read_text():
        config = Config(model=ModelConfig(model_name=str(base)))
        checkpoint = save_checkpoint(out / "run", dict(model.named_parameters()), config)
        exporter = Exporter.prepare(
            find_valid(checkpoint), build_model(), None, None, trust_remote_code=False, merge=False
        )
        exporter.write_model(out / "full", None, 10**9)
    target = r"(?!.*vis).*layers.*\.(self_attn|attention)\.(q_proj|qkv_proj|query_key_value|o_proj)"
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=target, lora_alpha=8)
    get_peft_model(model, settings).save_pretrained(out / "peft")
    exporter = Exporter.of_adapter(
        out / "peft", build_model(), base, str(base), trust_remote_code=False
    )
    exporter.write_model(out / "merged", None, 10**9)
    exporter.tokenizer.chat_template = "{{ messages }}"
    exporter.write_adapter(out / "adapter", None)


@pytest.fixture(scope="module")
def work(transformers4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4/MODEL and 5/MODEL, written by both versions, what is exported from each, and seen_by_4.pt
    of all."""
    from transformers import AutoTokenizer

    work = tmp_path_factory.mktemp("transformers4")
    run_job(transformers4, "make", work)
    for name in MODELS:
        base = work / "4" / name
        again = work / "5" / name
        auto_class(base).from_pretrained(base).save_pretrained(again)
        AutoTokenizer.from_pretrained(base).save_pretrained(again)
        for version in ("4", "5"):
            export(work / version / name, work / f"of-{version}" / name)
        for written in ("config.json", "tokenizer_config.json"):
            (again / written).rename(again / f"{written}-5")  # version 4 cannot read them
    run_job(transformers4, "read", work)
    return work


@pytest.mark.parametrize("version", ["4", "5"])
@pytest.mark.parametrize("name", MODELS)
def test_both_versions_read_the_same_model_from_an_export(
    name: str, version: str, work: Path
) -> None:
    from transformers import AutoTokenizer

    expected = torch.load(work / "4" / name / "seen_by_4.pt")
    out = work / f"of-{version}" / name
    kinds = [kind for kind in ("full", "merged") if (out / kind).exists()]
    assert kinds
    for kind in kinds:
        seen = torch.load(out / kind / "seen_by_4.pt")
        model = auto_class(out / kind).from_pretrained(out / kind).eval()
        with torch.no_grad():
            by_5 = model(input_ids=TOKENS).logits
        assert (seen["logits"] - expected["logits"]).abs().max() < 1e-5
        assert (by_5 - expected["logits"]).abs().max() < 1e-5
        assert seen["chat_template"] is None
    # as in training, which Transformers 5 has done
    tokenizer = AutoTokenizer.from_pretrained(work / "4" / name)
    for kind in (*kinds, "adapter"):
        seen = torch.load(out / kind / "seen_by_4.pt")
        assert seen["tokens"] == tokenizer(TEXT).input_ids
        assert seen["special"].items() >= {"eos_token": "</s>", "pad_token": "<pad>"}.items()
        assert seen["sizes"] == expected["sizes"]
    assert seen["chat_template"] == "{{ messages }}"
