"""Write the reference pages that follow from the code, and draw the pictures in docs/img:
`python docs/generate.py` writes them, `--check` compares. It also writes configs/schema.json, the
JSON schema of YAML configs, for editors.

The settings come from the dataclasses of `llama_ft.config`, the flags of the other recipes from
theirs, and the metrics from METRICS below, whose names a test compares with the code. The ready
configs, the examples, the launch files and the notebook are shown as they are: the site has no other
files. The repository's URL goes from pyproject.toml into the files of URL_KEYS, and the highlights of
the changelog into the README. Run it from anywhere;
it needs no model and no network.
"""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from llama_ft.commands import VERBS
from llama_ft.config.reading.dump import json_schema
from llama_ft.config.reading.tool_flags import with_extensions
from llama_ft.config.settings.settings import SECTIONS, SETTINGS, Setting, settings_of
from llama_ft.config.wording.messages import format_value

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pictures.draw import FOLDER, PICTURES  # noqa: E402

REFERENCE = Path(__file__).resolve().parent / "reference"
REPOSITORY = REFERENCE.parents[1]
SAMPLES_SHOWN = 5
LANGUAGES = {".yaml": "yaml", ".jsonl": "json"}  # of a file, for its colors; else a shell script
HEADER = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"
# Recipe -> what it is for, the module and the class of its flags, the words that stand alone.
RECIPES = {
    "plan": ("Predict the memory of a run before it starts. It takes every flag of `recipes/finetuning.py` too.",
             "plan.flags", "PlanFlags", ""),
    "check": ("Measure devices, network and disk before a run. Start it with torchrun, as the training.",
              "extensions.check.flags", "CheckFlags", ""),
    "inference": ("Ask a model: one prompt, a file of prompts, or a conversation.",
                  "inference.flags", "InferenceFlags", "[MODEL]"),
    "evaluate": ("Compute loss and perplexity, and run tasks of lm-evaluation-harness.",
                 "evaluation.flags", "EvaluateFlags", "[MODEL...]"),
    "export": ("Write a model or adapter in Hugging Face format from any checkpoint.",
               "export_flags", "ExportFlags", "CHECKPOINT OUT"),
    "rollout": ("Sample answers to prompts, score them, and write them in rounds.",
                "extensions.rollouts.flags", "RolloutFlags", "[MODEL]"),
    "report": ("Write the report of a run, or compare runs.", "extensions.report.run", "ReportFlags", "[RUN...]"),
    "watch": ("Watch a run in the terminal, from its files alone.", "extensions.report.watch", "WatchFlags", "[RUN]"),
}  # fmt: skip
# Key of metrics.jsonl -> its unit and meaning.
METRICS = {
    "step": ("optimizer steps", "Steps so far."),
    "epoch": ("epochs", "Passes over the training data so far, a fraction."),
    "tokens": ("tokens", "Loss tokens so far, over all ranks. `perf/tokens_per_second` counts input tokens."),
    "train/loss": ("nats per token", "Mean over the loss tokens of the global batch."),
    "train/lr": ("", "Learning rate of the step."),
    "train/grad_norm": ("", "Norm of all gradients, before clipping."),
    "train/router_aux_loss": (
        "",
        "MoE models: the routers' load-balancing loss before its coefficient, the mean over micro-batches.",
    ),
    "train/reward": ("", "GRPO: mean reward of the answers of the step; [more](../guides/grpo.md#what-to-watch)."),
    "train/rewards/margins": ("", "Pairs: reward of the chosen response minus that of the rejected one."),
    "train/kl": ("nats", "KTO: estimate of the KL divergence from the reference, the mean over micro-batches."),
    "train/rewards/accuracies": ("share", "Pairs whose chosen response has the higher reward."),
    "train/loss_scale": ("", "fp16 only: the factor on the loss."),
    "train/skipped_steps": ("steps", "fp16 only: steps whose gradients overflowed. They change no weight."),
    "eval/loss": ("nats per token", "Validation loss; only in steps with an evaluation."),
    "eval/reward": ("", "GRPO: mean reward of answers to held-out prompts; `eval/loss` is minus that."),
    "eval/score": ("", "With `--score`: the mean score of generated answers."),
    "eval/pass_at_<k>": ("share", "With `--score_answers`: the estimate of pass@k, for 1, 2, 4 and so on."),
    "eval/<name>/loss": (
        "nats per token",
        "Loss of the validation set `<name>`; it has its other numbers, too.",
    ),
    "eval/perplexity": ("", "The exponential of `eval/loss`; not with pairs."),
    "eval/rewards/margins": ("", "As `train/rewards/margins`, of the validation set."),
    "eval/rewards/accuracies": ("share", "As `train/rewards/accuracies`, of the validation set."),
    "perf/tokens_per_second": ("tokens/s", "Input tokens that are not padding, over all ranks."),
    "perf/step_seconds": ("s", "Duration of the step, without evaluations and checkpoints."),
    "perf/data_wait_seconds": ("s", "Part of `perf/step_seconds` in which the next batch was not ready."),
    "perf/mfu": ("share", "Model FLOPs per second over the published peak. Absent on CPUs, in fp32 and on GPUs whose "
                 "peak is not known."),
    "perf/matmul_utilization": ("share", "Model FLOPs per second over the matmul rate measured at the start."),
    "perf/rollout_seconds": ("s", "GRPO: part of `perf/step_seconds` in which answers were generated and scored."),
    "perf/save_stall_seconds": ("s", "After a checkpoint: how long training waited for it."),
    "perf/save_seconds": ("s", "After a checkpoint: how long saving took."),
    "memory/host_peak_bytes": ("bytes", "Peak host memory, one number per rank."),
    "memory/device_peak_bytes": ("bytes", "Peak GPU memory of tensors, one number per rank; CUDA only."),
}  # fmt: skip


