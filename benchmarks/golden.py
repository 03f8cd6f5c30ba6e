"""Compare two checkouts bit for bit: what they train, export, answer, evaluate and plan.

    python benchmarks/golden.py ../before .              # exit code 1 if a number differs
    python benchmarks/golden.py ../before . --turns 5    # step time and peak memory, in alternating runs

    python benchmarks/golden.py ../before --save before.json   # run one checkout once,
    python benchmarks/golden.py before.json .                  # and compare others with it

Both checkouts run the recipes with the same flags on the same small models and data, on this
machine. Numbers of other machines or of other versions of torch are never compared. Equal must be
the losses and gradient norms of all steps, validation losses and scores, the files of final models,
merged models and adapters, what a store holds, answers, evaluated losses, and planned bytes, by
category, of runs and of configs.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for `import benchmarks`

from benchmarks.golden_inputs import write_inputs
from benchmarks.shared.text_files import read_json_lines
from benchmarks.shared.torchrun_command import torchrun_command

# Processes are forks of one that has imported these; importing them takes each 5 to 8 s of a core.
IMPORTED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "datasets",
    "bitsandbytes",
    "peft",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
COMPARED = ("train/loss", "train/grad_norm", "train/lr", "eval/loss", "eval/score", "tokens")
Outcome = dict[str, Any]  # name of a number -> its value


@dataclass(frozen=True)
class Case:
    """A run of recipes/finetuning.py, and what is done with its result."""

    flags: str
    ranks: int = 0  # 0: one process without torchrun's variables
    then: tuple[str, ...] = ()  # names of AFTERWARDS
    recipe: str = "finetuning.py"
    restarts: int = 0  # of torchrun, which then starts the ranks


COMMON = (
    "--model_name model --dataset samples.jsonl --plan_memory false --device cpu --lr 1e-2 --num_epochs 2 "
    "--max_train_step 12 --context_length 128 --save_steps 6"
)
FEW_STEPS = "--max_train_step 4 --save_steps 2"
FSDP = "--enable_fsdp"
SCATTERED = "--enable_fsdp --low_cpu_fsdp"
PADDED = "--batching_strategy padding"
LORA = "--use_peft --target_modules all-linear --lora_dropout 0.1 --peft.r 4"
CHATS = "--dataset chats.jsonl --chat_template chatml --resize_embeddings"
PAIRS = f"--dataset pairs.jsonl {FEW_STEPS}"
EXPERTS = f"--model_name mixture --router_aux_loss_coef 0.02 {FEW_STEPS}"
DISTILLED = "--objective distill --teacher_model tied"
IMAGES = (
    f"--model_name images --dataset image_chats.jsonl --chat_template image_chats.jinja {FEW_STEPS}"
)
FP8 = f"--model_name fp8 {FEW_STEPS} {LORA}"
# without spaces: flags are split at them
GROUPS = '[{"match":"embed_tokens","lr":"0.1x"},{"match":"norm","weight_decay":0.0}]'
CASES = {
    "full": Case("--optimizer AdamW --validation 0.1", then=("evaluated", "planned")),
    "full, fp32, clipped": Case(
        "--precision fp32 --gradient_clipping --gradient_clipping_threshold 0.1"
    ),
    "full, 2 ranks, padding": Case(
        f"{SCATTERED} {PADDED} --gradient_accumulation_steps 2", 2, ("resumed",)
    ),
    "anyprecision, bf16_pure, 2 ranks": Case(
        f"{FSDP} --precision bf16_pure --optimizer anyprecision", 2
    ),
    "AdamW8bit, 2 ranks": Case(f"{SCATTERED} --optimizer AdamW8bit", 2),
    "SGD, checkpointing": Case(
        "--optimizer SGD --momentum 0.9 --activation_checkpointing full", then=("planned",)
    ),
    "Adafactor, 2 ranks": Case(f"{FSDP} --optimizer Adafactor --weight_decay 0.1", 2),
    "LoRA": Case(LORA, then=("resumed", "exported", "merged", "answers", "checkpoint", "planned")),
    "LoRA, 2 ranks, padding": Case(f"{SCATTERED} {LORA} {PADDED} --validation 0.1", 2),
    "8 bit, 2 ranks": Case(f"{SCATTERED} {LORA} --quantization 8bit", 2, ("planned",)),
    "4 bit": Case(f"{LORA} --quantization 4bit", then=("merged", "answers", "planned")),
    "4 bit, 2 ranks": Case(
        f"{FSDP} {LORA} --quantization 4bit --gradient_accumulation_steps 2", 2, ("resumed",)
    ),
    "chats": Case(f"{CHATS} --warmup_steps 3 --validation 0.1", then=("answers", "evaluated")),
    # of architectures
    "experts": Case(EXPERTS, then=("exported", "planned")),
    "experts, 2 ranks": Case(f"{EXPERTS} {SCATTERED} {PADDED} --validation 0.1", 2, ("answers",)),
    "experts, LoRA": Case(f"{EXPERTS} {LORA} --lora_dropout 0 --validation 0.1", then=("merged",)),
    "experts, 4 bit, 2 ranks": Case(
        f"{EXPERTS} {FSDP} {LORA} --lora_dropout 0 --quantization 4bit", 2
    ),
    "images": Case(
        f"--model_name images {FEW_STEPS} --validation 0.1",
        then=("exported", "checkpoint", "evaluated"),
    ),
    "images, 4 bit, 2 ranks": Case(
        f"--model_name images {FEW_STEPS} {SCATTERED} {LORA} --quantization 4bit",
        2,
        ("merged", "answers", "planned"),
    ),
    "hybrid": Case(
        f"--model_name hybrid {FEW_STEPS} --activation_checkpointing full", then=("planned",)
    ),
    "hybrid, by size, 2 ranks": Case(
        f"--model_name hybrid {FEW_STEPS} {FSDP} --fsdp_wrap_policy size --min_num_params 20000", 2
    ),
    "tied": Case(f"--model_name tied {FEW_STEPS} {PADDED}", then=("exported",)),
    # of adapters
    "new tokens, LoRA": Case(
        f"{CHATS} {LORA} {FEW_STEPS} --validation 0.1",
        then=("merged", "answers", "evaluated", "planned"),
    ),
    "new tokens, LoRA, tied, 2 ranks": Case(
        f"--model_name tied {CHATS} {LORA} {FEW_STEPS} {SCATTERED}", 2, ("merged",)
    ),
    "PiSSA, 2 ranks": Case(
        f"{LORA} {FEW_STEPS} {FSDP} --init_lora_weights pissa --lora_dropout 0", 2, ("merged",)
    ),
    "DoRA": Case(f"{LORA} {FEW_STEPS} --use_dora", then=("answers",)),
    "noise, frozen layers": Case(
        f"{FEW_STEPS} --neftune_noise_alpha 5 --freeze_layers --num_freeze_layers 1"
    ),
    # of objectives
    "reward": Case(f"{PAIRS} --objective reward", then=("resumed", "scores", "planned")),
    "reward, LoRA, 2 ranks": Case(
        f"{PAIRS} --objective reward {LORA} {SCATTERED}", 2, ("scores", "merged")
    ),
    "DPO, 2 ranks": Case(f"{PAIRS} --objective dpo {FSDP}", 2, ("resumed",)),
    "DPO, LoRA": Case(f"{PAIRS} --objective dpo {LORA} --validation 0.1", then=("planned",)),
    "DPO, reference model": Case(f"{PAIRS} --objective dpo --reference_model tied"),
    "ORPO, experts": Case(f"{PAIRS} --objective orpo --model_name mixture"),
    "label smoothing": Case(f"{EXPERTS} --label_smoothing_factor 0.1"),
    "distillation, 2 ranks": Case(
        f"{FEW_STEPS} {SCATTERED} {DISTILLED} --distill_top_k 8 --distill_weight 0.7",
        2,
        ("planned",),
    ),
    "distillation, LoRA": Case(f"{FEW_STEPS} {LORA} {DISTILLED}"),
    # of images
    "images, packed": Case(
        f"{IMAGES} --validation image_chats.jsonl", then=("evaluated", "image answers", "planned")
    ),
    "images, padding, 2 ranks": Case(f"{IMAGES} {PADDED} {SCATTERED}", 2),
    "images, LoRA, projector": Case(f"{IMAGES} {LORA} --train_vision projector", then=("merged",)),
    # of weights as they are stored
    "FP8 as stored": Case(f"{FP8} --quantization as_stored", then=("merged", "planned")),
    "FP8 as stored, 2 ranks": Case(f"{FP8} --quantization as_stored {SCATTERED}", 2),
    "FP8, 4 bit": Case(f"{FP8} --quantization 4bit"),
    # of what is written and computed during a run
    "groups": Case(f"{FEW_STEPS} --groups {GROUPS}", then=("resumed",)),
    "groups, own optimizer, 2 ranks": Case(
        f"{FEW_STEPS} {FSDP} --groups {GROUPS} --optimizer optimizers.py:momentum", 2
    ),
    "scored answers": Case(
        f"{CHATS} {FEW_STEPS} --validation 0.1 --eval_steps 2 --score contains --score_tokens 8"
    ),
    "store": Case("--save_to file://SIDE/store", then=("fetched",)),
    "store, LoRA, 2 ranks": Case(f"{LORA} {FSDP} --save_to file://SIDE/store", 2, ("fetched",)),
    "restarted, 2 ranks": Case(
        f"{SCATTERED} --optimizer optimizers.py:failing_once --resume auto --save_steps 4",
        2,
        restarts=1,
    ),
    # with the planner: memory that ranks share, and memory that is kept between steps
    "planned first": Case("--plan_memory true"),
    "planned first, 2 ranks": Case(f"--plan_memory true {SCATTERED}", 2),
    "planned first, LoRA, 2 ranks, padding": Case(
        f"--plan_memory true {SCATTERED} {LORA} {PADDED}", 2
    ),
    "planned first, DPO": Case(f"{PAIRS} --objective dpo {LORA} --plan_memory true"),
}
# Plans of configs: name -> ranks. Their models' config.json is in tests/model_shapes.py.
PLANNED_CONFIGS = {
    "gemma3_4b_lora_24gb": 1,
    "llama3.1_8b_4bit_24gb": 1,
    "llama3.1_8b_8bit_24gb": 1,
    "llama3.1_8b_dpo_4bit_24gb": 1,
    "llama3.1_8b_full_80gb": 1,
    "llama3.1_8b_full_8x80gb": 8,
    "llama3.2_1b_full_24gb": 1,
    "llama3.3_70b_8bit_2x80gb": 2,
    "llama3.3_70b_full_2x8x80gb": 16,
    "phi4_14b_4bit_24gb": 1,
    "qwen3_8b_full_8x80gb": 8,
    "smollm3_3b_lora_24gb": 1,
}
for config, config_ranks in PLANNED_CONFIGS.items():
    CASES[f"plan of {config}"] = Case(
        f"--config CHECKOUT/configs/{config}.yaml --model_name config-{config} --quick --json "
        f"--nproc {config_ranks}",
        recipe="plan.py",
    )
# In a fixed precision: "auto" measures the CPU, and a loaded machine may choose another one.
ANSWERS = "--device cpu --precision fp32 --prompts prompts.jsonl --max_new_tokens 8"
# What is done with a run: recipe, flags. RUN is its directory, SIDE the one above, OUT a new file or
# directory, FLAGS its flags.
AFTERWARDS = {
    "resumed": (
        "finetuning.py",
        f"{COMMON} FLAGS --resume RUN/checkpoints/STEP --output_dir OUT",
    ),
    "exported": ("export.py", "RUN/checkpoints/STEP OUT"),
    "merged": ("export.py", "RUN OUT --merge"),
    "answers": ("inference.py", f"RUN {ANSWERS} --output_file OUT"),
    "scores": (
        "inference.py",
        "RUN --device cpu --precision fp32 --prompts pairs.jsonl --batch_size 16 --output_file OUT",
    ),
    "checkpoint": ("inference.py", f"RUN/checkpoints/STEP {ANSWERS} --output_file OUT"),
    "evaluated": ("evaluate.py", "RUN --device cpu --output_file OUT"),
    "planned": ("plan.py", f"{COMMON} FLAGS --nproc RANKS --json"),
    "image answers": (
        "inference.py",
        f"RUN {ANSWERS} --prompts image_chats.jsonl --output_file OUT",
    ),
    "fetched": (
        "finetuning.py",
        f"{COMMON} FLAGS --resume file://SIDE/store --save_to file://OUT-store --output_dir OUT",
    ),
}


@dataclass
class Job:
    """The processes of a recipe, or its torchrun, and the file that has their output."""

    processes: list[ForkServerProcess | subprocess.Popen[bytes]]
    output: Path
    command: str

    def finish(self) -> str:
        """Wait for them, and return the output. Ends golden.py if one has failed."""
        exit_codes = []
        for process in self.processes:
            if isinstance(process, subprocess.Popen):
                exit_codes.append(process.wait())
            else:
                process.join()
                exit_codes.append(process.exitcode)
        text = self.output.read_text(errors="replace")
        if any(exit_codes):
            sys.exit(f"{self.command}\n{text[-6000:]}")
        return text


def start(checkout: Path, inputs: Path, output: Path, recipe: str, flags: str, ranks: int) -> Job:
    """Start a recipe of a checkout, on so many ranks as torchrun starts them."""
    script = checkout / "recipes" / recipe
    variables = {"LLAMA_FT_CACHE": str(output.parent / "cache")}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    if ranks:
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "golden",
        }
    context = multiprocessing.get_context("forkserver")
    output.write_text("")
    processes = []
    for rank in range(max(1, ranks)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
        arguments = (checkout, script, flags.split(), inputs, variables | place, output)
        process = context.Process(target=_run_script, args=arguments)
        process.start()
        processes.append(process)
    return Job(processes, output, f"{script} {flags}")


def start_torchrun(
    checkout: Path, inputs: Path, output: Path, recipe: str, flags: str, case: Case
) -> Job:
    """Start a recipe of a checkout by torchrun, which starts its ranks again if one fails."""
    script = checkout / "recipes" / recipe
    launcher = [*torchrun_command(case.ranks), "--max_restarts", str(case.restarts)]
    variables = {
        "PYTHONPATH": str(checkout / "src"),
        "LLAMA_FT_CACHE": str(output.parent / "cache"),
    }
    with output.open("wb") as file:
        torchrun = subprocess.Popen(
            [*launcher, str(script), *flags.split()],
            cwd=inputs,
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Job([torchrun], output, f"{script} {flags}")


def _run_script(
    checkout: Path,
    script: Path,
    flags: list[str],
    inputs: Path,
    variables: dict[str, str],
    output: Path,
) -> None:
    """What a forked process does: run the script as the interpreter would."""
    source = str(checkout / "src")
    os.environ.update(variables)
    os.environ["PYTHONPATH"] = source
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(inputs)
    sys.argv = [str(script), *flags]
    sys.path[0] = str(script.parent)
    sys.path.insert(1, source)
    runpy.run_path(str(script), run_name="__main__")


def words_for(after: str, case: Case, run: Path, out: Path) -> str:
    """Return the flags of something done with a run."""
    _, flags = AFTERWARDS[after]
    step = "step-000002" if FEW_STEPS in case.flags else "step-000006"
    named = {
        "FLAGS": case.flags,
        "RUN": run,
        "SIDE": run.parent,
        "OUT": out,
        "RANKS": max(1, case.ranks),
        "STEP": step,
    }
    for name, value in named.items():
        flags = flags.replace(name, str(value))
    return without_overridden(flags)


def without_overridden(flags: str) -> str:
    """Keep the last of each flag that is given more than once."""
    groups: list[list[str]] = []
    for word in flags.split():
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    last = {group[0]: group for group in groups}
    return " ".join(word for group in groups if last[group[0]] is group for word in group)


def run_case(
    checkouts: list[Path], inputs: Path, folder: Path, case: Case
) -> list[dict[str, Outcome]]:
    """Run a case in all checkouts at the same time. Return what came out: "" is the run itself."""
    sides = [folder / str(number) for number in range(len(checkouts))]
    found: list[dict[str, Outcome]] = [{} for _ in checkouts]
    for side in sides:
        side.mkdir(parents=True)
    for after in ("", *case.then):
        jobs = []
        for checkout, side in zip(checkouts, sides, strict=True):
            run = side / "run"
            out = side / after.replace(" ", "-")
            if after:
                recipe = AFTERWARDS[after][0]
                flags = words_for(after, case, run, out)
            elif case.recipe == "plan.py":
                recipe = case.recipe
                flags = case.flags.replace("CHECKOUT", str(checkout))
            else:
                recipe = case.recipe
                flags = without_overridden(f"{COMMON} {case.flags} --output_dir {run}")
                flags = flags.replace("SIDE", str(side))
            ranks = case.ranks if recipe == "finetuning.py" else 0
            output = side / f"output-{after or 'run'}.txt"
            if case.restarts and not after:
                jobs.append(start_torchrun(checkout, inputs, output, recipe, flags, case))
            else:
                jobs.append(start(checkout, inputs, output, recipe, flags, ranks))
        for job, side, outcomes in zip(jobs, sides, found, strict=True):
            outcomes[after] = read_outcome(side / (after or "run").replace(" ", "-"), job.finish())
            if after == "" and (side / "store").exists():
                outcomes[after] |= hashes_in_store(side / "store")
    return found


def read_outcome(place: Path, output: str) -> Outcome:
    """Return what has to be equal in a file or directory that a recipe wrote, or in its output."""
    if place.is_dir():
        return numbers_of_steps(place) | hashes(place)
    if place.is_file():
        text = place.read_text()
    else:
        text = output.strip().rpartition("\n")[2]  # a plan, after the lines on stderr
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in text.splitlines()]
    numbers = dict(leaves(values))
    assert numbers, f"{place}: nothing to compare"
    return numbers


def numbers_of_steps(run: Path) -> Outcome:
    """Return the numbers of each step of a run."""
    file = run / "metrics.jsonl"
    numbers = {}
    for text in file.read_text().splitlines() if file.exists() else []:
        line = json.loads(text)
        for name in COMPARED:
            if name in line:
                numbers[f"{name} of step {line['step']}"] = line[name]
    return numbers


def hashes(folder: Path) -> Outcome:
    """Return the hashes of a model's files, in the directory or its model/."""
    files = [*folder.glob("*.safetensors"), *folder.glob("model/*.safetensors")]
    assert files, f"{folder}: no safetensors"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def hashes_in_store(store: Path) -> Outcome:
    """Return the hashes of what a run uploaded, but for files that name times or directories."""
    files = sorted(store.rglob("*.safetensors"))
    assert files, f"{store}: no safetensors"
    found = {}
    for file in files:
        found[f"store/{file.relative_to(store)}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON by their path, without texts that name directories."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from leaves(part, f"{name}/{key}")
    elif not (isinstance(value, str) and "golden-" in value):
        yield name, value


def compare(name: str, old: Outcome, new: Outcome) -> bool:
    """Print a line of the table; return whether both are equal."""
    different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    verdict = "equal"
    if different:
        first = different[0]
        verdict = (
            f"{len(different)} differ: {first}: {old.get(first)} before, {new.get(first)} after"
        )
    print(f"{name:40} {len(old):4} numbers  {verdict}", flush=True)
    return not different


def cases(only: str | None) -> dict[str, Case]:
    """Return the cases asked for."""
    parts = only.split(";") if only is not None else [""]
    chosen = {}
    for name, case in CASES.items():
        if any(part in name for part in parts):
            chosen[name] = case
    return chosen


def equal_everywhere(old: Path, new: Path, inputs: Path, folder: Path, only: str | None) -> bool:
    """Run every case in both checkouts (or in the second one, if the first is a file) and
    compare."""
    equal = True
    saved = json.loads(old.read_text()) if old.is_file() else None
    checkouts = [new] if saved is not None else [old, new]
    for number, (name, case) in enumerate(cases(only).items()):
        found = run_case(checkouts, inputs, folder / f"case-{number}", case)
        before = found[0] if saved is None else saved[name]
        for after, outcome in found[-1].items():
            equal &= compare(f"{name}, {after}".removesuffix(", "), before[after], outcome)
    return equal


def save(checkout: Path, inputs: Path, folder: Path, only: str | None, file: Path) -> None:
    """Run every case in one checkout and write what came out."""
    saved = {}
    for number, (name, case) in enumerate(cases(only).items()):
        [saved[name]] = run_case([checkout], inputs, folder / f"case-{number}", case)
        print(name, flush=True)
    file.write_text(json.dumps(saved))


def cost(checkouts: list[Path], inputs: Path, folder: Path, turns: int) -> None:
    """Print medians of alternating runs, by new processes: a forked one begins with the memory of
    its parent."""
    common = "--dataset demo --context_length 512 --batch_size_training 2 --max_train_step 20"
    methods = {
        "one step": (0, "--max_train_step 1"),
        "full": (0, ""),
        "full, 2 ranks": (2, SCATTERED),
        "LoRA, 2 ranks": (2, LORA),
    }
    for number, (name, (ranks, method)) in enumerate(methods.items()):
        seen: list[list[dict[str, float]]] = [[] for _ in checkouts]
        for turn in range(turns):
            for side, checkout in enumerate(checkouts):
                run = folder / f"{number}-{turn}-{side}"
                flags = f"{COMMON} --model_name demo --save_steps 0 {common} {method}"
                flags = f"{without_overridden(flags)} --output_dir {run}"
                launched = launch(checkout, inputs, flags, ranks)
                seen[side].append(launched | time_and_memory(run))
        for what in seen[0][0]:
            medians = []
            for side in seen:
                medians.append(statistics.median(values[what] for values in side))
            old, new = medians
            numbers = f"{old:9.3f} before {new:9.3f} after  {new / old:5.3f}x"
            print(f"{name:16} {what:26} {numbers}", flush=True)


def launch(checkout: Path, inputs: Path, flags: str, ranks: int) -> dict[str, float]:
    """Run the recipe of a checkout in new processes. Returns what the whole run took."""
    command = torchrun_command(ranks) if ranks else [sys.executable]
    command += [str(checkout / "recipes" / "finetuning.py"), *flags.split()]
    variables = {
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "LLAMA_FT_CACHE": str(inputs / "cache"),
    }
    before = os.times()
    subprocess.run(command, cwd=inputs, env=os.environ | variables, check=True, capture_output=True)
    after = os.times()
    spent_by_program = after.children_user - before.children_user
    spent_by_system = after.children_system - before.children_system
    return {
        "s of the whole run": after.elapsed - before.elapsed,
        "CPU s of the whole run": spent_by_program + spent_by_system,
    }


def time_and_memory(run: Path) -> dict[str, float]:
    """Return the median step time, without the first steps, and the peak of host memory."""
    lines = read_json_lines(run / "metrics.jsonl")
    steps = [line for line in lines if "train/loss" in line]
    seconds = [line["perf/step_seconds"] for line in steps[3:] or steps]
    peaks = [max(line.get("memory/host_peak_bytes", [0])) for line in lines]
    return {
        "s per step": statistics.median(seconds),
        "MiB of host memory, peak": max(peaks) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout of the version before, or its --save")
    parser.add_argument("new", type=Path, nargs="?", help="a checkout of the version after")
    parser.add_argument("--save", type=Path, help="write the numbers of the only checkout")
    parser.add_argument("--only", help="parts of cases' names, separated by ;")
    parser.add_argument(
        "--turns", type=int, default=0, help="compare time and memory over so many alternating runs"
    )
    arguments = parser.parse_args()
    old = arguments.old.resolve()
    new = arguments.new and arguments.new.resolve()
    if (new is None) == (arguments.save is None):
        parser.error("give two checkouts, or one and --save")
    # One thread each, as "01": a plain 1, which torchrun sets by itself, means a share of the cores
    # to llama_ft.
    os.environ["OMP_NUM_THREADS"] = "01"
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        folder = Path(directory)
        inputs = folder / "inputs"
        inputs.mkdir()
        write_inputs(inputs)
        if arguments.save:
            save(old, inputs, folder, arguments.only, arguments.save)
        elif arguments.turns:
            cost([old, new], inputs, folder, arguments.turns)
        elif not equal_everywhere(old, new, inputs, folder, arguments.only):
            sys.exit(1)


if __name__ == "__main__":
    main()
