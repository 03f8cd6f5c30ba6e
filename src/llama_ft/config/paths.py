"""Check the files and directories that a configuration names, before anything slow starts and
without torch.

Two questions: can the inputs be read, and may the output directory be written? A run replaces
nothing without `--overwrite`, and never files that llama_ft did not write.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from llama_ft.config.data_names import NOT_A_FILE, data_problem, is_split_of, kind_of_data
from llama_ft.config.home import expanded
from llama_ft.config.objectives import FOLDERS, PASS_FILES, PASSES
from llama_ft.config.rules import SECRET, as_fraction
from llama_ft.config.wording.messages import describe_setting, missing_file, nearest
from llama_ft.errors import UserError, rank, reason
from llama_ft.masking import is_clean, is_url_with_secret
from llama_ft.objective_entry import PathKind
from llama_ft.processes import attempt, may_be_restarted

BUILT_IN_TEMPLATES = ("llama3", "chatml", "alpaca", "mistral")
INPUTS = (
    "model_name", "tokenizer_name", "dataset", "validation", "from_peft_checkpoint", "chat_template", "optimizer",
    "score", *(name for entry in PASSES for name in entry.paths),
)  # fmt: skip
TO_SAFETENSORS = "Convert it with Transformers:\nAutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Marks a run's directory. Other programs also write a metrics.jsonl or checkpoints/, but none
# writes this file.
RUN_MARKER = ".llama_ft-run"
# the samples that --skip_bad_rows has skipped; see data/tokenize/tokenize_files.py
BAD_SAMPLES_FILE = "bad_samples.jsonl"
# in the directory of a final model; see extensions/serving
PROBES_FILE = "probes.json"
# The newest checkpoint that was fetched from --save_to. launch/run.sh does not count it as progress of
# the run.
FETCHED_FILE = ".fetched"
PROBE = ".llama_ft_"  # begins the name of an empty directory that exists for a moment
SECONDS_OF_A_PROBE = 60.0
SHOWN_ENTRIES = 3  # names of other files in a warning
# Everything that a run writes into its directory. --overwrite deletes nothing else, and no FOLDERS.
RUN_ENTRIES = (
    "status.json", "config.yaml", "metrics.jsonl", "checkpoints", "model", "facts.json", "plan.json", "report.html",
    "profile", "tensorboard", "wandb",
    *PASS_FILES, *FOLDERS, BAD_SAMPLES_FILE, FETCHED_FILE,
)  # fmt: skip
# of these; the others are files
RUN_DIRECTORIES = {"checkpoints", "model", "profile", "tensorboard", "wandb", *FOLDERS}
# The entries of checkpoints/ that --overwrite may delete. set-aside-* and files of other programs
# stay.
CHECKPOINT_ENTRIES = re.compile(r"(\.writing-|\.removing-)?step-\d{6,}|\.?best\.json")
# What an export writes itself. --overwrite deletes nothing else in the directory of a model or
# adapter, but for the files that its model card lists as copied from the base model. Python files
# are in neither: they look like the user's own files.
MODEL_PATTERNS = (
    "config.json", "generation_config.json", "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken", "model.gguf", "adapter.gguf", "Modelfile", PROBES_FILE,
)  # fmt: skip
# protocol of an object store -> the package in which fsspec finds it
STORE_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
}  # fmt: skip
COPIED_FILES = "copied_from_base_model"  # in the header of a model card: names of files
# in the header of a model card, and in trainer.json: text if the samples had no chat template
PROMPT_FORMAT = "prompt_format"
CARD_TAG = "\n- llama_ft\n"  # in the header of every model card that export/weights.py writes


# a field, its value, and the function that returns what is wrong with that value
Check = tuple[str, Any, Callable[[Any], str | None]]


def check_paths(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    invalid: set[str],
) -> list[str]:
    """Return an error message for each setting whose file or directory cannot be used.

    Args:
        values: all settings by field name.
        origins: field name -> where it was set.
        invalid: fields whose own value could not be read. They are not checked.
    """
    checks: list[Check] = [
        *_models(values),
        *_samples(values),
        ("from_peft_checkpoint", values["from_peft_checkpoint"], _adapter_problem),
        ("chat_template", values["chat_template"], _template_problem),
        ("optimizer", values["optimizer"], _function_problem),
        ("score", values["score"], _function_problem),
        *(("sample_images", name, file_problem) for name in values["sample_images"] or ()),
        *_outputs(values),
    ]
    messages = []
    for name, value, problem_of in checks:
        if name in invalid or value is None:
            continue
        setting = describe_setting(name, origins)
        if is_url_with_secret(value):  # the message must not repeat it
            messages.append(f"{setting} {SECRET}")
            continue
        try:
            problem = problem_of(value)
        except (OSError, ValueError) as error:  # no permission, a name that is too long
            problem = f"cannot be accessed: {reason(error)}."
        if problem:
            messages.append(f"{setting} {value}: {problem}")
    return messages


def _models(values: Mapping[str, Any]) -> list[Check]:
    """Return the checks of the model, its tokenizer, and the files of passes before training."""

    def model_of_new_run(name: str) -> str | None:
        # what it has computed is stored
        return None if values["resume"] else model_problem(name)

    of_passes: dict[PathKind, Callable[[str], str | None]] = {
        "model": model_problem,
        "model_of_new_run": model_of_new_run,
        "file": _input_or_output_problem,
    }
    checks: list[Check] = [
        ("model_name", values["model_name"], model_problem),
        ("tokenizer_name", values["tokenizer_name"], _tokenizer_problem),
    ]
    for entry in PASSES:
        checks += [(name, values[name], of_passes[kind]) for name, kind in entry.paths.items()]
    return checks


def _samples(values: Mapping[str, Any]) -> list[Check]:
    """Return the checks of the training samples, of the validation samples, and of the file for
    those."""
    named = _named_validation(values)

    def validation(name: str) -> str | None:
        is_data = as_fraction(name) is None and not is_split_of(name, values["dataset"])
        return data_problem(name) if is_data else None

    return [
        *(("dataset", name, data_problem) for name in _datasets(values)),
        ("validation", None if named else values["validation"], validation),
        *(("validation", name, data_problem) for name in named.values()),
        ("validation_output", values["validation_output"], _samples_output_problem),
    ]


def _outputs(values: Mapping[str, Any]) -> list[Check]:
    """Return the checks of the places that the run writes to."""
    inputs = _inputs(values)

    def output_dir(name: str) -> str | None:
        resume = values["resume"]
        # the URL of the run's own copy
        is_own = resume is not None and resume == values["save_to"]
        return output_dir_problem(name, values["overwrite"], "auto" if is_own else resume, inputs)

    def save_to(url: str) -> str | None:
        return store_problem(url, values["output_dir"])

    return [
        ("output_dir", values["output_dir"] or "output/<model>", output_dir),
        ("save_to", values["save_to"], save_to),
    ]


def _datasets(values: Mapping[str, Any]) -> list[Any]:
    dataset = values["dataset"]
    return [part["path"] for part in dataset] if isinstance(dataset, list) else [dataset]


def _named_validation(values: Mapping[str, Any]) -> dict[str, Any]:
    return values["validation"] if isinstance(values["validation"], dict) else {}


def _inputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run reads and `--overwrite` must not delete: name in messages -> path or
    name."""
    inputs = {name: values[name] for name in INPUTS}
    inputs["resume"] = values["resume"] if values["overwrite"] else None
    inputs["dataset"] = None  # each part has its own entry
    named = _named_validation(values)
    if isinstance(inputs["validation"], dict):
        inputs["validation"] = None
    for name in [*_datasets(values), *named.values()]:
        inputs[f"dataset {name}"] = name
    return inputs