# The settings that most runs set -> the page that explains them, from docs/reference.
COMMON = {
    "model_name": "../guides/models.md",
    "dataset": "../guides/data.md",
    "validation": "../guides/data.md",
    "output_dir": "run-directory.md",
    "use_peft": "../guides/lora-qlora.md",
    "r": "../guides/lora-qlora.md",
    "mode": "../guides/lora-qlora.md",  # --quantization
    "lr": "../guides/hyperparameters.md",
    "num_epochs": "../guides/hyperparameters.md",
    "batch_size_training": "../guides/hyperparameters.md",
    "gradient_accumulation_steps": "../guides/training-options.md",
    "context_length": "../guides/data.md",
    "activation_checkpointing": "../guides/training-options.md",
    "enable_fsdp": "../guides/multi-gpu-multi-node.md",
    "objective": "../guides/preference-tuning.md",
    "resume": "../guides/resume.md",
}


def cell(text: str) -> str:
    """Text as it may stand in a table."""
    parts = text.replace("|", "\\|").split(
        "`"
    )  # every second one is code, which Markdown escapes itself
    parts[::2] = [part.replace("<", "&lt;").replace("{", "&#123;") for part in parts[::2]]
    return "`".join(parts)


def kind(setting: Setting) -> str:
    """A setting's type, or its choices."""
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    words = {
        "switch": "true or false",
        "data": "text or list",
        "names": "list",
        "groups": "list of mappings",
        "options": "mapping",
    }
    return choices or words.get(setting.kind, setting.kind)


