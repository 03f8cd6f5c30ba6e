"""Read runs with existing, missing and corrupted files; and recipes/report.py."""

import fcntl
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run
from forked import Finished
from report_run import write_run

from llama_ft.config.paths import RUN_MARKER
from llama_ft.data.tokenize.statistics import BadKind, BuildReport, SplitStatistics, warnings_of
from llama_ft.errors import UserError
from llama_ft.extensions.report.memory import BASE, rising
from llama_ft.extensions.report.page import report_page
from llama_ft.extensions.report.run import differing_settings, read_run
from llama_ft.extensions.report.write import write_or_warn

SCRIPT = REPOSITORY / "recipes" / "report.py"
WITHOUT_TORCH = "import runpy, sys; sys.argv = sys.argv[1:]; sys.modules |= dict.fromkeys(['torch', 'transformers']); "
WITHOUT_TORCH += "runpy.run_path(sys.argv[0], run_name='__main__')"


def report(*arguments: object) -> Finished:
    """recipes/report.py in an interpreter that cannot import torch."""
    return run([sys.executable, "-c", WITHOUT_TORCH, str(SCRIPT), *map(str, arguments)])


def copied(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    (to / "report.html").unlink(missing_ok=True)
    return to


def test_curves_equal_the_logged_metrics(run_dir: Path) -> None:
    found = read_run(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    curve = found.curves["train/loss"]
    assert dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) == losses
    assert 7 not in found.curves["train/grad_norm"].steps, "its value is not finite"
    peaks = [max(line["memory/device_peak_bytes"]) for line in lines[1:]]
    assert found.curves["memory/device_peak_bytes"].values.tolist() == peaks


def test_the_header_names_the_step_of_an_early_stop_and_of_the_final_weights(
    run_dir: Path, tmp_path: Path
) -> None:
    folder = copied(run_dir, tmp_path / "early")
    facts = json.loads((folder / "facts.json").read_text()) | {"total_steps": 450, "weights_of": 40}
    (folder / "facts.json").write_text(json.dumps(facts))
    head = report_page(read_run(folder)).partition("</header>")[0]
    assert "Stopped early, after step 60 of 450" in head
    assert "has the weights of step 40, with the best validation loss." in head
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("best_by: eval/loss", "best_by: eval/score"))
    assert "step 40, with the best eval/score." in report_page(read_run(folder))
    assert "Stopped early" not in report_page(
        read_run(run_dir)
    ) and "has the weights" not in report_page(read_run(run_dir))


def test_skipped_samples_are_listed_above_the_data_table(run_dir: Path, tmp_path: Path) -> None:
    folder = copied(run_dir, tmp_path / "bad")
    counted = BuildReport(
        SplitStatistics(), bad_samples=8, bad_kinds={"no text": BadKind(8, "a:1")}
    )
    facts = json.loads((folder / "facts.json").read_text())
    facts["data"]["warnings"] = warnings_of(counted)
    (folder / "facts.json").write_text(json.dumps(facts))
    data = report_page(read_run(folder)).partition("<h2>Data</h2>")[2].partition("<table>")[0]
    assert data.count('class="warn"') == 2
    assert "skipped 8 bad samples, listed in bad_samples.jsonl:" in data
    assert "8 x no text (first: a:1)" in data


def test_each_measure_of_memory_has_its_own_name(run_dir: Path, tmp_path: Path) -> None:
    """On the CPU the card is of anonymous memory, which RSS exceeds by what is mapped from
    files."""
    page = report_page(read_run(run_dir))
    assert '<div class="name">Peak GPU memory</div>' in page
    assert "Host memory (RSS), peak so far" in page
    assert "Peak memory of tensors in each phase" in page
    folder = copied(run_dir, tmp_path / "cpu")
    for name, device in (
        ("metrics.jsonl", '"memory/device_peak_bytes"'),
        ("facts.json", '"device_peak_bytes"'),
    ):
        text = (
            (folder / name)
            .read_text()
            .replace(device, '"other"' if "/" in device else '"anonymous_peak_bytes"')
        )
        (folder / name).write_text(text)
    facts = json.loads((folder / "facts.json").read_text())
    facts["memory"]["base_bytes"] = 100 * 2**20
    (folder / "facts.json").write_text(json.dumps(facts))
    page = report_page(read_run(folder))
    assert '<div class="name">Peak host memory</div>' in page
    assert "100.0 MiB of it before loading" in page
    # The plan predicts tensors. No chart shows them next to the process, of which they are a part.
    assert "Peak memory of tensors in each phase" not in page
    process = page.partition("Peak host memory in each phase")[2].partition("</figure>")[0]
    assert "predicted" not in process
    assert "Python and its libraries" in process and ">235.0 MiB<" in process
    assert "Host memory (RSS), peak so far" not in page, "one measure is enough"


