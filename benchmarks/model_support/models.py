"""Fine-tune a small random model of every decoder that the installed Transformers has, and compare
with Transformers.

    python benchmarks/model_support/models.py    # resumes: runs only what benchmarks/results/models.jsonl lacks
    python benchmarks/model_support/models.py --columns bf16 --minutes 8    # one column
    python benchmarks/model_support/models.py --only "qwen3|lfm2" --columns full,packing --again
    python benchmarks/model_support/models.py --images    # families on samples with images: models_images.py
    python benchmarks/model_support/models.py --write     # writes docs/reference/model-support.md

A model is made of its config class's defaults, with the small sizes of models.yaml. Each column is
a run of a recipe in a process of its own, forked from one that has imported everything. The first
loss (1e-5) and gradient norm (1e-4) are compared with those of plain Transformers and PEFT on the
samples one by one; the logits of the result, after a step of SGD, with those of the plain model
after the same step (1e-4). In 8 and 4 bits the plain model has weights that bitsandbytes has
quantized and dequantized.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes")]
os.environ["OMP_NUM_THREADS"] = "1"  # a process with further threads cannot be forked

import finetuning
import plan as plan_recipe
import torch
import transformers
import yaml
from bitsandbytes import functional as bnb
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llama_ft import models
from llama_ft.config import load
from llama_ft.config.reading.parse import as_keywords
from llama_ft.plan.flags import read_plan_flags

DECODERS: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
# tokens of the samples; windows and chunks are of 16
LAYERS = 4
LENGTHS = (40, 33, 24, 17)
SMALL_MODELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SMALL = {name: size for size, names in SMALL_MODELS["sizes"].items() for name in names.split()}
FLAGS = (
    "--no_plan --device cpu --precision fp32 --optimizer SGD --momentum 0 --weight_decay 0 --lr 0.01 --num_epochs 1 "
    "--max_train_step 1 --context_length 128 --sample_tokens 0 --save_steps 0 --dataset samples.jsonl"
).split()
PADDED = "--batching_strategy padding --batch_size_training".split()
PACKED = "--batch_size_training 1".split()
LORA = "--use_peft --target_modules all-linear --peft.r 4 --lora_dropout 0".split()
COLUMNS: dict[str, list[str]] = {  # those that do not say pack if `packing` is right, else they pad
    "full": [*PADDED, "4"],
    "packing": PACKED,
    "bf16": ["--precision", "bf16_mixed"],
    "LoRA": LORA,
    "8 bit": [*LORA, "--quantization", "8bit"],
    "4 bit": [*LORA, "--quantization", "4bit"],
    "2 ranks": [*PADDED, "2", "--enable_fsdp", "--low_cpu_fsdp", "--min_num_params", "1000"],
    "plan": [*LORA, "--precision", "bf16_mixed", "--context_length", "128"],
}
RESULTS = REPOSITORY / "benchmarks" / "results" / "models.jsonl"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
SHOWN = ("full", "export", "packing", "bf16", "LoRA", "8 bit", "4 bit", "2 ranks", "plan")
SECONDS = 120.0  # for a column; small models take 1 to 5


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The config with small sizes, and of lists with a value per layer one layer of each kind."""
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values = vars(config)
    depth = next(
        (values[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if values.get(name)),
        None,
    )
    given: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            given[name] = shrunk(value)
        elif (
            name not in known
            or (value is None and name not in SMALL_MODELS["needed"])
            or isinstance(value, bool)
        ):
            continue
        elif isinstance(value, list | tuple) and value and len(value) == depth:
            kinds = list(dict.fromkeys(value))
            kinds = [
                SMALL.get(name, kind) if isinstance(kind, int) and kind > LAYERS else kind
                for kind in kinds
            ]
            given[name] = [kinds[number % len(kinds)] for number in range(LAYERS)]
        elif "drop" in name or "jitter" in name:
            given[name] = type(value)(0)
        elif name in SMALL and value not in (0, -1):
            given[name] = (
                [SMALL[name]] * len(value) if isinstance(value, list | tuple) else SMALL[name]
            )
    heads = values.get("num_attention_heads")
    if "num_key_value_heads" in given and values["num_key_value_heads"] == heads:
        given["num_key_value_heads"] = LAYERS
    if "is_decoder" in values:
        given["is_decoder"] = True
    special = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    for pattern, settings in SMALL_MODELS["special"].items():
        special |= settings if re.fullmatch(pattern, config.model_type) else {}
    return type(config)(
        **given | {name: value for name, value in special.items() if name in values}
    )


def build(work: Path, model_type: str) -> dict[str, Any]:
    """Write the model into work/model, and see that plain Transformers trains it as a causal
    decoder here."""
    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[model_type]())
    kind = getattr(transformers, MULTIMODAL.get(model_type) or DECODERS[model_type])
    model = kind(config)
    for name, buffer in model.named_buffers():
        # DeepSeek's correction of routing, which begins as zeros. Matrices (MiniMax's decays) are
        # what makes the model causal.
        if name in model.state_dict() and buffer.is_floating_point() and buffer.ndim == 1:
            buffer.uniform_(-0.5, 0.5)
    for module in model.modules():
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):
            # Gemma 4's attention has no scale but this weight's. With ones the softmax over random
            # scores is all but a
            # maximum: rounding of 1e-7 became 0.1 in the logits after a step, in Transformers
            # itself.
            weight = module.q_norm.weight.data
            weight.fill_(len(weight) ** -0.5)
    model.save_pretrained(work / "model", max_shard_size="200KB")
    add_ignored_tensors(work / "model", model)
    model = plain(work / "model").train()
    rows = [torch.tensor([row]) for row in samples()]
    loss, _ = loss_and_norm(model)
    padded = padded_loss(model)
    with torch.no_grad():
        logits = model.eval()(input_ids=rows[0], use_cache=False).logits
        changed = model(
            input_ids=torch.cat([rows[0][:, :-1], rows[0][:, -1:] - 1], 1), use_cache=False
        ).logits
    if logits.shape[:2] != rows[0].shape:
        raise ValueError(f"its logits are {list(logits.shape)}: not a decoder of text")
    if not torch.allclose(logits[:, :-1], changed[:, :-1], atol=1e-5):
        raise ValueError("tokens see the tokens behind them: not a causal decoder")
    if not math.isfinite(loss):
        raise ValueError("its loss is not finite")
    return {
        "class": type(model).__name__,
        "parameters": model.num_parameters(),
        "padded": abs(padded / loss - 1),
    }


