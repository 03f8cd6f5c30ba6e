"""Home directories at the beginning of a path."""

from pathlib import Path

from llama_ft.errors import UserError


def expanded(name: str | Path) -> Path:
    """Return the path that a name means, with `~` and `~user` as home directories. Raises UserError
    if there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        home = Path(name).parts[0]
        raise UserError(
            f"{name}: {home} is not a user's home directory. ./{home} is a directory of that name."
        ) from None
