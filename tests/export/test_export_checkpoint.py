"""What is made of a checkpoint, against transformers' and peft's own saving of the same weights;
corruption, other bases, the model card and the hub."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_by_hand import METRICS, load, logits, save_checkpoint, stored, tuned
from conftest import REPOSITORY, build_model, load_script

from llama_ft.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PeftConfig,
    TrainConfig,
)
from llama_ft.config.paths import model_dir_problem, recorded_prompt_format
from llama_ft.errors import RunFailure, UserError
from llama_ft.export import Exporter, find_valid, write_model_card

LORA = {
    "use_peft": True,
    "target_modules": "all-linear",
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0,
}


def settings_of(base: Path, peft: dict[str, Any] | None = None, **model: Any) -> Config:
    return Config(
        model=ModelConfig(model_name=str(base), **model),
        train=TrainConfig(precision="bf16_mixed", lr=2e-3),
        peft=PeftConfig(**(peft or {})),
        data=DataConfig(dataset="/home/someone/rows.jsonl"),
        checkpoint=CheckpointConfig(output_dir="/home/someone/output"),
    )


def adapted(base: Path, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The base with an adapter of random weights, through peft alone; and the weights of the
    adapter."""
    from peft import LoraConfig, get_peft_model

    given = {key: value for key, value in {**LORA, **settings}.items() if key != "use_peft"}
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **given))
    return model.eval(), tuned(model)


def prepare(checkpoint: Path, merge: bool = False, base_model: str | None = None) -> Exporter:
    return Exporter.prepare(
        find_valid(checkpoint),
        build_model(),
        base_model,
        None,
        trust_remote_code=False,
        merge=merge,
    )


FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("tied", {}),
    "frozen layer, fp16 base": ("fp16", {"freeze_layers": True}),
    "GPT-2": ("gpt2", {}),
    "stacked experts": ("mixtral", {}),
    "buffers that are saved": ("deepseek", {}),
}


@pytest.mark.parametrize("case", FULL)
def test_an_exported_full_model_equals_the_one_that_transformers_saves(
    case: str, bases: Path, tmp_path: Path
) -> None:
    name, settings = FULL[case]
    base = bases / name
    dtype = next(iter(stored(base).values())).dtype
    reference = load(base)
    trained = tuned(reference, frozen="model.layers.0." if settings else "nothing")
    checkpoint = save_checkpoint(tmp_path, trained, settings_of(base, **settings))
    prepare(checkpoint).write_model(tmp_path / "out", None, 60_000)
    reference.to(dtype).save_pretrained(tmp_path / "reference")
    ours = stored(tmp_path / "out")
    theirs = stored(tmp_path / "reference")
    assert ours.keys() == theirs.keys() == stored(base).keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype == dtype, key
        assert torch.equal(ours[key], tensor), key
    exported = load(tmp_path / "out", dtype="auto")
    assert exported.dtype == dtype
    assert torch.equal(logits(exported), logits(load(tmp_path / "reference", dtype="auto")))
    assert not torch.equal(logits(exported.float()), logits(load(base)))
    files = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and files == set(index["weight_map"].values())