def add_ignored_tensors(folder: Path, model: Any) -> list[str]:
    """Add tensors that Transformers ignores at loading to a saved model, as published checkpoints
    have them: a layer for multi-token prediction, with the tensors of a decoder layer, or a single
    tensor. Returns their names."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    stored = {}
    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                stored[name] = opened.get_tensor(name)
                files[name] = file.name
    layers = []
    for name in stored:
        numbered = re.match(r"(.*\blayers\.)(\d+)\.", name)
        if numbered and not re.search("vision|visual|audio", numbered[0]):
            layers.append(numbered[0])
    layer = layers[-1] if layers else "-"
    parts = {
        name.removeprefix(layer): tensor
        for name, tensor in stored.items()
        if name.startswith(layer)
    }
    added = {}
    for pattern in sorted(model._keys_to_ignore_on_load_unexpected or ()):
        prefix = example_of(pattern)
        name = prefix if pattern.endswith(("$", "weight")) else f"{prefix}.weight"
        if prefix.endswith("inv_freq") or name in stored:
            continue  # computed by the model, or its own
        assert re.search(pattern, name), pattern
        if re.search(r"mtp|layers\.\d+$", prefix):
            added |= {f"{prefix}.{part}": tensor.clone() for part, tensor in parts.items()}
            added[f"{prefix}.eh_proj.weight"] = torch.randn(8, 16)
            added[f"{prefix}.enorm.weight"] = torch.randn(8).to(torch.bfloat16)
        else:
            added[name] = torch.randn(4, 4).to(torch.float16)
    if added:
        save_file(added, folder / "model-ignored.safetensors", {"format": "pt"})
        files |= dict.fromkeys(added, "model-ignored.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return list(added)


def example_of(pattern: str) -> str:
    """The beginning of a name that a pattern of `_keys_to_ignore_on_load_unexpected` matches."""
    text = re.sub(r"\([^()]*\)\?|\(\^\|\\\.\)|\^|\.\*", "", pattern)
    text = re.sub(r"\((?:\?:)?([^()|]*)[^()]*\)", r"\1", text)
    text = text.replace(r"\d+", "0").replace("[qkv]", "q").replace("\\", "")
    text = text.removesuffix("$").rstrip(".")
    return f"model{text}" if text.startswith(".") else text


def samples() -> list[list[int]]:
    """Token ids of the samples."""
    generator = random.Random(0)
    samples = []
    for length in LENGTHS:
        samples.append([generator.randrange(3, 256) for _ in range(length)])
    return samples


def plain(
    folder: Path,
    adapter: Path | None = None,
    mode: str = "",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The model in plain Transformers, with weights as bitsandbytes rounds them, and an adapter in
    plain PEFT."""
    from peft import PeftModel

    kind = getattr(
        transformers, json.loads((folder / "config.json").read_text())["architectures"][0]
    )
    model = kind.from_pretrained(folder, dtype=dtype)
    if mode:
        for name in quantized_names(folder, mode):
            weight = model.get_parameter(name).data
            flat = weight.flatten(0, -2)
            if mode == "4bit":
                rounded = bnb.dequantize_4bit(
                    *bnb.quantize_4bit(flat, blocksize=64, quant_type="nf4")
                )
            else:
                whole, scale, _ = bnb.int8_vectorwise_quant(flat.half())
                rounded = whole.float() * (scale.unsqueeze(1) / 127)
            weight.copy_(rounded.view(weight.shape))
    return PeftModel.from_pretrained(model, adapter, is_trainable=True) if adapter else model


