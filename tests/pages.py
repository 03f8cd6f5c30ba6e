"""Markdown pages taken apart: the commands, flags, files and links that they name, and a copy to
run commands in."""

import csv
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from forked import ENVIRONMENT, REPOSITORY, Finished

from llama_ft.commands import VERBS
from llama_ft.config import load
from llama_ft.config.settings.settings import settings_of
from llama_ft.config.wording.messages import known
from llama_ft.errors import UserError
from llama_ft.plan.flags import PlanFlags, read_plan_flags

DEMO_CONFIG = REPOSITORY / "configs" / "demo.yaml"
FOLDERS = ("recipes/", "src/", "configs/", "docs/", "tests/", "launch/", "benchmarks/", "examples/")
MINE = Path("configs/mine.yaml")  # the config that the reader of the page below writes
SCRIPTS = ("finetuning", "plan", "export", "report", "watch", "rollout", "inference", "evaluate")
OTHERS_FLAGS = re.compile(  # torchrun's, and what stands for any flag
    r"(nnodes|nproc_per_node|rdzv_\w*|node_rank|shutdown-timeout|max_restarts|no[_-]\w*|logdir|key|help|version|config)$"
    # SLURM's
    r"|(requeue|signal|export|time|nodes|ntasks\S*|gpus\S*|mem\S*|array|begin|kill-on-bad-exit|chdir)$"
    r"|(enable-lora|enable-mixed-moe-lora-format|language-model-only|generation-config|lora-modules|max-lora-rank|chat-template|served-model-name|logprobs-mode|max-model-len|tool-call-parser"
    r"|enable-auto-tool-choice)$"  # vLLM's
    r"|(outfile|outtype|base|lora|jinja|chat-template-file)$"  # llama.cpp's
    r"|(build-arg)$"  # Docker's
)
CONFIG_PAGE = "docs/getting-started/choose-a-model.md"
DATA_PAGE = "docs/guides/data.md"
TOOLS_PAGE = "docs/guides/chat-templates.md"
# The Hub names in commands that tests run. They stand for tiny models in a cache of the Hub that
# `lay_out` builds, so that the commands run as they are printed, without a network.
HUB_MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
)
COMMIT = "0" * 40  # of every model in that cache
# A bash block, and what it needs that a laptop without network lacks: in a comment above it, which
# readers of the page do not see.
BASH_BLOCK = r"^(?:<!-- needs: (.*?) -->\n)?```bash\n(.*?)^```$"
MISSING = (
    "no such directory",
    "there is no run or model",
    "there is no run in output",
    "no such file",
    "there is no folder",
    "no token for",
)
ROWS = 400  # a few packs of 4,096 tokens


@dataclass(frozen=True)
class Command:
    """One line of a bash block, its continuations joined: its text without comment, its words as
    bash splits them, and what it needs that a laptop without network lacks (empty where it is to be
    run)."""

    text: str
    words: list[str]
    needs: str

    def script(self) -> tuple[str, list[str]] | None:
        """Which of the recipes it calls, and with which words."""
        for number, word in enumerate(self.words):
            name = Path(word).stem if re.search(r"(^|/)recipes/\w+\.py$", word) else None
            if self.words[number - 1] == "llama-ft" and word in VERBS:
                name = VERBS[word].recipe
            if re.fullmatch(r"launch/\S+\.sbatch", word):  # which hands its flags on
                name = "finetuning"
            if name in SCRIPTS:
                rest = self.words[number + 1 :]
                ends = [n for n, other in enumerate(rest) if not other.strip("();<>|&")]
                rest = rest[: ends[0]] if ends else rest
                if self.words[number - 1] == "llama-ft" and rest[:1] == ["--nproc"]:
                    rest = rest[2:]  # which the launcher takes
                return name, rest
        return None