def test_code_configs_and_the_chat_template_are_exported_with_the_weights(
    bases: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(bases / "llama", base)
    (base / "modeling_mine.py").write_text("# mine\n")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_mine.Mine"}
    (base / "config.json").write_text(json.dumps(config))
    template = "{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"
    checkpoint = save_checkpoint(
        tmp_path, tuned(load(base)), settings_of(base), chat_template=template
    )
    prepare(checkpoint).write_model(tmp_path / "out", torch.bfloat16, 10**9)
    held = {file.name for file in (tmp_path / "out").iterdir()}
    assert held >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "modeling_mine.py",
        "README.md",
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template, "what the run wrote chats with"
    stops_at = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert stops_at == [2, tokenizer.convert_tokens_to_ids("</s>")] == [2, 1], (
        "the base's own, and the end of a turn"
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_small_files_of_the_base_are_copied_and_the_model_may_be_replaced(
    bases: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases / "llama", base)
    copied = {
        "LICENSE": "Do what you want.\n",
        "NOTICE.txt": "By somebody.\n",
        "chat_template.json": '{"chat_template": "{{ messages }}"}',
        "preprocessor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
        "configuration.json": "{}",
    }
    others = {
        "README.md": "# The base\n",
        "train.py": "import torch\n",
        "large.json": " " * 2**21,
        "samples.jsonl": "{}\n",
        "model.fp8.safetensors.index.json": "{}",
        "adapter_notes.json": "{}",
        "mm_settings.json": "{}",
        "notes.txt": "pin: 1234",
        "settings.yaml": "pin: 1234",
        "trainer_state.json": "{}",
        "all_results.json": "{}",
        "credentials.json": "{}",
        "wandb.json": '{"api": "hf_' + "a" * 34 + '"}',
        ".env": "HF_TOKEN=x",
        "optimizer.pt": "x",
        "merges.txt": "a b\n",
    }
    for name, text in (copied | others).items():
        (base / name).write_text(text)
    checkpoint = save_checkpoint(tmp_path, tuned(load(base)), settings_of(base))
    out = tmp_path / "out"
    prepare(checkpoint).write_model(out, None, 10**9)
    assert {name: (out / name).read_text() for name in copied} == copied
    held = {file.name for file in out.iterdir()}
    assert not (held & others.keys()) - {"README.md"}
    assert "# The base" not in (out / "README.md").read_text()
    assert model_dir_problem(str(out), True, {}) is None
    (out / "train.txt").write_text("mine")
    assert "contains files that are not part of a model (train.txt)" in str(
        model_dir_problem(str(out), True, {})
    )


EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"], "use_rslora": True}, EXPERTS],
)
def test_an_exported_adapter_equals_the_one_that_peft_saves(
    settings: dict[str, Any], bases: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    base = bases / ("mixtral" if settings is EXPERTS else "llama")
    reference, trained = adapted(base, **settings)
    checkpoint = save_checkpoint(tmp_path, trained, settings_of(base, {**LORA, **settings}))
    prepare(checkpoint).write_adapter(tmp_path / "adapter", None)
    reference.save_pretrained(tmp_path / "reference", save_embedding_layers=False)
    ours = stored(tmp_path / "adapter")
    theirs = stored(tmp_path / "reference")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    assert targets == sorted(targets), "the same file each time, whatever order a set has"
    again = PeftModel.from_pretrained(load(base), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(reference))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_base_that_has_moved_or_does_not_fit_is_rejected_with_a_way_out(
    bases: Path, tmp_path: Path
) -> None:
    weights = dict(tuned(load(bases / "llama")))
    checkpoint = save_checkpoint(tmp_path, weights, settings_of(tmp_path / "gone"))
    with pytest.raises(UserError, match="--base_model overrides it"):
        prepare(checkpoint)
    trusting = save_checkpoint(
        tmp_path / "other", {}, settings_of(bases / "llama", trust_remote_code=True)
    )
    with pytest.raises(UserError, match="--trust_remote_code"):
        prepare(trusting)
    prepare(checkpoint, base_model=str(bases / "llama")).write_model(tmp_path / "out", None, 10**9)
    assert (tmp_path / "out" / "model.safetensors").exists()
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    with pytest.raises(UserError, match=r"lm_head.weight: .* saved, \(301, 32\) needed"):
        prepare(save_checkpoint(tmp_path / "cut", weights, settings_of(bases / "llama")))


def test_a_corrupted_checkpoint_is_rejected_by_file_and_the_run_uses_an_older_one(
    bases: Path, tmp_path: Path
) -> None:
    weights = tuned(load(bases / "llama"))
    config = settings_of(bases / "llama")
    older, newer = (save_checkpoint(tmp_path, weights, config, step) for step in (1, 2))
    assert find_valid(tmp_path).folder == newer
    file = newer / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunFailure, match="shard-00002-model-00001-of-00001.safetensors"):
        find_valid(newer)
    assert find_valid(tmp_path).folder == older
    (older / "trainer.json").unlink()
    with pytest.raises(RunFailure, match="Use another checkpoint"):
        find_valid(tmp_path)


def test_the_model_card_says_that_the_samples_had_no_chat_template(tmp_path: Path) -> None:
    for form in ("text", "chat"):
        write_model_card(tmp_path, "me/base", {"prompt_format": form})
        _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
        assert ("prompt_format: text" in front) == (form == "text")
        assert ("without a chat template" in body) == (form == "text")
        assert recorded_prompt_format(tmp_path) == form
    assert recorded_prompt_format(tmp_path / "missing") == "chat"
    (tmp_path / "README.md").write_text("---\n- [\n---\n# Not a card of ours\n")
    assert recorded_prompt_format(tmp_path) == "chat"


def test_the_model_card_has_base_data_settings_and_loss_but_no_paths_and_secrets(
    tmp_path: Path,
) -> None:
    urls = ["http://me:hunter2@host/a.jsonl", "https://host/b?X-Amz-Signature=hunter2"]
    config = dataclasses.asdict(
        settings_of(Path("/home/someone/Llama-3.1-8B"), {"use_peft": True, "r": 4})
    )
    trainer = {"step": 12, "metrics": METRICS, "config": config}
    (tmp_path / "adapter_config.json").touch()

    def card(base: str) -> str:
        write_model_card(tmp_path, base, trainer)
        return (tmp_path / "README.md").read_text()

    local = card("/home/someone/Llama-3.1-8B")
    of_hub = card("meta-llama/Llama-3.1-8B")
    _, front, body = local.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["llama_ft", "lora"],
    }
    assert "/home/someone" not in body and "PeftModel" in body
    assert (
        "LoRA adapter for Llama-3.1-8B, trained on rows.jsonl with llama_ft. The base model's license"
        in body
    )
    facts = yaml.safe_load(re.search(r"```yaml\n(.*?)```", body, re.DOTALL)[1])  # type: ignore[index]
    assert (
        facts.items() >= {"optimizer steps": 12, "validation loss": 1.5, "lr": 2e-3, "r": 4}.items()
    )
    assert "base_model: meta-llama/Llama-3.1-8B" in of_hub
    assert 'from_pretrained("meta-llama/Llama-3.1-8B")' in of_hub
    for config["data"]["dataset"] in (urls[0], [{"path": url} for url in urls]):
        assert "hunter2" not in card("/models/base")
        assert "http://***@host/a.jsonl" in card("/models/base")


