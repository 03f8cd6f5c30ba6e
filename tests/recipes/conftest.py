"""A folder of things that are wrong, each in one way, beside a model and data that are right."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_rows

CHAT = [{"role": "user", "content": "What is a shard?"}, {"role": "assistant", "content": "Some rows of a weight."}]
FUNCTIONS = """
def raises(config, tokenizer, split):
    return [][7]

def returns_a_list(config, tokenizer, split):
    return [{"instruction": "a", "output": "b"}]
"""


def write_json_lines(file: Path, *rows: object) -> None:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture(scope="session")
def broken(tiny_model: Path, save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder; good are `model` and `rows.jsonl`, what is wrong with the rest its name says."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(tiny_model, folder / "model")
    write_rows(folder / "rows.jsonl", 16)
    _break_weights(folder)
    _break_models(folder, save_model)
    _break_data(folder)
    _break_adapters(folder)
    _break_recipes(folder)
    _fill_output_dirs(folder)
    return folder


def _break_weights(folder: Path) -> None:
    """Model folders whose safetensors files are not what config.json says."""
    from safetensors.torch import load_file, save_file

    def altered(name: str) -> tuple[Path, dict]:
        shutil.copytree(folder / "model", folder / name)
        file = folder / name / "model-00001-of-00003.safetensors"
        return file, load_file(file)

    file, _ = altered("truncated")
    file.write_bytes(file.read_bytes()[:20_000])
    file, _ = altered("half_downloaded")
    file.unlink()
    file, tensors = altered("missing_tensor")
    save_file({name: tensor for name, tensor in tensors.items() if "q_proj" not in name}, file)
    file, tensors = altered("extra_tensor")
    save_file({**tensors, "model.layers.7.mlp.up_proj.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    file, tensors = altered("wrong_shape")
    save_file({name: tensor[:-1].clone() if "embed" in name else tensor for name, tensor in tensors.items()}, file)


def _break_models(folder: Path, save_model: Callable[..., Path]) -> None:
    """Model folders that lack something else, or do not go with their tokenizer."""

    def without(name: str, *patterns: str) -> Path:
        shutil.copytree(folder / "model", folder / name, ignore=shutil.ignore_patterns(*patterns))
        return folder / name

    without("no_config", "config.json")
    without("no_tokenizer", "tokenizer*")
    settings = json.loads((without("no_vocabulary", "tokenizer*") / "config.json").read_text())
    (folder / "no_vocabulary" / "config.json").write_text(json.dumps({**settings, "model_type": "qwen3"}))
    without("no_weights", "*.safetensors*")
    (without("old_weights", "*.safetensors*") / "pytorch_model.bin").write_bytes(b"PK")
    (without("bad_generation") / "generation_config.json").write_text('{"eos_token_id": ')
    save_model(folder / "small_vocabulary", vocab_size=280)
    _save_models_that_leak(folder)


def _save_models_that_leak(folder: Path) -> None:
    """Good models whose layers cannot keep the rows of a pack apart."""
    from transformers import FalconConfig, FalconForCausalLM, MambaConfig, MambaForCausalLM

    small = {"vocab_size": 301, "hidden_size": 16, "num_hidden_layers": 1}
    FalconForCausalLM(FalconConfig(**small, num_attention_heads=2)).save_pretrained(folder / "falcon")
    MambaForCausalLM(MambaConfig(**small, state_size=4)).save_pretrained(folder / "mamba")
    for file in (folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "falcon")
        shutil.copy(file, folder / "mamba")


def _break_data(folder: Path) -> None:
    good = {"instruction": "What is a shard?", "output": "Some rows of a weight."}
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    write_json_lines(folder / "malformed.jsonl", good, good, '{"instruction": "a", "output"')
    write_json_lines(folder / "columns.jsonl", {"question": "a", "answer": "b"})
    write_json_lines(
        folder / "role.jsonl", {"messages": CHAT}, {"messages": [{**CHAT[0]}, {**CHAT[1], "role": "asistant"}]}
    )
    write_json_lines(folder / "all_bad.jsonl", {**good, "output": ""}, {**good, "output": 3})
    write_json_lines(folder / "late.jsonl", *[good] * 600, {**good, "output": 3}, *[good] * 300)
    write_json_lines(folder / "tokenized.jsonl", *({"input_ids": [5, 6, 7 + n]} for n in range(9)))
    (folder / "open.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (folder / "refuses.jinja").write_text("{{ raise_exception('no tools here') }}")
    (folder / "blank.jinja").touch()
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "syntax.py").write_text("def rows(:\n")


def _break_adapters(folder: Path) -> None:
    """An adapter of a model of another size."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=301, **shape))
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(model, lora).save_pretrained(folder / "other_adapter", save_embedding_layers=False)


def _break_recipes(folder: Path) -> None:
    (folder / "typo.yaml").write_text("# mine\nmodel:\n  model_name: demo\ntrain:\n  learning_rat: 1e-4\n")
    (folder / "tabs.yaml").write_text("train:\n\tlr: 1e-4\n")
    (folder / "escape.yaml").write_text('train:\n  "l\\e[2Jr\\a": 1e-4\n')
    (folder / "nan.yaml").write_text("train:\n  lr: .nan\n")


def _fill_output_dirs(folder: Path) -> None:
    (folder / "a_run").mkdir()
    (folder / "a_run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    (folder / "a_run" / ".llama_ft-run").touch()
    (folder / "a_run" / "notes.txt").write_text("mine")
    (folder / "no_run" / "model").mkdir(parents=True)
    (folder / "no_run" / "model" / "weights.pt").write_bytes(b"mine")
    (folder / "a_file").write_text("mine")
