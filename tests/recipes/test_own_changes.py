"""What people change in a copy of the recipe: a number of their own, and noise on the gradients."""

import json
from pathlib import Path

from conftest import RECIPE, metrics, write_rows
from forked import forked

OWN_METRIC = (
    '            # Add your own here: metrics["my/number"] = ...\n'  # the first of two lines
)
NOISE_PLACE = "    outcome = training.StepOutcome(step, losses, count, sums)\n"
# As the comment at this place says: replicas draw the same noise.
NOISE = """\
    generator = torch.Generator().manual_seed(1000 * step.step + ranks.shard.rank)
    for gradient in gradients:
        gradient += 0.1 * torch.randn(gradient.shape, generator=generator)
"""
SPREAD = """\
            total = sum(parameter.to_local().sum() for parameter in model.parameters())
            totals = ranks.all_gather_floats(total.item())
            metrics["my/spread"] = totals.max() - totals.min()
            metrics["my/total"] = total.detach()
"""


def test_a_changed_recipe_logs_its_own_metric_and_keeps_replicas_equal(
    tiny_model: Path, tmp_path: Path
) -> None:
    text = RECIPE.read_text()
    for place, added in ((OWN_METRIC, SPREAD), (NOISE_PLACE, NOISE)):
        assert text.count(place) == 1
        text = text.replace(place, added + place)
    copy = tmp_path / "mine.py"
    copy.write_text(text)
    write_rows(tmp_path / "rows.jsonl", 12)
    run = tmp_path / "run"
    flags = f"--model_name {tiny_model} --dataset {tmp_path}/rows.jsonl --output_dir {run}"
    settings = "--context_length 64 --precision fp32 --max_train_step 2 --no_plan --save_model no"
    finished = forked(copy, *flags.split(), *settings.split(), ranks=2)

    assert finished.exit_code == 0, finished.output
    lines = metrics(run)
    assert [line["my/spread"] for line in lines] == [0.0, 0.0], "replicas have diverged"
    assert lines[0]["my/total"] != lines[1]["my/total"]
    assert f"my/total {lines[1]['my/total']:.4g}" in finished.output
    assert "my/total" in (run / "report.html").read_text()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
