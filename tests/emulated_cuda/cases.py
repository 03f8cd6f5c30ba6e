"""The cases: runs of the recipe, with tiny models and samples.

    python tests/emulated_cuda/cases.py CASE...     # without a name: all

measures what a step of each does and stores it in steps.json. Look at the difference before you
commit it.
"""

import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__":
    for name in ("tests", "src"):
        sys.path.insert(0, str(FOLDER.parents[1] / name))

import image_models  # noqa: E402
import yaml  # noqa: E402
from conftest import REPOSITORY, load_script, write_jsonl  # noqa: E402
from emulated_cuda.device import compile_guard  # noqa: E402
from forked import forked  # noqa: E402
from models.published import test_sources as published  # noqa: E402
from models.test_architectures import ARCHITECTURES, save_random_model  # noqa: E402

gpu_models = load_script(REPOSITORY / "benchmarks" / "gpu" / "gpu_models.py")
JOB = FOLDER / "job.py"
CASES_FILE = FOLDER / "cases.yaml"
STEPS = FOLDER / "steps.json"
COMMON = (
    "--max_train_step 2 --gradient_accumulation_steps 2 --context_length 128 --batch_size_training 1 --lr 1e-3 "
    "--no_plan --run_validation false --activation_checkpointing off --save_every_epoch false --save_model false "
    "--use_liger false --overwrite"
)
GRPO = (
    "--prompts_per_step 2 --num_generations 4 --max_completion_length 8 --generate_batch_size 4 "
    "--batch_size_training 4 --precision fp32"
)
GPU_ONLY = ("--activation_offload", "--fsdp_cpu_offload", "--int8_threshold")  # flags
PADDED = "--batching_strategy padding --batch_size_training 2"
LENGTHS = [30, 60, 50, 40, 20, 70, 33, 90]  # tokens of the samples
REWARD = """
def letters(prompt, answer, sample):
    return sum(character.isalpha() for character in answer) / 8
"""
VOCABULARY = 200  # of the samples' tokens
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "FP8": ("llama", published.LLAMA, published.fp8_note(), published.in_blocks),
    "MXFP4": (
        "gpt_oss",
        published.GPT_OSS,
        published.MXFP4_NOTE,
        published.experts_in_mxfp4,
    ),
}


class Case(NamedTuple):
    """A run of the recipe."""

    flags: str
    model: str = "Llama 3.1"
    samples: str = "samples.jsonl"
    validation: str = ""
    teacher: str = ""
    capability: float = 9.0
    ranks: int = 1
    is_random: bool = False  # draws other random numbers on a GPU
    records: str = "step"  # or sampling, which is no part of a step here

    def words(self, folder: Path) -> list[str]:
        """Return the flags of the recipe. Models and samples are made in `folder`."""
        words = ["--model_name", str(make_model(folder / self.model, self.model))]
        words += ["--dataset", str(make_samples(folder / self.samples))]
        if self.validation:
            words += ["--validation", str(make_samples(folder / self.validation))]
        if self.teacher:
            words += ["--teacher_model", str(make_model(folder / self.teacher, self.teacher))]
        own = shlex.split(self.flags)
        common = _without(shlex.split(COMMON), own)
        if self.is_grpo:
            reward = make_samples(folder / "reward.py")
            common = _without(common, ["--gradient_accumulation_steps", "--batch_size_training"])
            common += ["--reward", f"{reward}:letters", *shlex.split(GRPO)]
        return [*words, *common, *own]

    @property
    def is_grpo(self) -> bool:
        return "--objective grpo" in self.flags

    @property
    def compares(self) -> str:
        """The key of the number that must be the CPU's. The loss of GRPO is near 0."""
        return "train/grad_norm" if self.is_grpo else "train/loss"

    @property
    def is_exact(self) -> bool:
        """Whether the case also runs in fp32, in which an emulated GPU computes what the CPU does."""
        return not self.is_random and "16" not in self.precision

    @property
    def precision(self) -> str:
        words = shlex.split(self.flags)
        return words[words.index("--precision") + 1] if "--precision" in words else ""

    @property
    def capability_pair(self) -> list[int]:
        return [int(number) for number in str(self.capability).split(".")]


def _without(flags: list[str], others: Sequence[str]) -> list[str]:
    """Return `flags`, each with its value, without those that are among others."""
    remaining = []
    is_other = False
    for word in flags:
        if word.startswith("--"):
            is_other = word in others
        if not is_other:
            remaining.append(word)
    return remaining


def _read_cases() -> dict[str, Case]:
    """Return the cases of cases.yaml, and LoRA for every kind of model."""
    settings = yaml.safe_load(CASES_FILE.read_text())
    cases = {name: Case(**values) for name, values in settings.items()}
    for name in ARCHITECTURES:
        cases[f"model {name}"] = Case("--use_peft --target_modules all-linear", name)
    for name in image_models.FAMILIES:
        layout = PADDED if name in image_models.PADDED_ONLY else ""
        layout += " --context_length 256" if name == "Gemma 4" else ""  # it has 70 tokens per image
        cases[f"images {name}"] = Case(f"--use_peft {layout}", name, "images/chats.jsonl")
    return cases