def quantized_names(folder: Path, mode: str) -> list[str]:
    """Names of the weights that llama_ft quantizes."""
    config, _ = load(
        [f"--model_name={folder}", f"--quantization={mode}", "--use_peft"], finetuning.DEMO_CONFIG
    )
    model_config = models.load_model_config(folder, False)
    quantization = models.choose_quantization(config.quantization, model_config, True)
    built = models.build_on_meta(model_config, config.model)
    assert quantization is not None
    models.quantize_linears(built, quantization)
    return [
        name
        for name, parameter in built.model.named_parameters()
        if not parameter.is_floating_point() and not name.endswith("scale")
    ]


def loss_and_norm(model: Any) -> tuple[float, float]:
    """Mean loss over all tokens of the samples, each alone, and the norm of its gradients, which
    stay in the model."""
    total = torch.zeros(())
    for row in samples():
        ids = torch.tensor([row])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    loss = total / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(gradients).item()


@torch.no_grad()
def padded_loss(model: Any) -> float:
    """The same mean of the samples in one padded batch."""
    rows = [torch.tensor(row) for row in samples()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=2)
    mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten()).item()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Logits of the first sample."""
    logits: torch.Tensor = model.eval()(
        input_ids=torch.tensor(samples()[:1]), use_cache=False
    ).logits
    return logits


def train(work: Path, column: str, layout: list[str]) -> dict[str, Any]:
    """Run recipes/finetuning.py on the model and compare."""
    flags = [*FLAGS, *layout, *COLUMNS[column], "--model_name", "model", "--output_dir", column]
    finetuning.main(**as_keywords([*flags, "--tokenizer_name", "../tokenizer"]))
    if os.environ.get("RANK", "0") != "0":
        return {}
    metrics = work / column / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seen = next(line for line in lines if "train/loss" in line)
    if column == "bf16":
        return compared_in_bf16(work, seen)
    mode = COLUMNS[column][-1] if "bit" in column else ""
    result = work / column / "model"
    adapter = result if "--use_peft" in COLUMNS[column] else None
    model = plain(work / "model", adapter, mode).train()
    lost = lost_tensors(model, result) if adapter else 0
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    loss, norm = loss_and_norm(model)
    before = logits_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= seen["train/lr"] * parameter.grad
    expected = logits_of(model)
    tuned = logits_of(plain(work / "model", adapter, mode) if adapter else plain(result))
    found = {
        "loss": abs(seen["train/loss"] / loss - 1),
        "norm": abs(seen["train/grad_norm"] / norm - 1),
        "moved": (expected - before).abs().max().item(),
        "logits": (tuned - expected).abs().max().item(),
        "lost": lost,
        "names": adapter is not None or stored_names(result) == stored_names(work / "model"),
    }
    if mode:
        shapes = dict(plain(work / "model").named_parameters())
        matrices = {
            name: p.numel() for name, p in shapes.items() if p.ndim > 1 and "embed" not in name
        }
        chosen = quantized_names(work / "model", mode)
        found["share"] = sum(shapes[name].numel() for name in chosen) / max(
            1, sum(matrices.values())
        )
    return found


def compared_in_bf16(work: Path, seen: dict[str, Any]) -> dict[str, Any]:
    """Compare loss and gradient norm with those of plain Transformers, loaded in bf16. If that does
    not compute (xLSTM), then in fp32. A value that is nearer to that in fp32 than Transformers' own
    differs by 0: in some models (Muse Spark) rounding alone moves the norm by 4%."""
    exact = loss_and_norm(plain(work / "model").train())
    try:
        rounded = loss_and_norm(plain(work / "model", dtype=torch.bfloat16).train())
    except RuntimeError:
        rounded = exact
    found = (seen["train/loss"], seen["train/grad_norm"])
    differences = []
    for value, in_fp32, in_bf16 in zip(found, exact, rounded, strict=True):
        is_nearer = abs(value - in_fp32) < abs(in_bf16 - in_fp32)
        differences.append(0.0 if is_nearer else abs(value / in_bf16 - 1))
    return {"loss": differences[0], "norm": differences[1], "lost": 0}


def lost_tensors(model: Any, adapter: Path) -> int:
    """Tensors of an adapter that PEFT does not load into the model."""
    from safetensors.torch import load_file

    held = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    stored = load_file(adapter / "adapter_model.safetensors").values()
    lost = 0
    for tensor in stored:
        same_shape = [mine for mine in held if mine.shape == tensor.shape]
        if not any(torch.equal(tensor, mine) for mine in same_shape):
            lost += 1
    return lost


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder."""
    from safetensors import safe_open

    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}


