"""The command line of recipes/evaluate.py: what it settles, and its mistakes, all told at once."""

import json
import sys
from pathlib import Path

import pytest
from conftest import write_rows

from llama_ft.config import Config, QuantizationConfig, to_yaml
from llama_ft.errors import UserError
from llama_ft.evaluation.flags import read_evaluate_flags


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, rows, and directories of runs with a result each."""
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "plain", "kept/model", "none/model", "other/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.safetensors").touch()
    write_rows(tmp_path / "rows.jsonl", 8)
    write_rows(tmp_path / "rows.json", 8)
    (tmp_path / "found.json").write_text("{}")
    for run, validation in {"kept": "0.25", "none": None, "other": "0.5"}.items():
        config = Config()
        config.model.model_name, config.data.dataset, config.data.validation = "base", "rows.jsonl", validation
        config.data.labels, config.train.precision, config.train.val_batch_size = "all", "fp32", 3
        (tmp_path / run / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def mistakes(*flags: str) -> list[str]:
    with pytest.raises(UserError) as refusal:
        read_evaluate_flags(list(flags), "")
    return list(refusal.value.messages)


def test_a_run_says_which_rows_it_held_out_and_how_it_computed(place: Path) -> None:
    options = read_evaluate_flags(["kept", "--base"], "")
    [(asked, base)] = options.asked
    assert (options.rows, options.config.data.dataset, options.config.data.validation) == (
        "held_out",
        "rows.jsonl",
        "0.25",
    )
    assert (options.config.data.labels, options.config.train.val_batch_size) == ("all", 3)
    assert (asked.place, asked.precision, base.place, base.precision) == ("kept", "fp32", "base", "fp32")


def test_the_base_has_all_settings_of_the_quantization_and_a_name_that_tells_them(place: Path) -> None:
    config = Config()
    config.model.model_name, config.model.resize_embeddings, config.data.dataset = "base", True, "rows.jsonl"
    config.quantization.mode, config.quantization.quant_type, config.quantization.block_size = "4bit", "fp4", 128
    (place / "kept" / "config.yaml").write_text(to_yaml(config))
    (place / "kept" / "model").rename(place / "kept" / "merged")
    (place / "kept" / "model").mkdir()
    (place / "kept" / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    (place / "kept" / "model" / "adapter_model.safetensors").touch()
    flags = ["kept", "--base", "--dataset", "rows.jsonl"]
    [(_, base)] = read_evaluate_flags(flags, "").asked
    assert (base.quantization, base.name, base.resized) == (config.quantization, "base: base (4bit fp4, grown)", True)
    [(_, base)] = read_evaluate_flags([*flags, "--quantization", "8bit"], "").asked
    assert (base.quantization, base.name) == ("8bit", "base: base (8bit, grown)")
    [(_, base)] = read_evaluate_flags(["kept/merged", *flags[1:]], "").asked  # whole: it has the bits it was saved in
    assert (base.quantization, base.name) == (QuantizationConfig(), "base: base (grown)")


def test_bases_of_runs_in_another_precision_have_names_that_tell_them_apart(place: Path) -> None:
    config = Config()
    config.model.model_name, config.train.precision = "base", "bf16_mixed"
    (place / "other" / "config.yaml").write_text(to_yaml(config))
    asked = read_evaluate_flags(["kept", "none", "other", "--base", "--dataset", "rows.jsonl"], "").asked
    assert [base.name for _, base in asked] == ["base: base, fp32"] * 2 + ["base: base, bf16_mixed"]


def test_flags_win_over_the_run(place: Path) -> None:
    options = read_evaluate_flags(["kept", "--labels", "completion", "--val_batch_size", "5", "--precision=bf16"], "")
    assert (options.config.data.labels, options.config.train.val_batch_size) == ("completion", 5)
    assert options.asked[0][0].precision == "bf16"


def test_a_dataset_is_taken_whole_unless_validation_says_otherwise(place: Path) -> None:
    whole = read_evaluate_flags(["kept", "--dataset", "rows.jsonl"], "")
    assert (whole.rows, whole.config.data.validation, whole.config.data.labels) == ("all", None, "all")
    named = read_evaluate_flags(["kept", "--dataset", "rows.jsonl", "--dataset_split", "train"], "")
    assert (whole.split, named.split) == ("validation", "train")
    part = read_evaluate_flags(["plain", "--dataset", "rows.jsonl", "--validation", "0.5"], "")
    assert (part.rows, part.config.data.validation) == ("held_out", "0.5")


def test_the_validation_of_the_run_itself_may_be_given_again(place: Path) -> None:
    options = read_evaluate_flags(["kept", "--validation", "0.25", "--output_file", "found.json", "--overwrite"], "")
    assert (options.rows, options.config.data.validation) == ("held_out", "0.25")


def test_tasks_alone_need_no_rows(place: Path) -> None:
    (place / "mine.yaml").write_text("task: mine\n")
    for model in ("plain", "none"):
        options = read_evaluate_flags([model, "--tasks", "mine.yaml, hellaswag"], "")
        assert (options.rows, options.flags.tasks, options.flags.batch_size) == ("none", ["mine.yaml", "hellaswag"], 8)
    assert read_evaluate_flags(["kept", "--tasks", "mine.yaml"], "").rows == "held_out"


def test_llama_recipes_names_of_model_and_adapter_work(place: Path) -> None:
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gone/base/model"}))
    (place / "adapter" / "adapter_model.safetensors").touch()
    flags = ["--peft_model", "adapter", "--base", "--dataset", "rows.jsonl"]
    options = read_evaluate_flags([*flags, "--model_name", "base"], "")
    assert [(asked.place, base.place) for asked, base in options.asked] == [("adapter", "base")]
    [message] = mistakes(*flags)
    assert message.startswith("adapter: its base model gone/base/model: no such folder.")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["MODEL is needed: evaluate.py output/<run>"]),
        ([""], ["MODEL is needed: evaluate.py output/<run>"]),
        (["kapt"], ["kapt: no such folder. Did you mean kept? A model of the Hub"]),
        (["./kapt"], ["./kapt: no such folder. Did you mean kept?"]),
        (["kept", "kept"], ["kept: given twice."]),
        (["kept", "--lables", "all"], ["--lables is not a flag. Did you mean --labels?"]),
        (["plain"], ["plain: is of no run, so it has no validation set."]),
        (["plain", "--validation", "0.5"], ["plain: is of no run, so it has no validation set"]),
        (["plain", "--tasks", "a", "--labels", "all"], ["--labels: needs --dataset"]),
        (["kept", "--validation", "0.5"], ["--validation 0.5: the run of kept had 0.25"]),
        (["none", "--validation", "0.5"], ["--validation 0.5: the run of none had none"]),
        (["kept", "--dataset_split", "test"], ["--dataset_split test: the run of kept had train"]),
        (["none"], ["none: its run had no validation set"]),
        (["kept", "other"], ["kept and other held out other samples (validation)"]),
        (["plain", "--base", "--dataset", "rows.jsonl"], ["--base: plain does not say what it was fine-tuned from."]),
        (["kept", "--base_model", "./bsae"], ["--base_model ./bsae: no such folder. Did you mean base?"]),
        (["kept", "--dataset", "row.jsonl"], ["--dataset row.jsonl: no such file. Did you mean rows.jsonl?"]),
        (["kept", "--labels", "some"], ["--labels some: expected auto, assistant, completion or all."]),
        (["kept", "--limit", "3"], ["--limit: there are no --tasks."]),
        (["kept", "--batch_size", "3"], ["--batch_size: there are no --tasks"]),
        (["kept", "--tasks", "tsk.yaml"], ["--tasks tsk.yaml: no such file."]),
        (
            ["kept", "--tasks", "a", "--limit", "2.5"],
            ["--limit 2.5: expected a whole number"],
        ),
        (["kept", "--tasks", "a", "--batch_size", "0"], ["--batch_size 0: expected a whole number"]),
        (["kept", "--output_file", "found.json"], ["--output_file found.json: is there already. --overwrite replaces"]),
        (["kept", "--tasks", "a", "--batch_size", "auto", "--enable_fsdp"], ["--batch_size auto: each rank would try"]),
        (["kept", "--output_file", "~nobody_/x.json"], ["--output_file ~nobody_/x.json: cannot be looked at: "]),
        (["kept", "--tasks", "~nobody_/x.yaml"], ["--tasks ~nobody_/x.yaml: cannot be looked at: "]),
        (["~nobody_/kept"], ["~nobody_/kept: cannot be looked at: "]),
        (["kept", "--dataset", "~nobody_/rows.jsonl", "--output_file", "x.json"], ["--dataset ~nobody_/rows.jsonl: "]),
        (["kept", "--base_model", "~nobody_/base"], ["--base_model ~nobody_/base: cannot be looked at: "]),
        (["kept", "--overwrite"], ["--overwrite: nothing is written without --output_file."]),
        (
            ["plain", "--dataset", "rows.json", "--output_file", "./rows.json", "--overwrite"],
            ["--output_file ./rows.json: holds something other than results"],
        ),
        (["kept", "--output_file", "base"], ["--output_file base: is a folder; expected a file"]),
        (["kept", "--output_path", "found.csv"], ["--output_file found.csv: JSON is written"]),
        (
            ["./kapt", "--limit", "3", "--output_file", "x.txt"],
            ["./kapt: no such folder.", "--limit: there are no --tasks.", "--output_file x.txt: JSON is written"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told_together(place: Path, flags: list[str], expected: list[str]) -> None:
    told = mistakes(*flags)
    assert len(told) == len(expected)
    for message, beginning in zip(told, expected, strict=True):
        assert message.startswith(beginning)


def test_a_run_whose_rows_are_gone_names_itself_and_the_file(place: Path) -> None:
    (place / "rows.jsonl").rename(place / "rows2.jsonl")
    [message] = mistakes("kept")
    assert message == "kept: its run: data.dataset rows.jsonl: no such file. Did you mean rows2.jsonl?"


def test_without_the_extra_the_command_that_installs_it_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    assert mistakes("kept", "--tasks", "hellaswag") == [
        "--tasks: lm-evaluation-harness is not installed.\npip install -e '.[eval]' installs it."
    ]
