"""The door: what extensions bring to runs and tools.

An extension is a folder of llama_ft/extensions/, with an `extension.py`, and its name in NAMES.
Nothing else in the core names one. What it brings is named by `module:Class` or `module:function`
and imported when a run or a tool needs it: neither this file nor an `extension.py` imports torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from llama_ft.errors import UserError, exit_on_error
from llama_ft.objective_entry import ObjectiveEntry

NAMES = (
    "kubeflow",
    "check",
    "images",
    "report",
    "rollouts",
    "scores",
    "serving",
    "store",
)  # in the order of their parts in a run
PAGE = "docs/development/add-an-extension.md"


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an extension brings; all of it is optional.

    Attributes:
        settings: section of the settings -> `module:Class` of its dataclass, as in config/settings.
        part: `module:Class` of a part of a run, or of several parts. It is called with the run's `Setup` and
            `RunInputs`, and should raise a UserError for settings that do not fit.
        needs_part: tells from the `Config` whether the run has this part.
        at_end: `module:function` of a run's directory. It is called when the run has ended in any
            way, also after an error, on the disk that has the log. It must not raise.
        holds_dataset: tells from a directory whether it is a dataset of this extension.
        dataset: `module:function` of the name of such a directory, the `DataConfig` and the
            tokenizer. It returns the `Source` of its samples, see data/read/sources.py.
        media: `module:Class` of a `MediaReader` (data/media.py), which reads what samples hold in
            addition to text. One extension has it.
        remote_run: `module:Class` of a `RemoteRun`, see checkpoint/remote.py. A run has one at most.
        needs_remote_run: tells from the `CheckpointConfig` whether the run has this one.
        scores: `module:Class` of `Scores`, see training/evaluation.py.
        needs_scores: tells from the `TrainConfig` whether evaluations have them.
        trial: `module:function` of the flags of recipes/check.py, which calls it on each rank: what
            it tries, or None if no flag asks for it.
        objectives: name -> what is known of an objective, see config/objectives.py.
        tools: tool of recipes/, such as check -> its flags and what they do.
        verbs: `llama-ft VERB` -> its recipe.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    part: str | tuple[str, ...] | None = None
    needs_part: Callable[[Any], bool] = lambda config: True
    at_end: str | None = None
    holds_dataset: Callable[[Path], bool] = lambda directory: False
    dataset: str | None = None
    media: str | None = None
    remote_run: str | None = None
    needs_remote_run: Callable[[Any], bool] = lambda settings: False
    scores: str | None = None
    needs_scores: Callable[[Any], bool] = lambda settings: False
    trial: str | None = None
    objectives: Mapping[str, ObjectiveEntry] = field(default_factory=dict)
    tools: Mapping[str, "ToolFlags"] = field(default_factory=dict)
    verbs: Mapping[str, "Verb"] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolFlags:
    """Flags that an extension adds to a tool of recipes/.

    Attributes:
        flags: `module:Class` of a dataclass of flags, see config/reading/tool_flags.py. `--help`
            prints them under the docstring of the class.
        run: `module:function`, which gets all flags of the tool.
        is_used: tells from the flags whether the functions are called.
        check: `module:function`, called when the flags are read; it raises a UserError for those
            that do not fit together.
        finish: `module:function`, called by recipes/export.py with the flags and the directory that
            it has written, before that replaces OUT. It changes the files, or raises a UserError,
            and then nothing is written.
    """

    flags: str
    run: str
    is_used: Callable[[Any], bool]
    check: str | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Trial:
    """What one rank has tried for recipes/check.py.

    Attributes:
        title: of a column in the table.
        result: of this rank, for that column.
        problem: what is wrong, for the ranks that have the same problem; "" if nothing is.
    """

    title: str
    result: str
    problem: str = ""


@dataclass(frozen=True)
class Verb:
    """A verb of `llama-ft`.

    Attributes:
        recipe: the name of its file in recipes/.
        about: what --help says about it.
        takes_nproc: `--nproc N` starts it as N processes.
    """

    recipe: str
    about: str
    takes_nproc: bool = False


@cache
def extensions() -> tuple[Extension, ...]:
    """Return all extensions. If one of them is not complete, the process ends with a message: they
    are asked for while modules are imported, before errors are caught."""
    with exit_on_error():
        return tuple(_load(f"llama_ft.extensions.{name}.extension:EXTENSION") for name in NAMES)


def _load(reference: str) -> Any:
    """Import what an extension names by `module:name`.

    Raises:
        UserError: there is no such module, or nothing of this name in it.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module imports what is not installed
        problem = f"there is no module {error.name}"
    else:
        if hasattr(module, name):
            return getattr(module, name)
        problem = f"{module.__file__} has no {name}"
    raise UserError(f"{reference}: {problem}. {PAGE} says what an extension consists of.")