class Page:
    """A page of the repository, by its path from the root."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = REPOSITORY / name
        self.text = self.path.read_text()
        self.prose = re.sub(r"^ *```.*?^ *```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    def bash_blocks(self) -> list[tuple[str, str]]:
        """What each bash block needs, and its text."""
        return re.findall(BASH_BLOCK, self.text, re.MULTILINE | re.DOTALL)

    def commands(self) -> list[Command]:
        return [
            command
            for needs, block in self.bash_blocks()
            for command in read_commands(block, needs)
        ]

    def inline_code(self) -> list[str]:
        return re.findall(r"`([^`\n]+)`", self.prose)

    def links(self) -> list[str]:
        """Targets within the repository, with their anchors."""
        return re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", self.prose)

    def anchors(self) -> set[str]:
        """As GitHub makes them of headings."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def sentences(self) -> list[str]:
        """The sentences of the prose, of headings, list items and cells; code and the target of a
        link are one word."""
        prose = re.sub(r"<!--.*?-->", "", self.prose, flags=re.DOTALL)
        prose = re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", prose))
        parts = re.split(r"\n\s*\n|\n\s*(?:[-*#>]+|\d+\.)\s|\|", f"\n{prose}")
        return [
            sentence
            for part in parts
            for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s", " ".join(part.split()))
        ]

    def missing_files(self) -> list[str]:
        """What it names in one of our folders, or links to, and what is not there."""
        named = {
            code
            for code in self.inline_code()
            if code.startswith(FOLDERS) and not re.search(r"[\s<>{]", code)
        }
        lost = [
            name
            for name in sorted(named - {str(MINE)})
            if not any(REPOSITORY.glob(name.rstrip("/")))
        ]
        return lost + [link for link in self.links() if not self._leads_somewhere(link)]

    def _leads_somewhere(self, link: str) -> bool:
        file, _, anchor = link.partition("#")
        target = (self.path.parent / file).resolve() if file else self.path
        if not target.exists() or not target.is_relative_to(REPOSITORY):
            return False
        return not anchor or anchor in Page(str(target.relative_to(REPOSITORY))).anchors()

    def unknown_flags(self) -> list[str]:
        """Flags named in the text that neither a recipe of ours nor a program we name has. On pages
        about other trainers the first column of a table has theirs."""
        text = (
            re.sub(r"^\|[^|]*\|", "|", self.prose, flags=re.MULTILINE)
            if "/migrate/" in self.name
            else self.prose
        )
        codes = re.findall(r"`([^`\n]+)`", text)
        named = {
            flag for code in codes for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w.-]*)", code)
        }
        ours = named & (settings_of(PlanFlags).keys() | script_flag_names())
        return [
            flag
            for flag in sorted(named - ours)
            if known(flag) is None and not OTHERS_FLAGS.match(flag)
        ]


def read_commands(block: str, needs: str = "") -> list[Command]:
    """The commands of a bash block. One that needs more than the others says so in a comment behind
    it."""
    commands = []
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        if words := list(lexer):
            text, _, own_needs = re.sub(r"\s+#\s(?!needs).*$", "", line).partition(" # needs ")
            commands.append(Command(text.strip(), words, own_needs.strip() or needs))
    return commands


def flag_reader(script: str) -> Callable[[list[str]], Any]:
    """What reads a recipe's command line."""
    if script == "finetuning":
        return lambda words: load(words, DEMO_CONFIG, paths=False)
    if script == "plan":
        return lambda words: read_plan_flags(words, DEMO_CONFIG)
    modules = {
        "check": "extensions.check.flags",
        "evaluate": "evaluation.flags",
        "export": "export_flags",
        "report": "extensions.report.run",
        "rollout": "extensions.rollouts.flags",
        "watch": "extensions.report.watch",
    }
    reader = importlib.import_module(f"llama_ft.{modules.get(script, f'{script}.flags')}")
    return lambda words: getattr(reader, f"read_{script}_flags")(words, "")


def script_flag_names() -> set[str]:
    """Flags of the recipes that have a few of their own, out of their --help."""
    names = set[str]()
    for script in ("check", "export", "report", "watch", "rollout", "inference", "evaluate"):
        printed = StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            flag_reader(script)(["--help"])
        names |= set(re.findall(r"--(\w+)", printed.getvalue()))
    return names


