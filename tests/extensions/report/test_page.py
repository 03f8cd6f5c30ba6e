"""The report's pages as files: what they show, and that they ask for nothing from elsewhere."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_run import LAYERS, MARKUP, SECRET, write_run

from llama_ft.extensions.report.page import comparison_page, named_runs, report_page
from llama_ft.extensions.report.run import read_run
from llama_ft.processes import replace_text

CURVES = [
    "Learning rate", "Gradient norm", "Tokens per second", "MFU, %", "Matmul utilization, %", "Time per step, s",
]  # fmt: skip
CONSTANT = {"GPU memory, peak so far": "236 MiB", "Host memory (RSS), peak so far": "900 MiB"}
BARS = ["Memory held at the optimizer step", "Peak memory of tensors in each phase"]
HEADINGS = [
    "Answers",
    "Scored answers",
    "Training",
    "Memory",
    "FSDP units",
    "Data",
    "Environment",
    "Settings",
]
EXPORT = "export R R-exported --save_dtype bfloat16"
FROM_ELSEWHERE = {"src", "srcset", "href", "action", "data", "poster"}


class Parsed(HTMLParser):
    """A page: its tags with their attributes, its rows of table cells, and its text outside of
    scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = list[tuple[str, dict[str, str | None]]]()
        self.rows = [[""]]
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data
            if self._inside in ("td", "th"):
                self.rows[-1][-1:] = [("".join(self.rows[-1][-1:]) + data).strip()]

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def asks_for_nothing(self) -> bool:
        names = {name for _, attributes in self.tags for name in attributes}
        policy = [
            attributes["content"]
            for tag, attributes in self.tags
            if "content-security-policy" in str(attributes.get("http-equiv", "")).lower()
        ]
        return (
            not names & FROM_ELSEWHERE
            and len(policy) == 1
            and "default-src 'none'" in str(policy[0])
        )


@pytest.fixture(scope="module")
def report(run_dir: Path) -> Path:
    replace_text(run_dir / "report.html", report_page(read_run(run_dir)))
    return run_dir / "report.html"


def drawn(text: str) -> dict[str, str]:
    """Title -> the figure."""
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    return {re.findall(r"<b[^>]*>(.*?)</b>", figure, re.DOTALL)[0]: figure for figure in figures}