def settings_sections() -> dict[str, Any]:
    """Return the sections of settings of all extensions: name -> dataclass."""
    sections = {}
    for extension in extensions():
        for name, implementation in extension.settings.items():
            with exit_on_error():  # as in `extensions`
                sections[name] = _load(implementation)
    return sections


def parts(config: Any) -> Iterator[Callable[[Any, Any], Any]]:
    """Yield the parts of extensions that a run with these settings has: classes that are called with
    its `Setup` and `RunInputs`."""
    for extension in extensions():
        if extension.part is not None and extension.needs_part(config):
            names = extension.part if isinstance(extension.part, tuple) else (extension.part,)
            yield from map(_load, names)


def functions_at_end() -> list[Callable[[Path], None]]:
    """Return what is called with the directory of a run that has ended."""
    names = [extension.at_end for extension in extensions()]
    return [_load(name) for name in names if name is not None]


def remote_run(settings: Any) -> Callable[[Any, Any], Any] | None:
    """Return the class of the other place of a run with these `CheckpointConfig`, if it has one."""
    for extension in extensions():
        if extension.remote_run is not None and extension.needs_remote_run(settings):
            return _load(extension.remote_run)
    return None


def scores(settings: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return the class of the scores of evaluations with this `TrainConfig`, if they have some."""
    for extension in extensions():
        if extension.scores is not None and extension.needs_scores(settings):
            return _load(extension.scores)
    return None


def trials(flags: Any) -> list[Trial]:
    """Try on this rank what the flags of recipes/check.py ask extensions for."""
    names = [extension.trial for extension in extensions()]
    results = [_load(name)(flags) for name in names if name is not None]
    return [trial for trial in results if trial is not None]


def objectives() -> dict[str, ObjectiveEntry]:
    """Return the objectives that extensions bring."""
    brought = dict[str, ObjectiveEntry]()
    for extension in extensions():
        brought.update(extension.objectives)
    return brought


def verbs() -> dict[str, Verb]:
    """Return the verbs of `llama-ft` that extensions bring."""
    return {name: verb for extension in extensions() for name, verb in extension.verbs.items()}


def holds_dataset(directory: Path) -> bool:
    """Return whether a directory is a dataset of an extension."""
    return any(extension.holds_dataset(directory) for extension in extensions())


def open_dataset(directory: Path, *arguments: Any) -> Any:
    """Return the samples of such a directory. `arguments`: of `Extension.dataset`."""
    [name] = [one.dataset for one in extensions() if one.dataset and one.holds_dataset(directory)]
    return _load(name)(*arguments)


def media_reader() -> Any:
    """Return the class of what reads media."""
    [name] = [extension.media for extension in extensions() if extension.media is not None]
    return _load(name)


def flags_of(tool: str) -> list[Any]:
    """Return the dataclasses of the flags that extensions add to a tool."""
    return [_load(entry.flags) for entry in _entries_of(tool)]


def functions_of(tool: str, flags: Any) -> Iterator[Callable[[Any], None]]:
    """Yield what the flags of extensions that are used ask a tool to do: functions of its flags."""
    for entry in _entries_of(tool):
        if entry.is_used(flags):
            yield _load(entry.run)


def checks_of(tool: str, flags: Any) -> Iterator[Callable[[Any], None]]:
    """Yield the functions that check the flags of extensions that are used."""
    for entry in _entries_of(tool):
        if entry.check is not None and entry.is_used(flags):
            yield _load(entry.check)


def finish_export(flags: Any, written: Path) -> None:
    """Let extensions change or reject what an export has written, before it replaces OUT."""
    for entry in _entries_of("export"):
        if entry.finish is not None and entry.is_used(flags):
            _load(entry.finish)(flags, written)


def _entries_of(tool: str) -> list[ToolFlags]:
    entries = [extension.tools.get(tool) for extension in extensions()]
    return [entry for entry in entries if entry is not None]
