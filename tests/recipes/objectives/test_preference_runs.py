"""Runs on preference pairs on two ranks: their losses, rewards and scores are those of plain loops.
The formulas of all objectives, with gradients, are compared in training/test_preferences.py."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, Finished, metrics, run_cases, write_jsonl
from forked import forked
from plain_losses import load_model, read_jsonl, write_pairs
from training.objectives.test_preferences import expected as of_formulas

from llama_ft import models
from llama_ft.config import ModelConfig
from llama_ft.data import Encoder, two_examples
from llama_ft.models.weights.conversion import open_model_weights

INFERENCE = RECIPE.with_name("inference.py")
EVALUATE = RECIPE.with_name("evaluate.py")
FSDP = "--enable_fsdp --low_cpu_fsdp"
PADDED = "--batching_strategy padding"
LEARNING_RATE = 3e-3
STEPS = 4  # one per epoch, so that the order of the pairs is free
PAIRS = 7
VALIDATION_PAIRS = 3
DPO = "--objective dpo --beta 0.3 --label_smoothing 0.1"
# One run for each way to get the reference's log-probabilities, and for each way to sum over ranks.
PREFERENCES = {
    "dpo": f"{DPO} --use_peft {FSDP} {PADDED}",
    "dpo_once": f"{DPO} --use_peft --enable_fsdp --precompute_ref_log_probs",
    "dpo_full": f"{DPO} {FSDP} --batch_size_training 2",
    "ipo_other": f"--objective ipo --beta 0.3 {PADDED} --val_batch_size 2 --reference_model @other",
    "orpo": "--objective orpo --beta 0.5 --enable_fsdp --activation_checkpointing full",
    # All of a step, and all of an evaluation, is one micro-batch per rank.
    "kto": "--objective kto --beta 0.3 --undesirable_weight 1.2 --use_peft --enable_fsdp "
    "--batch_size_training 8 --val_batch_size 4",
}
PREFERENCES["kto_once"] = f"{PREFERENCES['kto']} --precompute_ref_log_probs"
SETTINGS: dict[str, dict[str, Any]] = {  # for the formulas
    "dpo": {"objective": "dpo", "beta": 0.3, "dpo_label_smoothing": 0.1},
    "dpo_once": {"objective": "dpo", "beta": 0.3, "dpo_label_smoothing": 0.1},
    "dpo_full": {"objective": "dpo", "beta": 0.3, "dpo_label_smoothing": 0.1},
    "ipo_other": {"objective": "ipo", "beta": 0.3},
    "orpo": {"objective": "orpo", "beta": 0.5},
    "kto": {
        "objective": "kto",
        "beta": 0.3,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.2,
    },
}
SETTINGS["kto_once"] = SETTINGS["kto"]
REWARDS = {  # the first reads and sends shards from rank 0 and packs, the second does not
    "reward": f"--objective reward {FSDP} --activation_checkpointing full",
    "reward_lora": f"--objective reward --use_peft --enable_fsdp {PADDED}",
}
# Another way to the same numbers, or another objective of pairs: two of each kind are fast.
SLOW = ("dpo_once", "dpo_full", "ipo_other", "kto", "reward_lora")


def fast_and_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def further(folder: Path, tiny_model: Path, tied_model: Path) -> Finished:
    """The slow runs below `folder`, in one launch."""
    return launch_runs(folder, tiny_model, tied_model, [*SLOW])


@pytest.fixture(scope="module")
def launch(folder: Path, tiny_model: Path, tied_model: Path) -> Finished:
    """The other runs below `folder`, in one launch."""
    names = [name for name in (*PREFERENCES, *REWARDS) if name not in SLOW]
    return launch_runs(folder, tiny_model, tied_model, [*names, "dpo_first"])


def launch_runs(folder: Path, tiny_model: Path, tied_model: Path, names: list[str]) -> Finished:
    train = write_pairs(folder / "pairs.jsonl", PAIRS)
    validation = write_pairs(folder / "validation.jsonl", VALIDATION_PAIRS, first=9)
    common = f"--model_name {tiny_model} --dataset {train} --validation {validation}"
    common += f" --num_epochs {STEPS} --precision fp32 --lr_scheduler constant --lr {LEARNING_RATE}"
    common += " --gradient_accumulation_steps 4 --context_length 128"
    runs = {**PREFERENCES, **REWARDS}
    # After its first step the B of an adapter is not zero, but its A is as it was initialized.
    runs["dpo_first"] = f"{DPO} --use_peft --max_train_step 1 --run_validation False"
    cases = []
    for name in names:
        flags = f"{common} {runs[name]} --output_dir {folder}/{name}".replace(
            "@other", str(tied_model)
        )
        if "--batch_size_training" not in flags:
            flags += " --batch_size_training 1"  # one micro-batch of one rank has no pair
        cases.append(flags.split())
    return run_cases(folder, cases, ranks=2, timeout=400)


def tokens_and_starts(file: Path, encoder: Encoder) -> list[tuple[list[int], int]]:
    """Tokens of the chosen and the rejected responses in turn, and where each response begins."""
    found = []
    for pair in read_jsonl(file):
        for ids, labels in two_examples(pair, "preference", encoder):
            found.append((ids, labels.count(-100)))
    return found


def mean_rewards(rewards: list[Any]) -> tuple[float, float]:
    """The means of the chosen and of the rejected responses."""
    chosen = sum(reward[0].item() for reward in rewards) / len(rewards)
    rejected = sum(reward[1].item() for reward in rewards) / len(rewards)
    return chosen, rejected


def trained_model(name: str, folder: Path, tiny_model: Path) -> torch.nn.Module:
    """The model of a run before its first step."""
    from peft import PeftModel

    model = load_model(tiny_model)
    if "--use_peft" in PREFERENCES[name]:
        model = PeftModel.from_pretrained(model, folder / "dpo_first" / "model", is_trainable=True)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.data.zero_()
    return model


@pytest.mark.parametrize("name", fast_and_slow(PREFERENCES))
def test_preference_training_has_the_losses_of_a_plain_loop(
    request: pytest.FixtureRequest,
    launch: Finished,
    folder: Path,
    tiny_model: Path,
    tied_model: Path,
    name: str,
) -> None:
    """AdamW in one process, pair by pair, in transformers and peft."""
    if name in SLOW:
        request.getfixturevalue("further")
    from transformers import AutoTokenizer

    encoder = Encoder(AutoTokenizer.from_pretrained(tiny_model), 128)
    model = trained_model(name, folder, tiny_model)
    reference = load_model(tied_model if "--reference_model" in PREFERENCES[name] else tiny_model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    settings = SETTINGS[name]
    is_kto = settings["objective"] == "kto"
    losses_per_pair = 2 if is_kto else 1
    pairs = tokens_and_starts(folder / "pairs.jsonl", encoder)
    logged = [line for line in metrics(folder / name) if "train/loss" in line]
    assert len(logged) == STEPS
    for line in logged:
        loss, rewards = of_formulas(pairs, model, reference, **settings)
        loss = loss / (PAIRS * losses_per_pair)
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        chosen, rejected = mean_rewards(rewards)
        assert line["train/rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-4, abs=1e-5)
        if not is_kto:
            right = sum((chosen > rejected).item() for chosen, rejected in rewards)
            assert line["train/rewards/accuracies"] == pytest.approx(right / PAIRS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    validation = tokens_and_starts(folder / "validation.jsonl", encoder)
    loss, rewards = of_formulas(validation, model, reference, **settings)
    mean = loss.item() / (VALIDATION_PAIRS * losses_per_pair)
    assert logged[-1]["eval/loss"] == pytest.approx(mean, rel=1e-5)
    chosen, rejected = mean_rewards(rewards)
    margin = logged[-1]["eval/rewards/margins"]
    assert margin == pytest.approx(chosen - rejected, rel=1e-4, abs=1e-5)
    assert "eval/perplexity" not in logged[-1]
    # With an adapter the reference is the base: its numbers are stored only on request.
    is_stored = (folder / name / "reference.safetensors").exists()
    assert is_stored == (name in ("dpo_once", "dpo_full", "ipo_other", "kto_once"))


class RewardModels:
    """Reward models in plain Transformers, and their scores of pairs."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder / "reward" / "model")
        self.encoder = Encoder(self.tokenizer, 128)

    def load(self, path: Path, **settings: Any) -> Any:
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, **settings
        )
        return model.eval()

    def untrained(self, base: Path) -> Any:
        return self.load(base, num_labels=1, pad_token_id=self.tokenizer.pad_token_id)

    def scores(self, model: Any, file: Path) -> torch.Tensor:
        """Scores [pairs, 2] of the chosen and the rejected responses."""
        examples = [ids for ids, _ in tokens_and_starts(file, self.encoder)]
        # left or right, as it is saved
        padded = self.tokenizer.pad({"input_ids": examples}, return_tensors="pt")
        return model(**padded).logits.view(-1, 2)

    def loss(self, model: Any, file: Path) -> torch.Tensor:
        chosen, rejected = self.scores(model, file).unbind(1)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


