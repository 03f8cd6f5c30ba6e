"""llama.cpp itself, on the CPU and in an environment of its own, serves what `--for llama.cpp` writes."""

import re
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run
from forked import AT_THE_START

SCRIPT = REPOSITORY / "benchmarks" / "serving" / "serve_llama_cpp.py"
LINE = re.compile(
    r"^Llama, (\w+): (\S+) \(largest difference (\S+) of (\d+), base (\S+)\); chat template equal$",
    re.MULTILINE,
)


@pytest.mark.slow
def test_llama_cpp_serves_adapters_and_merged_models(tmp_path: Path) -> None:
    """Its log-probabilities of the next tokens are those of the run in fp32, and the base model is
    recognized."""
    pytest.importorskip("gguf")
    # the server is installed once, into the cache of the user, not of the tests
    cache = AT_THE_START.get("LLAMA_FT_CACHE", "")
    command = [sys.executable, str(SCRIPT), "--families", "Llama", "--work", str(tmp_path / "work")]
    finished = run(command, timeout=1200, LLAMA_FT_CACHE=cache)
    if "cannot be installed here" in finished.output:
        pytest.skip(finished.output.strip().splitlines()[-1])
    assert finished.exit_code == 0, finished.output
    found = {title: values for title, *values in LINE.findall(finished.output)}
    assert {title: values[0] for title, values in found.items()} == {
        "merged": "fine-tuned",
        "LoRA": "fine-tuned",
        "base": "base",
    }
    for title in ("merged", "LoRA"):
        difference, count, effect = map(float, found[title][1:])
        assert count >= 100
        assert difference < 1e-3 and effect > 1
