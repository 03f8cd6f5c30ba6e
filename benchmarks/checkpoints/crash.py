"""Kill a run with SIGKILL many times, resume it from its checkpoints, and compare it with an
uninterrupted run.

    python benchmarks/checkpoints/crash.py --kills 200 --flips 80

The runs are recipes/finetuning.py on 2 ranks under torchrun, in turn full fine-tuning, LoRA and
distillation: a tiny model with dropout, gradient accumulation, shuffled samples, evaluation with a
best checkpoint, a save in the background at every second step, keep_last 2. Each launch is killed at
a random moment: while it loads, between two steps, while a checkpoint or the final model is written.
The kill hits torchrun and both ranks at once, or one rank, after which torchrun must end the
others. Then --resume auto continues until the run is done. Runs follow until the number of kills is
reached.

After every kill each directory checkpoints/step-* must be valid. At the end metrics.jsonl must be
equal to that of the uninterrupted run in every number, except perf/ and memory/. So must best.json,
and every byte of the final model and of the ranks' files in checkpoints. Any difference is printed,
and the exit code is 1.

With --flips, single bits are flipped in the newest checkpoint of the uninterrupted run, in every
kind of file. Each must be found, the file must be named, and the previous checkpoint must be used.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.shared.text_files import read_json_lines
from benchmarks.shared.torchrun_command import torchrun_command
from llama_ft.checkpoint import checkpoint_errors, complete_checkpoints
from llama_ft.export import find_valid

FLAGS = (
    "--enable_fsdp --precision fp32 --lr 1e-2 --batch_size_training 2 --gradient_accumulation_steps 2 --num_epochs 3 "
    "--validation 0.1 --eval_steps 4 --save_steps 2 --keep_last 2 --context_length 64 --device cpu "
    "--resume auto"
).split()
METHODS = {
    "full": [],
    "lora": ["--use_peft", "--lora_dropout", "0.1"],
    "distill": ["--objective", "distill", "--teacher_model", "@teacher", "--distill_top_k", "16"],
}
ROWS = 150  # in 3 epochs of 8 steps of 8 packs, the last of them with fewer
MOMENTS = {"loading": 3, "step": 6, "save": 10, "result": 1}  # how often each is chosen
SECONDS_TO_END = 60  # for torchrun, when one rank was killed
POLL_SECONDS = 0.002
TIMINGS = ("perf/", "memory/")


def write_inputs(folder: Path) -> None:
    """A tiny Llama with dropout, another one as its teacher, a tokenizer of single bytes, and rows
    of uneven length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=66,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=260,
        attention_dropout=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    LlamaForCausalLM(config).save_pretrained(folder / "teacher")
    vocabulary = {
        token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    whole.save_pretrained(folder / "model")
    whole.save_pretrained(folder / "teacher")
    generator = random.Random(0)
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(ROWS):
            ids = [generator.randrange(256) for _ in range(8 + number % 40)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def method_flags(method: str, inputs: Path) -> list[str]:
    """Return the flags of a method, with the paths below the directory of `write_inputs`."""
    return [word.replace("@", f"{inputs}/") for word in METHODS[method]]


class Launch:
    """torchrun with 2 ranks of the recipe, whose processes are known by a variable in their
    environment."""

    def __init__(self, inputs: Path, run: Path, method: str, more: Sequence[str] = ()) -> None:
        self.mark = f"CRASH_LAUNCH={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        known = {
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # peft writes sets into adapter_config.json, in whatever order they have
        known["PYTHONHASHSEED"] = "0"
        command = torchrun_command(2)
        recipe = REPOSITORY / "recipes" / "finetuning.py"
        command += [str(recipe), *FLAGS, *method_flags(method, inputs)]
        command += ["--model_name", str(inputs / "model"), "--dataset", str(inputs / "rows.jsonl")]
        command += more
        self.log = run.with_suffix(".log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, "--output_dir", str(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **known, "LLAMA_FT_CACHE": str(inputs / "cache"), name: value},
            )

    def processes(self) -> dict[int, str]:
        """Process id -> RANK of all its living processes, torchrun's being empty."""
        return marked_processes(self.mark)

    def kill_all(self, order: random.Random) -> None:
        """SIGKILL to torchrun and ranks, until none is left: torchrun may be about to start
        some."""
        while alive := list(self.processes()):
            order.shuffle(alive)
            for process in alive:
                kill(process)
        self.process.wait()

    def kill_rank(self, rank: str) -> float | None:
        """SIGKILL to one rank. Returns the seconds after which all the others had ended; None:
        there is no such rank at the moment, or it has ended by itself."""
        found = [process for process, its in self.processes().items() if its == rank]
        if not found or self.process.poll() is not None:
            return None
        started = time.monotonic()
        for process in found:
            kill(process)
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill_all(random.Random())
            raise SystemExit(
                f"rank {rank} was killed, and {SECONDS_TO_END} s later the job still ran:\n{self.tail()}"
            ) from None
        while self.processes():
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    def tail(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-60:])


def marked_processes(mark: str) -> dict[int, str]:
    """Process id -> RANK, or an empty text, of the living processes with `mark` among their
    environment's NAME=value."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has ended, or is another user's
            if mark in variables:
                found[int(folder.name)] = next(
                    (v[5:] for v in variables if v.startswith("RANK=")), ""
                )
    return found


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reaches(
    launch: Launch, moment: str, run: Path, startup_seconds: float, chance: random.Random
) -> bool:
    """Wait for a random moment of that kind; False if the launch ended before."""
    folder = run / "checkpoints"
    delay = chance.random()
    if moment == "loading":
        wanted = time.monotonic() + delay * startup_seconds
        return wait_for(launch, lambda: time.monotonic() > wanted)
    if moment == "step":
        lines = count_lines(run) + chance.randint(1, 8)
        return wait_for(launch, lambda: count_lines(run) >= lines) and pause(delay * 0.05)
    if moment == "result":
        shutil.rmtree(run / "model", ignore_errors=True)
        return wait_for(launch, (run / "model").exists) and pause(delay * 0.05)
    seen = set(folder.glob(".writing-*"))
    wanted_saves = chance.randint(1, 4)

    def has_begun() -> bool:
        seen.update(folder.glob(".writing-*"))
        return len(seen) >= wanted_saves

    return wait_for(launch, has_begun) and pause(delay * 0.02)


def wait_for(launch: Launch, happens: Callable[[], bool]) -> bool:
    while not happens():
        if launch.process.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    return True


def pause(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def count_lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def differences(run: Path, reference: Path, all_checkpoints: bool = True) -> list[str]:
    """What a finished run has otherwise than the one that was never stopped.

    Args:
        run: its directory, or a copy of what it has uploaded.
        reference: the directory of the other one.
        all_checkpoints: False: `run` may lack checkpoints. An upload leaves out older ones if they
            are written faster than uploaded.
    """
    found = []
    lines = read_metrics(run)
    expected = read_metrics(reference)
    steps = [line["step"] for line in lines]
    if len(set(steps)) != len(steps):
        found.append(f"metrics.jsonl: steps are there more than once: {steps}")
    if len(lines) != len(expected):
        found.append(f"metrics.jsonl: {len(lines)} lines, not {len(expected)}")
    for line, wanted in zip(lines, expected, strict=False):
        for key in sorted(line.keys() | wanted.keys()):
            is_equal = line.get(key) == wanted.get(key)
            if not is_equal or (key in line) != (key in wanted):
                where = f"metrics.jsonl: step {line['step']}"
                found.append(f"{where}: {key} is {line.get(key)}, not {wanted.get(key)}")
    files = {
        "checkpoints/best.json",
        *relative_files(reference / "model", reference),
        *relative_files(run / "model", run),
    }
    if not all_checkpoints and not (run / "model" / "probes.json").exists():
        files -= {"model/probes.json"}  # holds text of the data, and is never uploaded
    for folder in complete_checkpoints(reference):
        if not all_checkpoints and not (run / "checkpoints" / folder.name).exists():
            continue
        files |= {f"checkpoints/{folder.name}/{file.name}" for file in folder.glob("shard-*")}
    for file in sorted(files):
        contents = [
            (path / file).read_bytes() if (path / file).exists() else None
            for path in (run, reference)
        ]
        if contents[0] != contents[1]:
            found.append(
                f"{file} differs"
                if None not in contents
                else f"{file}: only one of the runs has it"
            )
    left = [path.name for path in (run / "checkpoints").glob(".*")]
    return found + [f"checkpoints/{name} was left" for name in left]


def relative_files(folder: Path, parent: Path) -> Iterator[str]:
    return (str(path.relative_to(parent)) for path in folder.rglob("*") if path.is_file())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Its lines, without what differs between any two runs."""
    kept = []
    for values in read_json_lines(run / "metrics.jsonl"):
        kept.append({key: values[key] for key in values if not key.startswith(TIMINGS)})
    return kept


def unfinished(run: Path) -> set[tuple[str, int]]:
    """Names, and times of the last change, of what a save that was killed has left."""
    return {(path.name, path.stat().st_ctime_ns) for path in (run / "checkpoints").glob(".*")}


def unsound(run: Path) -> list[str]:
    """Complaints about checkpoints that have the name of a complete one."""
    return [
        f"{folder.name}: {line}"
        for folder in complete_checkpoints(run)
        for line in checkpoint_errors(folder)
    ]


def flip_bits(run: Path, flips: int, chance: random.Random) -> list[str]:
    """Flip bits in a run's newest checkpoint, one at a time; returns those that are missed."""
    newest, before, *_ = complete_checkpoints(run)
    kinds = [
        sorted(newest.glob(pattern))
        for pattern in ("*.safetensors", "trainer.json", "checksums.txt")
    ]
    missed = []
    for number in range(flips):
        file = chance.choice(kinds[number % len(kinds)])
        valid = file.read_bytes()
        place = chance.randrange(len(valid))
        bit = chance.randrange(8)
        if number % 2 and file.suffix == ".safetensors":
            place = chance.randrange(8 + int.from_bytes(valid[:8], "little"))  # in its header
        flipped = bytearray(valid)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        if (
            not any(file.name in line for line in checkpoint_errors(newest))
            or find_valid(run).folder != before
        ):
            missed.append(
                f"bit {bit} of byte {place} of {file} was flipped, and that was not found"
            )
        file.write_bytes(valid)
    return missed + checkpoint_errors(newest)


def reference_run(inputs: Path, method: str) -> tuple[Path, float]:
    """A run that nobody disturbs, and the seconds until it logs its first line."""
    run = inputs / f"{method}-uninterrupted"
    started = time.monotonic()
    launch = Launch(inputs, run, method)
    wait_for(launch, lambda: count_lines(run) > 0)
    startup = time.monotonic() - started
    if launch.process.wait():
        raise SystemExit(f"The uninterrupted run failed:\n{launch.tail()}")
    return run, startup


class Crashes:
    """Runs that are killed until there were enough kills; `counts` and `longest_end` are for the
    report."""

    def __init__(self, inputs: Path, kills: int, seed: int) -> None:
        self.inputs = inputs
        self.wanted = kills
        self.chance = random.Random(seed)
        self.kills = 0
        self.longest_end = 0.0
        self.counts = Counter[str]()

    def finish_run(self, run: Path, method: str, startup_seconds: float) -> list[str]:
        """Kill and resume until it is done; returns what is wrong."""
        while True:
            before = unfinished(run)
            launch = Launch(self.inputs, run, method)
            weights = list(MOMENTS.values())
            moment = self.chance.choices(list(MOMENTS), weights)[0]
            if self.kills < self.wanted and reaches(
                launch, moment, run, startup_seconds, self.chance
            ):
                who = self.kill(launch)
            else:
                who = ""
            if not who:
                if launch.process.wait():
                    return [f"a launch failed that was not killed:\n{launch.tail()}"]
                return []
            self.kills += 1
            leftovers = [name for name, _ in unfinished(run) - before]
            self.counts.update({moment, who, *({"in a save"} if leftovers else ())})
            newest = next(iter(complete_checkpoints(run)), Path("no checkpoint")).name
            about = f"{method}, {moment}, {who}; {newest}, {count_lines(run)} lines {' '.join(leftovers)}"
            print(f"kill {self.kills} of {self.wanted}: {about}", flush=True)
            if problems := unsound(run):
                return problems

    def kill(self, launch: Launch) -> str:
        """The whole job, or one rank; says which, or nothing if it has ended by itself."""
        rank = self.chance.choice(["0", "1", "", ""])
        if launch.process.poll() is not None:
            return ""
        if rank:
            seconds = launch.kill_rank(rank)
            if seconds is not None:
                if launch.process.returncode == 0:
                    return ""
                self.longest_end = max(self.longest_end, seconds)
                return f"rank {rank}"
        launch.kill_all(self.chance)
        return "job" if launch.process.returncode == -signal.SIGKILL else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=0, help="bits to flip, for each method")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    methods = asked.methods.split(",")
    runs = 0
    inputs = Path(tempfile.mkdtemp(prefix="crash-", dir=asked.folder))
    write_inputs(inputs)
    references: dict[str, tuple[Path, float]] = {}
    crashes = Crashes(inputs, asked.kills, asked.seed)
    while crashes.kills < crashes.wanted:
        method = methods[runs % len(methods)]
        run = inputs / f"run-{runs}"
        if method not in references:
            references[method] = reference_run(inputs, method)
            folder, _ = references[method]
            missed = flip_bits(folder, asked.flips, random.Random(asked.seed))
            if missed:
                raise SystemExit("\n".join(missed))
            print(f"{asked.flips} of {asked.flips} flipped bits were found ({method})", flush=True)
        reference, startup = references[method]
        problems = crashes.finish_run(run, method, startup) or differences(run, reference)
        if problems:
            raise SystemExit("\n".join([*problems, f"{run} is not {reference}; both are kept"]))
        shutil.rmtree(run)
        runs += 1
        print(f"run {runs} ({method}) is identical to the uninterrupted one", flush=True)
    shutil.rmtree(inputs)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(crashes.counts.items()))
    print(
        f"{crashes.kills} kills in {runs} runs ({counts}): every run identical to the uninterrupted one."
    )
    print(f"After the kill of one rank the job had ended within {crashes.longest_end:.1f} s.")


if __name__ == "__main__":
    main()
