"""What identifies the model that answers."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from transformers import AutoModelForCausalLM

from llama_ft.errors import UserError
from llama_ft.extensions.rollouts import policy
from llama_ft.extensions.rollouts.policy import (
    PolicyFiles,
    checksum_of,
    find_policy,
    open_served,
    trained_checksum,
)
from llama_ft.inference.flags import ModelFlags
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks

OLD_RUNS = REPOSITORY / "tests/recipes/checkpoints/before_seams"


def save_adapter(folder: Path, base: Path) -> Path:
    """An adapter with a tokenizer, as far as its files are looked at."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_the_files_of_a_policy_are_those_of_its_adapter_and_its_base(
    tiny_model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "run/model", tiny_model)
    expected = PolicyFiles(adapter, tiny_model)
    assert find_policy(str(adapter), ModelFlags()) == expected
    assert find_policy(str(tmp_path / "run"), ModelFlags()) == expected
    assert find_policy(str(tiny_model), ModelFlags()) == PolicyFiles(tiny_model, tiny_model)


def test_of_a_run_without_a_final_model_it_is_the_newest_checkpoint(tmp_path: Path) -> None:
    run = shutil.copytree(OLD_RUNS / "sft", tmp_path / "sft")
    base = OLD_RUNS / "model"
    files = find_policy(str(run), ModelFlags(base_model=str(base)))
    assert files == PolicyFiles(run / "checkpoints/step-000005", base)
    assert checksum_of(files) != checksum_of(PolicyFiles(base, base))


def test_the_checksum_changes_with_weights_and_tokenizer_only(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    files = PolicyFiles(adapter, base)
    first = checksum_of(files)
    (adapter / "README.md").write_text("about it")
    elsewhere = shutil.copytree(adapter, tmp_path / "elsewhere")
    assert checksum_of(files) == checksum_of(PolicyFiles(elsewhere, base)) == first
    seen = {first}
    for file in (adapter / "adapter_model.safetensors", adapter / "tokenizer.json"):
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        seen.add(checksum_of(files))
        file.write_bytes(content)
    weights = next(base.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b" ")
    seen.add(checksum_of(files))
    assert len(seen) == 4


@pytest.mark.parametrize("block_bytes", [0, 10_000, 2**30])
def test_the_checksum_of_trained_weights_is_that_of_their_bytes_one_after_another(
    tiny_model: Path, runtime: Ranks, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setitem(policy.BLOCK_BYTES, "cpu", block_bytes)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    model.model.norm = model.model.norm.float()  # other bytes per number
    digest = hashlib.sha256(b"base")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(bytes(parameter.detach().flatten().view(torch.uint8).tolist()))
    assert trained_checksum(BuiltModel(model), runtime, "base") == digest.hexdigest()


def test_a_served_policy_has_the_tokenizer_of_its_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}</s>")
    served = open_served(str(adapter), ModelFlags(), None)
    assert served.tokenizer.chat_template == "{{ messages[0].content }}</s>"
    assert served.tokens.form == "chat"
    assert served.tokens.context == 256
    assert open_served(str(adapter), ModelFlags(), "text").tokens.form == "text"


def test_a_checkpoint_is_not_served(tmp_path: Path) -> None:
    flags = ModelFlags(base_model=str(OLD_RUNS / "model"))
    with pytest.raises(UserError, match="a checkpoint, which no server loads"):
        open_served(str(OLD_RUNS / "sft"), flags, None)
