"""What a search for settings that fit has found, for people, for programs, and as recipes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_ft import commands
from llama_ft.config import Config, to_yaml
from llama_ft.config.fields import SETTINGS, values_of
from llama_ft.config.gpus import Device
from llama_ft.config.wording import is_flag, size_text
from llama_ft.errors import UserError
from llama_ft.plan.changes import Layout, differing, flags_of
from llama_ft.plan.predict import PlanRequest
from llama_ft.plan.record import Change, Plan


@dataclass
class Fitting:
    """Settings that fit.

    Attributes:
        config: all of them.
        layout: how it is done.
        flags: what differs from the user's.
        overridden: fields of the user's own that differ.
        gives_up: for people.
        plan: of it.
        seconds: that a token takes a rank, an estimate.
        keeps_training: whether only speed differs.
    """

    config: Config
    layout: Layout
    flags: list[str]
    overridden: list[str]
    gives_up: str
    plan: Plan
    seconds: float
    keeps_training: bool

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return 1 / self.seconds

    def change(self, fastest: float) -> Change:
        """For messages; `fastest` is the speed of the fastest."""
        return Change(self.flags, self.gives_up, self.plan.device_bytes, round(self.speed / fastest, 3))


@dataclass
class FitAnswer:
    """What fits.

    Attributes:
        request: what was asked for.
        device: what it had to fit.
        plan: of the recipe as it is.
        fits_as_it_is: whether that fits.
        fits: other settings that do: faster ones where it fits as it is, else first those that train the same.
        enough_ranks: where nothing that trains the same fits on these ranks, the number on which it does.
        blocker: what is in the way where no number of ranks is enough.
    """

    request: PlanRequest
    device: Device
    plan: Plan
    fits_as_it_is: bool
    fits: list[Fitting]
    enough_ranks: int | None = None
    blocker: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "fits_as_it_is": self.fits_as_it_is,
            "fits": [asdict(change) for change in self._changes()],
            "fits_on_ranks": self.enough_ranks,
        }

    def describe(self, commands: list[str]) -> str:
        """For people.

        Args:
            commands: one for each of `fits`, which runs it.
        """
        needs, has = size_text(self.plan.device_bytes), self.device.name
        if self.fits_as_it_is:
            lines = [f"It fits {has} as it is: {needs} a rank."]
            lines += ["Faster, by estimate, and fitting too:"] if self.fits else []
        else:
            lines = [f"It does not fit {has} as it is: {needs} a rank.", *self._verdict()]
        for number, (change, command) in enumerate(zip(self._changes(), commands, strict=True), 1):
            lines.append(f"{number}. {' '.join(change.flags)}")
            lines.append(f"   {size_text(change.peak_bytes)} a rank, speed {change.relative_speed:.2f}")
            lines.append(f"   gives up: {change.gives_up}")
            lines.append(f"   {command}")
        return "\n".join(lines)

    def _verdict(self) -> list[str]:
        lines, ranks = [], self.request.world_size
        if self.enough_ranks or self.blocker:
            same = f"The same training does not fit on {_ranks(ranks)}, however it is divided"
            lines.append(f"{same}; fits on {self.enough_ranks}." if self.enough_ranks else f"{same}.")
            if self.blocker:
                lines.append(f"More ranks do not help: what is in the way is the same on every rank ({self.blocker}).")
        if self.fits and self.fits[0].overridden:
            names = ", ".join(SETTINGS[name].name for name in self.fits[0].overridden)
            lines.append(f"Nothing fits with all that you have set. The least that would have to change: {names}.")
        if not self.fits and not lines:
            lines.append("No small change makes it fit. Without --quick everything is searched, and more ranks.")
        if self.fits:
            lines.append("What fits; speed is an estimate, beside the fastest of these:")
        return lines

    def _changes(self) -> list[Change]:
        fastest = max((it.speed for it in self.fits), default=1.0)
        return [it.change(fastest) for it in self.fits]

    def write(self, folder: Path) -> list[str]:
        """Write each answer as a recipe; returns the commands that run them.

        Raises:
            UserError: the folder cannot be written.
        """
        commands = []
        for number, (fitting, change) in enumerate(zip(self.fits, self._changes(), strict=True), 1):
            file = folder / f"fit-{number}.yaml"
            command = f"{_launcher(self.request)} --config {file}"
            head = f"{' '.join(change.flags)}\n{size_text(change.peak_bytes)} a rank, for {self.device.name}"
            head += f"\ngives up: {change.gives_up}\n  {command}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(to_yaml(fitting.config, head))
            except OSError as error:
                raise UserError(f"--fit_out {folder}: cannot be written: {error.strerror}.") from None
            commands.append(command)
        return commands

    def commands(self, places: Mapping[str, str], recipe: str | None) -> list[str]:
        """What runs each answer without a recipe of its own.

        Args:
            places: dotted name -> where the user set it.
            recipe: the file that --config named.
        """
        return [self._command(fitting.config, places, recipe) for fitting in self.fits]

    def _command(self, config: Config, places: Mapping[str, str], recipe: str | None) -> str:
        values = values_of(config)
        typed = {name for name, setting in SETTINGS.items() if is_flag(places.get(setting.dotted, ""))}
        different = differing(self.request.config, config)
        shown = {name: values[name] for name in values if name in typed or name in different}
        words = [f"--config {recipe}"] if recipe else []
        return " ".join([_launcher(self.request), *words, *flags_of(shown)])


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"


def _launcher(request: PlanRequest) -> str:
    nodes = request.world_size // request.local_world_size
    if request.world_size == 1:
        return commands.shown("finetuning")
    several = f"--nnodes {nodes} " if nodes > 1 else ""
    return commands.shown("finetuning", f"torchrun {several}--nproc_per_node {request.local_world_size}")