def test_every_plot_is_drawn_and_the_page_loads_nothing_from_elsewhere(report: Path) -> None:
    text = report.read_text()
    figures = drawn(text)
    assert list(figures) == ["Loss", *CURVES, *BARS]
    for title, figure in figures.items():
        points = re.findall(r'<path[^>]* d="M([^"]+)"', figure)
        assert points or 'class="bar' in figure, title
    page = Parsed(text)
    assert page.asks_for_nothing()
    headings = re.findall(r"<h2[^>]*>\s*([^<]+?)\s*<", text)
    assert [name for name in headings if name in HEADINGS] == HEADINGS
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_training_on_pairs_has_plots_of_rewards(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as log:
        for step in (61, 62):
            rewards = {
                f"train/rewards/{name}": step / 100
                for name in ("chosen", "rejected", "margins", "accuracies")
            }
            log.write(json.dumps({"step": step, **rewards}) + "\n")
    assert sum(title.startswith("Reward") for title in drawn(report_page(read_run(run)))) == 4


def test_the_plots_of_a_comparison_have_one_line_per_run(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", "failed", steps=30, lr="1e-3", scale=0.9)
    text = comparison_page([read_run(run_dir), read_run(other)])
    figures = drawn(text)
    constant = [f"{title}, MiB" for title in CONSTANT]
    assert list(figures) == ["Loss", "Validation loss", *CURVES, *constant]
    for title, figure in figures.items():
        assert len(re.findall(r'<path class="(?:line|dots)', figure)) == 2, title
    page = Parsed(text)
    assert page.asks_for_nothing()
    assert ["train.lr", "0.0003", "0.001"] in page.rows
    assert sum(row[0].startswith("train.") for row in page.rows if row) == 1


def test_markup_in_data_settings_and_messages_is_escaped(tmp_path: Path) -> None:
    page = Parsed(report_page(read_run(write_run(tmp_path / "evil <script>", "failed"))))
    assert not {"img", "iframe", "link", "a"} & {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count(MARKUP) >= 6
    assert "error: no good." in page.text and "exit code 1" in page.text


def test_no_secret_is_in_facts_json_or_the_report(run_dir: Path, report: Path) -> None:
    for text in (
        report.read_text(),
        (run_dir / "facts.json").read_text(),
        comparison_page([read_run(run_dir)] * 2),
    ):
        assert SECRET not in text and "hunter2" not in text
    assert "https://***@example.com/rows.jsonl" in report.read_text()
    assert "HF_TOKEN=***" in report.read_text()


def test_scored_answers_are_a_table_of_scores_over_time(report: Path) -> None:
    rows = Parsed(report.read_text()).rows
    scores = [row[:2] for row in rows if row and row[0].endswith(", a_long_name")]
    assert scores == [[f"step {step}, a_long_name", f"{step / 7:.4g}"] for step in range(8)]
    assert ["reference", "", ""] in rows, "the text of an answer is a paragraph in its cell"


def test_each_split_has_a_row_with_its_samples_and_tokens(report: Path) -> None:
    page = Parsed(report.read_text())
    counts = ["6,000", "3,000", "200", "0", "0"]
    assert ["training", "60", *counts] in page.rows
    assert ["validation", "7", *counts] in page.rows


def test_each_rank_has_a_row_and_the_page_is_small(report: Path) -> None:
    ranks = report.read_text().partition("Measured peaks of each rank<")[2]
    rows = ranks.partition("</details>")[0]
    assert rows.count("<tr>") == 3 and rows.count(">80.0 MiB<") == 1
    assert report.stat().st_size < 150_000


def test_the_first_screen_has_the_loss_the_main_numbers_and_the_answers(report: Path) -> None:
    before_training = report.read_text().partition("<h2>Training</h2>")[0]
    loss, answers = before_training.split("<h2>Answers</h2>")
    assert '<figure class="plot wide"' in loss
    names = re.findall(r'<div class="name">(.*?)</div>', loss)
    assert names == [
        "Validation loss",
        "Training loss",
        "Time",
        "Hardware",
        "Steps",
        "Tokens per second",
        "MFU",
        "Peak GPU memory",
    ]
    assert re.findall(r"<h3>(.*?)</h3>", answers) == [
        "before fine-tuning",
        "after fine-tuning",
        "reference",
    ]


def test_flat_curves_are_one_line_and_equal_units_are_one_row(report: Path) -> None:
    text = report.read_text()
    line = text.partition('<p class="constants">')[2].partition("</p>")[0]
    assert dict(re.findall(r"<span>([^<]+) <b>([^<]+)</b></span>", line)) == CONSTANT
    layers = f"model.layers.0 to model.layers.{LAYERS - 1}"
    assert [layers, "Layer", f"{LAYERS}", "1,000,000", "1.9 MiB"] in Parsed(text).rows


@pytest.mark.parametrize(
    ("quantization", "method"),
    [("none", "LoRA"), ("8bit", "LoRA on an 8-bit base"), ("4bit", "QLoRA")],
)
def test_the_head_names_the_method(
    run_dir: Path, tmp_path: Path, quantization: str, method: str
) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        settings.replace("use_peft: false", "use_peft: true").replace(
            "mode: none", f"mode: {quantization}"
        )
    )
    assert f'<p class="about">demo · {method} · trained on' in report_page(read_run(run))


def test_one_sentence_says_what_the_run_has_achieved(run_dir: Path, tmp_path: Path) -> None:
    page = report_page(read_run(run_dir))
    [sentence] = re.findall(r'<p class="verdict">(.*?)</p>', page)
    assert sentence == (
        "Full fine-tuning on demo, 60 samples, 60 steps in 12 min on 2 x H100 80GB HBM3: validation loss fell from 3 "
        "to 1.5; peak GPU memory 235.0 MiB (planned: 230.0 MiB)."
    )
    run = shutil.copytree(run_dir, tmp_path / "run")
    facts = json.loads((run / "facts.json").read_text())
    for evaluated, size in (
        ({"losses": 2000, "of_tokens": True, "answers": 0}, "on 2,000 of 3,000 tokens"),
        ({"losses": 2990, "of_tokens": True, "answers": 0}, "on all 2,990 tokens"),
        ({"losses": 37, "of_tokens": False, "answers": 0}, "on 37 samples"),
    ):
        (run / "facts.json").write_text(json.dumps(facts | {"evaluated": evaluated}))
        page = report_page(read_run(run))
        assert f"validation loss fell from 3 to 1.5 {size};" in page
        assert f'<div class="muted">{size}; 3 before training' in page


def test_a_loss_that_did_not_fall_is_not_called_a_success(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for last, words in (
        (3.001, "3 before and 3.001 after, no change"),
        (3.5, "rose from 3 to 3.5"),
    ):
        lines[60]["eval/loss"] = last
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert f"validation loss {words};" in report_page(read_run(run))


def test_a_loss_of_an_earlier_step_says_so(run_dir: Path, tmp_path: Path) -> None:
    """The run evaluates at steps 0, 20, 40 and 60."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for steps, words, below in (
        (45, "fell from 3 to 2 at step 40", "at step 40; 3 before training"),
        (15, "3 before training", "before training"),
    ):
        kept = lines[: steps + 1]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        (run / "status.json").write_text(json.dumps({"state": "stopped", "step": steps}))
        page = report_page(read_run(run))
        assert f"validation loss {words};" in page
        assert f'<div class="muted">{below}</div>' in page


def test_a_price_gives_the_cost_of_all_ranks(run_dir: Path) -> None:
    """2 ranks, 12 min 10 s, 3 per hour."""
    cards = re.findall(
        r'name">Cost</div><div class="value">(.*?)<', report_page(read_run(run_dir), 3)
    )
    assert cards == [f"{2 * 3 * 730 / 3600:.2f}"]
    assert ">Cost<" not in report_page(read_run(run_dir))


def test_a_score_has_its_size_and_its_value_before_training(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step, score in ((0, 0.25), (40, 0.75), (60, 0.5)):
        lines[step]["eval/score"] = score
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((run / "facts.json").read_text())
    facts["evaluated"] = {"losses": 3000, "of_tokens": True, "answers": 8}
    (run / "facts.json").write_text(json.dumps(facts))
    page = report_page(read_run(run))
    assert "score rose from 0.25 to 0.5 over 8 answers" in page
    assert "over 8 answers; 0.25 before training; highest 0.75 at step 40" in page


@pytest.mark.parametrize(
    ("settings", "state", "expected"),
    [
        ({}, "finished", ["chat R", "evaluate R --base", EXPORT]),
        ({"use_peft: false": "use_peft: true"}, "finished",
         ["chat R", "evaluate R --base", "export R R-exported --merge"]),
        ({"objective: sft": "objective: reward"}, "finished",
         ["chat R --prompts FILE", "evaluate R --base", EXPORT]),
        ({"save_model: true": "save_model: false"}, "finished", []),
        ({}, "failed", []),
    ],
)  # fmt: skip
def test_the_next_commands_are_those_that_fit_the_run(
    tmp_path: Path, settings: dict[str, str], state: str, expected: list[str]
) -> None:
    run = write_run(tmp_path / "run", state)
    text = (run / "config.yaml").read_text()
    for old, new in settings.items():
        assert old in text
        text = text.replace(old, new)
    (run / "config.yaml").write_text(text)
    commands = re.findall(r"<dd><code>(.*?)</code>", report_page(read_run(run)))
    served = [f"vllm serve {run}-exported"] if expected else []
    assert commands == [f"llama-ft {line.replace('R', str(run))}" for line in expected] + served


def test_checkpoints_have_their_times_at_their_own_steps(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    facts = json.loads((run / "facts.json").read_text())
    facts["saves"] = {"40": [0.1, 1.5], "20": [0.3, 1.0], "60": [0.2, 2.0]}
    (run / "facts.json").write_text(json.dumps(facts))
    curves = read_run(run).curves
    assert curves["perf/save_seconds"].steps.tolist() == [20, 40, 60]
    assert curves["perf/save_seconds"].values.tolist() == [1.0, 1.5, 2.0]
    assert curves["perf/save_stall_seconds"].values.tolist() == [0.3, 0.1, 0.2]


def test_compared_runs_have_different_names(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert [run.name for run in named_runs([run, run])] == ["a run (a)", "a run (b)"]
    assert [run.name for run in named_runs([run, run], ["low", "high"])] == ["low", "high"]
    text = comparison_page(named_runs([run, run]))
    assert "<h1>a run (a), a run (b)</h1>" in text and f"<td>{run_dir}</td>" in text
