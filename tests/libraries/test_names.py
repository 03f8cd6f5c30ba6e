"""The private names of other libraries that this package uses: each is listed, and exists."""

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from edited_copy import OTHER_TREE
from forked import REPOSITORY, forked
from transformers import core_model_loading, masking_utils

import llama_ft
from llama_ft.errors import UserError
from llama_ft.libraries.names import listed_names, missing_names, require
from llama_ft.models.base.replaced_functions import REPLACED, originals

SOURCE = REPOSITORY / "src" / "llama_ft"
LISTED = {name.name for name in listed_names()}
MODULES = {part for name in listed_names() for part in name.owner.split(".")}
# Private names of Python, and of torch's documentation
OF_PYTHON = {"_replace", "_asdict", "_exit", "_current_frames", "_check_buffer"}
# Functions that take the name of an attribute as a text
BY_TEXT = {"getattr", "setattr", "hasattr", "delattr", "get", "object", "private", "require"}
PUBLIC_MODULES = {
    "transformers.modeling_utils",  # PreTrainedModel, which the package exports, too
    "transformers.utils",  # logging
    "torch.utils.checkpoint",
}


@cache
def files() -> list[tuple[Path, ast.Module]]:
    paths = [*SOURCE.rglob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]
    return [(path, ast.parse(path.read_text())) for path in paths if "libraries" not in path.parts]


def own_attributes() -> set[str]:
    """Return the names of attributes and methods that this package defines."""
    names = set[str]()
    for _, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        names.add(part.name)
                    if isinstance(part, ast.AnnAssign):
                        names.add(ast.unparse(part.target))
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node.value) == "self":
                names.add(node.attr)
    return names


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def test_every_private_attribute_is_listed() -> None:
    allowed = LISTED | MODULES | OF_PYTHON | own_attributes()  # torch._dynamo.config
    unlisted = []
    for file, tree in files():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Call):
                function = ast.unparse(node.func).rpartition(".")[2]
                texts = [word.value for word in node.args if isinstance(word, ast.Constant)]
                if function in BY_TEXT:
                    names = [text for text in texts if isinstance(text, str)]
            for name in names:
                if is_private(name) and name not in allowed:
                    unlisted.append(f"{file.relative_to(REPOSITORY)}:{node.lineno} {name}")
    assert not unlisted


def test_every_import_from_an_inner_module_is_listed() -> None:
    """Transformers and PEFT document what their packages export; of torch, modules with an underscore
    are private."""
    listed = {(f"{name.library}.{name.owner}".rstrip("."), name.name) for name in listed_names()}
    modules = {owner for owner, _ in listed}
    unlisted = []
    imports = 0
    for file, tree in files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            library, _, inner = node.module.partition(".")
            documents_package = library in ("transformers", "peft") and inner
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if not (documents_package or "._" in path) or library == "llama_ft":
                    continue
                imports += 1
                is_listed = (node.module, alias.name) in listed or path in modules
                if not is_listed and node.module not in PUBLIC_MODULES:
                    unlisted.append(f"{file.relative_to(REPOSITORY)}:{node.lineno} {path}")
    assert imports > 40
    assert not unlisted


def test_every_private_method_that_is_overridden_is_listed() -> None:
    """A library that renames such a method would call its own without an error."""
    unlisted = []
    overridden = set[str]()
    for module in pkgutil.walk_packages(llama_ft.__path__, "llama_ft."):
        for _, kind in inspect.getmembers(import_module(module.name), inspect.isclass):
            if kind.__module__ != module.name:
                continue
            methods = [name for name, value in vars(kind).items() if inspect.isroutine(value)]
            for name in filter(is_private, methods):
                bases = [base for base in kind.__mro__[1:] if name in vars(base)]
                libraries = {base.__module__.partition(".")[0] for base in bases}
                if libraries & {"torch", "transformers", "peft"}:
                    overridden.add(name)
                    if name not in LISTED:
                        unlisted.append(f"{module.name} {kind.__name__}.{name}")
    assert {"_activate_lora", "_init_group"} <= overridden
    assert not unlisted


def test_every_listed_name_is_used() -> None:
    words = set[str]()
    for file, _ in files():
        words.update(re.findall(r"\w+", file.read_text()))
    assert not {name.place for name in listed_names() if name.name not in words}


@pytest.fixture
def as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test of this process may have built a model, which replaces some functions."""
    for owner, name in REPLACED:
        if name in originals:
            monkeypatch.setattr(import_module(f"transformers.{owner}"), name, originals[name])


@pytest.mark.usefixtures("as_imported")
def test_the_installed_versions_have_every_listed_name() -> None:
    assert len(LISTED) > 90
    assert missing_names() == []


@pytest.mark.usefixtures("as_imported")
def test_a_missing_name_and_changed_arguments_are_named_with_the_versions_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    with pytest.raises(UserError) as caught:
        require("transformers", "masking_utils", "find_packed_sequence_indices")
    assert re.fullmatch(
        r"error: Transformers [\d.]+ lacks masking_utils.find_packed_sequence_indices, which packing needs. "
        r"Install transformers>=5\.\d+,<5\.\d+\.",
        str(caught.value),
    )

    def renamed(key: str, patterns: list[str]) -> str:
        return key

    monkeypatch.setattr(core_model_loading, "apply_renamings", renamed)
    [_, problem] = missing_names()
    assert "has other arguments of core_model_loading.apply_renamings (key, patterns)" in problem


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=REPOSITORY
    )


WITHOUT_A_NAME = """
import runpy, sys
from transformers import core_model_loading
del core_model_loading.apply_converters
sys.argv = ["recipes/finetuning.py", "--device", "cpu"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_without_a_name_ends_with_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_NAME)
    finished = forked(OTHER_TREE, REPOSITORY, script)
    assert finished.exit_code == 2
    assert finished.output.count("error: ") == 1 and "Traceback" not in finished.output
    [line] = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: Transformers ")
    assert "lacks core_model_loading.apply_converters, which reading checkpoints needs" in line


IMPORTED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.integrations import moe, sdpa_attention

def functions():
    return [masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa,
            sdpa_attention.use_gqa_in_sdpa, moe._grouped_linear]

def logits():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])  # two packed samples
    padded = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    ids = torch.arange(8)[None]
    return [model(ids, position_ids=positions).logits, model(ids, attention_mask=padded).logits, model(ids).logits]

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                     num_hidden_layers=2, vocab_size=100)
model = LlamaForCausalLM(config).eval()
expected, before = functions(), logits()
import llama_ft.models, llama_ft.training, llama_ft.run
assert functions() == expected
assert all(map(torch.equal, logits(), before))
llama_ft.models.build_on_meta(config, llama_ft.config.ModelConfig())
assert not set(functions()) & set(expected)
assert all(map(torch.equal, logits(), before))
"""


@pytest.mark.slow
def test_an_import_leaves_transformers_alone_and_a_plain_model_computes_as_before() -> None:
    finished = python(IMPORTED)
    assert finished.returncode == 0, finished.stderr