def test_phases_that_only_repeat_an_earlier_peak_have_no_bar() -> None:
    peaks = {
        BASE: 1.0,
        "load": 2.0,
        "forward": 5.0,
        "backward": 5.02,
        "evaluation": 6.0,
        "save": 4.0,
    }
    shown, others = rising(peaks)
    assert shown == {BASE: 1.0, "load": 2.0, "forward": 5.0, "evaluation": 6.0}
    assert others == ["backward", "save"]


def test_answers_between_the_first_and_the_last_are_folded(run_dir: Path, tmp_path: Path) -> None:
    folder = copied(run_dir, tmp_path / "sampled")
    facts = json.loads((folder / "facts.json").read_text())
    moments = ["before fine-tuning", "after step 20", "after step 40", "after fine-tuning"]
    facts["samples"] = [
        {"when": when, "question": question, "answer": f"{question} {when}"}
        for when in moments
        for question in "BA"
    ]
    (folder / "facts.json").write_text(json.dumps(facts))
    answers = (
        report_page(read_run(folder))
        .partition("<h2>Answers</h2>")[2]
        .partition("</section>")[0]
        .replace("\n", "")
    )
    shown = re.findall(
        r"<h3>(.*?)</h3><p>(.*?)</p>", re.sub(r"<details>.*?</details>", "", answers)
    )
    between = "".join(re.findall(r"<details>.*?</details>", answers))
    assert shown == [
        (when, f"{name} {when}") for name in "AB" for when in moments[:: len(moments) - 1]
    ]
    assert re.findall(r"<h3>(.*?)</h3><p>(.*?)</p>", between) == [
        (when, f"{name} {when}") for name in "AB" for when in moments[1:-1]
    ]


def test_metrics_of_a_running_run_are_read_up_to_the_last_complete_line(
    run_dir: Path, tmp_path: Path
) -> None:
    folder = copied(run_dir, tmp_path / "running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "train/lo')
    assert read_run(folder).step == 60


def test_a_run_without_a_process_has_died_and_one_with_a_process_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="running")
    with open(folder / RUN_MARKER, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)  # as the process of the run does
        assert read_run(folder).status["state"] == "running"
    assert read_run(folder).status["state"] == "died"
    page = report_page(read_run(folder))
    assert '<span class="pill bad">died</span>' in page
    assert f"--output_dir {folder} --resume auto" in page
    (folder / RUN_MARKER).unlink()
    assert read_run(folder).status["state"] == "running", "nobody can know"


def test_a_run_of_an_older_version_has_a_report(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "old")
    finished = report(tmp_path / "old")
    assert finished.exit_code == 0, finished.output
    page = (tmp_path / "old" / "report.html").read_text()
    assert "<b>Loss</b>" in page and "FSDP units" not in page


