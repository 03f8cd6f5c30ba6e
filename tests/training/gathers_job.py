"""Full fine-tuning on shards: how often units are all-gathered in a step. Arguments: a file for the
results."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tiny_llama import tiny_llama
from torch.distributed.tensor import DTensor
from training.replicas_job import batches, settings, train

from llama_ft import runtime, training
from llama_ft.config import FSDPConfig
from llama_ft.cpu import gloo
from llama_ft.models import BuiltModel, apply_fsdp

LAYERS = 3
# whether units are all-gathered early, as on GPUs
CASES = [("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", False)]
CASES += [("SHARD_GRAD_OP", True)]


def run(strategy: str, is_early: bool, ranks: runtime.Ranks) -> dict[str, Any]:
    """Two steps: their losses and norms, the weights after them, and the all-gathers of the
    second."""
    built = BuiltModel(tiny_llama(num_hidden_layers=LAYERS, vocab_size=50))
    config = FSDPConfig(enable_fsdp=True, sharding_strategy=strategy)
    target = runtime.Target("cuda" if is_early else "cpu", backend="gloo")
    with runtime.computing_on(target):
        built.sharding = apply_fsdp(built, ranks.mesh, config, runtime.PRECISIONS["fp32"])
    optimizer = training.build_optimizer(built.model, settings("fp32"))
    numbers = train(built, optimizer, "fp32", range(1), ranks, reduce_last_only=False)
    gather = gloo.GlooAllGather.__call__
    with patch.object(gloo.GlooAllGather, "__call__", autospec=True, side_effect=gather) as gathers:
        numbers += train(built, optimizer, "fp32", range(1, 2), ranks, reduce_last_only=False)
    parameters = dict(built.model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    weights = {name: value.full_tensor().detach() for name, value in parameters.items()}
    micro_batches = len(batches(0, ranks))
    return {
        "numbers": numbers,
        "weights": weights,
        "gathers": gathers.call_count,
        "units": len(built.sharding.units),
        "micro_batches": micro_batches,
    }


if __name__ == "__main__":
    with runtime.start("cpu", "world") as ranks:
        found = {case: run(*case, ranks) for case in CASES}
        if ranks.is_main:
            torch.save(found, Path(sys.argv[1]))