def plan(work: Path, column: str, layout: list[str]) -> dict[str, Any]:
    """Run recipes/plan.py on the model."""
    flags = [
        "--model_name",
        "model",
        "--dataset",
        "samples.jsonl",
        *layout,
        *COLUMNS[column],
        "--nproc",
        "2",
    ]
    config, _, options = read_plan_flags(flags, finetuning.DEMO_CONFIG, "")
    assert plan_recipe.main(config, options) == 0
    return {}


def forked(
    call: Callable[[], dict[str, Any]], work: Path, ranks: int = 1
) -> tuple[dict[str, Any] | None, str]:
    """What `call` returns in a process of its own, or on rank 0 of some; None and the output if it
    does not return."""
    answer = work / "answer.json"
    output = work / "output.txt"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        try:
            file = os.open(
                output, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if rank == 0 else os.O_APPEND)
            )
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(work)
            if ranks > 1:
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": ranks,
                    "LOCAL_WORLD_SIZE": ranks,
                }
                place |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": "models",
                }
                os.environ.update({name: str(value) for name, value in place.items()})
            found = call()
            if rank == 0:
                answer.write_text(json.dumps(found))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    deadline = time.monotonic() + SECONDS
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = output.read_text(errors="replace") if output.exists() else ""
    if children:
        text += f"\nerror: not done in {SECONDS:.0f} s"
    return (json.loads(answer.read_text()) if answer.exists() else None), text


