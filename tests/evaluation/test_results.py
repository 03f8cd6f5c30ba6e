import math

from llama_ft.evaluation.held_out import HeldOut
from llama_ft.evaluation.results import Evaluated, describe, to_json


def model(name: str, loss: float, right: float, compared_with: int | None = None) -> Evaluated:
    tasks = {"sums": {"acc": {"value": right, "stderr": 0.05}, "seconds": {"value": 3.0, "stderr": None}}}
    return Evaluated(name, f"{name}, fp32", HeldOut(loss, 2**loss, 10, 1234), tasks, compared_with)


def test_models_stand_side_by_side_with_their_differences() -> None:
    shown = describe([model("base: m", 3.0, 0.5), model("run", 2.5, 0.75, 0)], "all rows of a.jsonl", None)
    assert shown.replace("+-", "±") == (
        "Loss on all rows of a.jsonl\n"
        "           tokens    loss  perplexity  difference\n"
        "  base: m   1,234  3.0000        8.00\n"
        "  run       1,234  2.5000        5.66     -0.5000\n"
        "\n"
        "Tasks of lm-evaluation-harness\n"
        "        metric           base: m              run  difference\n"
        "  sums  acc      0.5000 ± 0.0500  0.7500 ± 0.0500     +0.2500\n"
        "  sums  seconds           3.0000           3.0000     +0.0000"
    )


def test_one_model_alone_has_no_difference_and_a_limit_is_told() -> None:
    shown = describe([model("run", 2.5, 0.75)], "all rows of a.jsonl", 20)
    assert "difference" not in shown
    assert "Tasks of lm-evaluation-harness, with --limit 20: not for comparison with others' numbers\n" in shown


def test_json_holds_the_differences_too() -> None:
    found = to_json([model("base: m", 3.0, 0.5), model("run", 2.5, 0.75, 0)], "rows", {"limit": None})
    base, run = found["models"]
    assert (base["compared_with"], run["compared_with"]) == (None, "base: m")
    assert run["held_out"]["difference"] == -0.5
    assert run["tasks"]["sums"]["acc"] == {"value": 0.75, "stderr": 0.05, "difference": 0.25}


def test_what_is_no_number_is_null_in_json_and_a_warning() -> None:
    models = [model("base", 3.0, 0.5), model("run", math.nan, math.inf, 0)]
    assert "A loss that is not finite" in describe(models, "rows", None)
    assert "not finite" not in describe(models[:1], "rows", None)
    [base, run] = to_json(models, "rows", {})["models"]
    assert run["held_out"] == {"loss": None, "perplexity": None, "rows": 10, "target_tokens": 1234, "difference": None}
    assert run["tasks"]["sums"]["acc"] == {"value": None, "stderr": 0.05, "difference": None}
    assert base["held_out"]["loss"] == 3.0
