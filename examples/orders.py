"""Write orders in a sentence and what they say in one line, as chats: a small task with one right
answer, and a score of your own for it. The same seed writes the same files.

python examples/orders.py output/orders
--score exact
--score examples/orders.py:fields
--reward examples/orders.py:reward
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

SEED = 0
SAMPLES = {"train.jsonl": 200, "validation.jsonl": 50}
SYSTEM = "Reply with quantity, color, item and city."
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
COLORS = "blue red green black white yellow gray brown".split()
ITEMS = "mug lamp chair tent kettle bicycle notebook pillow clock table".split()
CITIES = "Oslo Lima Porto Kyoto Turin Quito Dublin Nairobi Hanoi Bergen".split()
SENTENCES = (
    "Hi, please send {number} {color} {item}s to our office in {city}.",
    "Our shop in {city} needs {number} {color} {item}s by Friday.",
    "I would like {number} of the {color} {item}s. I live in {city}.",
    "Could you ship {number} {item}s to {city}? In {color}, please!",
    "For the team in {city}: {number} {item}s, all of them {color}.",
)


def draw_order(generator: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a chat: an order as a sentence, and the line "3, blue, mug, Oslo" as the answer."""
    quantity = generator.randrange(2, 2 + len(NUMBERS))
    color = generator.choice(COLORS)
    item = generator.choice(ITEMS)
    city = generator.choice(CITIES)
    sentence = generator.choice(SENTENCES).format(
        number=NUMBERS[quantity - 2], color=color, item=item, city=city
    )
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": sentence},
            {"role": "assistant", "content": f"{quantity}, {color}, {item}, {city}"},
        ]
    }


def main(folder: str) -> None:
    """Write the files of SAMPLES into `folder`. No validation order is also in the training data."""
    generator = random.Random(SEED)
    drawn: dict[str, None] = {}
    while len(drawn) < sum(SAMPLES.values()):
        drawn[json.dumps(draw_order(generator))] = None
    lines = list(drawn)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, count in SAMPLES.items():
        Path(folder, name).write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
        del lines[:count]


def fields(prompt: str, answer: str, reference: str) -> float:
    """Return the share of quantity, color, item and city that are right."""
    found = answer.split(", ")
    expected = reference.split(", ")
    right = [one == other for one, other in zip(found, expected, strict=False)]
    return sum(right) / len(expected)


def reward(prompt: str, answer: str, sample: dict[str, Any]) -> dict[str, float]:
    """Return whether an answer is right, and its share of right fields. Further fields lower it, or
    answers would learn to go on and on."""
    reference = sample["messages"][-1]["content"]
    line = answer.strip()
    too_many = max(1.0, len(line.split(", ")) / len(reference.split(", ")))
    share = fields(prompt, line, reference) / too_many
    return {"exact": float(line == reference), "fields": share}


if __name__ == "__main__":
    main(sys.argv[1])
