"""The pages and the README keep their word: what they name is there, what they show works, and each command is run, or
says what it needs and loads. torchrun's own parser takes the commands that are printed, and then the recipe's.
Sentences are short, and the pages that are written by docs/generate.py are up to date."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from pages import DATA_PAGE, Command, Page, flag_mistakes, lay_out, read_commands, run_commands, write_tickets
from torch.distributed.run import get_args_parser

from llama_ft.config import load
from llama_ft.config.dump import help_text
from llama_ft.config.paths import RUN_ENTRIES
from llama_ft.config.settings import SETTINGS, DataConfig
from llama_ft.errors import UserError

OTHERS = ("configs/README.md", "examples/README.md", "launch/README.md", "CONTRIBUTING.md", "SECURITY.md")
NAMES = [str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMES += [name for name in OTHERS if (REPOSITORY / name).exists()]
PAGES = [Page(name) for name in NAMES]
README = Page("README.md")
SECONDS_A_COMMAND = 180  # of a machine whose cores are busy
LONGEST_SENTENCE = 30  # words
# Words that once made sentences hard to read; CONTRIBUTING.md has the rules.
NOT_PLAIN = re.compile(r"\b(anew|beside|mend|is told|a line says|goes on)\b", re.IGNORECASE)
EXAMPLE_OF_MISTAKES = "$ python recipes/finetuning.py "


def to_run(page: Page) -> list[Command]:
    """All but what needs more than this machine, and make, which sets up an environment of its own."""
    return [command for command in page.commands() if not command.needs and command.words[0] != "make"]


def plain(text: str) -> str:
    """Without what differs from machine to machine: numbers and how wide a column is."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "0", text))


def not_printed(page: Page, output: str) -> list[str]:
    """Lines that the page shows right under commands that were run, and that were not printed."""
    shown = re.findall(r"^```bash\n([^`]*?)^```\n+```text\n(.*?)^```$", page.text, re.MULTILINE | re.DOTALL)
    lines = [line for block, text in shown if "# needs" not in block for line in text.splitlines()]
    parts = [plain(part).strip() for line in lines for part in line.split("...")]
    printed = plain(output)
    return [part for part in parts if part not in printed]


@pytest.fixture(scope="module")
def laid_out(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("pages") / "copy", save_model)


@pytest.mark.parametrize("page", [*PAGES, README], ids=[*NAMES, "README.md"])
def test_what_a_page_names_is_there(page: Page) -> None:
    assert not page.missing_files()
    assert not page.unknown_flags()


@pytest.mark.parametrize("page", [*PAGES, README], ids=[*NAMES, "README.md"])
def test_flags_of_every_command_load(page: Page, laid_out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(laid_out)
    wrong = {command.text: mistakes for command in page.commands() if (mistakes := flag_mistakes(command))}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: page.name)
def test_commands_of_a_page_work(page: Page, save_model: Callable[..., Path], tmp_path: Path) -> None:
    commands, copy = to_run(page), lay_out(tmp_path / "copy", save_model)
    finished = run_commands(commands, copy, SECONDS_A_COMMAND * len(commands))
    assert finished.exit_code == 0, finished.output
    assert not not_printed(page, finished.output)


# Gradients and losses of a model beside the formulas; argv: its folder, and which formula.
CHECK_LOSS = """
import sys
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM
from llama_ft.data import Batch
from llama_ft.models import use_chunked_loss
from llama_ft.training import SupervisedFineTuning

ids = torch.arange(20).view(2, 10)
labels = ids.clone()
labels[0, :4] = -100
batch = Batch(ids, labels, [10, 10], False, ["a", "b"])
extra = {
    "smoothing": lambda logits, aims, plain: 0.1 * (-logits.log_softmax(-1).mean(-1).sum() - plain),
    "z-loss": lambda logits, aims, plain: 1e-4 * logits.exp().sum(-1).log().square().sum(),
}[sys.argv[2]]
for in_pieces in (True, False):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    logits, aims = model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    logits, aims = logits[aims >= 0], aims[aims >= 0]
    plain = -logits.log_softmax(-1)[range(len(aims)), aims].sum()
    wanted = plain + extra(logits, aims, plain)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    if in_pieces:
        assert use_chunked_loss(model)
    objective, ranks = SupervisedFineTuning(), SimpleNamespace(device=torch.device("cpu"))
    loss = objective.loss(model.train(), batch, ranks).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    assert abs(wanted - plain) > 1e-4 * plain
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(objective.loss(model.eval(), batch, ranks).loss, plain)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "formula"), [(0, "smoothing"), (1, "z-loss")])
def test_the_changed_losses_are_what_their_formulas_say(
    number: int, formula: str, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    page, copy = Page("docs/development/add-a-loss.md"), lay_out(tmp_path / "copy", save_model)
    (copy / "check.py").write_text(CHECK_LOSS)
    (copy / "change.diff").write_text(page.blocks("diff")[number])
    place = "my_models/Llama-3.1-8B"
    commands = ["git apply change.diff", f"python check.py {place} {formula}"]
    data = "--dataset my_data.jsonl --lr 1e-5 --max_train_step 2"
    commands += [f"python recipes/finetuning.py --model_name {place} {data}"]
    finished = run_commands([Command(text, [], "") for text in commands], copy, 3 * SECONDS_A_COMMAND)
    assert finished.exit_code == 0, finished.output
    assert "warning" not in finished.output


@pytest.mark.slow
def test_commands_of_the_readme_work(save_model: Callable[..., Path], tmp_path: Path) -> None:
    commands = to_run(README)
    assert len(commands) >= 5
    lay_out(tmp_path / "copy", save_model)
    finished = run_commands(commands, tmp_path / "copy", SECONDS_A_COMMAND * len(commands))
    assert finished.exit_code == 0, finished.output


def nav_pages(entries: list[dict[str, Any]]) -> list[str]:
    """The pages of a part of the navigation, in order."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else nav_pages(value))]


