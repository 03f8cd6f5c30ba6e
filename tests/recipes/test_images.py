"""Runs on images and text: the first loss and gradient norm are those of plain Transformers and PEFT
on the same samples one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics, run_cases
from image_models import FAMILIES, plain_loss, save_image_model, write_samples

TEXT = ("language_model", "text_model", "lm_head")
LORA = "--use_peft --target_modules all-linear --r 4 --lora_dropout 0 --weight_decay 0".split()
# what the micro-batches are like; with 1 sample per micro-batch some have no image, and with 2 ranks
# one has no sample
LAYOUTS = {
    "padded": "--batching_strategy padding --batch_size_training 5",
    "padded, one by one": "--batching_strategy padding --batch_size_training 1",
    "packed": "--batching_strategy packing --batch_size_training 1",
}


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()


def norm(parameters: list[Any]) -> float:
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_samples(folder / "data")
    for family in FAMILIES:
        save_image_model(folder / family, family)
    return folder


def cases_of(work: Path, ranks: int, families: list[str]) -> list[list[str]]:
    cases = []
    for family in families:
        for layout, flags in LAYOUTS.items():
            steps = 5 // (ranks * int(flags.split()[-1])) + 1
            for method, more in (("full", []), ("lora", LORA)):
                name = f"{family}, {layout}, {method}, {ranks}"
                cases.append(
                    f"--device cpu --precision fp32 --max_train_step 1 --context_length 256 {flags} "
                    f"--gradient_accumulation_steps {steps} --lr 1e-2".split()
                    + [
                        "--model_name",
                        str(work / family),
                        "--dataset",
                        str(work / "data" / "chats.jsonl"),
                    ]
                    + ["--output_dir", str(work / "runs" / name), *more]
                    + (["--enable_fsdp"] if ranks > 1 else [])
                )
    return cases


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("Qwen2.5-VL", "LLaVA") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_first_loss_and_gradient_norm_are_those_of_plain_transformers(
    work: Path, family: str, ranks: int
) -> None:
    finished = run_cases(work, cases_of(work, max(1, ranks), [family]), ranks)
    assert "Frozen, not quantized, without adapters: " in finished.output
    assert "training: 4 images in " in finished.output
    model = model_of(work / family)
    trained = [p for name, p in model.named_parameters() if any(part in name for part in TEXT)]
    loss, count = plain_loss(model, work / family, work / "data" / "chats.jsonl")
    (loss / count).backward()
    for layout in LAYOUTS:
        for method in ("full", "lora"):
            name = f"{family}, {layout}, {method}, {max(1, ranks)}"
            [first] = [line for line in metrics(work / "runs" / name) if "train/loss" in line]
            assert first["train/loss"] == pytest.approx(loss.item() / count, rel=1e-5), name
            if method == "full":
                assert first["train/grad_norm"] == pytest.approx(norm(trained), rel=1e-5), name
