"""Whole runs of the recipe on two ranks, as users start them, and what they leave behind."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import RECIPE, Finished, losses, metrics, recipe, write_rows
from forked import forked
from training.test_preferences import expected as of_formulas

from llama_ft import models
from llama_ft.config import ModelConfig
from llama_ft.data import Encoder, two_examples
from llama_ft.models.conversion import open_source

CASES = Path(__file__).resolve().parent.parent / "run_cases.py"
EXPORT, INFERENCE = RECIPE.with_name("export.py"), RECIPE.with_name("inference.py")
FSDP = ["--enable_fsdp", "--low_cpu_fsdp"]
PADDED = ["--batching_strategy", "padding"]
SECRETS = {"WANDB_API_KEY": "5ecre7" * 6 + "abcd", "MLFLOW_TRACKING_PASSWORD": "hunter2-hunter2"}
OPTIMIZERS = {  # name -> flags, and the bytes of state a parameter; narrow rows are few here
    "adamw": (["--precision", "bf16_pure"], 4.0),
    "stochastic": (["--optimizer", "anyprecision", "--precision", "bf16_pure"], 4.0),
    "kahan": (
        ["--optimizer", "anyprecision", "--use_kahan_summation", "--precision", "bf16_pure"],
        6.0,
    ),
    "eight_bits": (["--optimizer", "AdamW8bit"], 2.07),
    "sgd": (["--optimizer", "SGD", "--momentum", "0.9", "--lr", "0.1"], 4.0),
    "adafactor": (["--optimizer", "Adafactor", "--lr", "0.1"], 0.1),
}
PREFERENCE_RATE = 3e-3
DPO = ["--objective", "dpo", "--beta", "0.3", "--dpo_label_smoothing", "0.1", "--use_peft"]
KTO = ["--objective", "kto", "--beta", "0.3", "--undesirable_weight", "1.2"]
KTO += ["--batch_size_training", "8", "--val_batch_size", "4"]
PREFERENCES = {  # one step an epoch: their order is free; one micro-batch of one rank has no pair
    "dpo": [*DPO, "--batching_strategy", "padding", "--enable_fsdp", "--low_cpu_fsdp"],
    "dpo_first": [*DPO, "--max_train_step", "1", "--run_validation", "False"],
    "ipo": [*DPO[:1], "ipo", *DPO[2:4], "--use_peft", "--enable_fsdp", "--val_batch_size", "2"],
    "dpo_full": [*DPO[:-1], "--enable_fsdp", "--low_cpu_fsdp", "--batch_size_training", "2"],
    "ipo_other": [
        *DPO[:1],
        "ipo",
        *DPO[2:4],
        "--reference_model",
        "@",
        "--batching_strategy",
        "padding",
    ],
    "orpo": [
        "--objective",
        "orpo",
        "--beta",
        "0.5",
        "--enable_fsdp",
        "--activation_checkpointing",
        "full",
    ],
    "simpo": [
        "--objective",
        "simpo",
        "--beta",
        "2",
        "--simpo_gamma",
        "1",
        "--batching_strategy",
        "padding",
    ],
    # All of a step, and all of an evaluation, is one micro-batch of each rank.
    "kto": [*KTO, "--use_peft", "--enable_fsdp"],
    "kto_full": [*KTO, "--enable_fsdp", "--batching_strategy", "padding"],
}
REWARDS = {  # one reads and sends shards from rank 0 and packs, the other does not
    "reward": ["--objective", "reward", *FSDP, "--activation_checkpointing", "full"],
    "reward_lora": ["--objective", "reward", "--use_peft", "--enable_fsdp", *PADDED],
}
CUSTOM = """
import datasets


def rows(data_config, tokenizer, split):
    count = 24 if split == "train" else 5
    return datasets.Dataset.from_list([
        {"messages": [{"role": "user", "content": f"{split} {n}"}, {"role": "assistant", "content": "yes " * (n + 1)}]}
        for n in range(count)
    ])
