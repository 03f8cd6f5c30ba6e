"""Losses must equal those of a plain single-process loop with Transformers and torch, for any
sharding."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import losses, run_cases
from plain_losses import (
    loss_tokens,
    losses_per_sample,
    read_jsonl,
    sample_loss,
    write_pairs,
    write_tokenized,
)
from training.objectives.test_preferences import expected as of_formulas

from llama_ft.data import Encoder, two_examples

STEPS = 6
GLOBAL_BATCH = 16
# of the 16 samples; the longest fill a packed sequence, the others share one
LENGTHS = range(5, 37, 2)
CONTEXT_LENGTH = 36
PACKED_SEQUENCES = 9
WORLD_SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
LAUNCHES = [
    pytest.param(1, False, id="1", marks=pytest.mark.slow),
    pytest.param(2, False, id="2"),
    pytest.param(2, True, id="2, further", marks=pytest.mark.slow),
    pytest.param(4, False, id="4", marks=pytest.mark.slow),
]
# Cases on 2 ranks that have a launch of their own among the slow tests: what is new in each is in
# another case, too, or is proven apart from the loop: in test_packed_attention (eager), test_fsdp,
# test_activation_checkpointing, test_load_weights and test_quantized (bf16).
FURTHER = (
    "full, 4 micro-batches",
    "lora, padded",
    "lora, 1 micro-batch",
    "lora without fsdp",
    "lora in bf16_mixed",
    "8 micro-batches",
    "4bit, padded",
    "eager attention",
    "groups of both",
    "layers only",
    "products kept",
    "layers recomputed",
    "stored in 4bit",
    "8bit, whole model each",
    "pissa, every rank reads",
    "8bit in bf16_mixed",
    "4bit in bf16_mixed",
    "without fsdp",
    "8bit",
    "tied head",
    "full in bf16_mixed",
)
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
FSDP = ["--enable_fsdp", "--low_cpu_fsdp"]
HYBRID = ["--sharding_strategy", "HYBRID_SHARD", "--sharding_group_size"]
RECOMPUTED = ["--activation_checkpointing", "full"]
SELECTIVE = ["--activation_checkpointing", "selective"]
PADDED = ["--batching_strategy", "padding"]
KEPT = ["--save_model", "true", "--save_every_epoch", "false"]
FIRST_STEP = ["--max_train_step", "1"]
PAIRS = 8
BITS: dict[str, dict[str, Any]] = {  # DPO on a quantized base: flag -> the same in transformers
    "8bit": {"load_in_8bit": True},
    "4bit": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
    },
}
PISSA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
    "init_lora_weights": "pissa",
}
FULL = (
    f"--weight_decay {WEIGHT_DECAY} --gradient_clipping --gradient_clipping_threshold 0.5"
).split()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many tokenized samples as a padded global batch holds, and fewer packed sequences than a
    packed one: every step sees them all, and their order is free."""
    return write_tokenized(tmp_path_factory.mktemp("parity") / "samples.jsonl", LENGTHS, seed=1)


