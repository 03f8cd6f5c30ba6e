"""A part of a run in its own file, and one line in a copy of the recipe."""

import json
import textwrap
from pathlib import Path

from conftest import RECIPE, metrics, write_rows
from forked import forked
from pages import Page

LIST = "        parts = run_parts(setup, inputs)\n"
PART = '''
"""Writes down what it sees."""

from llama_ft.run import Part


class Diary(Part):
    def __init__(self, ranks):
        self.ranks = ranks
        self.lines = []

    def opened(self, run):
        self.lines.append("opened")

    def before_step(self, run, step):
        self.lines.append(f"before step {step.step}")

    def numbers(self, run):
        return {"diary/pages": 10.0 + self.ranks.rank}

    def after_step(self, run, outcome, metrics):
        metrics["diary/pages"] = outcome.numbers["diary/pages"].sum()
        self.lines.append(f"after step {outcome.step}")
        if outcome.step == 2:
            outcome.save = True

    def saved(self, run, step):
        self.lines.append(f"saved {step}")

    def ended(self, run, how):
        self.lines.append(how)
        file = run.directory / f"diary-{self.ranks.rank}.txt"
        file.write_text("\\n".join(self.lines))
        run.summary_lines.append("The diary is written.")
'''


def test_a_part_is_a_file_and_a_line_and_sees_the_run_on_two_ranks(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Also the example of the documentation."""
    (tmp_path / "diary.py").write_text(PART)
    example, added = Page("docs/development/add-a-part.md").blocks("python")
    (tmp_path / "waiting.py").write_text(example)
    lines = ["from diary import Diary", "from waiting import WaitingTimes"]
    lines += [*added.splitlines(), "parts.append(Diary(ranks))"]
    text = RECIPE.read_text()
    assert text.count(LIST) == 1
    copy = tmp_path / "mine.py"
    copy.write_text(text.replace(LIST, textwrap.indent("\n".join(lines), " " * 8) + "\n"))
    write_rows(tmp_path / "rows.jsonl", 12)
    run = tmp_path / "run"
    flags = f"--model_name {tiny_model} --dataset {tmp_path}/rows.jsonl --output_dir {run}"
    settings = "--context_length 64 --precision fp32 --max_train_step 3 --no_plan --save_model no"
    settings += " --save_async false"
    finished = forked(copy, *flags.split(), *settings.split(), ranks=2)

    assert finished.exit_code == 0, finished.output
    steps = [[f"before step {step}", f"after step {step}"] for step in (1, 2, 3)]
    expected = ["opened", *steps[0], *steps[1], "saved 2", *steps[2], "finished"]
    for rank in (0, 1):
        assert (run / f"diary-{rank}.txt").read_text().splitlines() == expected
    assert [line["diary/pages"] for line in metrics(run)] == [21.0] * 3
    assert "The diary is written." in finished.output
    waited = [float(line) for line in (run / "waiting.txt").read_text().splitlines()]
    longest = [line["my/longest_wait"] for line in metrics(run)]
    assert len(waited) == 3 and all(map(float.__le__, waited, longest))
    # without a plan, an upper bound says that there is memory to spare
    assert "Freed memory is kept for the next tensors: without a plan" in finished.output
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
