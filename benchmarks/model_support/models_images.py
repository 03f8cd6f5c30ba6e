"""The part of models.py for samples with images: families, columns and the section of the page.

The models are those of tests/image_models.py: small, random, with the processor of their family.
Five chats have none, one or two images. Loss and gradient norm are compared with plain Transformers
and PEFT on the chats one by one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "recipes", "tests")]
path = list(sys.path)
# models.py of this folder would hide the package of that name in tests
sys.path[:] = [folder for folder in path if Path(folder) != Path(__file__).parent]

import finetuning
import image_models
import torch
from peft import PeftModel

sys.path[:] = path

from llama_ft.config.reading.parse import as_keywords

RESULTS = REPOSITORY / "benchmarks" / "results" / "models_images.jsonl"
LR = 0.01
FLAGS = (
    f"--no_plan --device cpu --precision fp32 --optimizer SGD --momentum 0 --weight_decay 0 --lr {LR} "
    "--lr_scheduler constant --max_train_step 1 --context_length 256 --sample_tokens 0 --save_steps 0 "
    "--dataset data/chats.jsonl --model_name model"
).split()
PADDED = (
    "--batching_strategy padding --batch_size_training 5 --gradient_accumulation_steps 1".split()
)
TWO_RANKS = (
    "--batching_strategy padding --batch_size_training 1 --gradient_accumulation_steps 3".split()
)
PACKED = "--batch_size_training 1 --gradient_accumulation_steps 6".split()
LORA = "--use_peft --target_modules all-linear --peft.r 4 --lora_dropout 0".split()
COLUMNS: dict[str, list[str]] = {
    "padded": PADDED,
    "packed": PACKED,
    "projector": [*PADDED, "--train_vision", "projector"],
    "all": [*PADDED, "--train_vision", "all"],
    "LoRA": [*PADDED, *LORA],
    "bf16": [*PADDED, "--precision", "bf16_mixed"],
    "2 ranks": [*TWO_RANKS, "--enable_fsdp", "--train_vision", "all"],
}
PROJECTOR = (
    "merger",
    "projector",
    "connector",
    "image_newline",
    "embed_vision",
)  # in names of weights
# as the published models are called, where the family's name does not say it
PUBLISHED = {"LLaVA": "LLaVA 1.5", "Mistral 3": "Mistral Small 3.1 and newer", "GLM-4V": "GLM-4.1V"}

ABOUT = """## Samples with images

`benchmarks/model_support/models.py --images` trains a small random model of each family on five chats with none,
one or two images. Loss (relative difference below 1e-5) and gradient norm (1e-4) are those of the chats one by one.

| column | `yes` means |
| --- | --- |
| padded, packed | Full fine-tuning of the text part; the exported model has its logits for an image, too |
| projector, all | As `padded`, with `--train_vision` |
| LoRA | LoRA on the text part; PEFT loads the adapter into the family's class, with equal loss and gradient norm |
| bf16 | `bf16_mixed`: loss (3e-3) and gradient norm (2e-2) of Transformers in fp32 |
| 2 ranks | `all` with FSDP on 2 processes, on which some micro-batches have no image |

"""


def build(work: Path, family: str) -> dict[str, Any]:
    """Write the model into work/model, and the chats."""
    image_models.save_image_model(work / "model", family)
    image_models.write_samples(work / "data")
    return {"model": family, "model_type": image_models.FAMILIES[family][0]}


def is_trained(name: str, column: str) -> bool:
    """Return whether a weight is trained in a column without LoRA."""
    is_for_images = any(part in name for part in image_models.FOR_IMAGES)
    if column in ("all", "2 ranks") or not is_for_images:
        return True
    return column == "projector" and any(part in name for part in PROJECTOR)


@torch.no_grad()
def image_logits(model: Any, work: Path) -> torch.Tensor:
    """Return the logits of the first chat, which has an image."""
    first = json.loads((work / "data" / "chats.jsonl").read_text().splitlines()[0])
    processor = image_models.plain_processor(work / "model")
    inputs, _ = image_models.plain_inputs(processor, work / "data", first)
    logits: torch.Tensor = model.eval()(**inputs).logits
    return logits


def train(work: Path, column: str) -> dict[str, Any]:
    """Run recipes/finetuning.py on the model and compare."""
    flags = [*FLAGS, *COLUMNS[column], "--output_dir", column]
    finetuning.main(**as_keywords(flags))
    if os.environ.get("RANK", "0") != "0":
        return {}
    lines = (work / column / "metrics.jsonl").read_text().splitlines()
    [seen] = [line for line in map(json.loads, lines) if "train/loss" in line]
    model = image_models.model_of(work / "model")
    result = work / column / "model"
    if column == "LoRA":
        model = PeftModel.from_pretrained(model, result, is_trainable=True).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
        elif column != "LoRA":
            parameter.requires_grad_(is_trained(name, column))
    data = work / "data" / "chats.jsonl"
    loss, count = image_models.plain_loss(model, work / "model", data)
    (loss / count).backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    found = {
        "loss": abs(seen["train/loss"] / (loss.item() / count) - 1),
        "norm": abs(seen["train/grad_norm"] / image_models.norm(trained) - 1),
    }
    if column not in ("LoRA", "bf16"):
        before = image_logits(model, work)
        with torch.no_grad():
            for parameter in trained:
                parameter -= LR * parameter.grad
        expected = image_logits(model, work)
        moved = (expected - before).abs().max().item()
        difference = image_logits(image_models.model_of(result), work) - expected
        # Gemma 4's move by 3.8, and rounding with them.
        found["logits"] = difference.abs().max().item() / max(1.0, moved)
    return found


def verdict(column: str, found: dict[str, Any]) -> str:
    """`yes`, or what differs."""
    limits = {"loss": 1e-5, "norm": 1e-4, "logits": 1e-4}
    if column == "bf16":
        limits = {"loss": 3e-3, "norm": 2e-2}
    wrong = [f"{name} {found[name]:.0e}" for name in limits if found.get(name, 0) >= limits[name]]
    return f"differs: {', '.join(wrong)}" if wrong else "yes"


def worded(text: str) -> str:
    """A verdict, or the setting instead of the error of a model that cannot be packed."""
    return "no, padded only" if "cannot be packed" in text else text


def section(records: list[dict[str, Any]], runs: list[str]) -> str:
    """Return the section of docs/reference/model-support.md. `runs`: the table of runs."""
    lines = [f"| family | model_type | {' | '.join(COLUMNS)} |"]
    lines.append("| --- " * (2 + len(COLUMNS)) + "|")
    for record in records:
        name = PUBLISHED.get(record["model"], record["model"])
        cells = [worded(record.get(column, "")) for column in COLUMNS]
        lines.append(f"| {name} | `{record['model_type']}` | {' | '.join(cells)} |")
    return ABOUT + "\n".join([*lines, "", *runs, ""]) + "\n"