def test_the_model_card_names_the_adapter_method(tmp_path: Path) -> None:
    config = dataclasses.asdict(
        settings_of(
            tmp_path, {"use_peft": True, "peft_method": "loha", "target_modules": ["q_proj"]}
        )
    )
    (tmp_path / "adapter_config.json").touch()
    write_model_card(tmp_path, "me/base", {"step": 1, "metrics": METRICS, "config": config})
    card = (tmp_path / "README.md").read_text()
    assert "A LoHa adapter for me/base" in card and "\n- loha\n" in card
    assert "LoRA" not in card and "\n- lora\n" not in card


def test_the_model_card_names_the_datasets_before_and_after_a_resume(tmp_path: Path) -> None:
    mixture = [{"path": "/data/second.jsonl"}, {"path": "/data/first.jsonl"}]
    attempts = [
        {"step": 0, "changed": {}},
        {"step": 4, "changed": {"data.dataset": ["/data/first.jsonl", mixture]}},
        {"step": 8, "changed": {"data.dataset": [mixture, "/data/third.jsonl"]}},
    ]
    config = {"data": {"dataset": "/data/third.jsonl"}, "peft": {"use_peft": False}}
    run = {"step": 9, "metrics": METRICS, "config": config, "attempts": attempts}
    write_model_card(tmp_path, "me/base", run)
    card = (tmp_path / "README.md").read_text()
    assert "full fine-tuning, trained on first.jsonl, second.jsonl, third.jsonl with" in card


class Hub:
    """In place of huggingface_hub.HfApi, with one repository."""

    private = False
    uploaded = set[str]()

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        return f"https://hub/{name}"

    def model_info(self, name: str) -> "Hub":
        return self

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.uploaded = {file.name for file in folder_path.iterdir()}


def test_a_directory_is_uploaded_but_private_models_not_to_a_public_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_script(REPOSITORY / "recipes" / "export.py")
    hub = Hub()
    monkeypatch.setattr(recipe, "HfApi", lambda: hub)
    write_model_card(tmp_path, "meta-llama/Llama-3.1-8B")
    with pytest.raises(RunFailure, match="is public"):
        recipe.upload(tmp_path, "me/model", private=True)
    assert hub.uploaded == set()
    assert recipe.upload(tmp_path, "me/model", private=False) == "https://hub/me/model"
    assert hub.uploaded == {"README.md"}
    hub.private = True
    hub.uploaded = set()
    recipe.upload(tmp_path, "me/model", private=True)
    assert hub.uploaded == {"README.md"}
