"""Check installed libraries for the private names that are used here.

One file per library lists its names. Nobody promises them, so any release may rename one: then a
message says which one is missing, what needs it, and which versions have it.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from llama_ft.errors import UserError
from llama_ft.libraries import other_private, peft_private, torch_private, transformers_private
from llama_ft.libraries.versions import installed_version, requirement, title

# package that is imported -> its names
TABLES = {
    "transformers": transformers_private.NAMES,
    "peft": peft_private.NAMES,
    "torch": torch_private.NAMES,
    "liger_kernel": other_private.LIGER_NAMES,
    "datasets": other_private.DATASETS_NAMES,
    "safetensors": other_private.SAFETENSORS_NAMES,
}
LISTED = re.compile(r"(\w+)(?:\(([^)]*)\))?")  # name, or name(parameters)


@dataclass(frozen=True)
class PrivateName:
    """A name that its library may change in any release.

    Attributes:
        library: the package that is imported.
        owner: the module, class or object in it that has the name; "" for the package itself.
        name: of a function, a class, an attribute or a table.
        purpose: what needs it.
        parameters: of a function that is called or replaced here: those that are passed.
    """

    library: str
    owner: str
    name: str
    purpose: str
    parameters: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        """The name as the library's code would write it after an import of the package."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    def problem(self) -> str | None:
        """Return what is wrong with the name in the installed version; None if it is as listed."""
        owner = _find_owner(self.library, self.owner)
        if owner is None or not _has(owner, self.name):
            wrong = f"lacks {self.place}"
        else:
            parameters = _parameters(getattr(owner, self.name, None))
            if self.parameters is None or parameters is None or _fit(parameters, self.parameters):
                return None
            wrong = f"has other arguments of {self.place} ({', '.join(parameters)})"
        library = f"{title(self.library)} {installed_version(self.library)}"
        return (
            f"{library} {wrong}, which {self.purpose} needs. Install {requirement(self.library)}."
        )


def listed_names() -> Iterator[PrivateName]:
    """Yield the names of all libraries."""
    for library, table in TABLES.items():
        for (owner, purpose), names in table.items():
            for match in LISTED.finditer(names):
                name, parameters = match.groups()
                passed = None if parameters is None else tuple(re.findall(r"\w+", parameters))
                yield PrivateName(library, owner, name, purpose, passed)


def missing_names() -> list[str]:
    """Return a message per listed name that an installed library lacks, or whose arguments it has
    changed."""
    problems = []
    for name in listed_names():
        problem = name.problem() if find_spec(name.library) is not None else None
        if problem is not None:
            problems.append(problem)
    return problems


def require(library: str, owner: str, name: str) -> Any:
    """Return what a listed name stands for. Raises UserError if the installed version lacks it, or
    has changed its arguments."""
    listed = {(each.library, each.owner, each.name): each for each in listed_names()}
    problem = listed[library, owner, name].problem()
    if problem is not None:
        raise UserError(problem)
    return getattr(_find_owner(library, owner), name)


def _find_owner(library: str, path: str) -> Any:
    """Return the module, class or object with this path in a package; None if there is none."""
    owner: Any = import_module(library)
    module_name = library
    for part in path.split(".") if path else ():
        module_name = f"{module_name}.{part}"
        inside = owner
        owner = None
        if isinstance(inside, ModuleType):
            with suppress(ImportError):
                owner = import_module(module_name)
        if owner is None:
            owner = getattr(inside, part, None)
    return owner


def _has(owner: Any, name: str) -> bool:
    """Return whether an object has an attribute. An attribute that only instances of a class have
    occurs in the code of the class."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    try:
        code = inspect.getsource(owner)
    except (OSError, TypeError):  # not written in Python
        return False
    return re.search(rf"\b{name}\b", code) is not None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function, without `self`; None if they are not known."""
    if not isinstance(function, Callable):  # type: ignore[arg-type]
        return None
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # not written in Python
        return None
    parameters.pop("self", None)
    return parameters


def _fit(parameters: Mapping[str, inspect.Parameter], passed: tuple[str, ...]) -> bool:
    """Return whether a function takes all that is passed, and needs nothing else."""
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return (takes_any or set(passed) <= parameters.keys()) and set(needed) <= set(passed)