"""


def tokenized(file: Path, count: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with open(file, "w") as lines:
        for number in range(count):
            ids = torch.randint(0, 301, (8 + number % 7,), generator=generator).tolist()
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * 3 + ids[3:]}) + "\n")
    return file


def pairs(file: Path, count: int, first: int = 0) -> Path:
    """Pairs of texts of unlike lengths."""
    rows = [
        {
            "prompt": f"Why {n}?" + " Why?" * (n % 3),
            "chosen": " Yes" * (1 + n % 4),
            "rejected": " no" * (n % 5) + "!",
        }
        for n in range(first, first + count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PROMPTS = ["What is a shard", "Who reads the checkpoint and who does not"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


LOHA = "--enable_fsdp --low_cpu_fsdp --use_peft --peft_method loha --peft.r 4 --target_modules [q_proj,up_proj] "
LOHA += "--precision fp32 --num_epochs 2 --lr 0.05 --context_length 22"


@pytest.fixture(scope="module")
def launch(
    folder: Path, tiny_model: Path, tied_model: Path, save_model: Any, rows16: Path, rows70: Path
) -> Finished:
    """Every run below `folder`, in one launch."""
    no_pad = save_model(folder / "no_pad_model", pad=False)
    wide = save_model(folder / "wide_model", hidden_size=128, intermediate_size=194)
    train, validation = (
        tokenized(folder / "train.jsonl", 64, 1),
        tokenized(folder / "validation.jsonl", 11, 2),
    )
    few = tokenized(folder / "few.jsonl", 16, 3)
    (folder / "custom.py").write_text(CUSTOM)
    tiny = ["--model_name", str(tiny_model)]
    files = ["--dataset", str(train), "--validation", str(validation)]
    adapter = ["--use_peft", "--target_modules", "all-linear"]
    # a command of llama-recipes, with a local model and an early end of training and evaluation
    llama_recipes = (
        f"--enable_fsdp --low_cpu_fsdp --use_peft --peft_method lora --model_name {tiny_model} "
        f"--batch_size_training 1 --output_dir {folder}/llama_recipes --num_epochs 1 --save_model --max_train_step 3 "
        "--max_eval_step 2"
    )
    runs = {
        "early_stopping": [
            *FSDP,
            *tiny,
            *files,
            "--precision",
            "fp32",
            "--lr",
            "0.05",
            "--lr_scheduler",
            "constant",
        ]
        + [
            "--eval_steps",
            "1",
            "--early_stopping_patience",
            "3",
            "--save_steps",
            "2",
            "--use_tensorboard",
        ]
        + ["--use_wandb", "--wandb_mode", "offline", "--wandb_tags", "a,b", "--val_batch_size", "2"]
        + ["--context_length", "22", "--use_mlflow", "--mlflow_log_model", "--sample_tokens", "4"],
        "lora": [
            *FSDP,
            *tiny,
            "--dataset",
            str(rows70),
            "--validation",
            "0.2",
            *adapter,
            "--lr",
            "0.01",
        ]
        + [
            "--precision",
            "fp32",
            "--num_epochs",
            "1",
            "--lora_dropout",
            "0",
            "--sample_tokens",
            "12",
        ]
        + ["--sample_prompts", ",".join(PROMPTS), "--sample_steps", "2"],
        "timed": [
            *tiny,
            "--dataset",
            str(rows70),
            "--validation",
            "0.2",
            *adapter,
            "--num_epochs",
            "1000",
        ]
        + ["--max_train_time", "2s"],
        "loha": [*tiny, *files, *LOHA.split()],
        "no_pad": [
            *FSDP,
            "--model_name",
            str(no_pad),
            "--dataset",
            str(rows16),
            *adapter,
            "--num_epochs",
            "1",
        ]
        + [
            "--sample_tokens",
            "8",
            "--precision",
            "fp32",
            "--lora_dropout",
            "0",
            "--batch_size_training",
            "8",
        ]
        + ["--validation", str(rows16), "--val_batch_size", "4", *PADDED],
        "custom": [
            *tiny,
            "--dataset",
            f"{folder}/custom.py:rows",
            "--precision",
            "bf16_pure",
            "--num_epochs",
            "2",
        ]
        + [*PADDED, "--use_profiler", "--flop_counter", "--flop_counter_start", "2"],
        "frozen": [
            *FSDP,
            *tiny,
            *files,
            "--freeze_layers",
            "--num_epochs",
            "1",
            "--precision",
            "fp32",
        ]
        + ["--activation_checkpointing", "full", "--gradient_accumulation_steps", "3", *PADDED],
    }
    for name, own in {**PREFERENCES, **REWARDS}.items():
        own = [str(tied_model) if word == "@" else word for word in own]
        runs[name] = [
            *tiny,
            "--dataset",
            str(pairs(folder / "pairs.jsonl", 7)),
            *own,
            "--num_epochs",
            "10",
        ]
        runs[name] += [
            "--validation",
            str(pairs(folder / "held_out.jsonl", 3, 9)),
            "--precision",
            "fp32",
        ]
        runs[name] += ["--lr_scheduler", "constant", "--gradient_accumulation_steps", "4"]
        runs[name] += [
            *([] if "--batch_size_training" in own else ["--batch_size_training", "1"]),
            "--lr",
            str(PREFERENCE_RATE),
            "--context_length",
            "128",
        ]
    for name, (optimizer, _) in OPTIMIZERS.items():
        runs[name] = [*FSDP, "--model_name", str(wide), "--dataset", str(few), "--num_epochs", "4"]
        runs[name] += [
            *optimizer,
            "--lr_scheduler",
            "constant",
            *([] if "--lr" in optimizer else ["--lr", "0.01"]),
        ]
    flags = [llama_recipes.split()]
    flags += [[*own, "--output_dir", str(folder / name)] for name, own in runs.items()]
    flags += [
        [
            "--config",
            str(folder / "early_stopping" / "config.yaml"),
            "--output_dir",
            str(folder / "repeated"),
        ]
        + ["--use_wandb", "False", "--use_mlflow", "False"],
        [
            *FSDP,
            *tiny,
            "--dataset",
            str(rows70),
            "--validation",
            "0.2",
            "--use_peft",
            "--num_epochs",
            "1",
        ]
        + ["--from_peft_checkpoint", str(folder / "lora" / "model"), "--precision", "fp32"]
        + ["--output_dir", str(folder / "continued")],
    ]
    (folder / "cases.json").write_text(json.dumps(flags))
    finished = forked(
        CASES, folder / "cases.json", ranks=2, timeout=400, HOME=str(folder), **SECRETS
    )
    assert finished.exit_code == 0, finished.output
    return finished


def held_out_loss(model: torch.nn.Module, file: Path) -> float:
    """The mean over target tokens, row by row, in plain transformers."""
    total, targets = 0.0, 0
    for line in file.read_text().splitlines():
        row = json.loads(line)
        labels = torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        targets += int((labels != -100).sum())
    return total / targets


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_the_llama_recipes_command_leaves_an_adapter_that_peft_loads(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    from peft import PeftModel

    output = folder / "llama_recipes"
    model = PeftModel.from_pretrained(load(tiny_model), output / "model")
    assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)
    status = {"state": "finished", "step": 3, "exit_code": 0, "message": ""}
    assert json.loads((output / "status.json").read_text()) == status
    assert len(losses(output)) == 3
    assert yaml.safe_load((output / "config.yaml").read_text())["peft"]["use_peft"] is True
    assert (output / "checkpoints" / "step-000003" / "trainer.json").exists()


def test_another_method_of_peft_trains_and_plain_peft_reads_it(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load(tiny_model), folder / "loha" / "model").eval()
    assert model.peft_config["default"].peft_type == "LOHA"
    zero_at_first = [
        parameter for name, parameter in model.named_parameters() if "hada_w2_b" in name
    ]
    assert len(zero_at_first) == 4 and all(parameter.any() for parameter in zero_at_first)
    found = [line["eval/loss"] for line in metrics(folder / "loha") if "eval/loss" in line]
    before = held_out_loss(load(tiny_model), folder / "validation.jsonl")
    assert held_out_loss(model, folder / "validation.jsonl") == pytest.approx(found[-1], rel=2e-6)
    assert found[-1] != pytest.approx(before, rel=2e-5)


def test_early_stopping_takes_the_best_weights_and_the_logged_loss_is_that_of_the_result(
    launch: Finished, folder: Path
) -> None:
    output = folder / "early_stopping"
    evaluated = {line["step"]: line["eval/loss"] for line in metrics(output) if "eval/loss" in line}
    trained = {step: loss for step, loss in evaluated.items() if step > 0}
    best = min(trained, key=trained.__getitem__)
    rows, packs, steps = re.search(
        r"(\d+) samples in (\d+) packed sequences of at most 22 .*\n(\d+) opt", launch.output
    ).groups()
    assert int(rows) == 64 and 32 <= int(packs) < 48 and 12 <= int(steps) <= 18
    assert max(trained) == best + 3 < int(steps), "it stopped three evaluations after the best"
    found = held_out_loss(load(output / "model"), folder / "validation.jsonl")
    assert found == pytest.approx(trained[best], rel=1e-5)
    assert json.loads((output / "checkpoints" / "best.json").read_text())["step"] == best
    head = (output / "report.html").read_text().partition("</header>")[0]
    assert (
        f"Stopped early, after step {best + 3} of {steps}" in head
        and f"has the weights of step {best}," in head
    )
    kept = {path.name for path in (output / "checkpoints").glob("step-*")}
    assert f"step-{best:06d}" in kept
    assert kept == {
        f"step-{step:06d}" for step in trained if step % 2 == 0 or step in (best, max(trained))
    }


def test_an_export_of_a_run_that_stopped_early_is_what_its_model_directory_holds(
    launch: Finished, folder: Path, tmp_path: Path
) -> None:
    run, out = folder / "early_stopping", tmp_path / "out"
    best = json.loads((run / "checkpoints" / "best.json").read_text())["step"]
    finished = forked(EXPORT, run, out)
    assert finished.exit_code == 0, finished.output
    assert f"/step-{best:06d}, after step {best}" in finished.output
    files = [file.name for file in (run / "model").iterdir() if file.name != "README.md"]
    assert len(files) > 4 and all(
        (out / name).read_bytes() == (run / "model" / name).read_bytes() for name in files
    )


@pytest.mark.parametrize("name", [name for name in PREFERENCES if name != "dpo_first"])
def test_learning_from_pairs_is_what_a_plain_loop_computes(
    launch: Finished, folder: Path, tiny_model: Path, tied_model: Path, name: str
) -> None:
    """Ten steps of AdamW in one process, pair by pair, in transformers and peft."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    encoder, base, model = (
        Encoder(AutoTokenizer.from_pretrained(tiny_model), 128),
        load(tiny_model),
        load(tiny_model),
    )
    flags = PREFERENCES[name]
    settings: dict[str, Any] = {"objective": flags[1], "beta": float(flags[3])}
    settings |= {"dpo": {"dpo_label_smoothing": 0.1}, "simpo": {"simpo_gamma": 1.0}}.get(
        flags[1], {}
    )
    settings |= {"desirable_weight": 1.0, "undesirable_weight": 1.2} if flags[1] == "kto" else {}
    losses_per_pair = 2 if flags[1] == "kto" else 1
    base = load(tied_model) if "--reference_model" in flags else base
    if "--use_peft" in flags:
        # At the first step B is zero, so that A gets no gradient: it is as it was made.
        model = PeftModel.from_pretrained(model, folder / "dpo_first" / "model", is_trainable=True)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.data.zero_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PREFERENCE_RATE, weight_decay=0.0)

    def rows_of(file: Path) -> list[tuple[list[int], int]]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        examples = [example for row in rows for example in two_examples(row, "preference", encoder)]
        return [
            (ids, next(n for n, label in enumerate(labels) if label != -100))
            for ids, labels in examples
        ]

    found, rows = (
        [line for line in metrics(folder / name) if "train/loss" in line],
        rows_of(folder / "pairs.jsonl"),
    )
    assert len(found) == 10
    for line in found:
        loss, rewards = of_formulas(rows, model, base, **settings)
        loss = loss / (7 * losses_per_pair)
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        chosen, rejected = (sum(it[side].item() for it in rewards) / 7 for side in (0, 1))
        assert line["train/rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-4, abs=1e-5)
        if flags[1] != "kto":
            assert line["train/rewards/accuracies"] == pytest.approx(
                sum((c > r).item() for c, r in rewards) / 7
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out, rewards = of_formulas(rows_of(folder / "held_out.jsonl"), model, base, **settings)
    assert found[-1]["eval/loss"] == pytest.approx(held_out.item() / 3 / losses_per_pair, rel=1e-5)
    chosen, rejected = (sum(it[side].item() for it in rewards) / 3 for side in (0, 1))
    assert found[-1]["eval/rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-4, abs=1e-5)
    assert "eval/perplexity" not in found[-1]


def test_a_reward_model_is_what_plain_transformers_trains_and_loads(
    launch: Finished, folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Its first head is that of one process, in both ways of loading; scores of the result are
    those of its class."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "reward" / "model")
    encoder, held_out = Encoder(tokenizer, 128), folder / "held_out.jsonl"

    def base(place: Path, **settings: Any) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            place, dtype=torch.float32, **settings
        ).eval()

    def scores(model: Any, file: Path) -> torch.Tensor:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        examples = [ids for row in rows for ids, _ in two_examples(row, "preference", encoder)]
        # left or right, as it is saved
        padded = tokenizer.pad({"input_ids": examples}, return_tensors="pt")
        return model(**padded).logits.view(-1, 2)

    def loss(model: Any, file: Path) -> torch.Tensor:
        chosen, rejected = scores(model, file).unbind(1)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    model = base(tiny_model, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    skeleton_config = models.load_model_config(folder / "reward" / "model", False)
    skeleton = models.build_on_meta(skeleton_config, ModelConfig(model_name="mine"))
    model.score.weight.data = open_source(tiny_model, skeleton, seed=42).read("score.weight")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PREFERENCE_RATE, weight_decay=0.0)
    found = [line for line in metrics(folder / "reward") if "train/loss" in line]
    first = {name: metrics(folder / name)[0]["eval/loss"] for name in REWARDS}
    assert first == dict.fromkeys(REWARDS, pytest.approx(loss(model, held_out).item(), rel=1e-5))
    assert len(found) == 10
    for line in found:
        computed = loss(model, folder / "pairs.jsonl")
        assert line["train/loss"] == pytest.approx(computed.item(), rel=1e-4)
        computed.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted = PeftModel.from_pretrained(
        base(tiny_model, num_labels=1, pad_token_id=tokenizer.pad_token_id),
        folder / "reward_lora" / "model",
    )
    for name, place, result in (
        ("reward", "model", base(folder / "reward" / "model")),
        ("reward_lora", "checkpoints/step-000010", adapted.eval()),
    ):
        expected = loss(result, held_out).item()
        assert metrics(folder / name)[-1]["eval/loss"] == pytest.approx(expected, rel=1e-5)
        out = tmp_path / f"{name}.jsonl"
        flags = [
            "--prompts",
            held_out,
            "--output",
            out,
            "--batch_size",
            "4",
            "--precision",
            "fp32",
        ]
        finished = forked(INFERENCE, folder / name / place, *flags, "--device", "cpu")
        assert finished.exit_code == 0, finished.output
        printed = [json.loads(line) for line in out.read_text().splitlines()]
        pairs_of_scores = torch.tensor(
            [[row["score_chosen"], row["score_rejected"]] for row in printed]
        )
        torch.testing.assert_close(pairs_of_scores, scores(result, held_out), rtol=1e-5, atol=1e-5)
    for script, flags, way_out in (
        (INFERENCE, ["--prompt", "Why?"], "Use --prompts with chats or pairs"),
        (
            RECIPE.with_name("evaluate.py"),
            ["--dataset", held_out],
            "recipes/inference.py --prompts prints its scores",
        ),
        (
            RECIPE,
            ["--dataset", held_out, "--objective", "dpo", "--use_peft"],
            "Use --objective reward, or the causal",
        ),
    ):
        place = ["--model_name"] * (script == RECIPE) + [str(folder / "reward" / "model")]
        refused = forked(script, *place, *flags, "--device", "cpu")
        assert refused.exit_code == 2 and way_out in refused.output, refused.output


def test_the_runs_config_repeats_it_number_for_number(launch: Finished, folder: Path) -> None:
    assert losses(folder / "repeated") == losses(folder / "early_stopping")


def test_trackers_hold_the_metrics(launch: Finished, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = folder / "early_stopping"
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [round(event.value, 4) for event in events.Scalars("train/loss")] == [
        round(x, 4) for x in losses(output)
    ]
    assert len(list((output / "wandb").glob("offline-run-*/*.wandb"))) == 1, "one run a job"
    assert f"wandb sync {output}/wandb/offline-run-" in launch.output


def test_mlflow_holds_the_metrics_and_the_best_weights(
    launch: Finished, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    output, client = folder / "early_stopping", MlflowClient((folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("llama_ft")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("early_stopping", "FINISHED")
    logged = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.value for metric in logged] == losses(output)
    evaluated = {
        line["step"]: line["eval/loss"] for line in metrics(output)[1:] if "eval/loss" in line
    }
    best = min(evaluated, key=lambda step: evaluated[step])
    assert (run.data.tags["model.step"], run.data.tags["model.best"]) == (str(best), "true")
    names = {file.path for file in client.list_artifacts(run.info.run_id, "model")}
    assert names == {f"model/{path.name}" for path in (output / "model").iterdir()}


def test_no_run_writes_a_secret_of_its_environment(launch: Finished, folder: Path) -> None:
    """Settings, metrics, facts, report, model card, checkpoints, and what trackers keep, their own
    logs included."""
    assert not [value for value in SECRETS.values() if value in launch.output]
    written = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".safetensors", ".pyc")
    ]
    assert {
        "config.yaml",
        "facts.json",
        "report.html",
        "trainer.json",
        "README.md",
        "debug.log",
    } <= {path.name for path in written}
    assert not [
        path
        for path in written
        for value in SECRETS.values()
        if value.encode() in path.read_bytes()
    ]


def test_a_model_without_a_pad_token_trains_without_loss_on_padding(
    launch: Finished, folder: Path, rows16: Path
) -> None:
    """Batches of 8 and 4 rows of uneven length are padded with </s>, which also ends every answer.
    Row by row, without padding, plain transformers must find the same losses before the first
    step."""
    from transformers import AutoTokenizer

    # with the template the run gave it
    tokenizer = AutoTokenizer.from_pretrained(folder / "no_pad" / "model")
    assert tokenizer.pad_token is None
    for number, row in enumerate(rows16.read_text().splitlines()):
        example = json.loads(row)
        turns = [
            {"role": "user", "content": example["instruction"]},
            {"role": "assistant", "content": example["output"]},
        ]
        encoded = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        assert ids[-1] == tokenizer.eos_token_id and mask[-1] == 1, "the end of the turn is learned"
        labels = [token if answer else -100 for token, answer in zip(ids, mask, strict=True)]
        with open(folder / "unpadded.jsonl", "a" if number else "w") as lines:
            lines.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    expected = held_out_loss(load(folder / "no_pad_model"), folder / "unpadded.jsonl")
    lines = metrics(folder / "no_pad")
    assert lines[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert lines[1]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert "Before fine-tuning" in launch.output and "After fine-tuning" in launch.output


def test_the_prompts_asked_for_are_answered_as_plain_transformers_and_peft_do(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    """Prompts of different lengths share a batch; plain transformers answers them one by one."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    samples = json.loads((folder / "lora" / "facts.json").read_text())["samples"]
    said = {(sample["when"], sample["question"]): sample["answer"] for sample in samples}
    last = max(line["step"] for line in metrics(folder / "lora"))
    between = [f"after step {step}" for step in range(2, last, 2)]
    assert [*dict.fromkeys(when for when, _ in said)] == [
        "before fine-tuning",
        *between,
        "after fine-tuning",
    ]
    assert between and not any("reference" in sample for sample in samples)
    tokenizer = AutoTokenizer.from_pretrained(folder / "lora" / "model")
    models = {"before fine-tuning": load(tiny_model)}
    models["after fine-tuning"] = PeftModel.from_pretrained(
        load(tiny_model), folder / "lora" / "model"
    ).eval()
    for when, model in models.items():
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt"
            )
            tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
            answer = tokenizer.decode(
                tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            assert said[when, prompt] == answer.strip()
    assert said["before fine-tuning", PROMPTS[0]] != said["after fine-tuning", PROMPTS[0]]


def test_max_train_time_ends_a_run_as_its_last_step_would(launch: Finished, folder: Path) -> None:
    lines = metrics(folder / "timed")
    facts = json.loads((folder / "timed" / "facts.json").read_text())
    assert 1 < lines[-1]["step"] < facts["total_steps"] and "eval/loss" in lines[-1]
    spent = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    assert (
        spent < 20
        and json.loads((folder / "timed" / "status.json").read_text())["state"] == "finished"
    )
    assert load(folder / "timed" / "model") is not None
    ended = f"after step {lines[-1]['step']} of {facts['total_steps']:,}: max_train_time 2s is over"
    assert ended in (folder / "timed" / "report.html").read_text()
    assert re.search(
        r"^Chat with it: \S*python recipes/inference.py \S+/timed$", launch.output, re.MULTILINE
    )


def test_a_continued_adapter_begins_where_the_other_ended(launch: Finished, folder: Path) -> None:
    ended = [line["eval/loss"] for line in metrics(folder / "lora") if "eval/loss" in line][-1]
    assert metrics(folder / "continued")[0]["eval/loss"] == pytest.approx(ended, rel=1e-6)
    settings = json.loads((folder / "continued" / "model" / "adapter_config.json").read_text())
    assert settings["r"] == 8 and Path(settings["base_model_name_or_path"]).is_absolute()


def test_frozen_layers_stay_as_they_were(launch: Finished, folder: Path, tiny_model: Path) -> None:
    before, after = load(tiny_model).state_dict(), load(folder / "frozen" / "model").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith("model.layers.0.") for name in changed)
    assert {name for name in before if not name.startswith("model.layers.0.")} == changed


def test_every_optimizer_learns_and_tells_the_size_of_its_states(
    launch: Finished, folder: Path
) -> None:
    for name, (_, expected) in OPTIMIZERS.items():
        found = losses(folder / name)
        assert found[-1] < 0.9 * found[0], (name, found)
        facts = json.loads((folder / name / "facts.json").read_text())
        held = sum(rank["optimizer state"] for rank in facts["memory"]["holders"])
        assert held / sum(unit["parameters"] for unit in facts["units"]) == pytest.approx(
            expected, abs=0.1
        ), name


def test_utilization_is_six_flops_a_weight_and_token_and_attention_over_what_was_measured(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    speed = json.loads((folder / "early_stopping" / "facts.json").read_text())["speed"]
    model = load(tiny_model)
    weights = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in name
    )
    assert speed["flops_per_token"] == 6 * weights and len(speed["product_flops_per_second"]) == 2
    head, learned = model.lm_head.weight.numel(), 0
    for line in metrics(folder / "early_stopping")[1:]:
        tokens = line["perf/tokens_per_second"] * line["perf/step_seconds"]
        # these the head is not needed for
        unlabelled, learned = tokens - (line["tokens"] - learned), line["tokens"]
        done = (
            line["perf/matmul_utilization"]
            * sum(speed["product_flops_per_second"])
            * line["perf/step_seconds"]
        )
        attention = done - 6 * weights * tokens + 6 * head * unlabelled
        pairs = attention / tokens / (12 * 2 * 32)  # a token sees: 2 layers, heads x head_dim = 32
        assert 4 < pairs < 11.5  # rows of 8 to 14 tokens, or 22 at most


def test_the_profiler_leaves_a_trace_of_each_rank_and_the_counter_its_table(
    launch: Finished, folder: Path
) -> None:
    for rank in range(2):
        with gzip.open(folder / "custom" / "profile" / f"rank-{rank}.json.gz") as trace:
            events = [event["name"] for event in json.load(trace)["traceEvents"]]
        # from 0 on
        assert [events.count(f"ProfilerStep#{number}") for number in range(2, 7)] == [0, 1, 1, 1, 0]
        assert "aten::mm" in events
    counted = re.findall(
        r"FLOPs of step 2 on rank 0: (\S+) GFLOP as torch counts them, (\S+) GFLOP by the",
        launch.output,
    )
    assert len(counted) == 1
    # the head without labels; all pairs of attention
    assert 0.7 < float(counted[0][0]) / float(counted[0][1]) < 1.5
    assert launch.output.count("Traces of all ranks: ") == 1


def test_a_loss_that_is_no_number_ends_the_run_naming_step_rows_and_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    finished = forked(
        RECIPE,
        *[
            "--model_name",
            str(tiny_model),
            "--dataset",
            str(rows),
            "--precision",
            "fp32",
            "--save_steps",
            "1",
        ],
        *["--lr", "1e38", "--lr_scheduler", "constant", "--output_dir", str(tmp_path / "run")],
    )
    assert finished.exit_code == 1, finished.output
    assert "Traceback" not in finished.output
    assert "error: step 2: the loss is nan" in finished.output
    assert f"{rows}:" in finished.output
    assert f"The last good checkpoint is {tmp_path}/run/checkpoints/step-000001." in finished.output
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 1)
    assert not (tmp_path / "run" / "model").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">failed<" in page and "error: step 2: the loss is nan" in page


def test_every_run_leaves_a_report(launch: Finished, folder: Path) -> None:
    page = (folder / "no_pad" / "report.html").read_text()
    facts = json.loads((folder / "no_pad" / "facts.json").read_text())
    assert [sample["when"] for sample in facts["samples"]] == [
        "before fine-tuning",
        "after fine-tuning",
    ]
    assert {unit["kind"] for unit in facts["units"]} >= {"LlamaDecoderLayer"}
    assert facts["data"]["train"]["samples"] == 16
    assert facts["total_steps"] == max(line["step"] for line in metrics(folder / "no_pad"))
    for shown in (
        ">finished<",
        "<b>Loss</b>",
        "LlamaDecoderLayer",
        "in the loss",
        "after fine-tuning",
        "Mesh: replicate",
    ):
        assert shown in page
    assert "was not written" not in launch.output
    assert {path.parent.name for path in folder.glob("*/report.html")} == {
        p.parent.name for p in folder.glob("*/facts.json")
    }


@pytest.mark.slow
def test_the_embedded_demo_learns_on_held_out_rows_too(tmp_path: Path) -> None:
    finished = recipe(*FSDP, "--output_dir", str(tmp_path / "run"), processes=2, timeout=900)
    assert finished.exit_code == 0, finished.output
    found = losses(tmp_path / "run")
    assert sum(found[-10:]) / 10 < found[0] * 2 / 3
    evaluated = [line["eval/loss"] for line in metrics(tmp_path / "run") if "eval/loss" in line]
    assert evaluated[-1] < evaluated[0] * 0.75
    assert finished.output.count("question:") == 2
    assert load(tmp_path / "run" / "model") is not None
