"""Questions of the task python_docs: the demo's validation samples, each docstring among three
others."""

import json
import random

from datasets import Dataset

from llama_ft.data import build_demo, cache_dir

LONGEST_ANSWER = 200  # characters


def load(**_: object) -> dict[str, Dataset]:
    """Splits by name, as lm-evaluation-harness takes them. Rows: question, choices, answer (which
    of them is right)."""
    with open(build_demo(cache_dir()).validation_file, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    questions = [f"{row['instruction']}\n{row['input']}".strip() for row in rows]
    answers = [row["output"][:LONGEST_ANSWER] for row in rows]
    chance = random.Random(0)
    found = []
    for number, question in enumerate(questions):
        wrong = chance.sample(
            [answer for other, answer in enumerate(answers) if other != number], 3
        )
        place = chance.randrange(4)
        found.append(
            {
                "question": question,
                "choices": [*wrong[:place], answers[number], *wrong[place:]],
                "answer": place,
            }
        )
    return {"test": Dataset.from_list(found)}
