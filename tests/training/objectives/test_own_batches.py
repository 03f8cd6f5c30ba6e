"""An objective may make the batches of a step with the current weights."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_losses import load_model

from llama_ft import runtime as runtimes
from llama_ft.config import Config, FSDPConfig, TrainConfig
from llama_ft.data import Batch, StepBatches
from llama_ft.models import BuiltModel, apply_fsdp
from llama_ft.models.base.shards import local_shard
from llama_ft.runtime import Ranks
from llama_ft.training import LoopState, SupervisedFineTuning
from llama_ft.training.train_state import LossScale


class LearnsItsAnswer(SupervisedFineTuning):
    """Trains on the prompt with the token that the model finds most likely, in the place of the
    planned samples."""

    def batches(self, planned: StepBatches, built: BuiltModel, ranks: Ranks) -> StepBatches:
        made = []
        for batch in planned.batches:
            with torch.no_grad():
                logits = built.model(input_ids=batch.input_ids).logits
            answer = logits[:, -1:].argmax(-1)
            ids = torch.cat([batch.input_ids, answer], dim=1)
            labels = torch.full_like(ids, -100)
            labels[:, -1:] = answer
            made.append(Batch(ids, labels, [ids.shape[1]] * len(ids), False, batch.locations))
        count = ranks.all_gather_floats(sum(batch.target_tokens for batch in made)).sum()
        return replace(planned, batches=made, target_tokens=round(count.item()))


def test_own_batches_are_trained_on_and_counted(
    finetuning: ModuleType, runtime: Any, tiny_model: Path
) -> None:
    ids = torch.tensor([[1, 5, 9, 30], [4, 6, 11, 2]])
    batch = Batch(ids, ids.clone(), [4, 4], False, ["a", "b"])
    planned = StepBatches(batches=[batch], target_tokens=6, samples=2, step=3)
    config = Config(train=TrainConfig(precision="fp32", lr=0.1))
    results = []
    for objective, step in (
        (LearnsItsAnswer(config), planned),
        (SupervisedFineTuning(config), None),
    ):
        built = BuiltModel(load_model(tiny_model).train())
        if step is None:
            step = LearnsItsAnswer(config).batches(planned, built, runtime)
        built.sharding = apply_fsdp(built, runtime.mesh, FSDPConfig(), runtimes.PRECISIONS["fp32"])
        optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1)
        loop = LoopState(config, LossScale(1.0), runtime.device)
        outcome = finetuning.train_step(built, objective, optimizer, step, loop, runtime)
        assert outcome.count == 2 and outcome.step == 3
        results.append([outcome.read(), list(built.model.parameters())])
    (own, weights), (same, expected) = results
    assert own == pytest.approx(same)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(local_shard(ours), local_shard(theirs))