def table(settings: dict[str, Setting], flags: bool = False) -> str:
    """A row per setting: name, type, default, meaning."""
    rows = [
        "| flag | type | default | meaning |"
        if flags
        else "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for setting in settings.values():
        default = format_value(setting.default).strip("[]{}")
        name = f"`--{setting.name.removesuffix('_')}`" if flags else f"`{setting.name}`"
        rows.append(
            f"| {name} | {kind(setting)} | {f'`{default}`' if default else 'empty'} | {cell(setting.meaning)} |"
        )
    return "\n".join(rows) + "\n"


def common_table() -> str:
    """A row per setting that most runs set, with the page that explains it."""
    rows = ["| setting | default | explained in |", "|---|---|---|"]
    for name, guide in COMMON.items():
        default = format_value(SETTINGS[name].default).strip("[]")
        title = (REFERENCE / guide).read_text().partition("# ")[2].partition("\n")[0]
        rows.append(
            f"| `{SETTINGS[name].flag}` | {f'`{default}`' if default else 'empty'} | [{title}]({guide}) |"
        )
    return "\n".join(rows) + "\n"


def config_page() -> str:
    """Every setting of a run, by section."""
    parts = [
        "# Config reference\n\nEvery setting is a YAML key in its section and a flag: `train.lr` is `--lr 1e-4` or\n"
        "`--train.lr 1e-4`. `--config FILE` is read first, and the command line wins. FILE may be the\n"
        "name of a config in `configs/` or `examples/`, from any directory. Switches stand alone\n"
        "(`--use_peft`) or take true or false. Lists are written `a,b,c`, and `none` unsets a value.\n",
        f"## The most used\n\n{common_table()}",
    ]
    for section, cls in SECTIONS.items():
        own = {name: setting for name, setting in SETTINGS.items() if setting.section == section}
        meaning = " ".join(str(cls.__doc__).split())
        parts.append(f"## {section}\n\n{meaning}\n\n{table(own)}")
    return "\n".join(parts)


def cli_page() -> str:
    """The flags of every recipe."""
    parts = [
        "# Command lines\n\nEach recipe is a script in `recipes/` and a verb of the console command `llama-ft`.\n"
        "`--help` prints the same flags.\n",
        "## finetuning\n\n`python recipes/finetuning.py [flags]`, or `llama-ft train`. Its flags are the settings\n"
        "of the [config reference](config.md), and `--config FILE`.\n",
    ]
    verbs = {verb.recipe: name for name, verb in VERBS.items()}
    for name, (meaning, module, flags, words) in RECIPES.items():
        read: Any = getattr(importlib.import_module(f"llama_ft.{module}"), flags)
        usage = f"`python recipes/{name}.py {words + ' ' if words else ''}[flags]`, or `llama-ft {verbs[name]}`."
        settings = settings_of(with_extensions(name, read))
        stands_alone = settings.pop("paths", None)  # what stands without a flag
        note = f"{cell(stands_alone.meaning)}\n\n" if stands_alone else ""
        parts.append(f"## {name}\n\n{meaning}\n{usage}\n\n{note}{table(settings, flags=True)}")
    return "\n".join(parts)


def metrics_page() -> str:
    """The keys of metrics.jsonl."""
    rows = "\n".join(
        f"| `{key}` | {unit} | {cell(meaning)} |" for key, (unit, meaning) in METRICS.items()
    )
    return (
        "# Metrics\n\n`metrics.jsonl` in the run directory has one JSON object per logged step, written as it\n"
        "happens. A key appears only if it was measured. Trackers get the same names.\n\n"
        f"| key in `metrics.jsonl` | unit | meaning |\n|---|---|---|\n{rows}\n\n"
        "[MFU and matmul utilization](../guides/performance.md#mfu-and-matmul-utilization) has the formulas.\n"
    )


def anchor(heading: str) -> str:
    """What a link to a heading ends in."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def folder_page(folder: str, title: str, names: list[str]) -> str:
    """The README of a folder of the repository and, below it, the files `names` as they are. Its
    links lead to these files and to pages of docs/."""
    text = (REPOSITORY / folder / "README.md").read_text().rstrip()
    text = re.sub(r"^# .*$", f"# {title}", text, count=1, flags=re.MULTILINE)
    text = text.replace("](../docs/", "](../").replace("](../launch)", "](launch.md)")
    parts = [text, "## The files"]
    for name in names:
        text_of_file = (REPOSITORY / folder / name).read_text().rstrip()
        note = ""
        if name.endswith(".jsonl"):
            lines = text_of_file.splitlines()
            note = f"The first {SAMPLES_SHOWN} of {len(lines)} lines:\n\n"
            text_of_file = "\n".join(lines[:SAMPLES_SHOWN])
        language = LANGUAGES.get(Path(name).suffix, "sh")
        parts[0] = parts[0].replace(f"]({name})", f"](#{anchor(name)})")
        parts.append(f"### {name}\n\n{note}```{language}\n{text_of_file}\n```")
    return "\n\n".join(parts) + "\n"


def configs_page() -> str:
    """The ready configs, each with its file."""
    names = [file.name for file in sorted((REPOSITORY / "configs").glob("*.yaml"))]
    return folder_page("configs", "Ready configs", names)


def examples_page() -> str:
    """The examples, each with its file."""
    names = [file.name for file in sorted((REPOSITORY / "examples").glob("*.yaml"))]
    return folder_page("examples", "Examples", [*names, "data/support_tickets.jsonl"])


def launch_page() -> str:
    """The files for clusters."""
    folder = REPOSITORY / "launch"
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".md"]
    return folder_page(
        "launch", "Launch files for clusters", [str(file.relative_to(folder)) for file in files]
    )


def notebook_page() -> str:
    """The cells of the notebook."""
    cells = json.loads((REPOSITORY / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    parts = []
    for cell_of_notebook in cells:
        source = "".join(cell_of_notebook["source"])
        is_code = cell_of_notebook["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source.replace("```bash", "```sh"))
    note = "`notebooks/quickstart.ipynb` in the repository is this page as a notebook."
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


PAGES = {
    "config": config_page,
    "cli": cli_page,
    "metrics": metrics_page,
    "configs": configs_page,
    "examples": examples_page,
    "launch": launch_page,
    "notebook": notebook_page,
}
# The README's list of news: the highlights of the changelog's newest version.
NEWS = re.compile(r"(?<=\*\*New\*\*\n\n)- .*?(?=\n\n)", re.DOTALL)
HIGHLIGHTS = re.compile(r"(?<=### Highlights\n\n)- .*?(?=\n\n)", re.DOTALL)


def readme() -> str:
    """The README with the highlights of the changelog."""
    highlights = HIGHLIGHTS.search((REPOSITORY / "CHANGELOG.md").read_text())
    assert highlights is not None, "CHANGELOG.md has no highlights"
    text = (REPOSITORY / "README.md").read_text()
    return NEWS.sub(lambda _: highlights[0], text, count=1)


# File -> its key for the repository's URL.
URL_KEYS = {"mkdocs.yml": "repo_url", "CITATION.cff": "repository-code"}


def with_url(text: str, key: str, url: str) -> str:
    """A YAML text with the repository's URL, or with a comment if there is none."""
    line = f"{key}: {url}" if url else f"# {key}: none yet; repository_url in pyproject.toml"
    return re.sub(rf"^(# )?{key}:.*$", line, text, count=1, flags=re.MULTILINE)


NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"
COLAB = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{}/blob/main/notebooks/quickstart.ipynb)\n"
)