def _tokenizer_problem(name: str) -> str | None:
    return _folder(name) if looks_local(name) else None


def _adapter_problem(name: str) -> str | None:
    problem = _folder(name, *ADAPTER_FILES)
    return problem and (_result_in(expanded(name), ADAPTER_FILES[0]) or problem)


def _template_problem(name: str) -> str | None:
    problem = None if name in BUILT_IN_TEMPLATES else file_problem(name)
    if problem and not looks_local(name):
        return (
            f"{problem} Built in are {', '.join(BUILT_IN_TEMPLATES)}; otherwise name a Jinja file."
        )
    return problem


def _function_problem(name: str) -> str | None:
    return data_problem(name) if kind_of_data(name) == "function" else None


def _samples_output_problem(name: str) -> str | None:
    if not name.endswith(".jsonl"):
        return "expected the name of a .jsonl file."
    file = expanded(name)
    return NOT_A_FILE if file.is_dir() else not_writable(file.parent)


def _input_or_output_problem(name: str) -> str | None:
    file = expanded(name)
    return file_problem(name) if file.exists() else not_writable(file.parent)


def file_problem(name: str) -> str | None:
    """Return why the file `name` cannot be read, or None."""
    file = expanded(name)
    if not file.exists():
        return missing_file(file)
    return None if file.is_file() else NOT_A_FILE


