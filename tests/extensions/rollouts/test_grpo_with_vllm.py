"""A real vLLM, on the CPU and in an environment of its own, generates for runs with --objective grpo."""

from pathlib import Path

import pytest
from conftest import REPOSITORY, load_script, metrics, run_cases
from extensions.rollouts.test_grpo_runs import Job
from forked import AT_THE_START
from pages import Page

from llama_ft.inference.server import Server, served_models


def printed_flags() -> list[str]:
    """The flags of vLLM on the page, without the model."""
    commands = [command.words for command in Page("docs/guides/grpo.md").commands()]
    [words] = [words for words in commands if "vllm" in words]
    start = words.index("vllm")
    assert words[:start] == ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]
    assert words[start + 1] == "serve"
    return words[start + 3 :]


@pytest.mark.large
def test_vllm_answers_each_round_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started as on the page. Its log-probabilities are those of the training, also at a
    temperature. With staleness they are of the weights one step earlier."""
    # vLLM takes 3 GB: it is installed once, into the cache of the user, not of the tests
    monkeypatch.setenv("LLAMA_FT_CACHE", AT_THE_START.get("LLAMA_FT_CACHE", ""))
    serve = load_script(REPOSITORY / "benchmarks" / "serving" / "serve.py")
    try:
        python = serve.vllm_package.install(serve.cache_dir())
    except OSError as error:
        pytest.skip(f"{serve.NOT_INSTALLED}: {error}")
    models = load_script(REPOSITORY / "benchmarks" / "serving" / "serve_models.py")
    job = Job(tmp_path, models.write_model("Llama", tmp_path / "base"))
    launcher = serve.Launcher(python, tmp_path)
    try:
        with launcher.serve(job.model, "grpo", "--dtype", "float32", *printed_flags()) as address:
            settings = {"server": address, "lr": 0.05, "temperature": 0.7, "max_train_step": 4}
            cases = [job.flags("fresh", **settings), job.flags("stale", **settings, staleness=1)]
            finished = run_cases(tmp_path, cases, timeout=1200)
            assert list(served_models(Server(address, 60))) == ["base"]
    finally:
        launcher.close()
    assert finished.output.count("a probe proves that adapters are applied") == 2
    fresh = [line["train/sampler/largest_weight"] for line in metrics(tmp_path / "fresh")]
    assert fresh == pytest.approx([1, 1, 1, 1], abs=1e-3)
    stale = [line["train/sampler/largest_weight"] for line in metrics(tmp_path / "stale")]
    assert stale[0] == pytest.approx(1, abs=1e-3)
    assert all(abs(weight - 1) > 1e-3 for weight in stale[1:])