def reference_losses(
    model: torch.nn.Module, samples: Path, full: bool, steps: int = STEPS
) -> list[float]:
    """What anyone would write: one process, sample by sample, the mean over all loss tokens. The
    model is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if p.ndim > 1],
            "weight_decay": WEIGHT_DECAY if full else 0.0,
        },
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE)
    examples = read_jsonl(samples)
    targets = sum(loss_tokens(example) for example in examples)
    result = []
    for step in range(steps):
        total = 0.0
        for example in examples:
            loss = sample_loss(model, example) / targets
            loss.backward()
            total += loss.item()
        if full:
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimizer.step()
        optimizer.zero_grad()
        result.append(total)
    return result


@pytest.fixture(scope="module")
def wide_model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose weights have rows of whole 4-bit blocks of 64."""
    return save_model(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def stored_model(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, quantized twice over and saved by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    folder = tmp_path_factory.mktemp("stored")
    model = AutoModelForCausalLM.from_pretrained(
        wide_model, dtype=torch.float32, quantization_config=settings
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wide_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fine_tuned(tiny_model: Path, samples: Path) -> tuple[list[float], list[float]]:
    """Full fine-tuning in the plain loop: its losses, and those of each sample after it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    trained = reference_losses(model, samples, full=True)
    return trained, losses_per_sample(model, samples)


@pytest.fixture(scope="module")
def references(
    fine_tuned: tuple[list[float], list[float]],
    tiny_model: Path,
    tied_model: Path,
    wide_model: Path,
    stored_model: Path,
    samples: Path,
    lora_start: Path,
    wide_lora_start: Path,
) -> Callable[[str], list[float]]:
    """Losses of a plain loop by the name of the reference, each trained when it is first asked
    for."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def base(folder: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def quantized(dtype: torch.dtype, folder: Path = wide_model, **settings: Any) -> list[float]:
        # None would mean none
        asked = {"quantization_config": BitsAndBytesConfig(**settings)} if settings else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **asked)
        model = PeftModel.from_pretrained(model, wide_lora_start, is_trainable=True).train()
        return reference_losses(
            model, samples, full=False, steps=STEPS if dtype == torch.float32 else 1
        )

    nf4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    ways: dict[str, Callable[[], list[float]]] = {
        "full": lambda: fine_tuned[0],
        "tied": lambda: reference_losses(base(tied_model), samples, full=True),
        "lora": lambda: reference_losses(
            PeftModel.from_pretrained(base(tiny_model), lora_start, is_trainable=True),
            samples,
            full=False,
        ),
        "pissa": lambda: reference_losses(
            get_peft_model(base(tiny_model), LoraConfig(**PISSA)), samples, full=False
        ),
        "8bit": lambda: quantized(torch.float32, load_in_8bit=True),
        "nf4": lambda: quantized(torch.float32, **nf4, bnb_4bit_compute_dtype=torch.float32),
        "stored": lambda: quantized(torch.float32, stored_model),
        "8bit bf16": lambda: quantized(torch.bfloat16, load_in_8bit=True),
        "nf4 bf16": lambda: quantized(torch.bfloat16, **nf4, bnb_4bit_compute_dtype=torch.bfloat16),
    }
    return functools.cache(lambda name: ways[name]())


@pytest.fixture(scope="module")
def lora_start(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of(tiny_model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def wide_lora_start(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of(wide_model, tmp_path_factory.mktemp("wide_adapter"))


def adapter_of(base: Path, folder: Path) -> Path:
    """An adapter with weights that are not zero, saved by peft itself, for both sides to continue
    from."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    settings = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


def cases_of(
    world_size: int, lora_start: Path, wide_lora_start: Path
) -> dict[str, tuple[str, list[str]]]:
    """Case name -> reference it must match, flags."""

    def batch(accumulation: int) -> list[str]:
        """Of 9 packed sequences the last micro-batch has fewer: on 2 ranks at 4 each, or on 4 at 1, one rank
        has its only one."""
        size = GLOBAL_BATCH // world_size // accumulation
        return (
            f"--batch_size_training {size} --gradient_accumulation_steps {accumulation}"
        ).split()

    lora = ["--use_peft", "--from_peft_checkpoint", str(lora_start)]
    wide_lora = ["--use_peft", "--from_peft_checkpoint", str(wide_lora_start), "--quantization"]
    pissa = ["--use_peft", "--init_lora_weights", "pissa", "--peft.r", "4", "--lora_alpha", "8"]
    fp32 = ["--precision", "fp32"]
    bf16 = ["--precision", "bf16_mixed"]
    cases = {
        "full, 1 micro-batch": ("full", [*FSDP, *fp32, *FULL, *batch(1), *KEPT]),
        "full, 4 micro-batches": ("full", ["--enable_fsdp", *fp32, *FULL, *batch(4)]),
        "full, padded": ("full", [*FSDP, *fp32, *FULL, *batch(2), *PADDED, *KEPT]),
        "lora, padded": ("lora", [*FSDP, *fp32, *lora, *batch(1), *PADDED]),
        "lora, 1 micro-batch": ("lora", [*FSDP, *fp32, *lora, *batch(1)]),
        "lora, 4 micro-batches": ("lora", ["--enable_fsdp", *fp32, *lora, *batch(4)]),
        "pissa": ("pissa", [*FSDP, *fp32, *pissa, *batch(2), *KEPT]),
        "pissa, every rank reads": ("pissa", ["--enable_fsdp", *fp32, *pissa, *batch(1)]),
        "without fsdp": ("full", [*fp32, *FULL, *batch(4)]),
        "lora without fsdp": ("lora", ["--low_cpu_fsdp", *fp32, *lora, *batch(4)]),
        "full in bf16_mixed": ("full", [*FSDP, *SELECTIVE, *bf16, *FULL, *batch(4)]),
        "lora in bf16_mixed": ("lora", [*FSDP, "--precision", "bf16_mixed", *lora, *batch(1)]),
        "8bit": ("8bit", [*FSDP, *fp32, *wide_lora, "8bit", *batch(4)]),
        "4bit": ("nf4", ["--enable_fsdp", *fp32, *wide_lora, "4bit", *batch(1)]),
        "8bit in bf16_mixed": (
            "8bit bf16",
            ["--enable_fsdp", *bf16, *wide_lora, "8bit", *batch(1), *FIRST_STEP],
        ),
        "4bit in bf16_mixed": (
            "nf4 bf16",
            [*FSDP, *bf16, *wide_lora, "4bit", *batch(1), *FIRST_STEP],
        ),
    }
    if world_size == 2:
        full = [*FSDP, *fp32, *FULL]
        cases |= {
            "8 micro-batches": ("full", [*fp32, *FULL, *batch(8)]),
            "4bit, padded": ("nf4", [*FSDP, *fp32, *wide_lora, "4bit", *batch(2), *PADDED]),
            "eager attention": ("full", [*full, "--attn_implementation", "eager", *batch(2)]),
            "tied head": ("tied", [*full, *batch(2), "--min_num_params", "1000"]),
            "groups of both": ("full", [*full, *HYBRID, "2", *batch(2)]),
            "layers only": ("full", [*full, "--fsdp_wrap_policy", "transformer", *batch(1)]),
            "layers recomputed": ("full", [*full, *RECOMPUTED, *batch(2)]),
            "products kept": ("full", [*full, *SELECTIVE, *batch(2)]),
            "stored in 4bit": ("stored", [*FSDP, *fp32, *wide_lora[:-1], *batch(1)]),
            "8bit, whole model each": ("8bit", [*fp32, *wide_lora, "8bit", *batch(2)]),
        }
    if world_size == 4:
        full = [*FSDP, *fp32, *FULL]
        gathered = ["--sharding_strategy", "SHARD_GRAD_OP"]
        cases |= {
            "two copies over two ranks each": ("full", [*full, *HYBRID, "2", *batch(4)]),
            "four copies": ("full", [*full, *HYBRID, "1", *batch(2)]),
            "one copy over one group": ("full", [*full, *HYBRID, "4", *batch(2)]),
            "replicated": ("full", [*full, "--sharding_strategy", "NO_SHARD", *batch(4)]),
            "gathered until backward": ("full", [*full, *gathered, *batch(4)]),
            "accumulated unsharded": ("full", [*full, "--accumulate_unsharded", *batch(2)]),
            "units by size": (
                "full",
                [*full, "--fsdp_wrap_policy", "size", "--min_num_params", "2000", *batch(1)],
            ),
            "products kept, lora": ("lora", [*FSDP, *SELECTIVE, *fp32, *lora, *batch(2)]),
            "4bit, layers recomputed": (
                "nf4",
                [*FSDP, *RECOMPUTED, *fp32, *wide_lora, "4bit", *batch(2)],
            ),
            "8bit, products kept": (
                "8bit",
                [*FSDP, *SELECTIVE, *fp32, *wide_lora, "8bit", *batch(2)],
            ),
            "every 2nd recomputed": (
                "lora",
                [*FSDP, "--activation_checkpointing", "every_k", *fp32, *lora, *batch(1)],
            ),
            "lora, two copies": ("lora", ["--enable_fsdp", *fp32, *HYBRID, "2", *lora, *batch(4)]),
        }
    return cases


def bits_of(world_size: int, further: bool) -> list[str]:
    """Of DPO on a quantized base in a launch. It is in no fast one."""
    return [] if (world_size, further) == (2, False) else [*BITS]


@dataclass(frozen=True)
class Launch:
    """What one launch has trained."""

    cases: dict[str, tuple[str, list[float]]]  # name -> its reference, its losses
    folder: Path  # case -> its run
    output: str
    # losses over samples in random order, the last batch of an epoch being smaller
    shuffled: dict[str, list[float]]


@pytest.fixture(scope="module")
def launches(
    tiny_model: Path,
    tied_model: Path,
    wide_model: Path,
    stored_model: Path,
    samples: Path,
    rows70: Path,
    lora_start: Path,
    wide_lora_start: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, bool], Launch]:
    """All cases of a world size, in one launch; on 2 ranks in two."""

    @functools.cache
    def launch(world_size: int, further: bool) -> Launch:
        folder = tmp_path_factory.mktemp(f"parity{world_size}")
        cases = cases_of(world_size, lora_start, wide_lora_start)
        if world_size == 2:
            assert set(FURTHER) < cases.keys()
            cases = {name: case for name, case in cases.items() if (name in FURTHER) == further}
        flags = []
        for name, (reference, own) in cases.items():
            models = {"tied": tied_model, "stored": stored_model}
            models |= dict.fromkeys(("full", "lora", "pissa"), tiny_model)
            model = models.get(reference, wide_model)
            common = f"--model_name {model} --dataset {samples} --num_epochs {STEPS} "
            common += f"--lr {LEARNING_RATE} --context_length {CONTEXT_LENGTH}"
            if "--save_model" not in own:
                common += " --save_model false"
            flags.append([*common.split(), *own, "--output_dir", str(folder / name)])
        # 26 packed sequences, 70 samples
        ways = {"packing": 8, "padding": 16} if world_size != 2 or further else {}
        for way, batch in ways.items():
            shuffled = f"--model_name {tiny_model} --dataset {rows70} --precision fp32 "
            shuffled += "--enable_fsdp --num_epochs 2 --lr 1e-3 --save_model false "
            shuffled += f"--batching_strategy {way} --batch_size_training {batch // world_size}"
            flags.append([*shuffled.split(), "--output_dir", str(folder / way)])
        pairs = write_pairs(folder / "pairs.jsonl", PAIRS)
        for bits in bits_of(world_size, further):
            dpo = f"--model_name {wide_model} --dataset {pairs} --enable_fsdp --use_peft "
            dpo += f"--quantization {bits} --objective dpo --beta 0.3 --lora_dropout 0 "
            dpo += "--precision fp32 --lr_scheduler constant --lr 0.01 --context_length 64 "
            dpo += f"--batch_size_training {PAIRS // world_size // 2} "
            dpo += "--gradient_accumulation_steps 2 --num_epochs 5"
            name = str(folder / f"dpo {bits}")
            flags.append([*dpo.split(), "--save_model", "false", "--output_dir", name])
            flags.append([*dpo.split(), *FIRST_STEP, "--output_dir", f"{name} first"])
        # 4 ranks that share two cores take more than 4 minutes for all of it.
        launched = run_cases(folder, flags, ranks=world_size if world_size > 1 else 0, timeout=900)
        trained = {
            name: (reference, losses(folder / name)) for name, (reference, _) in cases.items()
        }
        return Launch(trained, folder, launched.output, {way: losses(folder / way) for way in ways})

    return launch


@pytest.mark.parametrize(("world_size", "further"), LAUNCHES)
def test_every_sharding_and_batch_layout_gives_the_losses_of_a_plain_loop(
    launches: Callable[[int, bool], Launch],
    references: Callable[[str], list[float]],
    world_size: int,
    further: bool,
) -> None:
    """Packing, unless the case says padded: all steps at equal global batches, and the same loss at
    each."""
    launched = launches(world_size, further)
    assert (
        f"16 samples in {PACKED_SEQUENCES} packed sequences of at most {CONTEXT_LENGTH} tokens"
        in launched.output
    )
    for name, (reference, found) in launched.cases.items():
        tolerance = 1e-2 if "bf16" in name else 1e-5
        expected = references(reference)
        assert found == pytest.approx(
            expected[: len(found)], rel=1e-3 if "bit in bf16" in name else tolerance
        ), name
        assert len(found) == (1 if "bit in bf16" in name else STEPS)
        assert len(expected) == 1 or expected[-1] < 0.99 * expected[0], (
            "the losses compared do fall"
        )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_after_the_last_step_every_sample_has_the_loss_it_has_after_the_plain_loop(
    launches: Callable[[int, bool], Launch],
    fine_tuned: tuple[list[float], list[float]],
    tiny_model: Path,
    samples: Path,
    world_size: int,
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    for name in ("full, 1 micro-batch", "full, padded"):
        model = AutoModelForCausalLM.from_pretrained(
            launches(world_size, False).folder / name / "model"
        )
        assert losses_per_sample(model, samples) == pytest.approx(fine_tuned[1], rel=1e-4), name
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(**PISSA))
    reference_losses(model, samples, full=False)
    folder = launches(world_size, False).folder / "pissa" / "model"
    exported = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder)
    assert losses_per_sample(exported, samples) == pytest.approx(
        losses_per_sample(model, samples), rel=1e-4
    )
    before = losses_per_sample(AutoModelForCausalLM.from_pretrained(tiny_model), samples)
    assert all(after < 0.95 * first for after, first in zip(fine_tuned[1], before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "further"), [(2, True), (4, False)])
def test_the_same_seed_gives_the_same_losses_on_any_number_of_ranks(
    launches: Callable[[int, bool], Launch], world_size: int, further: bool
) -> None:
    alone = launches(1, False).shuffled
    assert len(alone["padding"]) == 10, (
        "70 samples in batches of 16 are 5 steps per epoch: none is dropped"
    )
    assert len(alone["packing"]) == 8, "26 packed sequences in batches of 8 are 4"
    for way, found in launches(world_size, further).shuffled.items():
        assert found == pytest.approx(alone[way], rel=1e-5), way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "further", "bits"),
    [(*launch.values, bits) for launch in LAUNCHES for bits in bits_of(*launch.values)],
)
def test_dpo_on_a_quantized_base_gives_the_losses_of_a_plain_loop_on_any_number_of_ranks(
    launches: Callable[[int, bool], Launch],
    wide_model: Path,
    world_size: int,
    further: bool,
    bits: str,
) -> None:
    """The base, with the adapter off, is the reference."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder = launches(world_size, further).folder
    encoder = Encoder(AutoTokenizer.from_pretrained(wide_model), 64)
    model, base = (
        AutoModelForCausalLM.from_pretrained(
            wide_model, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**BITS[bits])
        ).train()
        for _ in range(2)
    )
    # At the first step B is zero, so that A gets no gradient: it is as it was made.
    model = PeftModel.from_pretrained(
        model, folder / f"dpo {bits} first" / "model", is_trainable=True
    )
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for name in trained:
        trained[name].data.mul_("lora_A" in name)
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01, weight_decay=0.0)
    pairs = []
    for pair in read_jsonl(folder / "pairs.jsonl"):
        pairs += [
            (ids, labels.count(-100)) for ids, labels in two_examples(pair, "preference", encoder)
        ]
    found = losses(folder / f"dpo {bits}")
    assert len(found) == 5 and found[-1] < 0.98 * found[0] == pytest.approx(0.98 * math.log(2))
    for loss in found:
        summed, _ = of_formulas(pairs, model, base, 0.3, "dpo")
        assert loss == pytest.approx(summed.item() / PAIRS, rel=1e-5)
        (summed / PAIRS).backward()
        optimizer.step()
        optimizer.zero_grad()