def folder_problem(folder: Path, expected: str) -> str | None:
    """Return why `folder` is not an existing directory, or None. `expected` says what kind of
    directory is needed."""
    if not folder.exists():
        return "no such directory."
    return None if folder.is_dir() else f"is a file; expected {expected}."


def looks_local(name: str) -> bool:
    """Return whether `name` is a path. org/name is a Hub name, unless a directory of that name
    exists, or org is a run or a directory of runs."""
    return (
        name.startswith((".", "/", "~", "output/"))
        or name.count("/") > 1
        or name.endswith("/")
        or Path(name).exists()
        or ("/" in name and _holds_runs(Path(name).parent))
    )


def _holds_runs(folder: Path) -> bool:
    return (folder / RUN_MARKER).exists() or bool(runs_in(folder))


def runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a directory, which need not exist."""
    return sorted(marker.parent.name for marker in folder.glob(f"*/{RUN_MARKER}"))


def similar_run(folder: Path) -> Path | None:
    """Return the run next to `folder` whose name is most similar, or None."""
    name = nearest(folder.name, runs_in(folder.parent))
    return folder.parent / name if name else None


def missing_run(folder: Path) -> str:
    """Return the error message for a path at which there is nothing."""
    similar = similar_run(folder)
    hint = f" Did you mean {similar}?" if similar else ""
    return f"there is no run or model here.{hint}"


def model_problem(name: str) -> str | None:
    """Return why `name` is neither a Hub name nor a directory with config.json and weights, or
    None."""
    if name == "demo" or not looks_local(name):
        return None
    problem = _folder(name, "config.json")
    if problem:
        return _result_in(expanded(name), "config.json") or problem
    has_weights = any(expanded(name).glob("*.safetensors"))
    return None if has_weights else f"holds no *.safetensors. {TO_SAFETENSORS}"


def _result_in(folder: Path, expected: str) -> str | None:
    """Return what a directory of llama_ft or PEFT holds in place of a model (`expected`: config.json)
    or an adapter (adapter_config.json), and the flags that use it; None if it is none."""
    kinds = {"config.json": "a whole model", ADAPTER_FILES[0]: "an adapter"}
    results = [place / file for place in (folder, folder / "model") for file in kinds]
    result = next((file for file in results if file.is_file()), None)
    is_run = (folder / RUN_MARKER).is_file()
    if result is None and (is_run or (folder / "trainer.json").is_file()):
        return f"is not a model. Make one of it: llama-ft export {folder} OUT."
    if result is None or result == folder / expected:
        return None
    place = result.parent
    what = f"is a run; its result is {kinds[result.name]}" if is_run else f"is {kinds[result.name]}"
    if result.name == "config.json":
        return f"{what}. Use --model_name {place}."
    if expected == result.name:
        return f"{what}. Use --from_peft_checkpoint {place}."
    try:
        base = base_model_of(str(place))
    except UserError:
        base = "BASE"
    return f"{what}. Use --model_name {base} --use_peft --from_peft_checkpoint {place}."


def _folder(name: str, *files: str) -> str | None:
    """Return why `name` is not a directory that holds these files, or None."""
    folder = expanded(name)
    expected = " and ".join(files) or "files"
    problem = folder_problem(folder, f"a directory with {expected}")
    if problem:
        return problem
    for file in files:
        if not (folder / file).is_file():
            return f"holds no {file}."
    return special_file(folder)


def special_file(folder: Path) -> str | None:
    """Return that a directory holds a pipe, a device or a socket, or None. A library that opens a
    pipe waits for ever, and /dev/zero has no end."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            return f"holds {path.name}, which is a pipe or a device, not a file."
    return None


def base_model_of(adapter: str) -> str:
    """Return the base model that a saved adapter names: a directory or a Hub name.

    Raises:
        UserError: adapter_config.json cannot be read, names no base model, or names a revision
            other than main.
    """
    file = expanded(adapter) / "adapter_config.json"
    try:
        settings = json.loads(file.read_text())
        name = settings["base_model_name_or_path"]
        revision = settings.get("revision") or "main"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as an adapter's settings ({error}).") from error
    if not name or (revision != "main" and not looks_local(name)):
        raise UserError(
            f"{file}: the base model is {name}, revision {revision}. Set --base_model to its directory."
        )
    return str(name)