def test_the_index_and_the_navigation_name_every_page_once() -> None:
    pages = sorted(name.removeprefix("docs/") for name in NAMES if name.startswith("docs/"))
    navigation = nav_pages(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert sorted(navigation) == pages
    assert sorted([*Page("docs/index.md").links(), "index.md"]) == pages


def test_pages_link_within_the_documentation_alone() -> None:
    """MkDocs knows no other files."""
    pages = [page for page in PAGES if page.name.startswith("docs/")]
    targets = {(page.name, (page.path.parent / link).resolve()) for page in pages for link in page.links()}
    assert len(targets) > 50
    assert not [(name, path) for name, path in targets if not path.is_relative_to(REPOSITORY / "docs")]


@pytest.mark.parametrize("page", [*PAGES, README], ids=[*NAMES, "README.md"])
def test_sentences_are_short_and_plain(page: Page) -> None:
    is_generated = page.text.startswith("<!-- Written by")
    long = [it for it in page.sentences() if len(it.split()) > LONGEST_SENTENCE and not is_generated]
    assert not long
    assert not NOT_PLAIN.findall(page.prose)


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    assert len(README.text.splitlines()) <= 250
    assert len(README.text.split()) <= 2800
    assert [command.text for command in read_commands(README.blocks("bash")[0])] == ["make quickstart", "make test"]
    assert "QLoRA" in README.text


def test_the_generated_pages_are_what_the_code_says() -> None:
    sys.path.insert(0, str(REPOSITORY / "docs"))
    import generate

    assert not generate.stale()


def test_the_mistakes_shown_are_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [shown] = [block for block in README.blocks("text") if block.startswith(EXAMPLE_OF_MISTAKES)]
    command, _, printed = shown.partition("\n")
    Path("configs").mkdir()
    Path("configs/bad.yaml").write_text("train:\n  learning_rate: 1e-4\n  num_epochs: 0\n")
    with pytest.raises(UserError) as refusal:
        load(shlex.split(command.removeprefix(EXAMPLE_OF_MISTAKES)), paths=False)
    assert str(refusal.value) == printed.rstrip("\n")


def prepared(dataset: str, save_tokenizer: Callable[..., Path], tmp_path: Path) -> Any:
    from llama_ft.data import prepare
    from llama_ft.models import load_tokenizer

    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer"), trust_remote_code=False)
    config = DataConfig(dataset=dataset)
    return prepare(config, tokenizer, context_length=128, cache=tmp_path / "cache", want_validation=True)


def test_the_custom_dataset_works(
    save_tokenizer: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tickets(tmp_path)
    data = prepared("my_dataset.py:tickets", save_tokenizer, tmp_path)
    assert (len(data.train), len(data.validation)) == (18, 2)
    assert data.report.chat_sample[0]["content"] == "Question 0?"


@pytest.mark.parametrize("row", [row for block in Page(DATA_PAGE).blocks("json") for row in block.splitlines()])
def test_every_row_shown_can_be_trained_on(row: str, save_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row}\n")
    assert len(prepared(str(path), save_tokenizer, tmp_path).train) == 1


def test_every_folder_of_the_package_is_described() -> None:
    package = REPOSITORY / "src" / "llama_ft"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    described = set(
        re.findall(
            r"^\| `(\w+)` \|", Page("docs/development/code-tour.md").text.partition("| folder of ")[2], re.MULTILINE
        )
    )
    assert described == folders


def test_the_metrics_named_are_those_that_are_written() -> None:
    table = Page("docs/reference/metrics.md").text.partition("| key in `metrics.jsonl`")[2].partition("\n\n")[0]
    keys = re.findall(r"^\| `([\w/]+)`", table, re.MULTILINE)
    sources = [REPOSITORY / "recipes" / "finetuning.py", *(REPOSITORY / "src").rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    assert len(keys) >= 14
    assert not [key for key in keys if f'"{key}"' not in code]
    assert set(re.findall(r'"((?:train|eval|perf|memory)/\w+)"', code)) <= set(keys)


def test_what_a_run_directory_holds_is_described() -> None:
    table = Page("docs/reference/run-directory.md").text
    described = {name.partition("/")[0] for name in re.findall(r"`([\w.-]+/?[\w./-]*)`", table)}
    assert set(RUN_ENTRIES) <= described


def words_of_script(command: str) -> list[str]:
    """What the script gets, by bash and by torchrun's parser, which ends the test where torchrun would stop."""
    first, *words = shlex.split(command)
    if first == "torchrun":
        return list(get_args_parser().parse_args(words).training_script_args)
    return words[1:]


@pytest.mark.parametrize("name", SETTINGS)
def test_torchrun_hands_every_flag_on(name: str) -> None:
    flag = SETTINGS[name].flag
    assert words_of_script(f"torchrun --nproc_per_node 2 recipes/finetuning.py {flag} 1") == [flag, "1"]
    assert words_of_script(f"torchrun --nproc_per_node 2 recipes/finetuning.py {flag}=1") == [f"{flag}=1"]


def test_torchrun_takes_the_commands_of_the_help_and_of_the_recipes() -> None:
    texts = [help_text("", script="recipes/finetuning.py").replace("[flags]", "")]
    for file in REPOSITORY.glob("configs/*.yaml"):
        texts.append(file.read_text().replace("\\\n#", " ").replace("\n#", "\n"))
    commands = re.findall(r"^ *(torchrun .*recipes/finetuning\.py.*)$", "\n".join(texts), re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        load(words_of_script(command), paths=False)
