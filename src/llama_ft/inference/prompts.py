"""Answer prompts on all ranks: a single one, a file, or a conversation with a terminal or a program
that writes lines. Answers go to stdout, everything else to stderr."""

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from llama_ft.config.data_names import data_problem
from llama_ft.config.home import expanded
from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import Encoder, cache_dir, one_example, two_examples
from llama_ft.data.chat.loss_mask import ChatDiffers
from llama_ft.data.media import media_reader
from llama_ft.data.read.files import samples_of_file
from llama_ft.data.read.formats import (
    PREFERENCE,
    BadSample,
    Sample,
    find_format,
    prompt_of,
    tools_of,
)
from llama_ft.data.read.media import (
    have_media,
    located,
    media_paths,
    user_message,
    with_marked_prompt,
)
from llama_ft.data.read.reshape import reshaped
from llama_ft.data.read.sources import Source
from llama_ft.data.read.values import in_own_names
from llama_ft.errors import RunFailure, UserError, plural
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answerer, Messages
from llama_ft.inference.load import LoadedModel
from llama_ft.masking import printable
from llama_ft.runtime import Ranks, log
from llama_ft.training import free_unsharded

with suppress(ImportError):  # some builds of Python lack it; input() then has no history
    import readline  # noqa: F401

RESPONSE_FORMS = (
    "expected a chat, a prompt and a completion, or a pair. --columns says which column is which."
)
Prompts = list[tuple[dict[str, Any], Messages | str]]  # each sample, and its prompt
SHOWN_BAD_SAMPLES = 20
HELP = "/reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer; a space before a slash makes it a message."


def one_prompt(options: InferenceFlags) -> str:
    """Return the single prompt of --prompt, --prompt_file or stdin."""
    text = (
        _text_of(options.prompt_file) if options.prompt_file else options.prompt or sys.stdin.read()
    )
    if not text.strip("\ufeff\n "):
        raise UserError("The prompt is empty. Use --prompt, --prompt_file, --prompts or stdin.")
    return text.removeprefix("\ufeff").rstrip("\n")


def _text_of(name: str) -> str:
    return expanded(name).read_text(encoding="utf-8-sig", errors="replace")


def refuse_or_skip(errors: list[tuple[str, str]], skip: bool) -> None:
    """Raise a UserError with all bad samples, or with --skip_bad_rows log them. `errors`: where, and
    what is wrong."""
    if not errors:
        return
    places = dict[str, list[str]]()  # what is wrong -> where
    for place, fault in errors:
        places.setdefault(fault, []).append(place)
    lines = [
        f"{first}: {fault}"
        + (f" ({plural(len(others), 'more sample')} likewise)" if others else "")
        for fault, (first, *others) in places.items()
    ]
    shown = lines[:SHOWN_BAD_SAMPLES]
    count = plural(len(errors), "bad sample")
    if not skip:
        raise UserError(*shown, f"--prompts: {count}. --skip_bad_rows skips such samples.")
    more = ["..."] if len(lines) > len(shown) else []
    log.warning("\n  ".join([f"skipped {count}:", *shown, *more]))


def read_prompts(
    name: str,
    columns: Sequence[str] = (),
    skip_bad_rows: bool = False,
    run_columns: Sequence[str] = (),
) -> Prompts:
    """Read the prompts of a file: .txt with one per line, or samples as for training.

    Args:
        name: the file; .jsonl, .json, .csv, .parquet or .txt.
        columns: as in --columns.
        skip_bad_rows: as in --skip_bad_rows.
        run_columns: --columns of the run, which hold without `columns` if the file has them.

    Returns:
        Each sample, to which the answer will be added, and its prompt: text, or a chat without its
        last response.

    Raises:
        UserError: the file has no prompts, or a prompt is malformed; the message names its place.
    """
    if name.endswith(".txt"):
        lines = [line for line in _text_of(name).split("\n") if line.strip()]
        prompts: Prompts = [({"prompt": line}, line) for line in lines]
    else:
        problem = data_problem(name)
        if problem:
            raise UserError(f"--prompts {name}: {problem}")
        source = Source(name, "", lambda: samples_of_file(expanded(name)))
        for pair in () if columns else run_columns:
            ours, _, theirs = pair.partition("=")
            if theirs.strip() in source.columns and ours.strip() not in source.columns:
                columns = [*columns, pair]
        config = DataConfig(dataset=name, columns=list(columns))
        prompts = []
        bad = list[tuple[str, str]]()
        for place, sample in reshaped(source, config).read():
            try:
                if isinstance(sample, BadSample):
                    raise sample
                if "answer" in sample:
                    raise BadSample('the sample already has a column "answer". Rename it.')
                prompts.append((dict(sample), prompt_of(_with_media(sample, place))))
            except BadSample as error:
                bad.append((place, str(in_own_names(error, sample))))
        refuse_or_skip(bad, skip_bad_rows)
    if not prompts:
        raise UserError(f"--prompts {name}: holds no prompts.")
    return prompts