def reason(output: str) -> str:
    """The last error of an output, in a few words."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line)]
    line = (errors or lines or ["it ended without a word"])[-1]
    if (
        line.startswith("error:")
        and (following := lines[lines.index(line) + 1 :])
        and line.endswith(":")
    ):
        line += " " + following[0]
    return re.sub(r"\(`[^`]*`\)|error: |rank 0 failed: ", "", line).replace("|", "/")[:160]


def verdict(column: str, found: dict[str, Any], record: dict[str, Any]) -> str:
    """`yes`, or what differs."""
    if column == "plan":
        return "yes"
    if found["lost"]:
        return f"PEFT does not load {found['lost']} tensors of its own layout"
    if column in ("full", "2 ranks") and found["loss"] > 1e-5 and record["padded"] > 1e-5:
        return f"padded samples differ by {record['padded']:.0e} in Transformers, too"
    wrong = []
    # in bf16, vectors that a few models keep in fp32 are rounded
    if not found["loss"] < (3e-3 if column == "bf16" else 1e-5):
        wrong.append(f"loss {found['loss']:.0e}")
    if not found["norm"] < (1e-2 if column == "bf16" else 1e-4):
        wrong.append(f"gradient {found['norm']:.0e}")
    if column in ("LoRA", "8 bit", "4 bit") and not found["logits"] < 1e-4:
        wrong.append(f"adapter's logits {found['logits']:.0e}")
    return f"differs: {', '.join(wrong)}" if wrong else "yes"


def run(
    earlier: dict[str, Any], columns: list[str], scratch: Path, this_run: str, show: bool
) -> dict[str, Any]:
    """Run columns of a model.

    Args:
        earlier: what earlier runs found; what is not in `columns` stays.
        columns: keys of COLUMNS.
        scratch: a directory for the model and the results.
        this_run: commit, date, versions and processor.
        show: print the output of what fails.
    """
    model_type: str = earlier["model"]
    work = scratch / model_type
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with open(work / "samples.jsonl", "w") as file:
        for row in samples():
            file.write(json.dumps({"input_ids": row, "labels": row}) + "\n")
    started = time.monotonic()
    made, output = forked(partial(build, work, model_type), work)
    record = {**earlier, "class": MULTIMODAL.get(model_type) or DECODERS[model_type]}
    if made is None and any(column in earlier for column in COLUMNS):
        return earlier  # it was built before: this time the machine was too busy
    if made is None:
        return record | {"skipped": reason(output)}
    for name in ("skipped", *columns):
        record.pop(name, None)
    record |= made
    record["runs"] = {
        before: [column for column in kept if column not in columns]
        for before, kept in earlier.get("runs", {}).items()
    }
    record["runs"][this_run] = [*record["runs"].get(this_run, []), *columns]
    for column in columns:
        has_own = "--batch_size_training" in COLUMNS[column]
        layout = PACKED if record.get("packing") == "yes" else [*PADDED, "4"]
        if has_own:
            layout = []
        full = record.get("full", "")
        if refused(full):
            record[column] = full
            continue
        call = partial(plan if column == "plan" else train, work, column, layout)
        found, output = forked(call, work, 2 if column == "2 ranks" else 1)
        record[column] = reason(output) if found is None else verdict(column, found, record)
        if found:
            record["numbers"] = record.get("numbers", {}) | {column: found}
        if column == "full":
            record["export"] = exported(found) if found is not None else "-"
        if found is None and show:
            print(output)
    shutil.rmtree(work)
    return record | {"seconds": round(time.monotonic() - started, 1)}


def refused(verdict: str) -> bool:
    """Whether the model is refused as such, so that no column runs."""
    return verdict.startswith("--model_name")


def exported(found: dict[str, Any]) -> str:
    """`yes`, or what is wrong with the model that was written."""
    if not found["names"]:
        return "other tensor names"
    return "yes" if found["logits"] < 1e-4 < found["moved"] else f"logits {found['logits']:.0e}"


ABOUT = """# Supported models

