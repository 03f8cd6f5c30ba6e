"""The versions of libraries that messages name are those of setup.py."""

import ast
from importlib.metadata import version

import pytest
import yaml
from forked import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from llama_ft.libraries import versions
from llama_ft.libraries.versions import ALLOWED, TESTED, requirement, untested_versions


def ranges_of_setup() -> dict[str, SpecifierSet]:
    words = ast.walk(ast.parse((REPOSITORY / "setup.py").read_text()))
    texts = [word.value for word in words if isinstance(word, ast.Constant)]
    lines = [text for text in texts if isinstance(text, str) and ">=" in text and "," in text]
    requirements = [Requirement(line) for line in lines if not line.startswith(">")]
    return {each.name: each.specifier for each in requirements}


def test_the_allowed_versions_are_those_of_setup_py() -> None:
    allowed = ranges_of_setup()
    for name, text in ALLOWED.items():
        assert SpecifierSet(text) == allowed[name], name
    assert requirement("liger_kernel") == "liger-kernel>=0.8,<0.9"


def test_the_tested_versions_are_allowed_and_tested_in_ci() -> None:
    jobs = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    for name, bounds in TESTED.items():
        for text in bounds:
            assert SpecifierSet(ALLOWED[name]).contains(f"{text}.0"), name
    for job, library in {"matrix": "torch", "transformers": "transformers"}.items():
        tried = jobs[job]["strategy"]["matrix"][library]
        assert (tried[0], tried[-1]) == TESTED[library]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("5.23.0", ""),
        ("5.24.7", ""),
        ("5.25.0", "Transformers 5.25.0 (tested: 5.23 to 5.24)"),
        ("5.22.2", "Transformers 5.22.2 (tested: 5.23 to 5.24)"),
        ("6.0.0rc1", "Transformers 6.0.0rc1 (tested: 5.23 to 5.24)"),
    ],
)
def test_a_version_that_was_not_tested_is_named(
    installed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        return installed if name == "transformers" else version(name)

    monkeypatch.setattr(versions, "version", find)
    line = untested_versions()
    assert expected in line and bool(line) == bool(expected)
    assert "\n" not in line