CASES = _read_cases()


def make_model(folder: Path, name: str) -> Path:
    """Save a tiny model of an architecture, of one that takes images, or as published quantized,
    unless it is there."""
    if folder.exists():
        return folder
    if name in image_models.FAMILIES:
        return image_models.save_image_model(folder, name)
    if name in PUBLISHED:
        folder.mkdir(parents=True)
        published.publish(folder, *PUBLISHED[name])
    else:
        save_random_model(name, folder)
    gpu_models.make_tokenizer(folder)
    return folder


def make_samples(file: Path) -> Path:
    """Write the samples that a file is named for, unless they are there."""
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    match file.name:
        case "samples.jsonl":
            return gpu_models.make_samples(file, LENGTHS, VOCABULARY)
        case "validation.jsonl":
            return gpu_models.make_samples(file, [30, 40], VOCABULARY)
        case "equal.jsonl":  # each fills a packed sequence alone: for cuDNN
            return gpu_models.make_samples(file, [128] * 8, VOCABULARY)
        case "pairs.jsonl":
            return gpu_models.make_pairs(file, 8)
        case "image_pairs.jsonl":
            image_models.write_samples(file.parent)
            return write_jsonl(file, _image_pairs())
        case "answers.jsonl":
            return write_jsonl(file, _answers())
        case "rated.jsonl":
            rows = [row | {"label": n % 2 == 0} for n, row in enumerate(_answers())]
            return write_jsonl(file, rows)
        case "chats.jsonl":
            return image_models.write_samples(file.parent)
        case "prompts.jsonl":
            return write_jsonl(file, [{"prompt": "ab" * (n + 1)} for n in range(4)])
        case "reward.py":
            file.write_text(REWARD)
            return file
    raise ValueError(f"there are no samples {file.name}")


def _answers() -> list[dict[str, Any]]:
    return [{"prompt": "ab" * (n + 1), "completion": "cd" * (9 - n)} for n in range(8)]


def _image_pairs() -> list[dict[str, Any]]:
    pairs = []
    for number in range(4):
        image = {"type": "image", "image": f"{number}.png"}
        question = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Noise.", "No"))
        pairs.append({"prompt": [question], "chosen": chosen, "rejected": rejected})
    return pairs


def run_job(folder: Path, cases: dict[str, Any], ranks: int = 1) -> dict[str, list[Any]]:
    """Run job.py for cases, all in one launch; return each rank's results by case. `folder` has the
    compiled guard."""
    (folder / "cases.json").write_text(json.dumps(cases))
    # Without a launcher there are no ranks: one process.
    finished = forked(JOB, folder / "cases.json", ranks=ranks if ranks > 1 else 0, timeout=1200)
    assert finished.exit_code == 0, finished.output
    by_rank = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [results[name] for results in by_rank] for name in cases}


def run_recipe(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    """Run cases of as many ranks as the first one; return each rank's results by case."""
    cases = {}
    for name in names:
        case = CASES[name]
        words = case.words(folder / "inputs")
        in_fp32 = [*_without(words, ["--precision"]), "--precision", "fp32"]
        has_bf16 = case.precision == "bf16_pure"  # some settings need it
        cases[name] = {
            "capability": case.capability_pair,
            "flags": words,
            "exact flags": in_fp32 if case.is_exact else None,
            "records": case.records,
            "compares": case.compares,
            "flags on the CPU": _without(words if has_bf16 else in_fp32, GPU_ONLY),
        }
    return run_job(folder, cases, CASES[names[0]].ranks)


def step_of(results: list[Any]) -> dict[str, Any]:
    """Return the launches of rank 0, and its waits without the numbers of lines, which other changes
    move."""
    waits = Counter[str]()
    for wait, count in results[0]["waits"].items():
        waits[without_lines(wait)] += count
    return {"launches": sum(results[0]["launches"].values()), "waits": dict(waits)}


def without_lines(wait: str) -> str:
    return re.sub(r":\d+", "", wait)


def stored_steps() -> dict[str, dict[str, Any]]:
    """Return what a step of each case did, as stored."""
    return json.loads(STEPS.read_text()) if STEPS.exists() else {}


def groups_of(names: list[str], size: int) -> list[list[str]]:
    """Divide cases into launches of at most `size`, each with cases of one number of ranks."""
    groups = []
    for ranks in sorted({CASES[name].ranks for name in names}):
        same = [name for name in names if CASES[name].ranks == ranks]
        groups += [same[start : start + size] for start in range(0, len(same), size)]
    return groups


def store(names: list[str]) -> None:
    """Measure cases, and write steps.json after each launch."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["LLAMA_FT_CACHE"] = str(folder / "cache")
        compile_guard(folder)
        for group in groups_of(names, 10):
            steps = stored_steps()
            for name, results in run_recipe(folder, group).items():
                if error := results[0]["error"]:
                    print(f"{name}: {error}", flush=True)
                    continue
                steps[name] = step_of(results)
                print(name, steps[name], flush=True)
            ordered = {name: steps[name] for name in CASES if name in steps}
            STEPS.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    store(sys.argv[1:] or list(CASES))