def notebook_with_url(text: str, url: str) -> str:
    """A notebook that clones the repository from this URL. On GitHub it has Colab's badge."""
    notebook = json.loads(text)
    title, install = notebook["cells"][:2]
    title["source"] = [line for line in title["source"] if "colab-badge.svg" not in line]
    on_github = url.removeprefix("https://github.com/")
    if on_github != url:
        title["source"].insert(1, COLAB.format(on_github))
    install["source"] = [
        re.sub(r'^REPOSITORY = ".*?"', f'REPOSITORY = "{url}"', line) for line in install["source"]
    ]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def files_with_url() -> dict[Path, str]:
    """The files that name the repository's URL."""
    tools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    url = tools["llama_ft"]["repository_url"]
    files = {REPOSITORY / name: key for name, key in URL_KEYS.items()}
    filled = {file: with_url(file.read_text(), key, url) for file, key in files.items()}
    return filled | {NOTEBOOK: notebook_with_url(NOTEBOOK.read_text(), url)}


def stale() -> list[str]:
    """The pages and pictures that are not what the code says."""
    wanted = {REFERENCE / f"{name}.md": HEADER + page() for name, page in PAGES.items()}
    wanted |= files_with_url() | {REPOSITORY / "README.md": readme()}
    wanted |= {FOLDER / name: draw() for name, draw in PICTURES.items()}
    return [
        file.name for file, text in wanted.items() if not file.exists() or file.read_text() != text
    ]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            f"stale: {', '.join(names)}; run python docs/generate.py" if (names := stale()) else 0
        )
    (REPOSITORY / "README.md").write_text(readme())
    for file, text in files_with_url().items():
        file.write_text(text)
    for name, page in PAGES.items():
        (REFERENCE / f"{name}.md").write_text(HEADER + page())
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
    (REPOSITORY / "configs" / "schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")
