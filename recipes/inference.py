"""Ask a model: one prompt, a file of prompts, or a conversation in the terminal.

MODEL is what a run has left (its directory, a checkpoint, an adapter) or any model's folder or hub name. It is loaded
as for training: on the CPU, on a GPU, in 8 or 4 bits, or under torchrun with --enable_fsdp, where several GPUs share a
model that is too large for one. Nothing is ever written into its folder.
"""

import gc
import io
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

if __name__ == "__main__":  # no traceback out of an import; runtime.start takes it over
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig, exit_with  # noqa: E402
from llama_ft.config.inference_flags import is_utf8, open_closed_streams, read_inference_flags  # noqa: E402
from llama_ft.errors import UserError  # noqa: E402

if __name__ == "__main__":
    # Before the imports below, which take 6 s: --help and most mistakes are answered at once.
    try:
        open_closed_streams()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # what is not UTF-8 is told of later
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # a locale may have no place for what a model says
        OPTIONS = read_inference_flags(sys.argv[1:], str(__doc__))
    except UserError as error:
        exit_with(error)
    gc.disable()  # see finetuning.py

from llama_ft import inference, models, runtime  # noqa: E402
from llama_ft.inference import Answerer, Encoding, Opened, Prompt, Sampling  # noqa: E402
from llama_ft.runtime import Runtime, log  # noqa: E402

SECONDS_TO_WAIT = 7 * 24 * 3600.0  # ranks wait for each other as long as someone thinks about the next question


def main(options: Namespace) -> None:
    """From whatever holds a model to its answers."""
    runtime.console.file = sys.stderr  # stdout is for answers
    degree = models.shard_degree(FSDPConfig(enable_fsdp=options.enable_fsdp))
    with runtime.start(options.device, degree, timeout_seconds=SECONDS_TO_WAIT) as job:
        asked = job.from_main(lambda: one_prompt(options))
        many = inference.read_prompts(Path(options.prompts).expanduser(), options.output_key) if options.prompts else []
        opened = inference.open_model(
            options.place,
            base_model=options.base_model,
            tokenizer_name=options.tokenizer_name,
            quantization=options.quantization,
            precision=options.precision,
            trust_remote_code=options.trust_remote_code,
            enable_fsdp=options.enable_fsdp,
            job=job,
        )
        if job.world_size == 1:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads the answers may stop reading
        log.info(opened.about)
        sampling = inference.settle_sampling(options, opened.model.generation_config)
        answerer = Answerer(opened, job, is_sharded=options.enable_fsdp and job.world_size > 1)
        encoding = inference.choose_encoding(opened.tokenizer, options.no_chat_template, options.system_prompt)
        log.info(sampling.describe)
        if options.mode == "many":
            answer_file(many, options, opened, answerer, encoding, sampling, job)
        elif options.mode == "one":
            answer_one(asked, answerer, encoding, sampling, job)
        else:
            chat(answerer, encoding, sampling, job)


def one_prompt(options: Namespace) -> str:
    """The prompt that is to be answered, where it is one: given, in a file, or what comes through stdin."""
    if options.mode != "one":
        return ""
    text, where = options.prompt, "--prompt"
    if options.prompt_file:
        where = f"--prompt_file {options.prompt_file}"
        try:
            text = Path(options.prompt_file).expanduser().read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise UserError(f"{where}: cannot be read ({error.strerror}).") from error
    elif text is None:
        text, where = sys.stdin.read(), "The prompt from stdin"
    text = text.removeprefix("\ufeff")  # with which some editors begin a file
    if not is_utf8(text):
        raise UserError(f"{where}: is not UTF-8.")
    if not text.strip():
        if options.prompt is not None or options.prompt_file:
            raise UserError(f"{where}: is empty; expected a prompt.")
        raise UserError(
            "There is no prompt: --prompt, --prompt_file, --prompts or stdin gives one, --chat asks for it."
        )
    return text.rstrip("\n") if options.prompt is None else text


def answer_one(prompt: str, answerer: Answerer, encoding: Encoding, sampling: Sampling, job: Runtime) -> None:
    """Stream the answer to one prompt to stdout."""
    ids = encoding.tokens(prompt)
    if answerer.longest_answer(len(ids), sampling) < 1:
        raise UserError(f"The prompt has {len(ids)} tokens, and the model {answerer.context} positions.")
    [answer] = answerer.answer([ids], [0], sampling, inference.print_part if job.is_main else None)
    if job.is_main:
        print(flush=True)
    if answer.is_cut:
        log.info("The answer was cut; --max_new_tokens allows a longer one.")


def answer_file(
    prompts: list[Prompt],
    options: Namespace,
    opened: Opened,
    answerer: Answerer,
    encoding: Encoding,
    sampling: Sampling,
    job: Runtime,
) -> None:
    """Answer a file of prompts, going on after the answers that are there."""
    source = Path(options.prompts).expanduser()
    lengths = inference.count_tokens(prompts, encoding, answerer, source)
    target = Path(options.output_file).expanduser() if options.output_file else None
    about = inference.describe_job(options, sampling, opened, source)
    rows = [prompt.row for prompt in prompts]
    with inference.AnswersFile(target if job.is_main else None, about, options.overwrite, rows) as answers:
        held = job.from_main(lambda: answers.held)
        if held:
            log.info(f"{target}: goes on after the {held} answers that are there")
        cut = inference.answer_prompts(
            prompts[held:], lengths[held:], answerer, encoding, sampling, options.batch_size, options.output_key,
            answers if job.is_main else None, job,
        )  # fmt: skip
    if cut:
        log.info(f"{cut} answers were cut; --max_new_tokens allows longer ones.")


def chat(answerer: Answerer, encoding: Encoding, sampling: Sampling, job: Runtime) -> None:
    """Talk, on rank 0, with the other ranks computing along."""
    if not encoding.is_chat:
        raise UserError("--chat: this model's tokenizer has no chat template. --prompt takes text to go on with.")
    if not job.is_main:
        inference.follow(answerer, job)
        return
    inference.Chat(inference.lead(answerer, job), encoding, sampling, answerer.context, job.world_size == 1).run()
    if job.world_size > 1:
        job.from_main(lambda: None)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(OPTIONS)
