"""The code stays small, and imports point one way. CONTRIBUTING.md says what to do when a budget is
reached."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import REPOSITORY

from llama_ft import door

SOURCE = REPOSITORY / "src" / "llama_ft"
DOOR = SOURCE / "door.py"
EXTENSIONS = [file.parent for file in SOURCE.glob("extensions/*/__init__.py")]
LONGEST_FILE = 600  # lines
LONGEST_FUNCTION = 65  # lines, with its docstring
MOST_PARAMETERS = 6  # without self and cls
# Functions with more. Four of them are operators of LoRA, whose tensors autograd needs one by one, and
# two are kernels in Triton, which take numbers and addresses only.
MOST_WITH_MORE_PARAMETERS = 8
MOST_FILES = 12  # per folder, without __init__.py
# Tokens per folder: names, operators, numbers and strings, without docstrings and comments. Lines
# are free. Whoever needs more raises the number in the same commit and says why.
TOKENS = {
    # the end of processes; before: datasets and objectives of extensions, generated steps, the command as
    # it was typed, configs of a model
    "": 6250,
    "checkpoint": 11_200,
    "config": 21_100,  # what words without a flag mean, rollouts, several scored answers, packages of stores
    "cpu": 4700,
    "data": 47_300,  # forms of traces, prompts of any format, shared steps; room for the format of a tutorial
    "evaluation": 3500,
    "export": 10_200,  # the adapter alone, for servers
    "extensions": 0,  # each has its own line below
    "extensions/check": 4300,
    "extensions/images": 13_400,  # what towers need to know of images, computed on the host
    "extensions/kubeflow": 850,
    "extensions/report": 11_100,  # llama-ft watch, the first rows of a report, corrupted files
    # rounds, samplers, servers, also ahead, rewards, conversions, GRPO, its plan; signals while servers
    # are probed or rewards computed, micro-batches by tokens, corrected rewards; copies from the device
    # for which the host waits once, and ends of answers for which it does not wait; lost adapters;
    # settings of older runs that have no effect
    "extensions/rollouts": 31_280,
    "extensions/scores": 2200,
    "extensions/serving": 17_700,  # rules of edited adapters and of quantized bases, probes that ranks share
    "extensions/store": 11_000,  # also what checkpoints share, of which only what has changed is looked at
    "inference": 8800,  # requests to servers and which weights they have, for rollouts, too
    "libraries": 2600,
    # LoRA without gradients; before: heads of gated delta nets that ranks share, experts without
    # torch's kernel, kernels in Triton, attention with sinks, tiled MLPs, shared sequences with images or
    # compiled layers, units kept for an answer; Triton's kernels are compared with
    # torch's operators here, no longer in cpu
    "models": 73_800,
    "observe": 12_600,
    # --longest with ranks (8xh100), plans of a search that share headers; generation; units that stay
    # unsharded for answers; changes as a run starts with them; bytes that operators move
    "plan": 27_100,
    "run": 9300,
    "runtime": 12_950,  # work of rank 0 that the others wait for, from extensions/rollouts
    # what objectives say of generation and of held-out prompts, answers by one rank, numbers whose largest
    # one is logged
    "training": 27_400,
}
# The files of the core that name images in their code. Others know media and towers, and leave the
# rest to the extension: see data/media.py.
NAME_IMAGES = {
    # flags and settings, and what is checked of them
    "config/objectives.py",
    "config/paths.py",
    "config/rules.py",
    "config/settings/settings.py",
    "config/wording/other_names.py",
    "inference/flags.py",
    "plan/flags.py",
    "run/inputs.py",
    "training/evaluation.py",
    "recipes/inference.py",
    "recipes/plan.py",
    # parts of messages, and columns
    "data/read/media.py",
    # what the classes of models say
    "libraries/evidence.py",
    "libraries/transformers_private.py",
    "models/build.py",
    "door.py",
    "objective_entry.py",
}
UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# What each folder imports of the others. config knows nobody; tools know the rest and are known by
# no other folder.
BELOW = {
    "": {"config", "libraries"},
    "libraries": set(),
    "config": set(),
    "runtime": {"config", "libraries"},
    "cpu": {"config", "runtime"},
    "data": {"config", "libraries", "runtime"},
    "models": {"config", "cpu", "libraries", "runtime"},
    "observe": {"config", "models", "runtime"},
    "training": {"config", "cpu", "data", "libraries", "models", "runtime"},
    "export": {"checkpoint", "config", "data", "models", "runtime", "training"},
    "checkpoint": {"config", "data", "models", "runtime", "training"},
    "plan": {
        "checkpoint",
        "config",
        "cpu",
        "data",
        "export",
        "libraries",
        "models",
        "observe",
        "runtime",
        "training",
    },
    "inference": {"checkpoint", "config", "data", "export", "models", "runtime", "training"},
    "evaluation": {"config", "data", "inference", "models", "runtime", "training"},
    "run": {
        "checkpoint",
        "config",
        "cpu",
        "data",
        "export",
        "libraries",
        "models",
        "observe",
        "plan",
        "runtime",
        "training",
    },
}


def folder_of(file: Path) -> str:
    """Return the folder of the core that has a file, or the extension, such as extensions/store."""
    first, *rest = file.relative_to(SOURCE).parts
    if not rest:
        return ""
    return first if first != "extensions" or len(rest) == 1 else f"{first}/{rest[0]}"


def docstring_lines(tree: ast.AST) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_tokens(text: str) -> int:
    """Count the tokens of a file. Python 3.12 splits an f-string into several; it counts as one."""
    docstrings = docstring_lines(ast.parse(text))
    count = 0
    f_strings = 0  # nested f-strings that are open
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_END"):
            f_strings -= 1
            continue
        if kind.endswith("STRING_START"):
            f_strings += 1
            if f_strings > 1:
                continue
        elif f_strings:
            continue
        if token.type not in UNCOUNTED and token.start[0] not in docstrings:
            count += 1
    return count


def test_f_strings_docstrings_and_comments_count_the_same_on_every_python() -> None:
    text = '"""What it does."""\nx = f"{y + 1} {f\'{z}\'}"  # why\n\n\ndef f():\n    """Doc."""\n'
    assert count_tokens(text) == len(["x", "=", "f-string", "def", "f", "(", ")", ":"])


def test_no_folder_and_no_file_exceeds_its_budget() -> None:
    texts = {file: file.read_text() for file in SOURCE.rglob("*.py")}
    lines = {str(file): len(text.splitlines()) for file, text in texts.items()}
    assert not {file: count for file, count in lines.items() if count > LONGEST_FILE}
    used = Counter[str]()
    for file, text in texts.items():
        used[folder_of(file)] += count_tokens(text)
    assert not {folder: count for folder, count in used.items() if count > TOKENS[folder]}, used


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of source and recipes, each with its place."""
    for file, tree in trees_of_source_and_recipes():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{file.relative_to(REPOSITORY)}:{node.lineno} {node.name}", node