`benchmarks/model_support/models.py` wrote this page. [When it ran](#runs) is below the table.
[Models](../guides/models.md) says how to choose one and what `--model_name` accepts.

| published models | model_type |
| --- | --- |
| Llama 2, 3, 3.1, 3.2 (1B, 3B), 3.3; Yi; SmolLM2 | `llama` |
| Llama 4 | `llama4` |
| Qwen2, Qwen2.5; Qwen2.5-VL | `qwen2`; `qwen2_5_vl` |
| Qwen3; its MoE models; Qwen3.5 | `qwen3`; `qwen3_moe`; `qwen3_5` |
| Mistral 7B; Mixtral; Mistral Small 3.1 and newer, Ministral 3 | `mistral`; `mixtral`; `mistral3` |
| Gemma 2; Gemma 3; Gemma 4 | `gemma2`; `gemma3`, `gemma3_text`; `gemma4` |
| Phi-2; Phi-3, Phi-4 | `phi`; `phi3` |
| DeepSeek V3, R1; gpt-oss | `deepseek_v3`; `gpt_oss` |
| SmolLM3; OLMo 2; Granite | `smollm3`; `olmo2`; `granite` |

The benchmark builds a small random model of every causal language model that Transformers has, and of every model for
images and text with a text decoder inside (`+`). Each is fine-tuned for one step of SGD and compared with Transformers
and PEFT.

| column | `yes` means |
| --- | --- |
| full | Full fine-tuning, padding: first loss (relative difference below 1e-5) and gradient norm (1e-4) are equal |
| export | Transformers loads the final model; its logits (1e-4) are those after the same step, its names the same |
| packing | As `full`, with packed samples compared with the samples one by one |
| bf16 | `bf16_mixed`, the default: loss (3e-3) and gradient norm (1e-2) as in Transformers in bf16, or nearer to fp32 |
| LoRA | LoRA on all linear layers: loss, gradient norm, and the logits of the adapter that PEFT loads, are equal |
| 8 bit, 4 bit | As `LoRA`, on quantized weights, compared with weights that bitsandbytes has rounded |
| 2 ranks | Full fine-tuning with FSDP on 2 processes: loss and gradient norm are equal |
| plan | `recipes/plan.py` plans LoRA on 2 GPUs |

A number refers to the [reasons](#reasons) below the table. All columns but `bf16` and `plan` are computed in fp32.

- BERT and its kind (BERT, Big Bird, CamemBERT, Data2Vec, ELECTRA, ERNIE, Megatron-BERT, RoBERTa, XLM-RoBERTa and
  others) are built with `is_decoder=true`. Their published checkpoints are encoders, and are rejected.
- The weights here are not quantized. Published directories may be: gpt_oss in MXFP4, DeepSeek V3 and MiniMax M2 in FP8.
  [Models](../guides/models.md#quantized-checkpoints-from-the-hub) has the planned memory of some.
- apertus1p5_text, dory, exaone, hy_v4_vl, inkling2_loop, lara_mini, sarvam_mla and sarvam_moe need Transformers 5.24.
- paligemma is built with its default text model. With Gemma 2's it is causal on text, and is rejected all the same.

"""


NOT_COMPARED = """\
Transformers itself does not train these on text alone on a CPU. They need images or other inputs, are not causal,
need a package, or fail with the small sizes of the benchmark."""


def page(records: list[dict[str, Any]]) -> str:
    """docs/reference/model-support.md."""
    tried = [record for record in records if "skipped" not in record]
    found_by_model = [
        {column: worded(record.get(column, "")) for column in SHOWN} for record in tried
    ]
    notes = Counter(
        text for found in found_by_model for text in found.values() if text not in ("", "yes")
    )
    number = {note: str(place) for place, note in enumerate(notes, 1)}
    lines = [f"| model_type | class | {' | '.join(SHOWN)} |", "| --- " * (2 + len(SHOWN)) + "|"]
    for title, is_multimodal in (("**text**", False), ("**images and text (`+`)**", True)):
        group = [record for record in tried if (record["model"] in MULTIMODAL) == is_multimodal]
        counts = []
        for column in SHOWN:
            verdicts = [record[column] for record in group if column in record]
            counts.append(f"{verdicts.count('yes')} of {len(verdicts)}")
        lines.append(f"| {title} | | {' | '.join(counts)} |")
    for record, found in zip(tried, found_by_model, strict=True):
        cells = [number.get(text, text) for text in found.values()]
        name = record["model"] + (" +" if record["model"] in MULTIMODAL else "")
        lines.append(f"| {name} | {record['class']} | {' | '.join(cells)} |")
    lines += ["", with_images().rstrip("\n"), "", "## Reasons", ""]
    lines += [*(f"{number[note]}. {note}" for note in notes), ""]
    skipped = [record["model"] for record in records if "skipped" in record]
    lines += ["## Not compared", "", NOT_COMPARED, "", "```text", *skipped, "```", ""]
    lines += ["## Runs", "", *table_of_runs(tried, list(COLUMNS))]
    return ABOUT + "\n".join(lines) + "\n"


def with_images() -> str:
    """The section on samples with images."""
    from benchmarks.model_support import models_images

    known = read_results(models_images.RESULTS)
    records = list(known.values())
    return models_images.section(records, table_of_runs(records, list(models_images.COLUMNS)))


def run_images(scratch: Path, this_run: str, only: str, wanted: str) -> None:
    """Run families on samples with images, and append to the results."""
    from benchmarks.model_support import models_images  # which imports tests

    columns = wanted.split(",") if wanted else list(models_images.COLUMNS)
    known = read_results(models_images.RESULTS)
    for family, (model_type, *_) in models_images.image_models.FAMILIES.items():
        if not re.fullmatch(f"({only or '.*'})", model_type):
            continue
        work = scratch / model_type
        work.mkdir()
        record, output = forked(partial(models_images.build, work, family), work)
        assert record is not None, output
        record = known.get(family, {}) | record
        for column in columns:
            call = partial(models_images.train, work, column)
            found, output = forked(call, work, 2 if column == "2 ranks" else 1)
            record[column] = reason(output)
            if found is not None:
                record[column] = models_images.verdict(column, found)
                record["numbers"] = record.get("numbers", {}) | {column: found}
        for kept in record.setdefault("runs", {}).values():
            kept[:] = [column for column in kept if column not in columns]
        record["runs"][this_run] = [*record["runs"].get(this_run, []), *columns]
        with open(models_images.RESULTS, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps({name: record[name] for name in ("model", *columns)}), flush=True)


def worded(verdict: str) -> str:
    """The verdict, or what models.yaml says instead of an error."""
    for part, words in SMALL_MODELS["reasons"].items():
        if part in verdict:
            return str(words)
    return verdict


def table_of_runs(records: list[dict[str, Any]], known: list[str]) -> list[str]:
    """A Markdown table: which columns of which models were run when, with what."""
    models: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for when, columns in record["runs"].items():
            if columns:
                names = ", ".join(column for column in known if column in columns)
                models.setdefault((when, names), []).append(f"`{record['model']}`")
    lines = ["| commit, date, versions, processor | columns | models |", "| --- | --- | --- |"]
    for (when, columns), names in sorted(models.items(), key=lambda group: -len(group[1])):
        text = ", ".join(names) if len(names) <= 20 else str(len(names))
        lines.append(f"| {when} | {columns} | {text} |")
    return lines


def describe_run() -> str:
    """Commit, date, versions and processor of a run."""
    versions = [f"{name} {version(name).partition('+')[0]}" for name in LIBRARIES]
    return ", ".join([f"`{commit()}`", str(date.today()), *versions, processor()])


def commit() -> str:
    """The short name of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def processor() -> str:
    """The CPU's name."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="JSON lines, one per model; appended to"
    )
    parser.add_argument("--images", action="store_true", help="run families on samples with images")
    parser.add_argument("--only", default="", help="a pattern of model types")
    parser.add_argument("--columns", default="", help="names of columns; all by default")
    parser.add_argument("--again", action="store_true", help="run also what the file has")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no model after them")
    parser.add_argument("--show", action="store_true", help="print what fails")
    parser.add_argument(
        "--write", action="store_true", help="write docs/reference/model-support.md"
    )
    arguments = parser.parse_args()
    known = read_results(arguments.results)
    if arguments.write:
        records = [known[model_type] for model_type in sorted(known)]
        lines = [json.dumps(record) + "\n" for record in records]
        arguments.results.write_text("".join(lines))
        (REPOSITORY / "docs" / "reference" / "model-support.md").write_text(page(records))
        return
    torch.set_num_threads(1)
    this_run = describe_run()
    last_start = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="models-") as directory:
        scratch = Path(directory)
        os.environ["LLAMA_FT_CACHE"] = str(scratch / "cache")
        write_tokenizer(scratch / "tokenizer")
        get_checkpoint_conversion_mapping("llama")  # compiles 900 patterns, once for all children
        if arguments.images:
            run_images(scratch, this_run, arguments.only, arguments.columns)
            return
        for model_type in sorted({**DECODERS, **MULTIMODAL}):
            if not re.fullmatch(f"({arguments.only or '.*'})", model_type):
                continue
            earlier = known.get(model_type, {"model": model_type})
            columns = arguments.columns.split(",") if arguments.columns else list(COLUMNS)
            if not arguments.again:
                columns = [column for column in columns if column not in earlier]
            if not columns or ("skipped" in earlier and not arguments.again):
                continue
            if time.monotonic() > last_start:
                break
            record = run(earlier, columns, scratch, this_run, arguments.show)
            with open(arguments.results, "a") as file:
                file.write(json.dumps(record) + "\n")
            left_out = ("numbers", "runs")
            shown = {name: value for name, value in record.items() if name not in left_out}
            print(json.dumps(shown), flush=True)


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last record of each model in a file of results."""
    known = {}
    if file.exists():
        for line in file.read_text().splitlines():
            record = json.loads(line)
            known[record["model"]] = record
    return known


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


if __name__ == "__main__":
    main()
