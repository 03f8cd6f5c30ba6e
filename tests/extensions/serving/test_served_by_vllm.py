"""A real vLLM, on the CPU and in an environment of its own, serves what the recipe has trained."""

import json
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run
from forked import AT_THE_START

SCRIPT = REPOSITORY / "benchmarks" / "serving" / "serve.py"


@pytest.mark.large
def test_vllm_serves_adapters_and_merged_models(tmp_path: Path) -> None:
    """Llama, and Gemma 3 with its parts for images, whose adapter is of the text part. The server's
    log-probabilities are those of the run in fp32, and the base model's differ by ten times as
    much."""
    results = tmp_path / "serve.jsonl"
    asked = ["--families", "Llama", "Gemma 3", "--artefacts", "LoRA", "LoRA exported", "merged"]
    places = ["--work", str(tmp_path / "work"), "--results", str(results)]
    # vLLM takes 3 GB: it is installed once, into the cache of the user, not of the tests
    cache = AT_THE_START.get("LLAMA_FT_CACHE", "")
    command = [sys.executable, str(SCRIPT), *asked, *places]
    finished = run(command, timeout=3600, LLAMA_FT_CACHE=cache)
    if "cannot be installed here" in finished.output:
        pytest.skip(finished.output.strip().splitlines()[-1])
    assert finished.exit_code == 0, finished.output
    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(outcomes) == 6
    for outcome in outcomes:
        assert outcome["result"] == "served", outcome
        assert outcome["difference"] < 1e-3 and outcome["effect"] > 1e-2
