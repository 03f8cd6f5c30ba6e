"""Compare predicted with measured memory: the plan of recipes/plan.py with the run itself.

    python benchmarks/planner/plan.py

A random Llama runs full fine-tuning, LoRA, LoRA on an 8-bit base, and QLoRA, with and without
activation checkpointing, on 1, 2 and 4 ranks, with packed sequences of two lengths, and DPO and
KTO: 60 runs of recipes/finetuning.py under torchrun, with 2 steps and a checkpoint each. Sequences
are full, and all of their tokens are in the loss. 3 more runs are LoRA on the experts of a random
Qwen3-MoE, 24 have samples with two images, of a random Qwen2.5-VL, and 8 are GRPO, whose model
generates before each step: with FSDP units that are freed after their forward pass, and with units
that are kept unsharded for the length of an answer. --only shared --hidden 256 runs 16 others, whose
ranks share each sequence.

The measured value is the peak of tensors on the rank with the highest memory, from the construction
of the model to the
end: on CUDA torch.cuda.max_memory_allocated, on the CPU every byte of torch's allocator, on any
thread. (That needs a C++ compiler; see plan_job.py.) The limit is 5% on CUDA and 10% on the CPU.
Cases with more ranks than GPUs are skipped. --phases prints the same for every phase, --dump the
living tensors at each measured peak.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("src", "recipes", ".")]

import finetuning
import torch
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.planner.plan_job import compile_counter
from benchmarks.shared.text_files import print_columns, write_json_lines
from benchmarks.shared.torchrun_command import torchrun_command
from llama_ft import training
from llama_ft.config import load
from llama_ft.extensions.images.planned_images import PlannedImages
from llama_ft.plan import predict as planner
from llama_ft.plan.types import Peak, Plan, PlanRequest

METHODS = {
    "full": [],
    "lora": ["--use_peft"],
    "8bit": ["--use_peft", "--quantization", "8bit"],
    "4bit": ["--use_peft", "--quantization", "4bit"],
}
PREFERENCES = {
    "dpo_full": ["--objective", "dpo"],
    "dpo_lora": ["--objective", "dpo", "--use_peft"],
    "kto_full": ["--objective", "kto"],
    "kto_lora": ["--objective", "kto", "--use_peft"],
}
# its model generates answers before each step
GRPO = {
    "grpo_full": ["--objective", "grpo"],
    "grpo_lora": ["--objective", "grpo", "--use_peft"],
}
GRPO_FLAGS = ["--num_generations", 4, "--prompts_per_step", 4, "--generate_batch_size", 16]
ANSWER_SHARE = 2  # an answer has at most the second half of a sequence
REWARD = """
def score(prompt, answer, sample):
    return len(set(answer))
