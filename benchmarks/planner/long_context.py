"""Measure sequence parallelism: the peak of one long sequence that 4 ranks share, against its plan
and against one rank, and the loss of a sequence against that of Transformers.

    python benchmarks/planner/long_context.py                # 32,768 tokens
    python benchmarks/planner/long_context.py --length 4096  # a minute

A random Llama in fp32 is trained for two steps on sequences of --samples samples each, which the
ranks cut. Memory is counted as in benchmarks/planner/plan.py. The loss is that of one rank in the
first step, for one sample of --loss_length tokens.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes")]

import finetuning
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks.planner.plan import highest_by_phase, launch, left_bytes, read_found
from benchmarks.shared.text_files import print_columns, write_json_lines
from llama_ft.config import load
from llama_ft.plan import predict as planner
from llama_ft.plan.types import Plan, PlanRequest

MIB = 2**20
RANKS = 4
PLAN_LIMIT = 0.05  # of the measured peak
SHARE_LIMIT = 0.35  # of the peak of one rank
LOSS_LIMIT = 1e-6


@dataclass(frozen=True)
class Case:
    """A run of recipes/finetuning.py for two steps in fp32, all of whose ranks share each sequence.

    Attributes:
        ranks: processes.
        length: tokens of a sequence.
        settings: more flags.
        keeps_units: for the length of an answer; these runs have none.
    """

    ranks: int
    length: int
    settings: str = "--enable_fsdp --activation_checkpointing off"
    keeps_units: bool = False

    @property
    def name(self) -> str:
        words = self.settings.replace("--", "").split()
        return "-".join([str(self.ranks), str(self.length), *words])

    def flags(self, folder: Path, device: str) -> list[str]:
        """Return the flags of the recipe."""
        data = ["--model_name", folder / "model", "--dataset", folder / f"rows-{self.length}.jsonl"]
        memory = ["--precision", "fp32", "--no_plan", *self.settings.split()]
        ranks = ["--sequence_parallel_size", self.ranks, "--device", device]
        size = ["--batch_size_training", 1, "--context_length", self.length]
        steps = ["--max_train_step", 2, "--num_epochs", 1, "--log_steps", 1]
        words = [*data, *memory, *ranks, *size, *steps, "--output_dir", folder / self.name]
        return list(map(str, words))


def write_inputs(
    folder: Path,
    lengths: dict[int, int],
    hidden_size: int = 128,
    intermediate_size: int = 352,
) -> None:
    """Write a random Llama, a tokenizer of single bytes, and two sequences of each length; `lengths`
    has the number of samples of each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=max(lengths),
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    for length, count in lengths.items():
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, 256, (2 * count, length // count), generator=generator)
        samples = [{"input_ids": sample} for sample in ids.tolist()]
        write_json_lines(folder / f"rows-{length}.jsonl", samples)


def planned(case: Case, folder: Path, device: str) -> Plan:
    """Return the plan of a case."""
    config, _ = load(case.flags(folder, device), finetuning.DEMO_CONFIG)
    on = "cuda" if device == "cuda" else "cpu"
    request = PlanRequest(config, folder / "model", case.ranks, case.ranks, on)
    return planner.predict(request, finetuning.RECIPE)


def measured(case: Case, folder: Path) -> int:
    """Return the peak of the rank with the most, in bytes."""
    if left_bytes(case, folder) > MIB:
        sys.exit(f"{case.name}: memory of the run before it was still there")
    peaks = [highest_by_phase(rank["peaks"]) for rank in read_found(case, folder)]
    return max(max(phases.values()) for phases in peaks)


def first_loss(case: Case, folder: Path) -> float:
    """Return the training loss of the first step."""
    lines = (folder / case.name / "metrics.jsonl").read_text().splitlines()
    return next(float(one["train/loss"]) for one in map(json.loads, lines) if "train/loss" in one)


@torch.no_grad()
def losses_of_transformers(folder: Path, length: int) -> list[float]:
    """Return the mean loss of each sample, as Transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    losses = []
    for line in (folder / f"rows-{length}.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of a sequence")
    parser.add_argument("--samples", type=int, default=7, help="samples of a sequence")
    parser.add_argument("--loss_length", type=int, default=8192)
    asked = parser.parse_args()
    cases = [Case(1, asked.length), Case(RANKS, asked.length)]
    of_loss = Case(1, asked.loss_length)
    with tempfile.TemporaryDirectory(prefix="long-") as temporary:
        folder = Path(temporary)
        write_inputs(folder, {asked.length: asked.samples, asked.loss_length: 1})
        plans = [planned(case, folder, asked.device) for case in cases]
        for case in dict.fromkeys([*cases, of_loss]):
            launch([case], folder, asked.device, dump=False)  # type: ignore[list-item]
        peaks = [measured(case, folder) for case in cases]
        loss = first_loss(of_loss, folder)
        expected = losses_of_transformers(folder, asked.loss_length)
    table = [["ranks", "tokens", "planned MiB", "measured MiB", "plan / measured", "of one rank"]]
    for case, plan, peak in zip(cases, plans, peaks, strict=True):
        ratio = plan.peak.bytes / peak
        figures = [f"{size / MIB:,.1f}" for size in (plan.peak.bytes, peak)]
        share = f"{peak / peaks[0]:.3f}"
        table.append([str(case.ranks), f"{case.length:,}", *figures, f"{ratio:.3f}", share])
    print_columns(table)
    error = min(abs(loss - each) / each for each in expected)
    print(
        f"\nloss of {asked.loss_length:,} tokens: {loss:.7f}, Transformers {expected}: {error:.1e}"
    )
    is_planned = abs(plans[1].peak.bytes / peaks[1] - 1) <= PLAN_LIMIT
    is_small = peaks[1] <= SHARE_LIMIT * peaks[0]
    sys.exit(int(not (is_planned and is_small and error <= LOSS_LIMIT)))


if __name__ == "__main__":
    main()
