"""Write the data set of benchmarks/trl_comparison/comparison.py: messages to a shop, and what they say as JSON.

    python benchmarks/trl_comparison/comparison_data.py output/tickets

A message names an order, a day and a wish, in one of many wordings. The answer is one line of JSON
with the number, the day as month and day, and a word for the wish. All three must be right in a
task score by exact match. The same seed writes the same files:

    train.jsonl       chats to fine-tune on
    validation.jsonl  chats for the validation loss
    held_out.jsonl    chats for the task score
    pairs.jsonl       preference pairs: in the rejected response one field is wrong
    held_out_pairs.jsonl
"""

import argparse
import json
import random
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

from benchmarks.shared.text_files import write_json_lines

SEED = 7
TRAIN_SAMPLES = 1500
TRAIN_PAIRS = 500
VALIDATION_SAMPLES = 24
HELD_OUT_SAMPLES = 100
HELD_OUT_PAIRS = 12
SYSTEM = "Extract JSON."
FIRST_DAY = date(2024, 1, 1)
DAYS = 366
# what a customer wants, in several wordings
WISHES = {
    "refund": ["I want my money back", "Please return the payment", "Just pay me back"],
    "replacement": ["Please send another one", "I need a new one", "Could you ship it again?"],
    "repair": ["Can somebody fix it?", "I would like it mended", "Please have it repaired"],
    "discount": ["Take something off the price", "A lower price would do", "Make it cheaper"],
    "answer": ["Tell me what happened", "How could that be?", "Please explain this"],
    "nothing": ["I only wanted you to know", "No need to do anything", "It is just feedback"],
}
MESSAGES = (
    "Order {order} broke on {day}. {wish}.",
    "On {day} I got parcel {order}, but not mine. {wish}.",
    "{wish}. Number {order} has been late since {day}.",
    "Since {day} I wait for {order}. {wish}.",
    "{order} is too small! {wish}. Written on {day}.",
    "{day}, order no. {order}: parts are missing. {wish}.",
)
Chat = list[dict[str, str]]


def ordinal(number: int) -> str:
    if number in (11, 12, 13):
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"


def day_in_words(day: date, style: int) -> str:
    """One of four ways in which people write a day."""
    month = day.strftime("%B")
    ways = (
        f"{month} {ordinal(day.day)}",
        f"{day.day} {month}",
        f"the {ordinal(day.day)} of {month}",
        f"{month[:3]} {day.day}",
    )
    return ways[style % len(ways)]


def draw_ticket(generator: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a message and what it says."""
    wish = generator.choice(list(WISHES))
    day = FIRST_DAY + timedelta(days=generator.randrange(DAYS))
    fields = {
        "order": generator.randrange(1000, 10_000),
        "date": day.strftime("%m-%d"),
        "wish": wish,
    }
    message = generator.choice(MESSAGES).format(
        order=fields["order"],
        day=day_in_words(day, generator.randrange(4)),
        wish=generator.choice(WISHES[wish]),
    )
    return message.replace("?.", "?"), fields


def spoil(fields: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return the fields with one of them wrong, as a model could have it wrong."""
    name = generator.choice(list(fields))
    wrong = dict(fields)
    if name == "order":
        wrong[name] = fields[name] + generator.choice((-100, -10, 10, 100))
    elif name == "date":
        right_day = date.fromisoformat(f"{FIRST_DAY.year}-{fields[name]}")
        wrong_day = right_day + timedelta(days=generator.choice((-30, -1, 1, 30)))
        wrong[name] = wrong_day.strftime("%m-%d")
    else:
        wrong[name] = generator.choice([wish for wish in WISHES if wish != fields[name]])
    return wrong


def prompt_of(message: str) -> Chat:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}]


def answer_of(fields: dict[str, Any]) -> Chat:
    return [{"role": "assistant", "content": json.dumps(fields)}]


def write_tickets(folder: Path, seed: int = SEED) -> None:
    """Write all files into a directory. No message is in two of them."""
    generator = random.Random(seed)
    counts = {
        "train": TRAIN_SAMPLES,
        "validation": VALIDATION_SAMPLES,
        "held_out": HELD_OUT_SAMPLES,
        "pairs": TRAIN_PAIRS,
        "held_out_pairs": HELD_OUT_PAIRS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    seen = set[str]()
    for name, count in counts.items():
        samples = list[Any]()
        while len(samples) < count:
            message, fields = draw_ticket(generator)
            if message in seen:
                continue
            seen.add(message)
            prompt = prompt_of(message)
            answer = answer_of(fields)
            if name.endswith("pairs"):
                rejected = answer_of(spoil(fields, generator))
                samples.append({"prompt": prompt, "chosen": answer, "rejected": rejected})
            else:
                samples.append({"messages": prompt + answer})
        write_json_lines(folder / f"{name}.jsonl", samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    write_tickets(asked.folder, asked.seed)
