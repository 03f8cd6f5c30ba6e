"""Compare the first step of fine-tuning on images with TRL's SFTTrainer.

    python benchmarks/trainers/images_trl.py --folder output/images_trl
    python benchmarks/trainers/images_trl.py --folder output/images_trl --families "LLaVA,Qwen2.5-VL"

Both sides train all weights of the same tiny random model in fp32 on the same chats with one or two
images, with the loss on the responses that the chat template marks. TRL pads them to one batch: it
does not pack samples with images. llama_ft pads and packs them. The first losses and gradient norms
must differ by less than 1e-5, or the exit code is 1.

TRL is installed into the folder, without its requirements, which are those of llama_ft.
"""

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForMultimodalLM

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "tests")]

import image_models

from benchmarks.trainers.trl_package import TRL, install

LIMIT = 1e-5
SIZES = ((60, 40), (30, 90), (56, 56), (100, 28))  # pixels of the images
# the content of a message; MARK is what the family writes for an image
CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}MARK"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{CONTENT}{{% endgeneration %}}"
    f"{{% else %}}{CONTENT}{{% endif %}}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = {
    "Qwen2.5-VL": image_models.QWEN_MARK,
    "Qwen3-VL": image_models.QWEN_MARK,
    "Gemma 3": "<start_of_image>",
    "LLaVA": "<image>",
}
LAYOUTS = {
    "padded": "--batching_strategy padding --batch_size_training 4 --gradient_accumulation_steps 1",
    # some families need two sequences of 256 tokens for the samples
    "packed": "--batching_strategy packing --batch_size_training 1 --gradient_accumulation_steps 2",
}


def write_chats(folder: Path) -> list[dict[str, Any]]:
    """Write the images and chats.jsonl. Return the chats."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(SIZES):
        image_models.write_image(folder / f"{number}.png", width, height, number)
    contents = [
        ([0], "What is it?", "Noise, most of it in color."),
        ([1, 2], "Which is larger?", "The second one."),
        ([3], "And this?", "The same."),
        ([0, 3], "Are they equal?", "No: one has more pixels, and other ones."),
    ]
    chats = []
    for images, question, answer in contents:
        parts = [{"type": "image", "image": f"{number}.png"} for number in images]
        user = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
        assistant = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        chats.append({"messages": [user, assistant]})
    lines = [json.dumps(chat) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return chats


def first_step_of_trl(model: Path, chats: list[dict[str, Any]], data: Path) -> dict[str, float]:
    """Return loss and gradient norm of the first step of SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    processor = image_models.plain_processor(model)
    processor.chat_template = (model / "chat_template.jinja").read_text()
    rows = []
    for chat in chats:
        images = []
        messages = []
        for message in chat["messages"]:
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    images.append(Image.open(data / part["image"]).convert("RGB"))
                    parts.append({"type": "image", "text": None})
                else:
                    parts.append(part)
            messages.append({"role": message["role"], "content": parts})
        rows.append({"messages": messages, "images": images})
    settings = SFTConfig(
        output_dir=str(model.parent / "trl_output"),
        max_steps=1,
        per_device_train_batch_size=len(chats),
        assistant_only_loss=True,
        max_length=None,
        learning_rate=0.0,
        logging_steps=1,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = SFTTrainer(
        AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )
    trainer.train()
    [first] = [line for line in trainer.state.log_history if "loss" in line]
    return {"loss": first["loss"], "grad_norm": first["grad_norm"]}


def first_step_of_llama_ft(model: Path, data: Path, layout: str) -> dict[str, float]:
    """Return loss and gradient norm of the first step of recipes/finetuning.py."""
    output = model.parent / f"llama_ft {layout}"
    flags = (
        "--device cpu --precision fp32 --max_train_step 1 "
        "--train_vision all --context_length 256 --no_plan --save_model false --overwrite "
        f"--sample_tokens 0 {LAYOUTS[layout]}"
    )
    paths = ["--model_name", model, "--dataset", data / "chats.jsonl", "--output_dir", output]
    recipe = REPOSITORY / "recipes" / "finetuning.py"
    command = [sys.executable, recipe, *flags.split(), *paths]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    [first] = [line for line in map(json.loads, lines) if "train/loss" in line]
    return {"loss": first["train/loss"], "grad_norm": first["train/grad_norm"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("output/images_trl"))
    parser.add_argument("--families", default="Qwen3-VL,Gemma 3", help=", ".join(MARKS))
    options = parser.parse_args()
    install(options.folder.resolve() / "packages")
    print(
        f"trl {TRL.partition('==')[2]}, transformers {version('transformers')}, torch {torch.__version__}, "
        f"{platform.machine()}"
    )
    print("| model | figure | TRL, padded | llama_ft, padded | llama_ft, packed |")
    print("|---|---|---|---|---|")
    largest = 0.0
    for family in options.families.split(","):
        work = options.folder.resolve() / family
        model = work / "model"
        chats = write_chats(work / "data")
        image_models.save_image_model(model, family)
        (model / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", MARKS[family]))
        expected = first_step_of_trl(model, chats, work / "data")
        found = {name: first_step_of_llama_ft(model, work / "data", name) for name in LAYOUTS}
        for figure, value in expected.items():
            ours = [found[name][figure] for name in LAYOUTS]
            print(f"| {family} | {figure} | {value:.7f} | {ours[0]:.7f} | {ours[1]:.7f} |")
            largest = max([largest, *(abs(each - value) / value for each in ours)])
    print(f"Largest relative difference: {largest:.1e}")
    if largest > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
