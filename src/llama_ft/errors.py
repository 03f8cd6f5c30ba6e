"""The one exception for a user's mistake. Everything that knows what the user should do differently raises it."""

from llama_ft.masking import mask_urls, printable


class UserError(Exception):
    """A mistake the user can mend: printed as `error: ...` without a traceback, exit code 2.

    Args:
        *messages: one text per mistake, as in `configs/mine.yaml:14: train.lrr is not a setting. Did you mean
            train.lr?`. First what is wrong and where, then what would be right; further lines are indented when
            printed.
    """

    def __init__(self, *messages: str) -> None:
        self.messages = tuple(mask_urls(message) for message in messages)  # terminals are logged and shared
        super().__init__(*self.messages)

    def __str__(self) -> str:
        return printable("\n".join("error: " + message.replace("\n", "\n       ") for message in self.messages))


class RunFailure(UserError):
    """A run that cannot go on although nobody made a mistake (loss no longer finite, disk full): told the same way,
    exit code 1."""


class LostRank(RunFailure):
    """Another rank is gone or hangs. Unlike after the others, torchrun may start the ranks again: it can go well."""