def _with_media(sample: Sample, place: str) -> Sample:
    """Return a sample whose media are parts of its messages."""
    if not have_media([sample]):
        return sample
    sample = with_marked_prompt(sample)
    kind = "sharegpt" if "conversations" in sample else "messages"
    return media_reader().with_parts(located(sample, place), kind, cache_dir())


def prompts_have_media(prompts: Prompts) -> bool:
    """Return whether a prompt of `read_prompts` is more than text."""
    return any(media_paths(prompt) for _, prompt in prompts if not isinstance(prompt, str))


def _name(number: int, options: InferenceFlags) -> str:
    """Return the name of a prompt in messages. `read_prompts` may have skipped others."""
    return f"prompt {number}{' of those not skipped' if options.skip_bad_rows else ''}"


def answer_prompts(
    prompts: Prompts,
    answerer: Answerer,
    options: InferenceFlags,
    ranks: Ranks,
) -> int:
    """Answer prompts and write the samples in their order. The ranks share the prompts of each
    batch.

    Args:
        prompts: the result of `read_prompts`.
        answerer: the model.
        options: batch_size per rank, and output (None: stdout), which must not exist.
        ranks: the ranks; rank 0 writes.

    Returns:
        The number of truncated answers.
    """
    tokens = []
    limits = []
    usable = []
    bad = list[tuple[str, str]]()
    for number, (sample, question) in enumerate(prompts, start=1):
        try:
            prompt = answerer.tokens(question, tools_of(sample))
            limits.append(answerer.longest_answer(len(prompt)))
            tokens.append(prompt)
            usable.append((sample, question))
        except UserError as error:
            bad.append((f"--prompts: {_name(number, options)}", error.messages[0]))
    refuse_or_skip(bad, options.skip_bad_rows)
    prompts = usable
    truncated = 0
    batch = options.batch_size * ranks.data.size
    with output_of(options, ranks) as out:
        start = 0
        while start < len(prompts):
            # Prompts near the end of the context have batches of their own: `answer` takes prompts
            # with one limit.
            most = min(start + batch, len(prompts))
            stop = start
            while stop < most and limits[stop] == limits[start]:
                stop += 1
            # A rank without a prompt answers the first one again, because every rank must join the
            # all-gathers of the weights. Nobody reads that answer.
            mine = tokens[start:stop][ranks.data.rank :: ranks.data.size] or tokens[:1]
            everyone = ranks.gather(answerer.answer(mine))
            for index, (sample, _) in enumerate(prompts[start:stop]):
                answer = everyone[index % ranks.data.size][index // ranks.data.size]
                truncated += answer.is_truncated
                if ranks.is_main:
                    _write({**sample, "answer": answer.text}, out)
            start = stop
            log.info(f"{start} of {len(prompts)} prompts answered")
    return truncated


@torch.no_grad()
def score_prompts(
    samples: Sequence[Sample], opened: LoadedModel, options: InferenceFlags, ranks: Ranks
) -> None:
    """Write samples with a reward model's score of their response, `score`, or of pairs
    `score_chosen` and `score_rejected`: tokenized as in training. All ranks compute all scores.

    Args:
        samples: samples in a format of the training data, or pairs.
        opened: the model and its tokenizer.
        options: batch_size, and output as of `answer_prompts`.
        ranks: the ranks; rank 0 writes.
    """
    if not samples:
        raise UserError(
            "MODEL is a reward model, which scores responses. Use --prompts with chats or pairs."
        )
    model = opened.model
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    encoder = Encoder(opened.tokenizer, context, stop_ids=opened.stop_ids)
    tokens = list[torch.Tensor]()
    usable = list[Sample]()
    bad = list[tuple[str, str]]()
    for number, sample in enumerate(samples, 1):
        try:
            responses = _responses(sample, encoder)
            longest = max(len(ids) for ids in responses)
            if longest > context:
                raise BadSample(f"it has {longest} tokens, and the model {context} positions.")
        except BadSample as error:
            bad.append((f"--prompts: {_name(number, options)}", str(error)))
            continue
        usable.append(sample)
        tokens += [torch.tensor(ids) for ids in responses]
    refuse_or_skip(bad, options.skip_bad_rows)
    scores = list[float]()
    for start in range(0, len(tokens), options.batch_size):
        part = tokens[start : start + options.batch_size]
        ones = [torch.ones_like(ids) for ids in part]
        # Padding is on the right: the score is read at the last token that is not padding.
        ids = pad_sequence(part, batch_first=True, padding_value=config.pad_token_id)
        mask = pad_sequence(ones, batch_first=True)
        ids = ids.to(ranks.device)
        mask = mask.to(ranks.device)
        output = model(input_ids=ids, attention_mask=mask, use_cache=False)
        scores += output.logits[:, 0].tolist()
    free_unsharded(model)
    remaining = iter(scores)
    with output_of(options, ranks) as out:
        for sample in usable if ranks.is_main else ():
            names = ("score_chosen", "score_rejected") if "chosen" in sample else ("score",)
            scored = {name: next(remaining) for name in names}
            _write({**sample, **scored}, out)


def _responses(sample: Sample, encoder: Encoder) -> list[list[int]]:
    """Return the token ids of a sample's response after its prompt; of a pair those of both."""
    if "chosen" in sample:
        try:
            examples = two_examples(sample, PREFERENCE, encoder)
        except ChatDiffers as chat:
            raise BadSample(chat.reason) from None
    else:
        try:
            kind = find_format("", sample.keys(), "auto")
        except UserError:
            raise BadSample(
                f"its columns are {', '.join(sorted(sample))}; {RESPONSE_FORMS}"
            ) from None
        try:
            examples = one_example(sample, kind, encoder)
        except ChatDiffers as chat:
            # the last response, after the prompt as the model gets it
            last = encoder.piece_rows(chat, sample)[-1]
            examples = one_example(last, "messages", encoder)
    return [ids for ids, _ in examples]


def _write(sample: Sample, out: IO[str]) -> None:
    line = json.dumps(sample, ensure_ascii=False, default=str)
    print(line, file=out, flush=True)


def output_of(options: InferenceFlags, ranks: Ranks) -> AbstractContextManager[IO[str]]:
    """Open what rank 0 writes to: --output, which must not exist, or stdout."""
    file = expanded(options.output or "")
    if not (options.output and ranks.is_main):
        return nullcontext(sys.stdout)
    file.parent.mkdir(parents=True, exist_ok=True)
    return open(file, "x", encoding="utf-8", errors="replace")


def converse(answerer: Answerer, ranks: Ranks, files: Sequence[str] = ()) -> None:
    """Answer messages until the input of rank 0 ends. All ranks generate together. The first message,
    and the first one after /reset, has the `files`. A model that is asked with text gets each message
    alone."""
    if not answerer.tokenizer.chat_template:
        raise UserError(
            "--chat: this model's tokenizer has no chat template. Use --prompt with a text to continue."
        )
    messages: Messages = []
    if ranks.world_size == 1:  # with several ranks, torchrun ends all of them at Ctrl-C
        # disable the handler of runtime.signals, which would end the program
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdin.isatty():
        log.info(HELP)
    while True:
        try:
            message = ranks.broadcast_from_rank0(_read)
            if message in (None, "/exit", "/quit"):
                return
            if message == "/reset":
                messages = []
            elif message.startswith("/"):
                log.info(HELP)
            elif message.strip():
                chat_message: dict[str, Any] = {"role": "user", "content": message}
                if files and not messages:
                    chat_message = user_message(message, files)
                if answerer.asks_text and not files:
                    _print_answer(message, answerer, ranks)
                    continue
                chat = [*messages, chat_message]
                answer = _print_answer(chat, answerer, ranks)
                messages = [*chat, {"role": "assistant", "content": answer}]
        except KeyboardInterrupt:
            log.info("\n(Ctrl-D or /exit ends)")
        except RunFailure:
            raise
        except UserError as error:
            log.info(str(error))


def _print_answer(prompt: Messages | str, answerer: Answerer, ranks: Ranks) -> str:
    """Print the answer while it is generated, and return it. Ctrl-C keeps the part so far."""
    parts = list[str]()
    note = ""

    def show(part: str) -> None:
        parts.append(part)
        if ranks.is_main:
            print_part(part)

    try:
        if answerer.answer([answerer.tokens(prompt)], show)[0].is_truncated:
            note = "(truncated: --max_new_tokens N allows longer answers)"
    except KeyboardInterrupt:
        note = "(stopped)"
    show("\n")
    if note:
        log.info(note)
    return "".join(parts[:-1])  # without the line break


def print_part(text: str) -> None:
    """Print a part of an answer. In a terminal control characters are replaced, so a model cannot
    move the cursor."""
    shown = printable(text) if sys.stdout.isatty() else text
    print(shown, end="", flush=True)


def _read() -> str | None:
    with suppress(EOFError):
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    return None
