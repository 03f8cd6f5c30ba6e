"""Serve what the recipe has trained with vLLM on the CPU, and compare log-probabilities.

    python benchmarks/serving/serve.py                          # resumes: what results/serve.jsonl has is left out
    python benchmarks/serving/serve.py --families Llama "Gemma 3" --again
    python benchmarks/serving/serve.py --write                  # only writes the table of docs/guides/serve.md

Small random models of each family are fine-tuned for five steps, with a learning rate that changes
them much. vLLM (vllm_package.py, in an environment of its own) serves them in fp32. An adapter is
served if its log-probabilities are ours (1e-3) and the base model's differ by ten times as much. A
server starts once per base model and once per whole model.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from benchmarks.serving import vllm_package
from benchmarks.serving.serve_models import FAMILIES
from benchmarks.shared.text_files import read_json, read_json_lines, write_json_lines
from llama_ft.data import cache_dir
from llama_ft.errors import UserError
from llama_ft.extensions.serving.adapter_files import read_adapter, read_base
from llama_ft.extensions.serving.probes.ask import ask
from llama_ft.extensions.serving.probes.check import compared
from llama_ft.extensions.serving.probes.probes import Probes, ProbeScores, find_probes
from llama_ft.extensions.serving.rules import vllm_versions
from llama_ft.extensions.serving.vllm import check_vllm
from llama_ft.inference.server import Rejected, Server
from llama_ft.inference.verdict import Weights, judge

FOLDER = Path(__file__).parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "serve.jsonl"
PAGE = REPOSITORY / "docs" / "guides" / "serve.md"
MARKS = ("<!-- serve.py: begin -->\n", "<!-- serve.py: end -->\n")
TOLERANCE = 1e-3  # of a log-probability in fp32; in bf16 it is judged as by check --server
DTYPE = {"Qwen3.5": "bfloat16"}  # vLLM on a CPU: "CPU GDN attention requires BF16"; others: float32
FP8_FAMILIES = ("Llama", "Qwen3")  # written in FP8; vLLM on a CPU computes it in bf16
# Stacked experts: a gate and an up projection have twice the rank. Of models whose experts vLLM does
# not stack, the server and each adapter must say so.
STACKED = {"Qwen3-MoE": ["--enable-mixed-moe-lora-format"]}
EFFECT = 10  # times the tolerance
ENGINE_FAILS = "engine fails"
START_SECONDS = 900
NOT_INSTALLED = f"{vllm_package.PACKAGE} cannot be installed here"
TEXT_ONLY = ("--language-model-only",)  # no processor for images; of other models it does nothing
LORA = "--use_peft --peft.r 8 --peft.lora_alpha 16"
ATTENTION = "--target_modules q_proj,k_proj,v_proj,o_proj"
SETTINGS = (
    "--context_length 160 --validation 0.5 --max_train_step 5 --num_epochs 50 --lr 1e-2 --weight_decay 0 "
    "--precision fp32 --save_dtype float32 --batch_size_training 2 --sample_tokens 0 --save_steps 0 --device cpu "
    "--overwrite"
)
# artefact, the title of its column -> flags of its run; others are made of the run LoRA
RUNS = {
    "LoRA": LORA,
    "LoRA on attention": f"{LORA} {ATTENTION}",
    "QLoRA": f"{LORA} --quantization 4bit",
    "FP8 as stored": f"{LORA} --quantization as_stored",
    "full": "--lr 2e-3",
}
EXPORTED = "LoRA exported"  # with --for vllm
FP8 = "FP8 as stored"  # of a base model in FP8, which the server has, too
ADAPTERS = ("LoRA on attention", "LoRA", EXPORTED, "QLoRA")  # of one base model, in this order
WHOLE = ("full", "merged")
NEXT_VERSION = "0.33"
BY_SOURCE = f"LoRA, {NEXT_VERSION} by source"  # what --for vllm says
ARTEFACTS = ("LoRA", EXPORTED, "LoRA on attention", "QLoRA", FP8, *WHOLE, BY_SOURCE)
WORDS = "model weight adapter server token loss batch layer cache queue probe prompt answer shard".split()


@dataclass(frozen=True)
class Outcome:
    """What became of an artefact of a family.

    Attributes:
        result: served, not applied, other weights, engine fails, or refused: neither trained, loaded or
            answered.
        difference: largest difference from our log-probabilities; None if there is none.
        effect: the same of the base model.
        message: of the program that refused.
    """

    family: str
    artefact: str
    result: str
    difference: float | None = None
    effect: float | None = None
    message: str = ""

    def cell(self) -> str:
        """Return the text of its cell in the table."""
        if self.difference is None:
            return self.result
        return f"{self.result} ({self.difference:.0e})"


def write_samples(file: Path) -> None:
    """Write chats of a few random words."""
    generator = random.Random(0)
    chats = []
    for number in range(18):
        question = " ".join(generator.choices(WORDS, k=5))
        answer = " ".join(generator.choices(WORDS, k=6))
        messages = [
            {"role": "user", "content": f"{number}: {question}?"},
            {"role": "assistant", "content": answer},
        ]
        chats.append({"messages": messages})
    write_json_lines(file, chats)


def folder_name(title: str) -> str:
    """Return the directory of a family or an artefact."""
    return title.replace(" ", "-")


def make_artefacts(families: Sequence[str], artefacts: Sequence[str], work: Path) -> dict[str, str]:
    """Train, merge and compute artefacts. Return the message of each that failed, by its
    directory."""
    write_samples(work / "samples.jsonl")
    steps = []
    for family in families:
        folder = work / folder_name(family)
        steps.append({"do": "model", "flags": [family, str(folder / "base")]})
        for artefact, flags in RUNS.items():
            if artefact not in artefacts and artefact != "LoRA":  # others are made of it
                continue
            if artefact == FP8 and family not in FP8_FAMILIES:
                continue
            base = base_of(artefact)
            if artefact == FP8:
                steps.append({"do": "fp8", "flags": [f"{folder}/base", f"{folder}/{base}"]})
            paths = f"--model_name {folder}/{base} --dataset {work}/samples.jsonl"
            out = folder / folder_name(artefact)
            steps.append(
                {"do": "train", "flags": f"{paths} {SETTINGS} {flags} --output_dir {out}".split()}
            )
        if EXPORTED in artefacts:
            export = (
                f"--for vllm --overwrite true {folder}/LoRA/model {folder}/{folder_name(EXPORTED)}"
            )
            steps.append({"do": "export", "flags": export.split()})
        if "merged" in artefacts:
            merge = (
                f"--merge --save_dtype float32 --overwrite true {folder}/LoRA/model {folder}/merged"
            )
            steps.append({"do": "export", "flags": merge.split()})
        if "QLoRA" in artefacts:  # the server has the unquantized base model
            again = [f"{folder}/QLoRA", f"{folder}/QLoRA-unquantized"]
            steps.append({"do": "probe", "flags": again})
    file = work / "steps.json"
    file.write_text(json.dumps(steps))
    log = work / "runs.log"
    while any("done" not in step for step in read_json(file)):
        with log.open("w") as output:
            command = [sys.executable, str(FOLDER / "serve_runs.py"), str(file)]
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
        if ended.returncode:  # a run that fails ends its process
            steps = read_json(file)
            failing = next(step for step in steps if "done" not in step)
            failing |= {"done": True, "error": last_error(log)}
            file.write_text(json.dumps(steps))
    failed = {}
    for step in read_json(file):
        if "error" in step:
            failed[step["flags"][-1]] = step["error"]
    return failed


def base_of(artefact: str) -> str:
    """Return the directory of the base model of an artefact."""
    return "base-fp8" if artefact == FP8 else "base"


class Launcher:
    """Starts servers: see serve_vllm.py."""

    def __init__(self, python: Path, work: Path) -> None:
        self._work = work
        self._process = subprocess.Popen(
            [python, FOLDER / "serve_vllm.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(work / "launcher.log").open("w"),
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(last_error(self._work / "launcher.log"))
        return line

    def close(self) -> None:
        """End the launcher."""
        self._process.terminate()
        self._process.wait()

    @contextmanager
    def serve(self, model: Path, title: str, *arguments: str) -> Iterator[str]:
        """Run a server for the block, whose address is yielded. It has the model as `base`.

        Raises:
            OSError: it did not start; the message is its last error.
        """
        port = free_port()
        log = self._work / f"{folder_name(title)}.log"
        always = f"--model {model} --served-model-name base --enforce-eager --max-model-len 256"
        more = f"--max-num-seqs 8 --host 127.0.0.1 --port {port}"
        asked = {"arguments": [*always.split(), *more.split(), *arguments], "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        process = int(self._line())
        address = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(address, process, log)
            yield address
        finally:
            if is_alive(process):
                os.killpg(process, signal.SIGKILL)  # its own group: see serve_vllm.py


def dtype_of(family: str, artefact: str = "") -> str:
    """Return the dtype in which vLLM computes a family."""
    return "bfloat16" if artefact == FP8 else DTYPE.get(family, "float32")


def free_port() -> int:
    """Return a port that no server has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_alive(process: int) -> bool:
    """Return whether a process exists."""
    return Path(f"/proc/{process}").exists()