@pytest.fixture(scope="module")
def reward_models(launch: Finished, folder: Path) -> RewardModels:
    return RewardModels(folder)


def test_a_reward_model_has_the_losses_of_plain_transformers(
    reward_models: RewardModels, folder: Path, tiny_model: Path
) -> None:
    """The first score head is that of one process, in both ways of loading."""
    model = reward_models.untrained(tiny_model)
    skeleton_config = models.load_model_config(folder / "reward" / "model", False)
    skeleton = models.build_on_meta(skeleton_config, ModelConfig(model_name="mine"))
    model.score.weight.data = open_model_weights(tiny_model, skeleton, seed=42).source.read(
        "score.weight"
    )
    first = reward_models.loss(model, folder / "validation.jsonl").item()
    assert metrics(folder / "reward")[0]["eval/loss"] == pytest.approx(first, rel=1e-5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    logged = [line for line in metrics(folder / "reward") if "train/loss" in line]
    assert len(logged) == STEPS
    for line in logged:
        loss = reward_models.loss(model, folder / "pairs.jsonl")
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def check_scores(
    reward_models: RewardModels, folder: Path, run: str, path: Path, model: Any
) -> None:
    """Inference with `path` has the scores of `model`, in plain Transformers."""
    file = folder / "validation.jsonl"
    expected = reward_models.loss(model, file).item()
    assert metrics(folder / run)[-1]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    out = folder / f"{run}-scores.jsonl"
    flags = f"--prompts {file} --output_file {out} --batch_size 4 --precision fp32 --device cpu"
    finished = forked(INFERENCE, path, *flags.split())
    assert finished.exit_code == 0, finished.output
    printed = [[line["score_chosen"], line["score_rejected"]] for line in read_jsonl(out)]
    expected_scores = reward_models.scores(model, file)
    torch.testing.assert_close(torch.tensor(printed), expected_scores, rtol=1e-5, atol=1e-5)


def test_inference_prints_the_scores_of_plain_transformers(
    reward_models: RewardModels, folder: Path
) -> None:
    path = folder / "reward" / "model"
    check_scores(reward_models, folder, "reward", path, reward_models.load(path))


@pytest.mark.slow
def test_inference_with_a_reward_adapter_prints_the_scores_of_plain_peft(
    reward_models: RewardModels, further: Finished, folder: Path, tiny_model: Path
) -> None:
    from peft import PeftModel

    base = reward_models.untrained(tiny_model)
    model = PeftModel.from_pretrained(base, folder / "reward_lora" / "model").eval()
    first = metrics(folder / "reward_lora")[0]["eval/loss"]
    assert first == pytest.approx(metrics(folder / "reward")[0]["eval/loss"], rel=1e-5)
    path = folder / "reward_lora" / "checkpoints" / f"step-{STEPS:06d}"
    check_scores(reward_models, folder, "reward_lora", path, model)


def test_samples_that_a_reward_model_cannot_score_are_all_named_and_can_be_skipped(
    reward_models: RewardModels, folder: Path, tmp_path: Path
) -> None:
    good = read_jsonl(folder / "validation.jsonl")[0]
    bad = [{"prompt": "Why?"}, good | {"rejected": good["chosen"]}]
    file = write_jsonl(tmp_path / "samples.jsonl", [bad[0], good, bad[1]])
    words = [folder / "reward" / "model", "--prompts", file, "--precision", "fp32"]
    finished = forked(INFERENCE, *words, "--device", "cpu")
    assert finished.exit_code == 2, finished.output
    assert "prompt 1: its columns are prompt; expected a chat" in finished.output
    assert "prompt 3: " in finished.output and finished.output.count("error: ") == 3
    out = tmp_path / "scores.jsonl"
    finished = forked(INFERENCE, *words, "--device", "cpu", "--skip_bad_rows", "--output", out)
    assert finished.exit_code == 0, finished.output
    [scored] = read_jsonl(out)
    expected = reward_models.scores(reward_models.load(words[0]), folder / "validation.jsonl")
    found = torch.tensor([scored["score_chosen"], scored["score_rejected"]])
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (INFERENCE, "@model --prompt Why?", "Use --prompts with chats or pairs"),
        (EVALUATE, "@model --dataset @data", "recipes/inference.py --prompts prints its scores"),
        (
            RECIPE,
            "--model_name @model --dataset @data --objective dpo --use_peft",
            "Use --objective reward, or the causal",
        ),
    ],
    ids=["inference", "evaluate", "finetuning"],
)
def test_a_reward_model_is_rejected_where_a_language_model_is_needed(
    launch: Finished, folder: Path, script: Path, flags: str, message: str
) -> None:
    paths = {"@model": folder / "reward" / "model", "@data": folder / "validation.jsonl"}
    words = [str(paths.get(word, word)) for word in flags.split()]
    finished = forked(script, *words, "--device", "cpu")
    assert finished.exit_code == 2, finished.output
    assert message in finished.output
