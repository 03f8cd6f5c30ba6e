"""The file of answers, which a second start goes on with."""

import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from llama_ft.checkpoint.reader import file_digest
from llama_ft.config.inference_flags import foreign_complaint, settings_file
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.generate import Sampling
from llama_ft.inference.load import Opened
from llama_ft.models import fingerprint

DRAWN = ("top_p", "top_k", "min_p", "seed")  # say nothing of greedy answers


def describe_job(options: Any, sampling: Sampling, opened: Opened, prompts: Path) -> dict[str, Any]:
    """What answers depend on, as it stands beside them."""
    tuned = [opened.place / name for name in ("adapter_model.safetensors", "checksums.txt")]
    return {
        "prompts": file_digest(prompts),
        "model": str(opened.place.resolve()),
        "weights": [fingerprint(opened.folder), *(file_digest(file) for file in tuned if file.is_file())],
        "quantization": opened.quantization,
        "precision": str(opened.model.dtype).removeprefix("torch."),
        "tokenizer_name": options.tokenizer_name,
        "system_prompt": options.system_prompt,
        "no_chat_template": options.no_chat_template,
        "output_key": options.output_key,
        **{name: value for name, value in vars(sampling).items() if sampling.temperature or name not in DRAWN},
    }


class AnswersFile:
    """A .jsonl file of answers in the order of their prompts, written batch by batch.

    What they depend on stands beside it, in <name>.settings.json: a second start with the same goes on after the
    answers that are there.

    Args:
        file: None: stdout, from the beginning.
        settings: see describe_job.
        overwrite: begin anew.
        rows: of all prompts, in their order: what stands with each answer.

    Attributes:
        held: answers that are there.

    Raises:
        UserError: it holds answers of other settings or prompts, or something else; or another process writes it.
        RunFailure: it cannot be written.
    """

    def __init__(
        self, file: Path | None, settings: Mapping[str, Any], overwrite: bool, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        self.held, self._name = 0, file
        self._file: IO[str] | None = None
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(file, "r+" if file.exists() else "x+", encoding="utf-8", newline="\n")
            self._begin(file, settings, overwrite, rows)
        except OSError as error:
            raise RunFailure(f"--output_file {file}: cannot be written ({error.strerror or error}).") from error
        except UserError:
            if self._file is not None:
                self._file.close()
            raise

    def _begin(
        self, file: Path, settings: Mapping[str, Any], overwrite: bool, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        assert self._file is not None
        self._lock(file)
        if complaint := foreign_complaint(file):
            raise UserError(f"--output_file {file}: {complaint}")
        beside = settings_file(file)
        if overwrite:
            self._file.truncate(0)
        if os.fstat(self._file.fileno()).st_size:
            _check_same(file, beside, settings)
            self._go_on(rows, settings["output_key"])
        else:
            beside.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def _lock(self, file: Path) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"--output_file {file}: another process is writing it.") from error
        except OSError:  # a file system without locks
            pass

    def _go_on(self, rows: Sequence[Mapping[str, Any]], output_key: str) -> None:
        """Count the answers, each of them to its prompt, and cut off what a killed process has left half written."""
        assert self._file is not None
        whole = 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                if complaint := _row_complaint(line, rows[self.held : self.held + 1], output_key):
                    raise UserError(
                        f"--output_file {self._name}:{self.held + 1}: {complaint}\nChoose another file, or --overwrite "
                        "this one: answers stand in it in the order of the prompts, a line each."
                    )
                whole += len(line)
                self.held += 1
        self._file.truncate(whole)
        self._file.seek(whole)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add answers; they are on the disk when this returns.

        Raises:
            RunFailure: the disk is full, or something else is wrong with it.
        """
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self._file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunFailure(
                f"--output_file {self._name}: could not be written ({error.strerror}).\nThe same command goes on after "
                "the answers that are there."
            ) from error

    def __enter__(self) -> "AnswersFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:  # it tries to write once more what could not be written, which `error` has told
                if error is None:
                    raise


def _row_complaint(line: bytes, rows: Sequence[Mapping[str, Any]], output_key: str) -> str | None:
    """Say why a line is not the answer to its prompt, whose row is the one of `rows`; none: there is no such prompt."""
    if not line.strip():
        return "is blank."
    if not rows:
        return "there are fewer prompts than answers."
    try:
        held = json.loads(line)
        answer = held.pop(output_key)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f'is no row with "{output_key}".'
    # As text: NaN, which a row may hold, is not equal to itself, and 1 is equal to true.
    is_same = json.dumps(held, sort_keys=True) == json.dumps(rows[0], sort_keys=True)
    return None if is_same and isinstance(answer, str) else "is not the answer to the prompt of this place."


def _check_same(file: Path, beside: Path, settings: Mapping[str, Any]) -> None:
    try:
        then = json.loads(beside.read_text())
        changed = {name for name in {*then, *settings} if then.get(name) != json.loads(json.dumps(settings)).get(name)}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--output_file {file}: is not empty, and {beside.name}, which would say what is in it, cannot be read.\n"
            "Choose another file, or --overwrite it."
        ) from error
    if changed:
        told = "\n".join(
            f"{name}: {then.get(name)} then, {settings.get(name)} now"
            if name not in ("prompts", "weights")
            else {"prompts": "the prompts are others", "weights": "the model's weights are others"}[name]
            for name in sorted(changed)
        )
        raise UserError(
            f"--output_file {file}: holds answers that were made in another way.\n{told}\nChoose another file, or "
            "--overwrite it."
        )
