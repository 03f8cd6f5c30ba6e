"""A tiny random model learns to read digits in images."""

import random
from pathlib import Path

import image_models
import pytest
import torch
from conftest import recipe, write_jsonl
from image_models import FAMILIES, model_of, plain_processor, save_image_model
from PIL import Image, ImageDraw

QUESTION = "Which?"
TRAINED = 1500
HELD_OUT = 200
LEARN = (
    "--train_vision all --precision fp32 --batching_strategy padding --batch_size_training 64 "
    "--max_train_step 350 --num_epochs 20 --lr 3e-3 --warmup_steps 20 --gradient_clipping "
    "--activation_checkpointing off --save_steps 0 --log_steps 50 --device cpu --no_plan"
)


def draw(generator: random.Random) -> tuple[Image.Image, int]:
    """An image of 28 x 28 pixels with a digit, somewhere near its middle, and the digit."""
    digit = generator.randrange(10)
    image = Image.new("RGB", (28, 28), "white")
    place = (generator.randint(6, 10), generator.randint(0, 4))
    size = generator.randint(20, 24)
    ImageDraw.Draw(image).text(place, f"{digit}", fill="black", font_size=size)
    return image, digit


def accuracy(folder: Path, generator: random.Random) -> float:
    """Share of held-out images whose digit is the most probable one, by plain Transformers."""
    model = model_of(folder)
    processor = plain_processor(folder)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    drawn = [draw(generator) for _ in range(HELD_OUT)]
    inputs = processor(
        text=[prompt] * HELD_OUT, images=[[image] for image, _ in drawn], return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1, ord("0") : ord("9") + 1]
    digits = torch.tensor([digit for _, digit in drawn])
    return float((logits.argmax(-1) == digits).float().mean())


@pytest.mark.large
def test_a_model_learns_to_read_digits_in_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, text, vision, others, template, processor, images = FAMILIES["LLaVA"]
    small = {"patch_size": 7}  # 16 patches
    family = (model_type, text, vision | small, others, template, processor | small, images)
    monkeypatch.setitem(image_models.FAMILIES, "digits", family)
    save_image_model(tmp_path / "model", "digits")
    generator = random.Random(1)
    rows = []
    for number in range(TRAINED):
        image, digit = draw(generator)
        image.save(tmp_path / f"{number}.png")
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": f"{digit}"}
        rows.append({"messages": [{"role": "user", "content": parts}, answer]})
    write_jsonl(tmp_path / "digits.jsonl", rows)
    paths = f"--model_name {tmp_path}/model --dataset {tmp_path}/digits.jsonl --output_dir {tmp_path}/run"
    before = accuracy(tmp_path / "model", generator)
    assert before < 0.3, "a random model guesses: 10%, or the share of one digit"
    finished = recipe(*LEARN.split(), *paths.split(), timeout=1500)
    assert finished.exit_code == 0, finished.output
    assert accuracy(tmp_path / "run" / "model", generator) > 0.9