def wait_until_ready(address: str, process: int, log: Path) -> None:
    """Wait for a server. Raises OSError if it ends, or does not start in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not is_alive(process):
            raise OSError(last_error(log))
        try:
            Server(address, 5).get("/v1/models")
            return
        except UserError:
            time.sleep(2)
    raise OSError(f"not ready after {START_SECONDS} s")


def last_error(log: Path) -> str:
    """Return the message of the error that ended a program, from its log."""
    found = re.findall(
        r"^.*?((?:(?:\w+\.)*\w*(?:Error|Exception)|error): .*)$", log.read_text(), re.MULTILINE
    )
    # the engine's error is before those of the programs that wait for it
    waiting = ("Engine", "WorkerProc", "Cancelled")
    own = [line for line in found if not any(name in line for name in waiting)]
    return (own or found or ["no message"])[-1][:300]


def probes_of(folder: Path, artefact: str) -> Probes:
    """Return the probes with which an artefact is compared."""
    names = {"merged": "LoRA", EXPORTED: "LoRA", "QLoRA": "QLoRA-unquantized"}
    name = names.get(artefact, artefact)
    _, probes = find_probes(str(folder / folder_name(name)))
    if probes.probes[0].scores.base is not None:
        return probes
    # the base model's log-probabilities, by the run of an adapter on the same samples
    _, others = find_probes(str(folder / "LoRA"))
    with_base = []
    for probe, other in zip(probes.probes, others.probes, strict=True):
        assert probe.token_ids == other.token_ids
        scores = ProbeScores(probe.scores.fine_tuned, other.scores.base)
        with_base.append(
            replace(
                probe, scores=scores, next_ids=[], next_texts=[], next_scores=ProbeScores([], [])
            )
        )
    return replace(probes, probes=with_base)


def compare(address: str, model: str, family: str, artefact: str, work: Path) -> Outcome:
    """Ask a server for the probes of an artefact."""
    try:
        probes = probes_of(work / folder_name(family), artefact)
        answers = ask(Server(address, 300), model, probes.probes)
    except UserError as error:
        message = error.messages[0]
        result = (
            ENGINE_FAILS if " HTTP 500" in message or "stopped answering" in message else "refused"
        )
        return Outcome(family, artefact, result, message=message)
    numbers = compared(probes, answers)
    quantization = probes.quantization if artefact == FP8 else None
    verdict = judge([*numbers.prompts, *numbers.following], quantization)
    assert verdict.largest_of_base is not None
    is_ours = verdict.largest <= TOLERANCE
    if dtype_of(family, artefact) == "bfloat16":
        is_ours = verdict.weights is Weights.FINE_TUNED
    result = "other weights"
    if is_ours and verdict.largest_of_base > EFFECT * max(TOLERANCE, verdict.largest):
        result = "served"
    elif verdict.weights is Weights.BASE:
        result = "not applied"
    return Outcome(family, artefact, result, verdict.largest, verdict.largest_of_base)


def serve_adapters(
    launcher: Launcher,
    family: str,
    artefacts: Sequence[str],
    work: Path,
    failed: dict[str, str],
) -> Iterator[Outcome]:
    """Serve the base model of some adapters with each of them, loaded one by one so that a message has
    its own. A server whose engine has failed is replaced."""
    folder = work / folder_name(family)
    title = f"{family} adapters of {base_of(artefacts[0])}"
    dtype = dtype_of(family, artefacts[0])
    lora = [*"--enable-lora --max-lora-rank 16 --max-loras 1 --dtype".split(), dtype]
    flags = [*TEXT_ONLY, *lora, *STACKED.get(family, [])]
    remaining = []
    for artefact in artefacts:
        message = failed.get(str(folder / folder_name(artefact)))
        if message is None:
            remaining.append(artefact)
            continue
        result = "refused by --for vllm" if artefact == EXPORTED else "not trained"
        yield Outcome(family, artefact, result, message=message)
    while remaining:
        try:
            with launcher.serve(folder / base_of(artefacts[0]), title, *flags) as address:
                while remaining:
                    outcome = serve_adapter(address, family, remaining.pop(0), work)
                    if outcome.result == ENGINE_FAILS:
                        yield replace(
                            outcome, message=last_error(work / f"{folder_name(title)}.log")
                        )
                        break
                    yield outcome
        except OSError as error:
            for artefact in remaining:
                yield Outcome(family, artefact, "not loaded", message=str(error))
            return


def serve_adapter(address: str, family: str, artefact: str, work: Path) -> Outcome:
    """Load an adapter into a server of its base model, and compare."""
    path = work / folder_name(family) / folder_name(artefact)
    name = folder_name(artefact)
    saved = path if artefact == EXPORTED else path / "model"
    content: dict[str, Any] = {"lora_name": name, "lora_path": str(saved)}
    if family in STACKED and artefact != "LoRA on attention":
        content["is_3d_lora_weight"] = True
    try:
        load_adapter(address, content)
    except Rejected as error:
        result = ENGINE_FAILS if error.status >= 500 else "refused"
        return Outcome(family, artefact, result, message=str(error))
    return compare(address, name, family, artefact, work)


def judge_by_source(family: str, work: Path) -> Outcome:
    """Return what the rules of the next version say about the adapter as it was trained."""
    folder = work / folder_name(family)
    [version] = vllm_versions(NEXT_VERSION)
    adapter = read_adapter(folder / "LoRA" / "model")
    verdict = check_vllm(version, adapter, read_base(folder / "base", family))
    if verdict.problems:
        message = " ".join(problem.what for problem in verdict.problems)
        return Outcome(family, BY_SOURCE, "refused by --for vllm", message=message)
    result = "served if exported" if verdict.renames else "served"
    return Outcome(family, BY_SOURCE, result)


def load_adapter(address: str, content: dict[str, Any]) -> None:
    """Load an adapter into a running server. Raises Rejected."""
    request = Request(
        f"{address}/v1/load_lora_adapter",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urlopen(request, timeout=300):
            pass
    except HTTPError as error:
        answer = json.loads(error.read())
        raise Rejected(error.code, str(answer.get("error", {}).get("message"))) from error


def serve_whole(
    launcher: Launcher, family: str, artefact: str, work: Path, failed: dict[str, str]
) -> Outcome:
    """Serve a model that has all its weights."""
    folder = work / folder_name(family) / artefact
    if str(folder) in failed:
        return Outcome(family, artefact, "not trained", message=failed[str(folder)])
    model = folder if artefact == "merged" else folder / "model"
    dtype = ["--dtype", dtype_of(family)]
    try:
        with launcher.serve(model, f"{family} {artefact}", *TEXT_ONLY, *dtype) as address:
            return compare(address, "base", family, artefact, work)
    except OSError as error:
        return Outcome(family, artefact, "not loaded", message=str(error))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table for the page, with the messages below it."""
    by_place = {(one.family, one.artefact): one for one in outcomes}
    families = list(dict.fromkeys(one.family for one in outcomes))
    lines = [f"| family | {' | '.join(ARTEFACTS)} |", f"|---|{'---|' * len(ARTEFACTS)}"]
    for family in families:
        cells = []
        for artefact in ARTEFACTS:
            found = by_place.get((family, artefact))
            cells.append(found.cell() if found else "not tried")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    places = dict[str, list[str]]()
    for one in outcomes:
        if one.message:
            message = one.message.replace("`", "")
            places.setdefault(f"{one.result}: `{message}`", []).append(
                f"{one.family} ({one.artefact})"
            )
    notes = [f"- {', '.join(found)}: {message}" for message, found in places.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def write_page(outcomes: Sequence[Outcome]) -> None:
    """Replace the table of the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    how = "on a CPU, in fp32 (Qwen3.5 and FP8: bf16), by `python benchmarks/serving/serve.py`"
    about = f"vLLM {vllm_package.VERSION} {how}."
    PAGE.write_text(f"{before}{MARKS[0]}{about}\n\n{table(outcomes)}\n{MARKS[1]}{after}")


def read_results(file: Path) -> list[Outcome]:
    """Return what is known, in the order of the table."""
    if not file.exists():
        return []
    newest = {}
    for values in read_json_lines(file):
        newest[values["family"], values["artefact"]] = Outcome(**values)
    order = [(family, artefact) for family in FAMILIES for artefact in ARTEFACTS]
    return [newest[key] for key in order if key in newest]


def main() -> None:
    """Serve what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--artefacts", nargs="*", choices=ARTEFACTS, default=ARTEFACTS)
    parser.add_argument("--work", type=Path, default=cache_dir() / "benchmarks" / "serve")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what results/serve.jsonl has")
    parser.add_argument("--write", action="store_true", help="write the table of the page, only")
    options = parser.parse_args()
    if options.write:
        write_page(read_results(options.results))
        return
    known = (
        set()
        if options.again
        else {(one.family, one.artefact) for one in read_results(options.results)}
    )
    families = [
        family
        for family in options.families
        if any((family, artefact) not in known for artefact in options.artefacts)
    ]
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        python = vllm_package.install(cache_dir())
    except OSError as error:
        sys.exit(f"{NOT_INSTALLED}: {error}")
    failed = make_artefacts(families, options.artefacts, options.work)
    launcher = Launcher(python, options.work)
    try:
        for family in families:
            for outcome in outcomes_of(launcher, family, options, failed):
                print(
                    f"{family}, {outcome.artefact}: {outcome.cell()} {outcome.message}", flush=True
                )
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    finally:
        launcher.close()


def outcomes_of(
    launcher: Launcher, family: str, options: argparse.Namespace, failed: dict[str, str]
) -> Iterator[Outcome]:
    """Yield the outcomes of a family."""
    adapters = [artefact for artefact in ADAPTERS if artefact in options.artefacts]
    if adapters:
        yield from serve_adapters(launcher, family, adapters, options.work, failed)
    if FP8 in options.artefacts and family in FP8_FAMILIES:
        yield from serve_adapters(launcher, family, [FP8], options.work, failed)
    if BY_SOURCE in options.artefacts:
        yield judge_by_source(family, options.work)
    for artefact in WHOLE:
        if artefact in options.artefacts:
            yield serve_whole(launcher, family, artefact, options.work, failed)


if __name__ == "__main__":
    main()
