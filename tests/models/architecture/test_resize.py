"""--resize_embeddings: the losses, the new rows and the results of plain transformers and peft on a
resized model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import stored
from conftest import build_model, losses, metrics, run_cases

from llama_ft.config import ModelConfig, PeftConfig
from llama_ft.errors import UserError
from llama_ft.export import Exporter, find_valid
from llama_ft.models import NewTokens, build_on_meta, inject_lora, load_model_config, load_tokenizer
from llama_ft.models.architecture.new_tokens import use_token_rows

Make = Callable[..., Path]
STORED = 301
GROWN = 303
STEPS = 4
GLOBAL_BATCH = 8
LEARNING_RATE = 1e-2
NEW = [301, 302]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LORA = ["--use_peft", "--lora_dropout", "0", "--target_modules", "all-linear"]
SCATTER = ["--low_cpu_fsdp"]
TINY_UNITS = ["--fsdp_wrap_policy", "size", "--min_num_params", "20"]
# Case -> base model, flags.
CASES: dict[str, tuple[str, list[str]]] = {
    "full": ("untied", []),
    "full, tied": ("tied", SCATTER),
    "lora": ("untied", LORA),
    "lora, scattered": ("untied", [*LORA, *SCATTER]),
    "lora, tied": ("tied", LORA),
    "lora, spare embeddings": ("spare", LORA),
    "lora, head in full": ("untied", [*LORA, "--modules_to_save", "lm_head"]),
    "lora, 4bit": ("wide", [*LORA, "--quantization", "4bit", *SCATTER]),
    "from an adapter": ("untied", ["--use_peft", *TINY_UNITS, *SCATTER]),
}
FAST = ("full, tied", "lora, tied", "lora, 4bit")


@pytest.fixture(scope="module")
def bases(save_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base models; `tokens`, their tokenizer with two special tokens more; `samples.jsonl`, samples with
    these tokens; and an adapter of plain peft to go on from."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("bases")
    save_model(folder / "untied")
    save_model(folder / "tied", tied=True)
    save_model(folder / "spare", vocab_size=310)
    save_model(folder / "wide", hidden_size=64, intermediate_size=128)
    tokenizer = load_tokenizer(folder / "untied", False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "tokens")
    generator = torch.Generator().manual_seed(1)
    with open(folder / "samples.jsonl", "w") as lines:
        for number in range(GLOBAL_BATCH):
            ids = [
                301,
                *torch.randint(0, 301, (5 + 2 * number,), generator=generator).tolist(),
                302,
                7,
            ]
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * 2 + ids[2:]}) + "\n")
    torch.manual_seed(3)
    indices = {"model.embed_tokens": NEW, "lm_head": NEW}
    settings = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", trainable_token_indices=indices
    )
    model = get_peft_model(resized(folder / "untied"), settings)
    for key, parameter in model.named_parameters():
        if "lora_B" in key or "trainable_tokens" in key:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / "untied-adapter", save_embedding_layers=False)
    return folder


def resized(folder: Path, tokens: int = GROWN, new: str = "mean", **settings: Any) -> Any:
    """The base as its user would resize it; new rows are the mean of the others, or random."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **settings})
    stored = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(max(tokens, stored), mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if new == "mean" and stored < tokens:
                module.weight[stored:] = module.weight[:stored].mean(dim=0)
    return model


def mean_loss(model: Any, samples: Path, train: int = 0) -> list[float]:
    """Loss over all target tokens, before each of `train` steps of plain AdamW; 0: only once."""
    examples = [json.loads(line) for line in samples.read_text().splitlines()]
    targets = sum(label != -100 for example in examples for label in example["labels"][1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    result = []
    for _ in range(max(train, 1)):
        total = 0.0
        with torch.set_grad_enabled(train > 0):
            for example in examples:
                logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0]
                labels = torch.tensor(example["labels"])
                loss = (
                    torch.nn.functional.cross_entropy(
                        logits[:-1].float(), labels[1:], reduction="sum"
                    )
                    / targets
                )
                if train:
                    loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        result.append(total)
    return result


@pytest.fixture(scope="module")
def runs(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fast case -> its run."""
    return launch(bases, tmp_path_factory.mktemp("runs"), is_fast=True)


@pytest.fixture(scope="module")
def further(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Slow case -> its run."""
    return launch(bases, tmp_path_factory.mktemp("runs"), is_fast=False)


def launch(bases: Path, folder: Path, is_fast: bool) -> dict[str, Path]:
    """Case -> its run on two ranks, all of one launch."""
    text = f"--resize_embeddings --tokenizer_name {bases}/tokens --enable_fsdp"
    text += f" --dataset {bases}/samples.jsonl --validation {bases}/samples.jsonl"
    text += f" --num_epochs {STEPS} --batch_size_training {GLOBAL_BATCH // 2} --precision fp32"
    text += f" --batching_strategy padding --lr {LEARNING_RATE} --lr_scheduler constant"
    text += " --save_steps 2 --save_every_epoch false"
    flags = {}
    for case, (base, own) in CASES.items():
        if (case in FAST) != is_fast:
            continue
        flags[case] = [*text.split(), "--model_name", f"{bases}/{base}", *own]
        if "--min_num_params" not in own:
            flags[case] += ["--min_num_params", "1000"]
        if case.startswith("from an adapter"):
            flags[case] += ["--from_peft_checkpoint", f"{bases}/{base}-adapter"]
    if is_fast:
        checkpoint = f"{folder}/lora, tied/checkpoints/step-000002"
        flags["resumed"] = [*flags["lora, tied"], "--resume", checkpoint]
    found = {case: folder / case for case in flags}
    run_cases(
        folder, [[*own, "--output_dir", str(found[case])] for case, own in flags.items()], ranks=2
    )
    return found


def reloaded(case: str, bases: Path, result: Path) -> Any:
    """A run's result as its user would load it. Whatever rows a base is resized with, the adapter
    brings its own."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, flags = CASES[case]
    if "--use_peft" not in flags:
        return AutoModelForCausalLM.from_pretrained(result, dtype=torch.float32).eval()
    return PeftModel.from_pretrained(base_of(case, bases, new="random"), result).eval()


def base_of(case: str, bases: Path, new: str = "mean") -> Any:
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig

    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
    }
    settings = {"quantization_config": BitsAndBytesConfig(**nf4)} if "4bit" in case else {}
    model = resized(bases / CASES[case][0], new=new, **settings)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # it would take bf16 for inference, whatever is asked for
            module.support_avx512bf16_for_cpu = False
    return model


def check_losses(runs: dict[str, Path], bases: Path) -> None:
    from peft import PeftModel

    for case, run in runs.items():
        if case == "resumed":
            continue
        base, flags = CASES[case]
        model = base_of(case, bases)
        if case.startswith("from an adapter"):
            model = PeftModel.from_pretrained(model, bases / f"{base}-adapter", is_trainable=True)
        # others' adapters begin at random
        whole = "--use_peft" not in flags or case.startswith("from an adapter")
        expected = mean_loss(model, bases / "samples.jsonl", train=STEPS if whole else 0)
        found = losses(run)
        assert found[: len(expected)] == pytest.approx(expected, rel=1e-5), case
        assert len(found) == STEPS and found[-1] < 0.95 * found[0], case


def check_results(runs: dict[str, Path], bases: Path) -> None:
    for case, run in runs.items():
        if case != "resumed":
            held_out = metrics(run)[-1]["eval/loss"]
            [loss] = mean_loss(reloaded(case, bases, run / "model"), bases / "samples.jsonl")
            assert loss == pytest.approx(held_out, rel=1e-5), case


def check_new_rows(runs: dict[str, Path], bases: Path) -> None:
    """Of the embeddings, LoRA trains only the new rows."""
    for case, run in runs.items():
        if case == "resumed" or "--use_peft" not in CASES[case][1]:
            continue
        held = stored(run / "model")
        new_rows = {
            name: tensor for name, tensor in held.items() if "trainable_tokens_delta" in name
        }
        assert len(new_rows) == (1 if "tied" in case or "in full" in case else 2), case
        before = base_of(case, bases)
        for name, tensor in new_rows.items():
            weight = before.get_submodule(
                name.removeprefix("base_model.model.").split(".token_")[0]
            ).weight
            assert tensor.shape == (2, weight.shape[1]) and tensor.dtype == torch.float32
            assert ((tensor - weight[NEW].float()).abs().amax(dim=1) > 1e-2).all(), (case, name)
        others = [name for name in held.keys() - new_rows.keys() if ".lora_" not in name]
        assert others == (["base_model.model.lm_head.weight"] if "in full" in case else []), case


def check_same_bits(one: Path, other: Path) -> None:
    mine = stored(one / "model")
    theirs = stored(other / "model")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert losses(one) == losses(other)


def test_losses_equal_those_of_a_plain_resized_model(runs: dict[str, Path], bases: Path) -> None:
    check_losses(runs, bases)


def test_the_result_loads_into_plain_transformers_and_peft_with_the_trained_loss(
    runs: dict[str, Path], bases: Path
) -> None:
    check_results(runs, bases)


def test_lora_trains_only_the_new_rows_of_the_embeddings(
    runs: dict[str, Path], bases: Path
) -> None:
    check_new_rows(runs, bases)


def test_a_resumed_run_gives_the_same_bits(runs: dict[str, Path]) -> None:
    check_same_bits(runs["lora, tied"], runs["resumed"])


@pytest.mark.slow
def test_further_cases_train_as_plain_resized_models(further: dict[str, Path], bases: Path) -> None:
    check_losses(further, bases)
    check_results(further, bases)
    check_new_rows(further, bases)
    check_same_bits(further["lora"], further["lora, scattered"])


@pytest.mark.parametrize(
    "case",
    [
        *FAST,
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("lora, spare embeddings", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_exports_to_the_same_result_and_merges_as_peft_does(
    case: str, request: pytest.FixtureRequest, bases: Path, tmp_path: Path
) -> None:
    runs = request.getfixturevalue("runs" if case in FAST else "further")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = runs[case] / "model"
    is_lora = "--use_peft" in CASES[case][1]
    exporter = Exporter.prepare(
        find_valid(runs[case]), build_model(), None, None, trust_remote_code=False, merge=is_lora
    )
    if not is_lora:
        exporter.write_model(tmp_path / "again", None, 10**9)
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
            result / "model.safetensors"
        ).read_bytes()
        return
    exporter.write_adapter(tmp_path / "again", None)
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (result / name).read_bytes()
    exporter.write_model(tmp_path / "merged", None, 60_000)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = resized(bases / CASES[case][0])
    reference = PeftModel.from_pretrained(plain, result).merge_and_unload()
    assert merged.config.vocab_size == reference.config.vocab_size
    weights = merged.state_dict()
    assert weights.keys() == reference.state_dict().keys()
    for key, tensor in reference.state_dict().items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("kind", ["untied", "scaled", "gpt2"])
def test_token_rows_have_the_outputs_and_gradients_of_pefts_layer(kind: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig

    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    configs = {
        "untied": LlamaConfig(vocab_size=GROWN, **shape),
        # tied
        "scaled": Gemma2Config(vocab_size=GROWN, head_dim=16, num_key_value_heads=1, **shape),
        "gpt2": GPT2Config(
            vocab_size=GROWN,
            n_embd=32,
            n_layer=1,
            n_head=2,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        ),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind])
    ids = [302, 5]  # in no order
    names = {"untied": ["embed_tokens", "lm_head"], "scaled": ["embed_tokens"], "gpt2": ["wte"]}[
        kind
    ]
    settings = LoraConfig(
        target_modules="all-linear", trainable_token_indices=dict.fromkeys(names, ids)
    )
    model = get_peft_model(model, settings)
    new_rows = [
        parameter
        for name, parameter in model.named_parameters()
        if "trainable_tokens_delta" in name
    ]
    assert len(new_rows) == len(names)
    for parameter in new_rows:
        torch.nn.init.normal_(parameter, std=0.1)
    results = []
    for _ in range(2):
        logits = model(input_ids=torch.tensor([[302, 7, 5, 5], [0, 302, 1, 300]])).logits
        results.append([logits, *torch.autograd.grad(logits.sin().sum(), new_rows)])
        use_token_rows(model)
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_settings_that_new_token_rows_do_not_support_are_rejected(bases: Path) -> None:
    def refused(base: str, new: NewTokens | None, message: str, **settings: Any) -> None:
        built = build_on_meta(
            load_model_config(bases / base, False), ModelConfig(model_name=base), new
        )
        with pytest.raises(UserError, match=message):
            inject_lora(built, PeftConfig(use_peft=True, **settings), "base", new)

    refused("tied", NewTokens(NEW, STORED, GROWN), "are tied", modules_to_save=["lm_head"])
    saved = {"from_peft_checkpoint": str(bases / "untied-adapter")}
    refused("untied", None, "trains 2 new tokens that the model, of 301 tokens, lacks", **saved)
