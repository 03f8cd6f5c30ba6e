import json
import math

from llama_ft.evaluation.results import Evaluated, describe, write_json


def model(name: str, loss: float, right: float, base: Evaluated | None = None) -> Evaluated:
    tasks = {"sums": {"acc": {"value": right, "stderr": 0.05}, "seconds": {"value": 3.0, "stderr": None}}}
    return Evaluated(name, f"{name}, fp32", {"loss": loss, "target_tokens": 1234}, tasks, base)


BASE = model("base: m", 3.0, 0.5)


def test_models_stand_side_by_side_with_their_differences() -> None:
    shown = describe([BASE, model("run", 2.5, 0.75, BASE)], "all samples of a.jsonl", 20)
    title, *lines = shown.splitlines()
    assert title.startswith("Loss on all samples of a.jsonl, ") and "--limit 20: not for comparison" in title
    assert [line.split() for line in lines] == [
        ["metric", "base:", "m", "run", "difference"],
        ["loss", "3.0000", "2.5000", "-0.5000"],
        ["target_tokens", "1,234", "1,234", "+0.0000"],
        ["sums", "acc", "0.5000", "±", "0.0500", "0.7500", "±", "0.0500", "+0.2500"],
        ["sums", "seconds", "3.0000", "3.0000", "+0.0000"],
    ]


def test_json_says_what_is_compared_and_null_for_what_is_no_number() -> None:
    models = [BASE, model("run", 2.5, 0.75, BASE), model("bad", math.nan, math.inf, BASE)]
    base, run, bad = json.loads(write_json(models, "rows", {"limit": None}))["models"]
    assert (base["base"], run["base"]) == (None, "base: m") and base["held_out"]["loss"] == 3.0
    assert run["tasks"]["sums"]["acc"] == {"value": 0.75, "stderr": 0.05}
    assert bad["held_out"] == {"loss": None, "target_tokens": 1234}
