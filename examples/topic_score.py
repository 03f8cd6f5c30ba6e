"""Topics of support tickets: samples and a score of your own. See docs/guides/evaluate.md.

--dataset examples/topic_score.py:tickets --score examples/topic_score.py:topic
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

TICKETS = Path(__file__).parent / "data" / "support_tickets.jsonl"


def tickets(dataset_config: Any, tokenizer: Any, split: str) -> Dataset:
    """Return the questions of the tickets, each with its topic as the response."""
    samples = []
    for line in TICKETS.read_text().splitlines():
        *_, question, answer = json.loads(line)["messages"]
        topic = answer["content"].rpartition("\n")[2]
        samples.append({"instruction": question["content"], "output": topic})
    return Dataset.from_list(samples)


def topic(prompt: str, answer: str, reference: str) -> float:
    """Return 1 if the answer is the reference, such as "Topic: billing", 0.5 if it is another
    topic, else 0."""
    if answer == reference:
        return 1.0
    return 0.5 if answer.startswith("Topic: ") else 0.0