"""
EXPERTS = {"experts_lora": ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0"]}
MICRO_BATCH = 2
# of a random Qwen2.5-VL, whose samples have two images
IMAGES = {
    "images_full": [],
    "images_lora": ["--use_peft"],
    "images_8bit": ["--use_peft", "--quantization", "8bit"],
    "images_all": ["--train_vision", "all"],
}
# whose ranks share each packed sequence: a Llama, a Qwen2.5-VL, and a Qwen3.5 with a gated delta net
SHARED = {
    "full_shared": [],
    "images_shared": [],
    "images_lora_shared": ["--use_peft"],
    "delta_shared": [],
}
IMAGE_SIDE = 140  # pixels
IMAGE_TOKENS = 25
# Pixels are in numpy's memory, and what is measured are torch's allocations: so they are left out of
# the plan. Fp32 numbers of an image: 10 x 10 patches, each 14 x 14 pixels of 3 channels, twice.
IMAGE_BYTES = 4 * 10 * 10 * 14 * 14 * 3 * 2
# Samples whose pixels are planned: a micro-batch and a validation sample. Until training ends, 3
# micro-batches wait.
PLANNED_SAMPLES = MICRO_BATCH + 1
WAITING_SAMPLES = 3 * MICRO_BATCH
RANKS = (1, 2, 4)
LENGTHS = (128, 512)
STEPS = 2
LIMITS = {"cpu": 0.10, "cuda": 0.05}
MIB = 2**20
LEFT_BYTES = 2**19  # that a case may find of the one before it: 320 KiB after one with images


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        method: a key of METHODS, PREFERENCES, GRPO, EXPERTS, IMAGES or SHARED.
        checkpointing: off or full.
        ranks: processes.
        length: tokens of a pack.
        keeps_units: for the length of an answer.
    """

    method: str
    checkpointing: str
    ranks: int
    length: int
    keeps_units: bool = False

    @property
    def name(self) -> str:
        name = f"{self.method}-{self.checkpointing}-{self.ranks}-{self.length}"
        return f"{name}-kept" if self.keeps_units else name

    @property
    def has_images(self) -> bool:
        return self.method.startswith("images")

    def model(self, folder: Path) -> Path:
        """The model's folder."""
        if self.has_images:
            return folder / "vision"
        if self.method == "delta_shared":
            return folder / "delta"
        return folder / ("moe" if self.method in EXPERTS else "model")

    def flags(self, folder: Path, device: str) -> list[str]:
        """Of recipes/finetuning.py."""
        flags = ["--model_name", self.model(folder), "--dataset"]
        samples = "rows"
        if self.method in PREFERENCES:
            samples = "pairs"
        elif self.has_images:
            samples = "images"
        elif self.method in GRPO:
            samples = "prompts"
        flags += [folder / f"{samples}-{self.length}.jsonl"]
        flags += ["--device", device, "--enable_fsdp", "--min_num_params", 100_000]
        flags += {**METHODS, **PREFERENCES, **GRPO, **EXPERTS, **IMAGES, **SHARED}[self.method]
        if self.method in SHARED:
            flags += ["--sequence_parallel_size", self.ranks]
        if self.method in GRPO:
            flags += ["--reward", f"{folder}/reward.py:score", *GRPO_FLAGS]
            flags += ["--max_completion_length", self.length // ANSWER_SHARE]
        flags += [
            "--precision",
            "bf16_mixed",
            "--activation_checkpointing",
            self.checkpointing,
            "--context_length",
            self.length,
        ]
        flags += [
            "--batch_size_training",
            MICRO_BATCH,
            "--max_train_step",
            STEPS,
            "--log_steps",
            STEPS,
            # the run then knows no save before the one at its end, which makes no copies on a CPU
            "--num_epochs",
            1,
        ]
        flags += ["--output_dir", folder / self.name, "--no_plan"]
        return list(map(str, flags))


CASES = [
    Case(method, checkpointing, ranks, length)
    for ranks in RANKS
    for method in METHODS
    for checkpointing in ("off", "full")
    for length in LENGTHS
] + [Case(method, "off", ranks, LENGTHS[-1]) for ranks in RANKS for method in PREFERENCES]
CASES += [
    Case(method, "off", ranks, LENGTHS[-1], keeps_units)
    for ranks in RANKS[:2]
    for method in GRPO
    for keeps_units in (False, True)
]
CASES += [Case(method, "off", ranks, LENGTHS[0]) for ranks in RANKS for method in EXPERTS]
CASES += [
    Case(method, checkpointing, ranks, LENGTHS[-1])
    for ranks in RANKS
    for method in IMAGES
    for checkpointing in ("off", "full")
]
SHARED_CASES = [
    Case(method, checkpointing, ranks, LENGTHS[-1])
    for ranks in RANKS[1:]
    for method in SHARED
    for checkpointing in ("off", "full")
]


def write_inputs(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """A random Llama and a random Qwen3-MoE in bf16, a tokenizer of single bytes, and rows that
    fill a pack each."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": max(LENGTHS),
    }
    dense = LlamaConfig(**shape, intermediate_size=hidden * 11 // 4)
    LlamaForCausalLM(dense).bfloat16().save_pretrained(folder / "model")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    sparse = Qwen3MoeConfig(**shape, **experts, head_dim=64)
    Qwen3MoeForCausalLM(sparse).bfloat16().save_pretrained(folder / "moe")
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": hidden // 4, "linear_value_head_dim": hidden // 4}
    kinds = ["linear_attention", "full_attention"] * (layers // 2)
    deltas = Qwen3_5TextConfig(**shape, **heads, layer_types=kinds, head_dim=64)
    AutoModelForCausalLM.from_config(deltas).bfloat16().save_pretrained(folder / "delta")
    tokens = {
        token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for model in ("model", "moe", "delta"):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
            folder / model
        )
    for length in LENGTHS:
        pairs = []
        rows = []
        for number in range(STEPS * MICRO_BATCH * max(RANKS)):
            # a token of the prompt, and </s> after each response
            responses = {"chosen": "c" * (length - 2), "rejected": "r" * (length - 2)}
            pairs.append({"prompt": chr(ord("A") + number), **responses})
            rows.append({"input_ids": [(number + place) % 256 for place in range(length)]})
        longest = length - length // ANSWER_SHARE
        prompts = [{"prompt": "p" * (longest - number % 2)} for number in range(8)]
        write_json_lines(folder / f"prompts-{length}.jsonl", prompts)
        write_json_lines(folder / f"pairs-{length}.jsonl", pairs)
        write_json_lines(folder / f"rows-{length}.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    write_images(folder, hidden, layers)


def write_images(folder: Path, hidden: int, layers: int) -> None:
    """A random Qwen2.5-VL in bf16 with its processor, and samples with two images that fill a packed
    sequence each."""
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    special = ["</s>", "<pad>", "<|start|>", *marks]
    tokens = {
        token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(special)
    ids = {token: len(tokens) + number for number, token in enumerate(special)}
    rotary = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10_000.0}
    text = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "vocab_size": 512,
        "max_position_embeddings": max(LENGTHS),
        "rope_parameters": rotary,
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["</s>"],
        "bos_token_id": None,
    }
    vision = {
        "depth": layers,
        "hidden_size": hidden // 2,
        "intermediate_size": hidden,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [1],
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = folder / "vision"
    Qwen2_5_VLForConditionalGeneration(config).bfloat16().save_pretrained(model)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role[0] }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|start|>a{% endif %}"
    )
    fast.save_pretrained(model)
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    (model / "processor_config.json").write_text(json.dumps(processor))
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
    images |= {"temporal_patch_size": 2, "merge_size": 2}
    images["size"] = {"shortest_edge": 784, "longest_edge": 1_000_000}
    (model / "preprocessor_config.json").write_text(json.dumps(images))
    Image.linear_gradient("L").resize((IMAGE_SIDE, IMAGE_SIDE)).save(folder / "image.png")
    parts = [{"type": "image", "image": "image.png"}] * 2
    # of the prompt 2 marks, a role and a letter, of the response 2 marks and a role
    around = 2 * (IMAGE_TOKENS + 2) + 4 + 3
    for length in LENGTHS:
        rows = []
        for number in range(STEPS * MICRO_BATCH * max(RANKS)):
            question = [*parts, {"type": "text", "text": chr(ord("A") + number)}]
            chat = [{"role": "user", "content": question}]
            chat.append({"role": "assistant", "content": "r" * (length - around)})
            rows.append({"messages": chat})
        write_json_lines(folder / f"images-{length}.jsonl", rows)


def write_job(cases: list[Case], folder: Path, device: str, dump: bool = False) -> Path:
    """For plan_job.py: the cases of one launch, which have the same number of ranks."""
    library = str(compile_counter(folder)) if device == "cpu" else ""
    runs = []
    for case in cases:
        flags = case.flags(folder, device)
        runs.append({"name": case.name, "flags": flags, "keeps_units": case.keeps_units})
    job = folder / f"cases-{cases[0].ranks}.json"
    job.write_text(json.dumps({"device": device, "library": library, "dump": dump, "cases": runs}))
    return job


def read_found(case: Case, folder: Path) -> list[dict[str, Any]]:
    """What plan_job.py has found, rank by rank."""
    return [
        json.loads((folder / f"{case.name}-{rank}.json").read_text()) for rank in range(case.ranks)
    ]


def left_bytes(case: Case, folder: Path) -> int:
    """Return the bytes of an earlier run that a case found, on the rank with the most."""
    return max(int(rank["baseline_bytes"]) for rank in read_found(case, folder))


def measure(cases: list[Case], folder: Path, device: str, dump: bool) -> None:
    """Run the cases; one launch for each number of ranks. A case that found too much of the one
    before it, which changes from time to time, runs again in a launch of its own."""
    for ranks in sorted({case.ranks for case in cases}):
        print(f"measuring on {ranks} ranks", file=sys.stderr)
        launch([case for case in cases if case.ranks == ranks], folder, device, dump)
    for case in cases:
        if left_bytes(case, folder) > LEFT_BYTES:
            print(f"measuring {case.name} again, alone", file=sys.stderr)
            shutil.rmtree(folder / case.name)  # its run directory
            launch([case], folder, device, dump)


def launch(cases: list[Case], folder: Path, device: str, dump: bool) -> None:
    """Run cases with the same number of ranks, one after the other."""
    ranks = cases[0].ranks
    job = write_job(cases, folder, device, dump)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "LLAMA_FT_CACHE": str(folder / "cache"),
    }
    script = REPOSITORY / "benchmarks" / "planner" / "plan_job.py"
    command = [*torchrun_command(ranks), str(script), str(job)]
    with open(folder / f"output-{ranks}.txt", "w") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    if ended.returncode:
        sys.exit((folder / f"output-{ranks}.txt").read_text()[-6000:])


def predict(cases: list[Case], folder: Path, device: str) -> dict[Case, Plan]:
    """What recipes/plan.py would say of each case."""
    plans = {}
    for case in cases:
        words = case.flags(folder, device)
        config, _ = load(words, finetuning.DEMO_CONFIG)
        request = PlanRequest(
            training.resolve_format(config),
            case.model(folder),
            case.ranks,
            case.ranks,
            "cuda" if device == "cuda" else "cpu",
            media=PlannedImages(2, IMAGE_TOKENS) if case.has_images else None,
        )
        plan = planner.predict(request, finetuning.RECIPE)
        plans[case] = plan.with_kept_units() if case.keeps_units else plan
    return plans


def highest_by_phase(peaks: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the highest of all steps' peaks, by phase."""
    return {phase: max(steps.values()) for phase, steps in peaks.items()}


class Line:
    """A case, what was predicted of it, and what each rank held: the most in every phase."""

    def __init__(self, case: Case, plan: Plan, ranks: list[dict[str, Any]]) -> None:
        self.case = case
        self.plan = plan
        self.ranks = ranks
        left = max(rank["baseline_bytes"] for rank in ranks)
        if left > LEFT_BYTES:
            raise SystemExit(f"{case.name}: {left} bytes of the run before it were still there")
        self.by_rank = [highest_by_phase(rank["peaks"]) for rank in ranks]
        self.fullest = max(self.by_rank, key=lambda phases: max(phases.values()))
        self.measured = max(self.fullest.values())
        self.ratio = self._without_pixels(plan.peak) / self.measured

    def _without_pixels(self, planned: Peak) -> int:
        if not self.case.has_images:
            return planned.bytes
        samples = PLANNED_SAMPLES
        if planned.phase != "save":
            samples += WAITING_SAMPLES
        return planned.bytes - 2 * samples * IMAGE_BYTES

    @property
    def phase(self) -> str:
        """The measured peak's."""
        return max(self.fullest, key=lambda phase: self.fullest[phase])

    def phases(self) -> list[tuple[str, float, int]]:
        """Phase, bytes predicted, bytes measured, of phases that have both."""
        both = []
        for peak in self.plan.peaks:
            measured = self.fullest.get(peak.phase, 0)
            if measured:
                both.append((peak.phase, self._without_pixels(peak), measured))
        return both

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.case),
            "name": self.case.name,
            "plan": asdict(self.plan),
            "ranks_measured": self.ranks,
        }


