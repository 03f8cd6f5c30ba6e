"""Plans beside runs of the recipe whose tensors are counted; benchmarks/plan.py does it for 48 cases."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from forked import REPOSITORY, forked

CASES = ["full-off-1-128", "4bit-full-1-128", "full-full-2-128", "8bit-off-2-128"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/plan.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("benchmark_plan", REPOSITORY / "benchmarks" / "plan.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["benchmark_plan"] = importlib.util.module_from_spec(spec)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch's allocations are counted by C++ that has to be compiled"
)
def test_a_runs_peak_is_the_predicted_one_within_a_tenth(benchmark: ModuleType, tmp_path: Path) -> None:
    benchmark.write_inputs(tmp_path, hidden=128, layers=2, vocabulary=512)
    cases = [case for case in benchmark.CASES if case.name in CASES]
    plans = benchmark.predict(cases, tmp_path, "cpu")
    for ranks in (1, 2):
        job = benchmark.write_job([case for case in cases if case.ranks == ranks], tmp_path, "cpu")
        finished = forked(REPOSITORY / "benchmarks" / "plan_job.py", job, ranks=ranks)
        assert finished.exit_code == 0, finished.output
    for case in cases:
        line = benchmark.Line(case, plans[case], benchmark.read_found(case, tmp_path))
        for phase in ("forward", "backward", "optimizer step", "save"):
            predicted, measured = {name: figures for name, *figures in line.phases()}[phase]
            assert predicted == pytest.approx(measured, rel=0.1), (case.name, phase)
        assert line.ratio == pytest.approx(1, abs=0.1), case.name