def run_entries(directory: Path) -> list[Path]:
    """Return the existing paths that a run wrote into `directory`.

    Args:
        directory: an output_dir; it need not exist.

    Returns:
        Paths; none if the directory has no RUN_MARKER.
    """
    if not (directory / RUN_MARKER).is_file():
        return []
    entries = [directory / entry for entry in RUN_ENTRIES if entry != "checkpoints"]
    checkpoints = directory / "checkpoints"
    if checkpoints.is_symlink():  # what it leads to may belong to somebody else
        entries.append(checkpoints)
    else:
        for path in checkpoints.glob("*"):
            if CHECKPOINT_ENTRIES.fullmatch(path.name):
                entries.append(path)
    return [path for path in entries if path.exists()]


def replaced_entries(directory: Path) -> list[Path]:
    """Return the paths that `--overwrite` deletes in `directory`. Answers in `FOLDERS` stay: they may
    have been paid."""
    return [path for path in run_entries(directory) if path.name not in FOLDERS]


def foreign_entries(directory: Path) -> str | None:
    """Return an error message if `directory` has entries with a run's names but no RUN_MARKER, or
    None."""
    existing = [entry for entry in RUN_ENTRIES if (directory / entry).exists()]
    if not existing or (directory / RUN_MARKER).is_file():
        return None
    return f"holds {', '.join(existing)} but no {RUN_MARKER}, which marks a run's directory. Choose another output_dir."


def unusual_output_dir(directory: str, model_name: str) -> str | None:
    """Return a warning if a new run would write among other files, or None.

    Args:
        directory: output_dir, not yet written to.
        model_name: of the run; a Hub name is never among files.
    """
    path = expanded(directory).resolve()
    model = expanded(model_name).resolve()
    if run_entries(path):  # a new run may have locked its directory already
        return None
    if path.is_relative_to(model) and (model / "config.json").is_file():
        return (
            f"--output_dir {directory} is in the directory of the model, {model_name}: "
            "the run's files will be among the model's."
        )
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
    held = sorted(names - {RUN_MARKER})
    if not held:
        return None
    shown = ", ".join(held[:SHOWN_ENTRIES]) + (", ..." if len(held) > SHOWN_ENTRIES else "")
    return (
        f"--output_dir {directory} has other files ({shown}): the run's files will be among them."
    )


def output_dir_problem(
    directory: str,
    overwrite: bool,
    resume: str | None,
    inputs: Mapping[str, Any],
) -> str | None:
    """Return why a run cannot write into `directory`, or None.

    Only rank 0 checks, because only rank 0 writes: another rank could already see files of the run
    that is starting.

    Args:
        directory: output_dir.
        overwrite: whether an existing run may be replaced.
        resume: `auto`, or the checkpoint that the run continues, or None.
        inputs: field name -> file or directory that the run reads. Replacing a run must not delete
            it.
    """
    if rank() != 0:
        return None
    if not is_clean(directory):
        return "has control characters, or is not UTF-8. Choose another output_dir."
    path = expanded(directory)
    problem = not_writable(path)
    if problem:
        return problem
    has_run_entries = any((path / entry).exists() for entry in RUN_ENTRIES)
    if not has_run_entries:
        return None  # files of other programs may stay
    problem = foreign_entries(path)
    if problem:
        return problem
    # torchrun may have restarted the ranks. checkpoint/run_directory.py finds that out before it
    # writes anything.
    resumes = resume == "auto" or may_be_restarted()
    if resume is not None and not resumes:
        checkpoint = expanded(resume).resolve()
        resumes = checkpoint.is_relative_to(path.resolve())
    if not resumes and not overwrite:
        return "already holds a run. Choose another output_dir, --resume auto to continue it, or --overwrite."
    # After a restart the directory holds the run's own first attempt, and nothing is deleted.
    deletes = overwrite and attempt() == 0
    return deleted_input(replaced_entries(path), inputs) if deletes else None


