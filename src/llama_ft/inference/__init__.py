"""A tuned model in use: loaded from whatever a run has left, and asked."""

from llama_ft.inference.answers_file import AnswersFile, describe_job
from llama_ft.inference.chat import Chat, follow, lead, print_part
from llama_ft.inference.generate import Answerer, Sampling, settle_sampling
from llama_ft.inference.load import Opened, open_model
from llama_ft.inference.prompts import (
    Encoding,
    Prompt,
    answer_prompts,
    choose_encoding,
    count_tokens,
    read_prompts,
)

__all__ = [
    "Answerer",
    "AnswersFile",
    "Chat",
    "Encoding",
    "Opened",
    "Prompt",
    "Sampling",
    "answer_prompts",
    "choose_encoding",
    "count_tokens",
    "describe_job",
    "follow",
    "lead",
    "open_model",
    "print_part",
    "read_prompts",
    "settle_sampling",
]