def flag_errors(command: Command) -> list[str]:
    """What a recipe of ours finds wrong in the command, files that an earlier one would write
    aside. Called in a directory made by `lay_out`."""
    if command.words[0] == "make":
        unknown = set(command.words[1:2]) - make_targets()
        return [f"there is no make {target}" for target in unknown]
    found = command.script()
    if found is None or "--help" in found[1]:
        return []
    script, words = found
    for config in re.findall(r"--config[ =](output/\S+)", " ".join(words)):
        # as if the run before had written it
        Path(config).parent.mkdir(parents=True, exist_ok=True)
        Path(config).write_text(
            "model: {model_name: Qwen/Qwen3-4B}\ndata: {dataset: my_data.jsonl}\n"
        )
    try:
        flag_reader(script)(words)
    except UserError as error:
        to_come = [
            word
            for word in words
            if word.startswith("output/") or ("/" in word and not Path(word).exists())
        ]
        return [
            line
            for line in error.messages
            if not any(part in line for part in (*MISSING, *to_come))
        ]
    return []


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def lay_out(folder: Path, save_model: Callable[..., Path]) -> Path:
    """A copy of the repository in which a page's commands can be run: a cache of the Hub with tiny
    models, each with a tokenizer and the chat template of Llama 3.1, and data."""
    from transformers import AutoTokenizer

    from llama_ft.data.chat.chat_template import BUILT_IN

    for name in ("recipes", "src", "configs", "launch", "docs", "examples"):
        if (REPOSITORY / name).exists():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    linked = (
        "tests",
        "benchmarks",
        "notebooks",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "Makefile",
        "CHANGELOG.md",
        "CITATION.cff",
        "mkdocs.yml",
    )
    for name in linked:
        (folder / name).symlink_to(REPOSITORY / name)
    for name in ("output", "bin"):
        (folder / name).mkdir()
    script = folder / "bin" / "llama-ft"  # as pip makes it
    script.write_text(f"#!{sys.executable}\nfrom llama_ft import commands\n\ncommands.main()\n")
    script.chmod(0o755)
    [text] = Page(CONFIG_PAGE).blocks("yaml")
    (folder / MINE).write_text(text)
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 305,
        "max_position_embeddings": 131_072,
    }
    for number, name in enumerate(HUB_MODELS):
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        place = save_model(repository / "snapshots" / COMMIT, seed=number, **shape)
        tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer.add_special_tokens(
            {"bos_token": special[0], "eos_token": special[3], "additional_special_tokens": special}
        )
        tokenizer.chat_template = BUILT_IN["llama3"]
        tokenizer.save_pretrained(place)
        config = json.loads((place / "config.json").read_text())
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        (place / "config.json").write_text(json.dumps(config | ids))
        (place / "generation_config.json").write_text(json.dumps(ids))
    (folder / "my_models").mkdir()  # of someone who downloads models by hand
    for name in ("Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"):
        snapshot = folder / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
        (folder / "my_models" / Path(name).name).symlink_to(snapshot)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} times {n + 1}?"},
                {"role": "assistant", "content": f"It is {n * (n + 1)}."},
            ]
        }
        for n in range(ROWS)
    ]
    (folder / "my_prompts.jsonl").write_text('{"prompt": "What is a shard?"}\n')
    (folder / "my_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [tools] = Page(TOOLS_PAGE).blocks("json")
    (folder / "my_tools.jsonl").write_text(" ".join(tools.split()) + "\n")
    write_tickets(folder)
    return folder


def write_tickets(folder: Path) -> None:
    """The dataset of the page on data: its function, and a table for it."""
    [snippet] = [
        snippet for snippet in Page(DATA_PAGE).blocks("python") if "def tickets" in snippet
    ]
    (folder / "my_dataset.py").write_text(snippet)
    with (folder / "tickets.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", "state"])
        writer.writerows(
            [[f"Question {n}?", f"Answer {n}.", "open" if n == 5 else "solved"] for n in range(21)]
        )


def run_commands(commands: list[Command], folder: Path, timeout: float) -> Finished:
    """Run commands as they are printed, by one bash that stops at the first that fails, in a
    directory of `lay_out`."""
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {
        "PYTHONPATH": str(folder / "src"),
        "PATH": os.pathsep.join(path),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    finished = subprocess.run(
        ["bash", "-exc", "\n".join(command.text for command in commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **own},
    )
    return Finished(finished.returncode, finished.stdout, 0.0)