def store_problem(url: str, output_dir: str | None) -> str | None:
    """Return why a run that writes into `output_dir` cannot upload to `url`, or None."""
    from fsspec.registry import known_implementations, registry  # 0.1 s

    protocol, _, path = url.partition("://")
    package = STORE_PACKAGES.get(protocol)
    if package is not None and find_spec(package) is None:
        return f"needs the package {package}: pip install {package}"
    if protocol not in known_implementations and protocol not in registry:
        return "expected a protocol that fsspec knows, such as s3, gs, az or file."
    if protocol not in ("file", "local") or output_dir is None:
        return None
    store = expanded(path).resolve()
    run = expanded(output_dir).resolve()
    if store == run or any(store.is_relative_to(run / entry) for entry in RUN_ENTRIES):
        return f"is output_dir {output_dir} itself, or in its files. Choose a directory outside."
    return None


def model_dir_problem(
    directory: str,
    overwrite: bool,
    inputs: Mapping[str, str | None],
) -> str | None:
    """Return why a model cannot be exported into `directory`, or None. Arguments: see
    `output_dir_problem`."""
    path = expanded(directory)
    problem = not_writable(path)
    if problem:
        return problem
    if not path.exists() or not any(path.iterdir()):
        return None
    card = path / "README.md"
    copied = _copied_files(card)
    others = []
    for file in sorted(path.rglob("*")):
        if file.is_dir():
            continue
        name = str(file.relative_to(path))
        is_of_model = any(fnmatch(name, pattern) for pattern in MODEL_PATTERNS)
        if not is_of_model and name not in copied:
            others.append(name)
    if others:
        return f"contains files that are not part of a model ({', '.join(others[:5])}). Choose another OUT."
    is_ours = card.is_file() and CARD_TAG in card.read_text(errors="replace")
    if not is_ours:
        return "holds a model that llama_ft did not write (no README.md tagged llama_ft). Choose another OUT."
    if not overwrite:
        return "already holds a model. Choose another OUT, or replace that model with --overwrite."
    return deleted_input([path], inputs)


def _copied_files(card: Path) -> set[str]:
    """Return the names of the files that a model card lists as copied from the base model."""
    try:
        return {str(name) for name in _header(card)[COPIED_FILES]}
    except (LookupError, TypeError):  # not a card of llama_ft, or it lists none
        return set()


def recorded_prompt_format(folder: Path) -> str:
    """Return how the model or adapter in a directory is asked, by its model card: chat or text."""
    return "text" if _header(folder / "README.md").get(PROMPT_FORMAT) == "text" else "chat"


def _header(card: Path) -> dict[str, Any]:
    """Return the settings in the header of a model card; {} if it has none."""
    try:
        parts = card.read_text(errors="replace").split("---\n")
        settings = yaml.safe_load(parts[1])
    except (OSError, yaml.YAMLError, LookupError):
        return {}
    return settings if isinstance(settings, dict) else {}


def deleted_input(
    entries: list[Path],
    inputs: Mapping[str, str | None],
) -> str | None:
    """Return an error message if deleting `entries` would delete one of the inputs, or None."""
    for name, value in inputs.items():
        if not value:
            continue
        before_function = value.rpartition(".py:")[0]  # of path/to/file.py:function
        # not resolve(), which raises RuntimeError for a link to itself
        source = Path(os.path.realpath(expanded(before_function or value)))
        for entry in entries:
            if source.is_relative_to(os.path.realpath(entry)):
                return f"--overwrite would delete {entry}, which {name} reads. Choose another directory."
    return None


def not_writable(path: Path) -> str | None:
    """Return why nothing can be written to `path`, or None.

    It creates a temporary directory in the nearest existing parent. Permission bits are not enough:
    they allow root everything, even on a read-only disk.
    """
    ancestors = (path, *path.absolute().parents)
    # a link to nothing exists, too: a directory of its name cannot be made
    existing = next(folder for folder in ancestors if folder.exists() or folder.is_symlink())
    if not existing.is_dir():
        # The message begins with `path`.
        return "is not a directory." if existing == path else f"{existing} is not a directory."
    try:
        _remove_probes(existing)
        with tempfile.TemporaryDirectory(prefix=PROBE, dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written to: {error.strerror}."


def _remove_probes(folder: Path) -> None:
    """Remove the directories that `not_writable` has made for a moment, if a kill has left them."""
    for path in folder.glob(f"{PROBE}????????"):
        with suppress(OSError):  # it is not empty, or another process was faster
            if time.time() - path.stat().st_mtime > SECONDS_OF_A_PROBE:
                path.rmdir()