def test_functions_are_short() -> None:
    lines = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in functions()}
    assert not {place: count for place, count in lines.items() if count > LONGEST_FUNCTION}


def test_few_functions_have_many_parameters() -> None:
    """An object of what belongs together, such as a section of the settings, makes them fewer."""
    many = {}
    for place, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = {argument.arg for argument in arguments} - {"self", "cls"}
        if len(names) > MOST_PARAMETERS:
            many[place] = len(names)
    assert len(many) <= MOST_WITH_MORE_PARAMETERS, many


def test_only_the_class_of_the_ranks_sets_their_fields() -> None:
    """`ranks.lock = lock` elsewhere would hide from a reader of Ranks who changes it."""
    wrong = []
    for file, tree in trees_of_source_and_recipes():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if re.search(r"\b_?ranks\.", ast.unparse(node)):
                wrong.append(f"{file}:{node.lineno} sets {ast.unparse(node)}")
    assert not wrong


def test_one_function_gathers_objects_of_all_ranks() -> None:
    callers = set[str]()
    for file, tree in trees_of_source_and_recipes():
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if "all_gather_object" in names:
            callers.add(file.name)
    assert callers == {"rendezvous.py"}


@cache
def trees_of_source_and_recipes() -> list[tuple[Path, ast.Module]]:
    files = [*SOURCE.rglob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]
    return [(file, ast.parse(file.read_text())) for file in files]


