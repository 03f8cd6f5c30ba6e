"""A run's directory that the tests of the report read."""

from pathlib import Path

import pytest
from report_run import write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished."""
    return write_run(tmp_path_factory.mktemp("report") / "a run")