def test_one_run_differs_from_the_defaults_and_several_from_each_other(
    run_dir: Path, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", lr="1e-3")
    assert differing_settings([read_run(run_dir)])["train.lr"] == [3e-4, 1e-4]
    assert differing_settings([read_run(run_dir), read_run(other)]) == {"train.lr": [3e-4, 1e-3]}


def test_the_script_writes_one_report_or_a_comparison(run_dir: Path, tmp_path: Path) -> None:
    first = copied(run_dir, tmp_path / "first")
    second = copied(run_dir, tmp_path / "second")
    finished = report(first)
    assert (finished.exit_code, finished.output) == (0, f"The report: {first}/report.html\n")
    assert finished.seconds < 60  # it imports no torch; a loaded machine is slow
    assert report(first, second, "--output", tmp_path / "both.html").exit_code == 0
    assert "Settings that differ" in (tmp_path / "both.html").read_text()
    assert not (second / "report.html").exists()
    flags = ["--output", tmp_path / "both.html", "--names", "low,high", "--price", "2"]
    assert report(first, second, *flags).exit_code == 0
    assert "<h1>low, high</h1>" in (tmp_path / "both.html").read_text()
    finished = report(first, second, "--names", "low")
    assert finished.output == "error: --names: has 1 name for 2 runs.\n"


def test_only_reports_are_replaced(run_dir: Path, tmp_path: Path) -> None:
    folder = copied(run_dir, tmp_path / "run")
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    (folder / "report.html").write_text("mine, too")
    for flags, named in ((["--output", notes], notes), ([], folder / "report.html")):
        finished = report(folder, *flags)
        assert finished.exit_code == 2
        assert finished.output == (
            f"error: --output {named}: exists, and is not a report. Name another file.\n"
        )
    assert notes.read_text() == "mine"
    notes.unlink()
    for _ in range(2):
        assert report(folder, "--output", notes).exit_code == 0
    finished = report(folder, "--output", tmp_path / "x.txt")
    assert finished.output == (
        f"error: --output {tmp_path}/x.txt: expected a name that ends in .html.\n"
    )


def test_user_errors_are_reported_together(run_dir: Path, tmp_path: Path) -> None:
    copied(run_dir, tmp_path / "good")
    (tmp_path / "file").touch()
    finished = report(
        tmp_path / "goof", tmp_path, tmp_path / "file", "--output", tmp_path / "no" / "x.html"
    )
    assert finished.exit_code == 2
    places = (f"{tmp_path}/goof: ", f"{tmp_path}: ", f"{tmp_path}/file: ")
    assert all(f"error: {place}" in finished.output for place in places)
    assert f"{tmp_path}/goof: there is no run or model here." in finished.output
    finished = report(tmp_path / "good", "--output", tmp_path / "good" / "config.yaml")
    assert finished.exit_code == 2 and finished.output.startswith("error: --output ")


def test_corrupted_files_are_named(run_dir: Path, tmp_path: Path) -> None:
    folder = copied(run_dir, tmp_path / "damaged")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    broken = {
        "plan.json": "{",
        "config.yaml": "a: [",
        "metrics.jsonl": "\n".join([*lines[:4], lines[4][:30], "", ""]),
    }
    for file, text in broken.items():
        (folder / file).write_text(text)
        with pytest.raises(UserError, match=re.escape(f"{folder}/{file}: ")):
            read_run(folder)
        if file != "metrics.jsonl":
            (folder / file).unlink()
    finished = report(folder)
    assert finished.exit_code == 2
    assert f"{folder}/metrics.jsonl: corrupted (line 5 is not JSON).\n" in finished.output


def test_a_report_that_cannot_be_written_gives_a_warning(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run_dir, tmp_path / "run")
    (folder / "report.html").mkdir()
    write_or_warn(folder)
    assert (
        f"warning: {folder}/report.html was not written: IsADirectoryError"
        in capfd.readouterr().err
    )
    (folder / "facts.json").write_text('{"data": 7, "units": "x", "samples": {"a": 1}}')
    write_or_warn(folder)
    assert "warning: " in capfd.readouterr().err
    assert {path.name for path in folder.iterdir() if "report" in path.name} == {"report.html"}


@pytest.mark.parametrize(
    "attempts",
    [5, ["a"], [{}], [{"step": 1, "changed": {"train.lr": [1]}}], [{"step": "x", "changed": {}}]],
)
def test_corrupted_attempts_are_left_out(run_dir: Path, attempts: object) -> None:
    found = read_run(run_dir)
    found.facts["attempts"] = attempts
    assert found.attempts == [] and found.settings_over_time == found.settings
