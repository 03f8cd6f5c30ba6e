"""Ask a model: one prompt, a file of prompts, or a conversation in the terminal.

MODEL is a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a model.
It is loaded as for
training: on the CPU, on a GPU, in 8 or 4 bits, or under torchrun with --enable_fsdp, which shards a
model that is too large for one GPU. Nothing is written into its directory.
"""

import io
import os
import signal
import sys
from functools import partial

if __name__ == "__main__":  # Ctrl-C prints no traceback of an import; runtime.start replaces it
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig  # noqa: E402
from llama_ft.errors import before_imports, plural  # noqa: E402
from llama_ft.inference.flags import InferenceFlags, columns_of_run, read_inference_flags  # noqa: E402

if __name__ == "__main__":
    with before_imports():
        OPTIONS = read_inference_flags(sys.argv[1:], str(__doc__))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # for any locale

from finetuning import build_model  # noqa: E402

from llama_ft import models, runtime  # noqa: E402
from llama_ft.data import AS_TEXT  # noqa: E402
from llama_ft.data.read.media import user_message  # noqa: E402
from llama_ft.inference.generate import Answerer, Messages  # noqa: E402
from llama_ft.inference.load import OpenMedia, open_media, open_model  # noqa: E402
from llama_ft.inference.prompts import (  # noqa: E402
    answer_prompts,
    converse,
    one_prompt,
    print_part,
    prompts_have_media,
    read_prompts,
    score_prompts,
)
from llama_ft.runtime import Ranks, log  # noqa: E402

SECONDS_TO_WAIT = 7 * 24 * 3600.0  # between two messages of a conversation, ranks wait for the user


def main(options: InferenceFlags) -> None:
    """Load the model and answer the prompts; a reward model scores their responses."""
    runtime.console.file = sys.stderr  # stdout is for answers
    degree = models.shard_degree(FSDPConfig(enable_fsdp=options.enable_fsdp))
    with runtime.start(options.device, degree, timeout_seconds=SECONDS_TO_WAIT) as ranks:
        has_prompt = bool(options.prompt or options.prompt_file or options.prompts)
        is_chat = ranks.broadcast_from_rank0(
            lambda: options.chat or (not has_prompt and sys.stdin.isatty())
        )
        prompts = (
            read_prompts(
                options.prompts,
                options.columns,
                options.skip_bad_rows,
                columns_of_run(options.paths[0]),
            )
            if options.prompts
            else []
        )
        prompt = (
            "" if prompts or is_chat else ranks.broadcast_from_rank0(lambda: one_prompt(options))
        )
        question: str | Messages = prompt
        files = [os.path.abspath(os.path.expanduser(file)) for file in options.image]
        if files and not is_chat:
            question = [user_message(prompt, files)]
        media: OpenMedia | None = None
        if files or prompts_have_media(prompts):
            media = partial(open_media, max_pixels=options.max_pixels)
        opened = open_model(options.paths[0], options, ranks, build_model, open_media=media)
        if ranks.world_size == 1:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader of stdout may close it early
        log.info(opened.about)
        if opened.built.has_score:
            return score_prompts([sample for sample, _ in prompts], opened, options, ranks)
        answerer = Answerer(opened, options, ranks)
        if answerer.asks_text:
            log.info(f"prompts: {AS_TEXT} (--prompt_format chat uses it)")
        log.info(", ".join(f"{name} {value:g}" for name, value in answerer.sampling.items()))
        if is_chat:
            converse(answerer, ranks, files)
        elif (
            truncated := answer_prompts(prompts, answerer, options, ranks)
            if prompts
            else answer_one(question, answerer, ranks)
        ):
            log.info(
                f"Truncated: {plural(truncated, 'answer')}. --max_new_tokens allows longer ones."
            )


def answer_one(prompt: str | Messages, answerer: Answerer, ranks: Ranks) -> int:
    """Stream the answer to a prompt to stdout. Return 1 if it was truncated, otherwise 0."""
    [answer] = answerer.answer([answerer.tokens(prompt)], print_part if ranks.is_main else None)
    if ranks.is_main:
        print(flush=True)
    return int(answer.is_truncated)


if __name__ == "__main__":
    main(OPTIONS)
