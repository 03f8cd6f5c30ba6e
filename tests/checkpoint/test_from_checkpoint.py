"""What is made of a checkpoint, against transformers' and peft's own saving of the same weights; damage, other bases,
the model card and the hub."""

import base64
import dataclasses
import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_by_hand import METRICS, save_checkpoint
from conftest import REPOSITORY
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from llama_ft.checkpoint import Exporter, check_export, find_valid, write_model_card
from llama_ft.config import CheckpointConfig, Config, DataConfig, ModelConfig, PeftConfig, TrainConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.models import load_model_config, load_tokenizer
from llama_ft.models.source import fingerprint
from llama_ft.runtime import log

Make = Callable[..., Path]
LORA = {"use_peft": True, "target_modules": "all-linear", "r": 4, "lora_alpha": 6, "lora_dropout": 0}
IDS = torch.tensor([[1, 17, 42, 5, 99, 250, 3]])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the tensors of tiny models take several blocks of rows."""
    monkeypatch.setattr("llama_ft.models.source.BLOCK_ELEMENTS", 500)


@pytest.fixture(scope="module")
def bases(save_model: Make, save_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of base models with tokenizers."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        MixtralConfig,
        MixtralForCausalLM,
    )

    folder = tmp_path_factory.mktemp("bases")
    save_model(folder / "llama")
    save_model(folder / "tied", tied=True)
    for name, dtype in (("half", torch.bfloat16), ("fp16", torch.float16)):
        shutil.copytree(folder / "llama", folder / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        load(folder / "llama").to(dtype).save_pretrained(folder / name)
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=301, initializer_range=0.1))
    gpt2.save_pretrained(save_tokenizer(folder / "gpt2"))
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 3, "num_key_value_heads": 2, "vocab_size": 301}
    MixtralForCausalLM(MixtralConfig(**shape, **experts)).save_pretrained(save_tokenizer(folder / "mixtral"))
    deep = {**shape, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
            "vocab_size": 301, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_tok": 2}  # fmt: skip
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**deep))
    for name, buffer in deepseek.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    deepseek.save_pretrained(save_tokenizer(folder / "deepseek"))
    return folder


def load(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **settings}).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def settings_of(base: Path, peft: dict[str, Any] | None = None, **model: Any) -> Config:
    return Config(
        model=ModelConfig(model_name=str(base), **model),
        train=TrainConfig(precision="bf16_mixed", lr=2e-3),
        peft=PeftConfig(**(peft or {})),
        data=DataConfig(dataset="/home/someone/rows.jsonl"),
        checkpoint=CheckpointConfig(output_dir="/home/someone/output"),
    )


def tuned(model: torch.nn.Module, frozen: str = "nothing") -> dict[str, torch.Tensor]:
    """Move every parameter that is trained, and return those."""
    torch.manual_seed(3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and frozen not in name}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return trained


def adapted(base: Path, **settings: Any) -> Any:
    """The base with an adapter of random weights, through peft alone."""
    from peft import LoraConfig, get_peft_model

    given = {key: value for key, value in {**LORA, **settings}.items() if key != "use_peft"}
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **given))
    tuned(model)
    return model.eval()


def prepare(checkpoint: Path, merge: bool = False, base_model: str | None = None) -> Exporter:
    return Exporter.prepare(find_valid(checkpoint), base_model, None, trust_remote_code=False, merge=merge)


FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("tied", {}),
    "frozen layer": ("half", {"freeze_layers": True}),
    "frozen layer, fp16 base": ("fp16", {"freeze_layers": True}),
    "bf16 base": ("half", {}),
    "GPT-2": ("gpt2", {}),
    "stacked experts": ("mixtral", {}),
    "buffers that are saved": ("deepseek", {}),
}


@pytest.mark.parametrize("case", FULL)
def test_a_fully_tuned_model_is_what_transformers_would_save(case: str, bases: Path, tmp_path: Path) -> None:
    name, settings = FULL[case]
    base = bases / name
    dtype = next(iter(stored(base).values())).dtype
    reference = load(base)
    trained = tuned(reference, frozen="model.layers.0." if settings else "nothing")
    checkpoint = save_checkpoint(tmp_path, trained, settings_of(base, **settings))
    prepare(checkpoint).write_model(tmp_path / "out", None, 60_000)
    reference.to(dtype).save_pretrained(tmp_path / "reference")
    ours, theirs = stored(tmp_path / "out"), stored(tmp_path / "reference")
    assert ours.keys() == theirs.keys() == stored(base).keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype == dtype and torch.equal(ours[key], tensor), key
    exported = load(tmp_path / "out", dtype="auto")
    assert exported.dtype == dtype
    assert torch.equal(logits(exported), logits(load(tmp_path / "reference", dtype="auto")))
    assert not torch.equal(logits(exported.float()), logits(load(base)))
    files = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and files == set(index["weight_map"].values())


def test_what_stands_beside_the_weights_is_carried_over(bases: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(bases / "llama", base)
    (base / "modeling_mine.py").write_text("# mine\n")
    template = "{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"
    checkpoint = save_checkpoint(tmp_path, tuned(load(base)), settings_of(base), chat_template=template)
    prepare(checkpoint).write_model(tmp_path / "out", torch.bfloat16, 10**9)
    held = {file.name for file in (tmp_path / "out").iterdir()}
    assert held >= {"model.safetensors", "config.json", "generation_config.json", "modeling_mine.py", "README.md"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template, "what the run wrote chats with"
    stops_at = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert stops_at == [2, tokenizer.convert_tokens_to_ids("</s>")] == [2, 1], "the base's own, and the end of a turn"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("text", ["[1, 2]", '{"eos_token_id": '])
def test_a_generation_config_that_is_none_is_told_before_anything_is_written(
    text: str, bases: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(bases / "llama", tmp_path / "base")
    checkpoint = save_checkpoint(tmp_path, tuned(load(base)), settings_of(base))
    config, tokenizer = load_model_config(base, False), load_tokenizer(base, False)
    check_export(config, tokenizer, base)
    (base / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=f"{base}/generation_config.json: not a JSON object"):
        check_export(config, tokenizer, base)
    with pytest.raises(UserError, match=f"{base}/generation_config.json: not a JSON object"):
        prepare(checkpoint).write_model(tmp_path / "out", None, 10**9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints"]


def test_a_tokenizer_that_cannot_be_saved_is_told_with_the_models_folder(bases: Path) -> None:
    from transformers import PreTrainedTokenizer

    class Unsaveable(PreTrainedTokenizer):
        """Copies its vocabulary from a file that is gone."""

        vocab_size = 0

        def get_vocab(self) -> dict[str, int]:
            return {}

        def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
            return (shutil.copy("gone/tokenizer.model", save_directory),)

    base = bases / "llama"
    with pytest.raises(UserError, match=f"{base}: the config or the tokenizer cannot be saved.*gone/tokenizer.model"):
        check_export(load_model_config(base, False), Unsaveable(), base)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "dora": ("llama", {"use_dora": True}),
    "head in full": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "rslora, 16 bits": ("half", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_what_peft_would_save_and_merges_as_peft_merges(case: str, bases: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    base, settings = bases / ADAPTERS[case][0], ADAPTERS[case][1]
    reference = adapted(base, **settings)
    trained = {n.removeprefix("base_model.model."): p for n, p in reference.named_parameters() if p.requires_grad}
    checkpoint = save_checkpoint(tmp_path, trained, settings_of(base, {**LORA, **settings}))
    exporter = prepare(checkpoint, merge=True)
    exporter.write_adapter(tmp_path / "adapter", None)
    reference.save_pretrained(tmp_path / "reference", save_embedding_layers=False)
    ours, theirs = stored(tmp_path / "adapter"), stored(tmp_path / "reference")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets), "the same file each time, whatever order a set has"
    assert torch.equal(logits(PeftModel.from_pretrained(load(base), tmp_path / "adapter").eval()), logits(reference))

    exporter.write_merged(tmp_path / "merged", torch.float32, 60_000)
    expected = logits(reference)
    assert (logits(load(tmp_path / "merged")) - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    if "modules_to_save" not in settings:  # peft's merge changes embedding and head together
        weights = load(tmp_path / "merged").state_dict()
        for name, tensor in reference.merge_and_unload().state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_base_that_has_moved_is_named_anew(bases: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, tuned(load(bases / "llama")), settings_of(tmp_path / "gone"))
    with pytest.raises(UserError, match="--base_model overrides it"):
        prepare(checkpoint)
    prepare(checkpoint, base_model=str(bases / "llama")).write_model(tmp_path / "out", None, 10**9)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_base_whose_weights_were_changed_since_is_warned_of(
    bases: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    base = tmp_path / "base"
    shutil.copytree(bases / "llama", base)
    contents = {"model_name": fingerprint(base)}
    checkpoint = save_checkpoint(tmp_path, tuned(load(base)), settings_of(base), contents=contents)
    prepare(checkpoint)
    assert not caplog.messages
    changed = sorted(base.glob("*.safetensors"))[-1]
    save_file({name: tensor + 1 for name, tensor in load_file(changed).items()}, changed, {"format": "pt"})
    prepare(checkpoint)
    assert f"{base} holds another model than when" in caplog.text


def test_the_settings_of_an_earlier_adapter_are_asked_for(bases: Path, tmp_path: Path) -> None:
    config = settings_of(bases / "llama", {**LORA, "from_peft_checkpoint": str(tmp_path / "gone")})
    with pytest.raises(UserError, match="continued an adapter") as error:
        prepare(save_checkpoint(tmp_path, {}, config))
    assert f"{tmp_path}/gone: no such folder" in str(error.value)


def test_a_checkpoint_that_does_not_fit_its_base_is_refused_with_names(bases: Path, tmp_path: Path) -> None:
    weights = dict(tuned(load(bases / "llama")))
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    del weights["lm_head.weight"]
    checkpoint = save_checkpoint(tmp_path, weights, settings_of(bases / "llama"))
    with pytest.raises(UserError) as error:
        prepare(checkpoint)
    assert "lm_head.weight: absent, expected (301, 32)" in str(error.value)
    assert "model.norm.weight: (31,), expected (32,)" in str(error.value)


def test_remote_code_needs_the_word_of_who_exports(bases: Path, tmp_path: Path) -> None:
    weights = tuned(load(bases / "llama"))
    checkpoint = save_checkpoint(tmp_path, weights, settings_of(bases / "llama", trust_remote_code=True))
    with pytest.raises(UserError, match="--trust_remote_code"):
        prepare(checkpoint)


def test_a_damaged_checkpoint_is_refused_by_file_and_a_run_falls_back(bases: Path, tmp_path: Path) -> None:
    weights, config = tuned(load(bases / "llama")), settings_of(bases / "llama")
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
    with pytest.raises(RunFailure, match="all of its checkpoints are damaged"):
        find_valid(tmp_path)


def test_too_little_space_is_told_with_the_size_before_writing(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path, tuned(load(bases / "llama")), settings_of(bases / "llama"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    with pytest.raises(RunFailure, match=r"needs 0\.1 MiB, and 0\.0 MiB are free"):
        prepare(checkpoint).write_model(tmp_path / "out", None, 10**9)
    assert not (tmp_path / "out").exists()


def front_and_body(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_tells_recipe_data_metrics_and_versions_and_no_local_folders(tmp_path: Path) -> None:
    trainer = {"step": 12, "metrics": METRICS, "versions": {"torch": "2.13.0"}}
    config = settings_of(Path("/home/someone/models/Llama-3.1-8B"), {"use_peft": True})
    trainer["config"] = dataclasses.asdict(config)
    (tmp_path / "adapter_config.json").touch()
    write_model_card(tmp_path, "/home/someone/models/Llama-3.1-8B", trainer)
    front, body = front_and_body(tmp_path)
    assert front == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["llama_ft", "lora"]}
    assert "/home/someone" not in body
    assert (
        "LoRA adapter for Llama-3.1-8B, trained on rows.jsonl with llama_ft. The base model's license applies" in body
    )
    for said in ("12,345", "1.25", "torch 2.13.0", "PeftModel"):
        assert said in body, body
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", body, re.DOTALL)[1])  # type: ignore[index]
    assert recipe == {
        "model": {"model_name": "Llama-3.1-8B"},
        "train": {"lr": 2e-3},
        "peft": {"use_peft": True},
        "data": {"dataset": "rows.jsonl"},
    }
    write_model_card(tmp_path, "meta-llama/Llama-3.1-8B", trainer)
    assert front_and_body(tmp_path)[0]["base_model"] == "meta-llama/Llama-3.1-8B"
    assert 'from_pretrained("meta-llama/Llama-3.1-8B")' in front_and_body(tmp_path)[1]


def test_the_card_of_an_older_run_with_a_secret_in_a_url_tells_none(tmp_path: Path) -> None:
    config = dataclasses.asdict(settings_of(Path("/models/base"), {"use_peft": True}))
    trainer = {"step": 12, "metrics": METRICS, "versions": {"torch": "2.13.0"}, "config": config}
    urls = ["http://me:hunter2@host/a.jsonl", "https://host/b.jsonl?X-Amz-Signature=hunter2&x=1"]
    for config["data"]["dataset"] in (urls[0], [{"path": url} for url in urls]):
        config["data"]["validation"] = urls[1]
        write_model_card(tmp_path, "/models/base", trainer)
        card = (tmp_path / "README.md").read_text()
        assert "hunter2" not in card and "http://***@host/a.jsonl" in card and "X-Amz-Signature=***&x=1" in card


def test_the_demos_model_is_built_again_where_it_is_missing(cache: Path, tmp_path: Path) -> None:
    from llama_ft.data import build_demo

    demo = build_demo(cache)
    reference = adapted(demo.model_dir, target_modules=["q_proj"])
    trained = {n.removeprefix("base_model.model."): p for n, p in reference.named_parameters() if p.requires_grad}
    config = settings_of(Path("demo"), {**LORA, "target_modules": ["q_proj"]})
    prepare(save_checkpoint(tmp_path, trained, config)).write_adapter(tmp_path / "out", None)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(demo.model_dir.resolve())
    assert "LoRA adapter for demo" in front_and_body(tmp_path / "out")[1]


def upload(folder: Path, repository: str, private: bool) -> str:
    spec = importlib.util.spec_from_file_location("export_recipe", REPOSITORY / "recipes" / "export.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return str(recipe.upload(folder, repository, private))


class Hub(ThreadingHTTPServer):
    """As much of the Hugging Face hub as an upload speaks to.

    Attributes:
        files: path -> content of all that was committed.
        tokens: what requests were signed with.
        is_private: of the repository.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.is_private = True
        self.address = f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.reply({"id": "me/model", "private": self.server.is_private})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.tokens.add(self.headers["Authorization"])
        if self.path.endswith("/preupload/main"):
            files = [{"path": file["path"]} for file in json.loads(body)["files"]]
            self.reply({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
            return
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        where = f"{self.server.address}/me/model"
        self.reply({"url": where, "commitUrl": f"{where}/commit/1", "commitOid": "1"})

    def reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    yield server
    server.shutdown()


def test_a_folder_arrives_at_the_hub_signed_with_the_environments_token(hub: Hub, tmp_path: Path) -> None:
    write_model_card(tmp_path, "meta-llama/Llama-3.1-8B")
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert upload(tmp_path, "me/model", private=True) == f"{hub.address}/me/model"
    assert hub.files == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert hub.tokens == {"Bearer hf_of_the_environment"}


def test_what_must_stay_private_is_not_uploaded_to_a_public_repository(hub: Hub, tmp_path: Path) -> None:
    hub.is_private = False
    write_model_card(tmp_path, "demo")
    with pytest.raises(RunFailure, match="is public"):
        upload(tmp_path, "me/model", private=True)
    assert not hub.files


def test_a_hub_that_cannot_be_reached_leaves_the_folder_as_it_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.shutdown()
    hub.server_close()
    write_model_card(tmp_path, "demo")
    with pytest.raises(RunFailure, match="connection refused") as error:
        upload(tmp_path, "me/model", private=False)
    assert f"`hf upload me/model {tmp_path}`" in str(error.value) and "hf_of_the" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]