def print_table(lines: list[Line], limit: float) -> None:
    titles = [
        "method",
        "checkpointing",
        "ranks",
        "length",
        "kept units",
        "predicted MiB",
        "measured MiB",
        "of rank 0",
        "ratio",
    ]
    table = [[*titles, "peak predicted in", "measured in", ""]]
    for line in lines:
        found = [f"{nbytes / MIB:,.1f}" for nbytes in (line.ratio * line.measured, line.measured)]
        found += [
            f"{max(line.by_rank[0].values()) / MIB:,.1f}",
            f"{line.ratio:.3f}",
            line.plan.peak.phase,
            line.phase,
        ]
        verdict = "" if abs(line.ratio - 1) <= limit else "outside"
        table.append([*map(str, asdict(line.case).values()), *found, verdict])
    print_columns(table)


def print_phases(lines: list[Line]) -> None:
    table = [["case", "phase", "predicted MiB", "measured MiB", "ratio"]]
    for line in lines:
        for phase, predicted, measured in line.phases():
            figures = [
                f"{predicted / MIB:,.2f}",
                f"{measured / MIB:,.2f}",
                f"{predicted / measured:.3f}",
            ]
            table.append([line.case.name, phase, *figures])
    print()
    print_columns(table)


def print_dumps(lines: list[Line]) -> None:
    """Predicted holders, and what rank 0 had allocated, by place, at the peak of each phase."""
    for line in lines:
        for peak in line.plan.peaks:
            dump = line.ranks[0].get("dump", {})
            places = dump.get(peak.phase, [])
            print(f"\n{line.case.name}, {peak.phase}: {peak.bytes / MIB:,.2f} MiB predicted")
            for holder, nbytes in peak.holders.items():
                print(f"  {nbytes / MIB:10,.3f}  {holder}")
            print(f"  {line.by_rank[0].get(peak.phase, 0) / MIB:,.2f} MiB measured:")
            for place in places:
                print(
                    f"  {place['bytes'] / MIB:10,.3f}  in {place['tensors']:3d}  {place['place']}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--cases", type=int, help="only the first so many")
    parser.add_argument(
        "--only", default="", help="only cases with this in their name, such as lora-full-2"
    )
    parser.add_argument("--hidden", type=int, default=128, help="of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--phases", action="store_true", help="print every phase")
    parser.add_argument(
        "--dump", action="store_true", help="print what was alive at the peaks (CPU); slower"
    )
    parser.add_argument("--json", type=Path, help="write all that was found into this file")
    asked = parser.parse_args()
    device = asked.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    machine_ranks = torch.cuda.device_count() if device == "cuda" else max(RANKS)
    possible = SHARED_CASES if "shared" in asked.only else CASES
    cases = [case for case in possible if asked.only in case.name and case.ranks <= machine_ranks][
        : asked.cases
    ]
    if not cases:
        parser.error(
            f"--only {asked.only}: no case has this in its name. They are named {CASES[0].name}, ..."
        )
    with tempfile.TemporaryDirectory(prefix="plan-") as temporary:
        folder = Path(temporary)
        write_inputs(folder, asked.hidden, asked.layers, asked.vocabulary)
        predicted = predict(cases, folder, device)
        measure(cases, folder, device, asked.dump)
        lines = [Line(case, predicted[case], read_found(case, folder)) for case in cases]
    if asked.json:
        asked.json.write_text(json.dumps([line.to_json() for line in lines]))
    print_table(lines, LIMITS[device])
    if asked.phases:
        print_phases(lines)
    if asked.dump:
        print_dumps(lines)
    worst = max(lines, key=lambda line: abs(line.ratio - 1))
    print(
        f"\nWorst: {worst.case.name}, {worst.ratio:.3f} of what was measured; the limit is {LIMITS[device]:.0%}"
    )
    sys.exit(int(abs(worst.ratio - 1) > LIMITS[device]))


if __name__ == "__main__":
    main()
