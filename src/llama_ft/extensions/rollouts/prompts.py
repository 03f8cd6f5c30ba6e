"""Read the prompts of a dataset and tokenize them: messages that end with the user's, a text, or a
sample for fine-tuning, whose response is only for rewards."""

import hashlib
import itertools
import json
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.config import DataConfig
from llama_ft.data import cache_dir, check_ids
from llama_ft.data.read.formats import BadSample, Sample, prompt_of, tools_of
from llama_ft.data.read.media import have_media
from llama_ft.data.read.reshape import reshaped
from llama_ft.data.read.sources import Split, open_source
from llama_ft.data.read.values import RenamedSample, in_own_names
from llama_ft.data.tokenize.prompt_tokens import PromptFormat, chat_prompt, text_prompt
from llama_ft.errors import UserError, plural
from llama_ft.extensions.rollouts.rounds import Prompt
from llama_ft.inference.generate import Messages
from llama_ft.runtime import log

BAD_SAMPLES_SHOWN = 20


class PromptTokens(NamedTuple):
    """What turns prompts into tokens: as the model was fine-tuned.

    Attributes:
        tokenizer: with the chat template, if there is one.
        form: of prompts of text: with the chat template, or without it.
        vocabulary: tokens of the model; None if it is not known.
        context: the model's positions.
    """

    tokenizer: PreTrainedTokenizerBase
    form: PromptFormat
    vocabulary: int | None
    context: int

    def encode(self, content: str | Messages, sample: Sample) -> list[int]:
        """Return the token ids of a prompt. Raises BadSample if it cannot be asked."""
        has_template = bool(self.tokenizer.chat_template)
        if isinstance(content, str) and (self.form == "text" or not has_template):
            ids = text_prompt(self.tokenizer, content)
        elif not has_template:
            raise BadSample("a chat needs a chat template, and the tokenizer has none.")
        else:
            messages = content
            if isinstance(content, str):
                messages = [{"role": "user", "content": content}]
            ids = chat_prompt(self.tokenizer, messages, tools_of(sample))  # type: ignore[arg-type]
        check_ids(max(ids, default=0), "the prompt", self.tokenizer, self.vocabulary)
        if not 0 < len(ids) < self.context:
            raise BadSample(
                f"the prompt has {len(ids)} tokens, and the model {self.context} positions."
            )
        return ids


class DatasetPrompts(NamedTuple):
    """The prompts of a dataset.

    Attributes:
        by_place: place of a sample, as messages name it -> its prompt.
        sha256: checksum of the samples.
    """

    by_place: dict[str, Prompt]
    sha256: str

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in the order of the dataset."""
        return list(self.by_place.values())


def read_dataset(
    config: DataConfig,
    tokens: PromptTokens,
    dataset: str | None = None,
    split: Split = "train",
) -> DatasetPrompts:
    """Read all prompts of a dataset.

    Args:
        config: dataset, dataset_split, columns, max_samples and skip_bad_rows.
        tokens: makes their tokens.
        dataset: other data, such as a validation set; None: those of `config`.
        split: what they are for.

    Raises:
        UserError: the dataset cannot be read, has no prompts, or bad samples are not skipped.
    """
    digest = hashlib.sha256()
    prompts = dict[str, Prompt]()
    bad = list[str]()
    source = open_source(
        dataset or config.dataset,
        split,
        config=config,
        tokenizer=tokens.tokenizer,
        cache=cache_dir(),
    )
    samples = reshaped(source, config).read()
    most = config.max_samples if split == "train" else 0
    for index, (place, sample) in enumerate(itertools.islice(samples, most or None)):
        try:
            if isinstance(sample, BadSample):
                raise sample
            given = sample.original if isinstance(sample, RenamedSample) else sample
            text = json.dumps(given, default=str)
            digest.update(text.encode() + b"\n")
            name = place if place not in prompts else f"{place}, again at {index}"  # of a mixture
            prompts[name] = _prompt(index, sample, json.loads(text), tokens)
        except BadSample as error:
            bad.append(f"{place}: {in_own_names(error, sample)}")
    flag = "dataset" if split == "train" else split
    shown = bad[:BAD_SAMPLES_SHOWN]
    count = plural(len(bad), "bad sample")
    if bad and not config.skip_bad_rows:
        raise UserError(*shown, f"--{flag}: {count}. --skip_bad_rows skips such samples.")
    if bad:
        log.warning("\n  ".join([f"skipped {count}:", *shown]))
    if not prompts:
        raise UserError(f"--{flag} {dataset or config.dataset}: holds no prompts.")
    return DatasetPrompts(prompts, digest.hexdigest())


def _prompt(index: int, sample: Sample, given: Sample, tokens: PromptTokens) -> Prompt:
    if have_media([sample]):
        raise BadSample("it has media; rollouts are of text only.")
    content = prompt_of(sample)
    ids = tokens.encode(content, sample)
    text = str(tokens.tokenizer.decode(ids, skip_special_tokens=True)).strip()
    return Prompt(index, dict(given), content, text, ids)