def test_imports_point_one_way() -> None:
    wrong = []
    for file in core_files():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if not name.startswith("llama_ft."):
                    continue
                target = name.removeprefix("llama_ft.").partition(".")[0]
                is_folder = (SOURCE / target).is_dir()
                if is_folder and target != folder_of(file) and target not in BELOW[folder_of(file)]:
                    wrong.append(f"{file.relative_to(SOURCE)} imports {target}")
    assert not wrong


def core_files() -> list[Path]:
    """Return the files that are not of an extension."""
    return [file for file in SOURCE.rglob("*.py") if not folder_of(file).startswith("extensions")]


def named_extensions(file: Path) -> set[str]:
    """Return the extensions that a file imports or names as `module:Class`."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        texts = list[str]()
        if isinstance(node, ast.Import):
            texts = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            texts = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [node.value]
        for text in texts:
            names |= set(re.findall(r"\bllama_ft\.extensions\.?(\w*)", text))
    return names


def test_only_the_door_names_extensions() -> None:
    """A recipe is allowed the extension whose verb it is: it is how users start it."""
    wrong = {str(file): named_extensions(file) for file in core_files() if file != DOOR}
    for file in (REPOSITORY / "recipes").glob("*.py"):
        own = {
            name
            for name, extension in zip(door.NAMES, door.extensions(), strict=True)
            if any(verb.recipe == file.stem for verb in extension.verbs.values())
        }
        wrong[str(file)] = named_extensions(file) - own
    for folder in EXTENSIONS:
        for file in folder.rglob("*.py"):
            wrong[str(file)] = named_extensions(file) - {folder.name}
    assert not {file: names for file, names in wrong.items() if names}


def test_the_door_has_the_names_of_all_extensions() -> None:
    assert sorted(door.NAMES) == sorted(folder.name for folder in EXTENSIONS)


def names_images(text: str) -> bool:
    """Return whether a name or a text in code, not in its docstrings and comments, is of images."""
    docstrings = docstring_lines(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_code = tokenize.tok_name[token.type].startswith(("NAME", "STRING", "FSTRING"))
        if is_code and token.start[0] not in docstrings and "image" in token.string.lower():
            return True
    return False


def test_few_files_of_the_core_name_images() -> None:
    files = {str(file.relative_to(SOURCE)): file for file in core_files()}
    files |= {f"recipes/{file.name}": file for file in (REPOSITORY / "recipes").glob("*.py")}
    assert {name for name, file in files.items() if names_images(file.read_text())} == NAME_IMAGES


def test_a_file_names_images_in_its_code_only() -> None:
    assert names_images("x = batch.image_sizes") and names_images('f"{x} Images"')
    assert not names_images('"""Images."""\nx = 1  # image\n')


def test_folders_are_small() -> None:
    files = Counter[str]()
    for file in [*SOURCE.rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]:
        if file.name != "__init__.py":
            files[str(file.parent.relative_to(REPOSITORY))] += 1
    assert not {folder: count for folder, count in files.items() if count > MOST_FILES}


def test_imports_make_no_circle_of_folders_or_files() -> None:
    """Nodes are the innermost folders. The files of a folder that holds folders are nodes of their
    own, and so are those of plan."""
    folders = {file.parent for file in SOURCE.rglob("*.py")}
    holds_folders = {folder.parent for folder in folders} | {SOURCE / "plan"}

    def node_of(file: Path) -> Path:
        return file if file.parent in holds_folders else file.parent

    imports = {node_of(file): set[Path]() for file in SOURCE.rglob("*.py")}
    for file in SOURCE.rglob("*.py"):
        if file.name == "__init__.py" or file.parent == SOURCE:
            continue
        for name in imported_names(file):
            target = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
            outside = target.parent != SOURCE and target.is_file()
            if outside and node_of(target) != node_of(file):
                imports[node_of(file)].add(node_of(target))
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError, which names it
    assert order.index(SOURCE / "plan/predict.py") < order.index(SOURCE / "plan/fit.py")
    assert order.index(SOURCE / "plan/fit.py") < order.index(SOURCE / "plan/preflight.py")


def imported_names(file: Path) -> set[str]:
    """Return the modules of this package that a file imports, also inside of functions, but not for
    type checkers only."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llama_ft"):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names
