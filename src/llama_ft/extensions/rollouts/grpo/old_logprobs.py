"""With --num_iterations: log-probabilities of a round's answers for the weights before the first step on
it. That step computes them; the later ones have other weights, and compare with them. With --kl_beta
also those of the reference, which does not change.

    RUN/rollouts/000001/old-logprobs.safetensors    location of an answer -> float32 [1 or 2, tokens]

They are on disk for a run that resumes between two steps on a round.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from llama_ft.errors import UserError, reason
from llama_ft.extensions.rollouts.rounds import folder_of
from llama_ft.processes import replace_bytes
from llama_ft.runtime import Ranks

FILE = "old-logprobs.safetensors"
CHECKSUM = "sha256"  # in the file's metadata


class OldLogprobs:
    """Those of one round.

    Args:
        is_used: several steps have the same round.

    Attributes:
        by_location: of all answers in the loss, with those of the reference in a second row; None
            during the first step on a round.
    """

    def __init__(self, is_used: bool) -> None:
        self._is_used = is_used
        self.by_location: dict[str, torch.Tensor] | None = None
        self._own = dict[str, torch.Tensor]()

    def begin(self) -> None:
        """Forget those of the round before."""
        self.by_location = None
        self._own = {}

    def add(self, locations: Sequence[str], lengths: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Add a micro-batch of the first step.

        Args:
            locations: of its answers.
            lengths: of its answers, int64 [answers], on the host.
            logprobs: of their tokens, float32 [1 or 2, tokens].
        """
        if self._is_used:
            parts = logprobs.split(lengths.tolist(), dim=1)
            self._own |= dict(zip(locations, parts, strict=True))

    def share(self, output_dir: Path, number: int, ranks: Ranks) -> None:
        """After the first step: let all ranks have those of all, and write them. It waits for the
        device.

        Raises:
            UserError: the file cannot be written.
        """
        own = _on_host(self._own)
        together = dict[str, torch.Tensor]()
        for part in ranks.gather(own):
            together |= part
        self.by_location = together
        self._own = {}
        if not ranks.is_main:
            return
        file = folder_of(output_dir, number) / FILE
        try:
            metadata = {CHECKSUM: _checksum_of(together)}
            replace_bytes(file, save(dict(sorted(together.items())), metadata))
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({reason(error)}).") from error

    def read(self, output_dirs: Sequence[Path], number: int, ranks: Ranks) -> None:
        """Read those of a round from the first of some directories that has them.

        Raises:
            UserError: none has, or the file is corrupted.
        """
        files = [folder_of(place, number) / FILE for place in output_dirs]
        self.by_location = ranks.broadcast_from_rank0(lambda: _read(files))


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors [rows, tokens] on the host, with one copy from the device."""
    if not tensors:
        return {}
    together = torch.cat([*tensors.values()], dim=1).cpu()
    parts = together.split([values.shape[1] for values in tensors.values()], dim=1)
    return {name: part.clone() for name, part in zip(tensors, parts, strict=True)}


def _checksum_of(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _read(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    file = next(filter(Path.is_file, files), files[0])
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if (opened.metadata() or {}).get(CHECKSUM) != _checksum_of(tensors):
                raise ValueError("its checksum differs")
        return tensors
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{file}: is missing or corrupted ({reason(error)}).\n"
            "The checkpoint is of a step between two steps on this round, and needs it. Resume from another checkpoint."
        ) from error
