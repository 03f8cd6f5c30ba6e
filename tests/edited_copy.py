"""A copy of the tree that a test edits as a page says, and the files that the edit touches."""

import subprocess
from pathlib import Path
from shutil import copytree, ignore_patterns

from conftest import REPOSITORY
from forked import forked

OTHER_TREE = REPOSITORY / "tests" / "other_tree.py"
COPIED = ("src", "recipes", "configs")


class EditedCopy:
    """A copy of source, recipes and configs.

    Attributes:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            copytree(REPOSITORY / name, folder / name, ignore=ignore_patterns("__pycache__"))
        self._before = self._contents()

    def apply(self, diff: str) -> None:
        """Change files by a diff, as `git apply` does."""
        subprocess.run(["git", "apply", "-"], cwd=self.folder, input=diff, text=True, check=True)

    def replace(self, name: str, old: str, new: str) -> None:
        """Change a file in one place."""
        file = self.folder / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    def write(self, name: str, text: str) -> None:
        """Add a file."""
        file = self.folder / name
        assert not file.exists()
        file.write_text(text)

    def run(self, *arguments: str | Path) -> str:
        """Run a script with the copy's package. Return what it writes to stdout and stderr."""
        finished = forked(OTHER_TREE, self.folder, *arguments)
        assert finished.exit_code == 0, finished.output
        return finished.output

    def touched(self) -> list[str]:
        """Return the files that differ from the tree's, or are new."""
        after = self._contents()
        names = sorted(self._before.keys() | after.keys())
        return [name for name in names if self._before.get(name) != after.get(name)]

    def _contents(self) -> dict[str, bytes]:
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return {
            str(file.relative_to(self.folder)): file.read_bytes()
            for file in files
            if file.suffix != ".pyc" and file.relative_to(self.folder).parts[0] in COPIED
        }
