import json
import math

from llama_ft.evaluation.results import Evaluated, describe, write_json


def model(name: str, loss: float, right: float, base: Evaluated | None = None) -> Evaluated:
    tasks = {"sums": {"acc": {"value": right, "stderr": 0.05}, "seconds": {"value": 3.0, "stderr": None}}}
    held_out = {"loss": loss, "perplexity": 2**loss, "target_tokens": 1234}
    return Evaluated(name, f"{name}, fp32", held_out, tasks, base)


BASE = model("base: m", 3.0, 0.5)


def test_models_stand_side_by_side_with_their_differences() -> None:
    shown = describe([BASE, model("run", 2.5, 0.75, BASE)], "all samples of a.jsonl", None)
    assert [line.split() for line in shown.splitlines()] == [
        ["Loss", "on", "all", "samples", "of", "a.jsonl"],
        ["tokens", "loss", "perplexity", "difference"],
        ["base:", "m", "1,234", "3.0000", "8.00"],
        ["run", "1,234", "2.5000", "5.66", "-0.5000"],
        [],
        ["Tasks", "of", "lm-evaluation-harness"],
        ["metric", "base:", "m", "run", "difference"],
        ["sums", "acc", "0.5000", "±", "0.0500", "0.7500", "±", "0.0500", "+0.2500"],
        ["sums", "seconds", "3.0000", "3.0000", "+0.0000"],
    ]
    alone = describe([BASE], "all samples of a.jsonl", 20)
    assert "difference" not in alone and "with --limit 20: not for comparison" in alone


def test_json_holds_the_differences_too_and_null_for_what_is_no_number() -> None:
    models = [BASE, model("run", 2.5, 0.75, BASE), model("bad", math.nan, math.inf, BASE)]
    base, run, bad = json.loads(write_json(models, "rows", {"limit": None}))["models"]
    assert (base["compared_with"], run["compared_with"]) == (None, "base: m")
    assert run["held_out"]["difference"] == -0.5 and base["held_out"]["loss"] == 3.0
    assert run["tasks"]["sums"]["acc"] == {"value": 0.75, "stderr": 0.05, "difference": 0.25}
    assert bad["held_out"] == {"loss": None, "perplexity": None, "target_tokens": 1234, "difference": None}
