"""Whole runs of the recipe on two ranks, as users start them, and what they write."""

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import (
    CASES,
    RECIPE,
    Finished,
    losses,
    metrics,
    recipe,
    series,
    write_jsonl,
    write_rows,
)
from forked import forked
from plain_losses import load_model, mean_loss, read_jsonl, write_tokenized

from llama_ft.extensions.report.live import moment, progress_of
from llama_ft.extensions.report.run import read_run

EXPORT = RECIPE.with_name("export.py")
FSDP = "--enable_fsdp --low_cpu_fsdp"
PADDED = "--batching_strategy padding"
ADAPTER = "--use_peft --target_modules all-linear"
SECRETS = {"WANDB_API_KEY": "5ecre7" * 6 + "abcd", "MLFLOW_TRACKING_PASSWORD": "hunter2-hunter2"}
# Name -> flags, and the bytes of optimizer state per parameter. Few weights have rows too short to
# be quantized or factored. AdamW's bytes are compared in observe/test_memory.py.
OPTIMIZERS = {
    "kahan": (
        "--optimizer anyprecision --use_kahan_summation --precision bf16_pure --lr 0.01",
        6.0,
    ),
    "eight_bits": ("--optimizer AdamW8bit --lr 0.01", 2.07),
    "adafactor": ("--optimizer Adafactor --lr 0.1", 0.1),
}
PROMPTS = ["What is a shard", "Who reads the checkpoint and who does not"]
# Flags of each run; @name is a file of the folder. @tiny is the model, @rows70 a dataset.
FILES = "--model_name @tiny --dataset @train.jsonl --validation @validation.jsonl"
RUNS = {
    "early_stopping": f"{FSDP} {FILES} --precision fp32 --lr 0.05 --lr_scheduler constant "
    "--eval_steps 1 --early_stopping_patience 3 --save_steps 2 --val_batch_size 2 "
    "--context_length 22 --sample_tokens 4",
    "lora": f"{FSDP} --model_name @tiny --dataset @rows70 --validation 0.2 {ADAPTER} --lr 0.01 "
    "--precision fp32 --num_epochs 1 --lora_dropout 0 --sample_tokens 12 --sample_steps 2",
    "timed": f"--model_name @tiny --dataset @rows70 --validation 0.2 {ADAPTER} --num_epochs 1000 "
    "--precision fp32 "
    "--max_train_time 1s",
    "no_pad": f"{FSDP} --model_name @no_pad_model --dataset @rows16 --validation @rows16 {ADAPTER} "
    "--num_epochs 1 --sample_tokens 8 --precision fp32 --lora_dropout 0 "
    f"--batch_size_training 8 --val_batch_size 4 {PADDED}",
    "repeated": "--config @lora/config.yaml",
}
# Runs of the slow tests, in a launch of their own.
SLOW_RUNS = {
    "custom": "--model_name @tiny --dataset @custom.py:rows --precision bf16_pure --num_epochs 2 "
    f"{PADDED} --use_profiler --flop_counter --flop_counter_start 2",
    "tracked": f"{RUNS['early_stopping']} --use_tensorboard "
    "--use_wandb --wandb_mode offline --wandb_tags a,b --use_mlflow --mlflow_log_model",
    "loha": f"{FSDP} {FILES} --use_peft --peft_method loha --peft.r 4 "
    "--target_modules [q_proj,up_proj] --precision fp32 --num_epochs 2 --lr 0.05 "
    "--context_length 22",
    "frozen": f"{FSDP} {FILES} --freeze_layers --num_epochs 1 --precision fp32 "
    f"--activation_checkpointing full --gradient_accumulation_steps 3 {PADDED}",
    "continued": f"{FSDP} --model_name @tiny --dataset @rows70 --validation 0.2 --use_peft "
    "--num_epochs 1 --from_peft_checkpoint @lora/model --precision fp32",
}
# A command of llama-recipes, with a local model and an early end of training and evaluation.
LLAMA_RECIPES = (
    "--enable_fsdp --low_cpu_fsdp --use_peft --peft_method lora --model_name @tiny "
    "--dataset @rows70 "
    "--batch_size_training 1 --num_epochs 1 --save_model --max_train_step 3 --max_eval_step 2"
)
CUSTOM = """
import datasets


def rows(data_config, tokenizer, split):
    count = 24 if split == "train" else 5
    return datasets.Dataset.from_list([
        {"messages": [{"role": "user", "content": f"{split} {n}"}, {"role": "assistant", "content": "yes " * (n + 1)}]}
        for n in range(count)
    ])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def launch(folder: Path, tiny_model: Path, save_model: Any, rows16: Path, rows70: Path) -> Finished:
    """The runs of the fast tests below `folder`, in one launch."""
    save_model(folder / "no_pad_model", pad=False)
    write_tokenized(folder / "train.jsonl", [8 + n % 7 for n in range(64)], seed=1)
    write_tokenized(folder / "validation.jsonl", [8 + n % 7 for n in range(11)], seed=2)
    (folder / "custom.py").write_text(CUSTOM)
    files = {"@tiny": tiny_model, "@rows16": rows16, "@rows70": rows70}
    return launch_runs(folder, {"llama_recipes": LLAMA_RECIPES, **RUNS}, files)


@pytest.fixture(scope="module")
def further(
    launch: Finished, folder: Path, tiny_model: Path, save_model: Any, rows70: Path
) -> Finished:
    """Those of the slow tests."""
    save_model(folder / "wide_model", hidden_size=128, intermediate_size=194)
    write_tokenized(folder / "few.jsonl", [8 + n % 7 for n in range(16)], seed=3)
    runs = dict(SLOW_RUNS)
    for name, (optimizer, _) in OPTIMIZERS.items():
        runs[name] = f"{FSDP} --model_name @wide_model --dataset @few.jsonl --num_epochs 4 "
        runs[name] += f"--lr_scheduler constant {optimizer}"
    return launch_runs(folder, runs, {"@tiny": tiny_model, "@rows70": rows70})


def launch_runs(folder: Path, runs: dict[str, str], files: dict[str, Path]) -> Finished:
    """Two ranks that do all runs. `files` are those outside the folder."""
    cases = []
    for name, flags in runs.items():
        words = [str(files.get(word, word)) for word in flags.split()]
        words = [word.replace("@", f"{folder}/") for word in words]
        words += ["--output_dir", str(folder / name)]
        if name == "lora":
            words += ["--sample_prompts", ",".join(PROMPTS)]
        cases.append(words)
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = forked(
        CASES, folder / "cases.json", ranks=2, timeout=400, HOME=str(folder), **SECRETS
    )
    assert finished.exit_code == 0, finished.output
    return finished


def test_a_llama_recipes_command_writes_an_adapter_that_peft_loads(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    from peft import PeftModel

    output = folder / "llama_recipes"
    model = PeftModel.from_pretrained(load_model(tiny_model), output / "model")
    assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)
    status = {"state": "finished", "step": 3, "exit_code": 0, "message": ""}
    assert json.loads((output / "status.json").read_text()) == status
    assert len(losses(output)) == 3
    assert yaml.safe_load((output / "config.yaml").read_text())["peft"]["use_peft"] is True
    assert (output / "checkpoints" / "step-000003" / "trainer.json").exists()


@pytest.mark.slow
def test_another_peft_method_trains_and_plain_peft_loads_it(
    further: Finished, folder: Path, tiny_model: Path
) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(tiny_model), folder / "loha" / "model").eval()
    assert model.peft_config["default"].peft_type == "LOHA"
    zero_at_first = [
        parameter for name, parameter in model.named_parameters() if "hada_w2_b" in name
    ]
    assert len(zero_at_first) == 4 and all(parameter.any() for parameter in zero_at_first)
    found = series(folder / "loha", "eval/loss")
    before = mean_loss(load_model(tiny_model), folder / "validation.jsonl")
    assert mean_loss(model, folder / "validation.jsonl") == pytest.approx(found[-1], rel=2e-6)
    assert found[-1] != pytest.approx(before, rel=2e-5)


def test_early_stopping_exports_the_weights_with_the_best_validation_loss(
    launch: Finished, folder: Path
) -> None:
    output = folder / "early_stopping"
    evaluated = {line["step"]: line["eval/loss"] for line in metrics(output) if "eval/loss" in line}
    trained = {step: loss for step, loss in evaluated.items() if step > 0}
    best = min(trained, key=trained.__getitem__)
    printed = re.search(
        r"(\d+) samples in (\d+) packed sequences of at most 22 .*\n(\d+) opt", launch.output
    )
    assert printed is not None
    samples, sequences, steps = printed.groups()
    assert int(samples) == 64
    assert 32 <= int(sequences) < 48
    assert 12 <= int(steps) <= 18
    assert max(trained) == best + 3 < int(steps), "it stopped three evaluations after the best"
    found = mean_loss(load_model(output / "model"), folder / "validation.jsonl")
    assert found == pytest.approx(trained[best], rel=1e-5)
    assert json.loads((output / "checkpoints" / "best.json").read_text())["step"] == best
    head = (output / "report.html").read_text().partition("</header>")[0]
    assert f"Stopped early, after step {best + 3} of {steps}" in head
    assert f"has the weights of step {best}," in head
    kept = {path.name for path in (output / "checkpoints").glob("step-*")}
    assert f"step-{best:06d}" in kept
    assert kept == {
        f"step-{step:06d}" for step in trained if step % 2 == 0 or step in (best, max(trained))
    }


def test_an_export_of_an_early_stopped_run_equals_its_final_model(
    launch: Finished, folder: Path, tmp_path: Path
) -> None:
    run = folder / "early_stopping"
    out = tmp_path / "out"
    best = json.loads((run / "checkpoints" / "best.json").read_text())["step"]
    finished = forked(EXPORT, run, out)
    assert finished.exit_code == 0, finished.output
    assert f"/step-{best:06d}, after step {best}" in finished.output
    # probes are computed with the model of a run, and tell nothing about another model
    of_a_run = {"README.md", "probes.json"}
    files = [file for file in (run / "model").iterdir() if file.name not in of_a_run]
    assert len(files) > 4
    for file in files:
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_config_of_a_run_repeats_its_losses_exactly(launch: Finished, folder: Path) -> None:
    assert len(losses(folder / "lora")) > 2
    assert losses(folder / "repeated") == losses(folder / "lora")


@pytest.mark.slow
def test_trackers_hold_the_metrics(further: Finished, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = folder / "tracked"
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [round(event.value, 4) for event in events.Scalars("train/loss")] == [
        round(x, 4) for x in losses(output)
    ]
    assert len(list((output / "wandb").glob("offline-run-*/*.wandb"))) == 1, "one run per launch"
    assert f"wandb sync {output}/wandb/offline-run-" in further.output


@pytest.mark.slow
def test_mlflow_holds_the_metrics_and_the_best_weights(
    further: Finished, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    output = folder / "tracked"
    client = MlflowClient((folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("llama_ft")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
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
    """Settings, metrics, facts, report, model card and checkpoints."""
    check_no_secret(launch, folder, "config.yaml facts.json report.html trainer.json README.md")


@pytest.mark.slow
def test_no_tracker_writes_a_secret_of_its_environment(further: Finished, folder: Path) -> None:
    """Their own logs included."""
    check_no_secret(further, folder / "tracked", "config.yaml debug.log")


def check_no_secret(finished: Finished, folder: Path, expected: str) -> None:
    assert not [value for value in SECRETS.values() if value in finished.output]
    written = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".safetensors", ".pyc")
    ]
    assert set(expected.split()) <= {path.name for path in written}
    for path in written:
        content = path.read_bytes()
        assert not any(value.encode() in content for value in SECRETS.values()), path


def test_a_model_without_a_pad_token_trains_without_loss_on_padding(
    launch: Finished, folder: Path, rows16: Path
) -> None:
    """Batches of 8 and 4 samples of uneven length are padded with </s>, which also ends every answer.
    Sample by sample, without padding, plain transformers must find the same losses before the first
    step."""
    from transformers import AutoTokenizer

    # with the template the run gave it
    tokenizer = AutoTokenizer.from_pretrained(folder / "no_pad" / "model")
    assert tokenizer.pad_token is None
    unpadded = []
    for sample in read_jsonl(rows16):
        chat = [
            {"role": "user", "content": sample["instruction"]},
            {"role": "assistant", "content": sample["output"]},
        ]
        encoded = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = encoded["input_ids"]
        mask = encoded["assistant_masks"]
        assert ids[-1] == tokenizer.eos_token_id and mask[-1] == 1, (
            "the end of the message is in the loss"
        )
        labels = [token if answer else -100 for token, answer in zip(ids, mask, strict=True)]
        unpadded.append({"input_ids": ids, "labels": labels})
    write_jsonl(folder / "unpadded.jsonl", unpadded)
    expected = mean_loss(load_model(folder / "no_pad_model"), folder / "unpadded.jsonl")
    lines = metrics(folder / "no_pad")
    assert lines[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert lines[1]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert "Before fine-tuning" in launch.output and "After fine-tuning" in launch.output


def test_sample_prompts_have_the_answers_of_plain_transformers_and_peft(
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
    models = {"before fine-tuning": load_model(tiny_model)}
    models["after fine-tuning"] = PeftModel.from_pretrained(
        load_model(tiny_model), folder / "lora" / "model"
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
    assert 1 <= lines[-1]["step"] < facts["total_steps"] and "eval/loss" in lines[-1]
    spent = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    assert spent < 120  # without the limit it would take much longer
    assert json.loads((folder / "timed" / "status.json").read_text())["state"] == "finished"
    assert load_model(folder / "timed" / "model") is not None
    ended = f"after step {lines[-1]['step']} of {facts['total_steps']:,}: max_train_time 1s is over"
    assert ended in (folder / "timed" / "report.html").read_text()
    assert re.search(
        r"^Chat with it: \S*python recipes/inference.py \S+/timed$", launch.output, re.MULTILINE
    )


def test_a_run_can_be_watched_from_its_files(launch: Finished, folder: Path) -> None:
    progress = progress_of(read_run(folder / "lora"), time.time())
    assert (progress.step, progress.total_steps, progress.ranks) == (3, 3, 2)
    assert progress.checkpoint is not None and progress.checkpoint.step == 3
    assert progress.spent_seconds is not None and progress.spent_seconds >= 0
    assert progress.started_at is not None and progress.until >= progress.started_at
    facts = json.loads((folder / "lora" / "facts.json").read_text())
    assert facts["training_began"]["step"] == 0
    assert moment(facts["ended"]) == progress.until
    watched = forked(RECIPE.with_name("watch.py"), folder / "lora")
    assert watched.exit_code == 0, watched.output
    loss = losses(folder / "lora")[-1]
    assert f"loss {loss:.4g}, mean of the last 3: " in " ".join(watched.output.split())
    assert "after fine-tuning: " in watched.output


def test_facts_have_the_size_of_the_evaluations_and_the_time_of_each_checkpoint(
    launch: Finished, folder: Path
) -> None:
    facts = json.loads((folder / "lora" / "facts.json").read_text())
    in_loss = facts["data"]["validation"]["target_tokens"]
    assert facts["evaluated"] == {"losses": in_loss, "of_tokens": True, "answers": 0}
    printed = re.findall(
        r"Checkpoint step-(\d+): .*waited ([\d.]+) s, written after ([\d.]+) s", launch.output
    )
    for name in ("early_stopping", "lora"):
        facts = json.loads((folder / name / "facts.json").read_text())
        saved = {int(step): times for step, times in facts["saves"].items()}
        assert saved and all(0 < waited <= written for waited, written in saved.values())
        for step, (waited, written) in saved.items():
            assert (f"{step:06d}", f"{waited:.2f}", f"{written:.2f}") in printed
        assert read_run(folder / name).curves["perf/save_seconds"].steps.tolist() == sorted(saved)
    assert max(saved) == 3, "the last checkpoint of the run, after which no line follows"


@pytest.mark.slow
def test_a_continued_adapter_starts_with_the_loss_of_the_first_one(
    further: Finished, folder: Path
) -> None:
    ended = series(folder / "lora", "eval/loss")[-1]
    assert metrics(folder / "continued")[0]["eval/loss"] == pytest.approx(ended, rel=1e-6)
    settings = json.loads((folder / "continued" / "model" / "adapter_config.json").read_text())
    assert settings["r"] == 8 and Path(settings["base_model_name_or_path"]).is_absolute()


@pytest.mark.slow
def test_frozen_layers_do_not_change(further: Finished, folder: Path, tiny_model: Path) -> None:
    before = load_model(tiny_model).state_dict()
    after = load_model(folder / "frozen" / "model").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith("model.layers.0.") for name in changed)
    assert {name for name in before if not name.startswith("model.layers.0.")} == changed


@pytest.mark.slow
def test_every_optimizer_learns_and_reports_the_size_of_its_states(
    further: Finished, folder: Path
) -> None:
    for name, (_, expected) in OPTIMIZERS.items():
        found = losses(folder / name)
        assert found[-1] < 0.9 * found[0], (name, found)
        facts = json.loads((folder / name / "facts.json").read_text())
        held = sum(rank["optimizer state"] for rank in facts["memory"]["holders"])
        assert held / sum(unit["parameters"] for unit in facts["units"]) == pytest.approx(
            expected, abs=0.1
        ), name


def test_matmul_utilization_is_model_flops_over_the_measured_rate(
    launch: Finished, folder: Path, tiny_model: Path
) -> None:
    speed = json.loads((folder / "early_stopping" / "facts.json").read_text())["speed"]
    model = load_model(tiny_model)
    weights = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in name
    )
    assert speed["flops_per_token"] == 6 * weights and len(speed["product_flops_per_second"]) == 2
    head = model.lm_head.weight.numel()
    learned = 0
    for line in metrics(folder / "early_stopping")[1:]:
        tokens = line["perf/tokens_per_second"] * line["perf/step_seconds"]
        # these the head is not needed for
        unlabelled = tokens - (line["tokens"] - learned)
        learned = line["tokens"]
        done = (
            line["perf/matmul_utilization"]
            * sum(speed["product_flops_per_second"])
            * line["perf/step_seconds"]
        )
        attention = done - 6 * weights * tokens + 6 * head * unlabelled
        pairs = attention / tokens / (12 * 2 * 32)  # a token sees: 2 layers, heads x head_dim = 32
        assert 4 < pairs < 11.5  # rows of 8 to 14 tokens, or 22 at most


@pytest.mark.slow
def test_the_profiler_writes_a_trace_per_rank_and_the_flop_counter_its_table(
    further: Finished, folder: Path
) -> None:
    for rank in range(2):
        with gzip.open(folder / "custom" / "profile" / f"rank-{rank}.json.gz") as trace:
            events = [event["name"] for event in json.load(trace)["traceEvents"]]
        # from 0 on
        assert [events.count(f"ProfilerStep#{number}") for number in range(2, 7)] == [0, 1, 1, 1, 0]
        assert "aten::mm" in events
    counted = re.findall(
        r"FLOPs of step 2 on rank 0: (\S+) GFLOP as torch counts them, (\S+) GFLOP by the",
        further.output,
    )
    assert len(counted) == 1
    # the head without labels; all pairs of attention
    assert 0.7 < float(counted[0][0]) / float(counted[0][1]) < 1.5
    assert further.output.count("Traces of all ranks: ") == 1


def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_samples_and_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    flags = f"--model_name {tiny_model} --dataset {rows} --output_dir {tmp_path}/run"
    settings = "--precision fp32 --save_steps 1 --lr 1e38 --lr_scheduler constant"
    finished = forked(RECIPE, *flags.split(), *settings.split())
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


def test_every_run_writes_a_report(launch: Finished, folder: Path) -> None:
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
        "2 ranks: the model is sharded over all of them",
    ):
        assert shown in page
    assert "was not written" not in launch.output
    assert {path.parent.name for path in folder.glob("*/report.html")} == {
        p.parent.name for p in folder.glob("*/facts.json")
    }


@pytest.mark.large
def test_the_embedded_demo_lowers_the_validation_loss(tmp_path: Path) -> None:
    flags = [*FSDP.split(), "--precision", "fp32"]  # bf16 takes longer on a CPU
    flags += ["--output_dir", str(tmp_path / "run")]
    finished = recipe(*flags, processes=2, timeout=900)
    assert finished.exit_code == 0, finished.output
    found = losses(tmp_path / "run")
    assert sum(found[-10:]) / 10 < found[0] * 2 / 3
    evaluated = series(tmp_path / "run", "eval/loss")
    assert evaluated[-1] < evaluated[0] * 0.75
    assert finished.output.count("question:") == 2
    assert load_model(tmp_path / "run" / "model") is not None
