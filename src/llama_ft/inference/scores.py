"""Scores of responses by a reward model: of samples as it was trained on them, token for token."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from llama_ft.data import Encoder, two_examples
from llama_ft.data.formats import PREFERENCE, BadRow, Row, find_format
from llama_ft.errors import UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import Opened
from llama_ft.inference.prompts import output_of
from llama_ft.runtime import Runtime, log
from llama_ft.training import free_unsharded


def score_prompts(rows: Sequence[Row], opened: Opened, options: InferenceFlags, job: Runtime) -> None:
    """Write samples with the score of their response: `score`, or of pairs `score_chosen` and `score_rejected`.

    Args:
        rows: samples in a format of the training data, each with a response at its end, or pairs.
        opened: a reward model and its tokenizer.
        options: batch_size, and output_file (None: stdout), which must not exist.
        job: the ranks; all compute all scores, and rank 0 writes.

    Raises:
        UserError: there is nothing to score, a sample is malformed or too long; it names the sample.
    """
    if not rows:
        raise UserError("MODEL is a reward model, which scores responses. Use --prompts with chats or pairs.")
    model, tokenizer = opened.model, opened.tokenizer
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    encoder, tokens = Encoder(tokenizer, context), list[list[int]]()
    for number, row in enumerate(rows, 1):
        try:
            if _is_pair(row):
                examples = two_examples(row, PREFERENCE, encoder)
            else:
                examples = [encoder.tokenize(row, find_format(f"prompt {number}", row.keys(), "auto"))]
        except BadRow as error:
            raise UserError(f"--prompts: prompt {number}: {error}") from error
        tokens += [ids for ids, _ in examples]
        if (longest := max(map(len, tokens))) > context:
            raise UserError(f"--prompts: prompt {number} has {longest} tokens, and the model {context} positions.")
    scores, size = list[float](), options.batch_size
    for start in range(0, len(tokens), size):
        scores += _scores(model, tokens[start : start + size], job)
        log.info(f"{len(scores)} of {len(tokens)} responses scored")
    free_unsharded(model)
    left = iter(scores)
    with output_of(options, job) as out:
        for row in rows if job.is_main else ():
            names = ("score_chosen", "score_rejected") if _is_pair(row) else ("score",)
            scored = {**row, **{name: next(left) for name in names}}
            print(json.dumps(scored, ensure_ascii=False, default=str), file=out, flush=True)


def _is_pair(row: Row) -> bool:
    return {"chosen", "rejected"} <= row.keys()


@torch.no_grad()
def _scores(model: Any, tokens: list[list[int]], job: Runtime) -> list[float]:
    """The scores of rows of token ids, as the model's own class computes them of padded rows."""
    ids = [torch.tensor(row) for row in tokens]
    padded = pad_sequence(ids, batch_first=True, padding_value=model.config.get_text_config().pad_token_id)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    output = model(input_ids=padded.to(job.device), attention_mask=mask.to(job.device), use_cache=False)
    found: list[float] = output.logits[:, 0].float().tolist()
    return found
