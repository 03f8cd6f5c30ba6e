"""Draw 2,000 bar charts, each with a question and its answer, for fine-tuning on images.

    python examples/draw_charts.py output/charts
    python examples/draw_charts.py output/charts --count 200 --seed 2

The folder gets train.jsonl (90% of the samples), validation.jsonl and the images. The same seed draws
the same pixels with the same version of Pillow.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 448, 336
MARGIN = 40  # pixels around the bars
HIGHEST = 90  # value of a bar
NAMES = ("bread", "milk", "tea", "soap", "rice", "apples", "paper", "salt", "corn", "wool")
COLORS = ("firebrick", "steelblue", "seagreen", "darkorange", "slateblue", "sienna")


def draw_chart(values: dict[str, int], color: str) -> Image.Image:
    """Return a bar chart: above each bar its value, below it its name."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    bottom = HEIGHT - MARGIN
    step = (WIDTH - 2 * MARGIN) / len(values)
    for number, (name, value) in enumerate(values.items()):
        left = MARGIN + step * (number + 0.15)
        right = MARGIN + step * (number + 0.85)
        top = bottom - (bottom - MARGIN) * value / HIGHEST
        middle = (left + right) / 2
        pen.rectangle((left, top, right, bottom), fill=color)
        pen.text((middle, top - 12), f"{value}", fill="black", font_size=18, anchor="mm")
        pen.text((middle, bottom + 16), name, fill="black", font_size=18, anchor="mm")
    pen.line((MARGIN, bottom, WIDTH - MARGIN, bottom), fill="black", width=2)
    return image


def ask(values: dict[str, int], generator: random.Random) -> tuple[str, str]:
    """Return a question about a chart, and its answer."""
    first, second = generator.sample(list(values), 2)
    larger, smaller = sorted((first, second), key=lambda name: values[name], reverse=True)
    difference = values[larger] - values[smaller]
    highest = max(values, key=lambda name: values[name])
    questions = [
        (f"What is the value of {first}?", f"{values[first]}"),
        ("Which bar is the highest?", highest),
        (f"How much higher is {larger} than {smaller}?", f"{difference}"),
        ("How many bars are there?", f"{len(values)}"),
    ]
    return generator.choice(questions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000, help="number of charts, at least 10")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.count < 10:
        parser.error(f"--count {options.count}: expected at least 10")
    generator = random.Random(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(options.count):
        names = generator.sample(NAMES, generator.randint(3, 5))
        heights = generator.sample(range(5, HIGHEST), len(names))  # no two bars are equal
        values = dict(zip(names, heights, strict=True))
        file = f"{number:05}.png"
        draw_chart(values, generator.choice(COLORS)).save(options.folder / file)
        question, answer = ask(values, generator)
        parts = [{"type": "image", "image": file}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    held_out = options.count // 10
    for name, part in (("train", lines[held_out:]), ("validation", lines[:held_out])):
        file = options.folder / f"{name}.jsonl"
        file.write_text("\n".join(part) + "\n")
        print(f"{file}: {len(part)} samples")


if __name__ == "__main__":
    main()
