"""python loading_memory_job.py CASE.json: one measurement of benchmarks/speed/loading.py, added to the
file. Its ranks are forks of this process, which has torch imported."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.speed import loading

if __name__ == "__main__":
    file = Path(sys.argv[1])
    case = json.loads(file.read_text())
    result = loading.Result()
    wanted = loading.Case(case["ranks"], case["way"], case["target"])
    loading.measure(wanted, Path(case["folder"]), "cpu", result, start_method="fork")
    file.write_text(json.dumps(asdict(result)))
