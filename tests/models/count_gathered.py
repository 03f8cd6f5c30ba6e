"""Runs a forward pass of models and saves how many bytes each all-gather of rank 0 brought together."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama_ft import models, runtime
from llama_ft.config import FSDPConfig, ModelConfig, PeftConfig, QuantizationConfig


class CountGathers(TorchDispatchMode):
    """Notes every all-gather on its way to the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(function) or "all_gather_into" in str(function):
            outputs = args[0] if isinstance(args[0], list) else [args[0]]
            self.gathered += [tensor.nbytes for tensor in outputs]
        return function(*args, **(kwargs or {}))


if __name__ == "__main__":
    folder, cases, out = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    counted = {}
    for name, settings in cases.items():
        with runtime.start("cpu", "world") as job:
            precision, peft = (
                runtime.PRECISIONS["bf16_mixed"],
                PeftConfig(use_peft=True, r=4, target_modules=["q_proj"]),
            )
            model = models.build_on_meta(models.load_model_config(folder, False), ModelConfig(model_name=str(folder)))
            if chosen := models.choose_quantization(QuantizationConfig(**settings), model.config, peft.use_peft):
                models.quantize_linears(model, chosen)
            adapter = models.inject_lora(model, peft, str(folder))
            models.set_storage_dtypes(model, precision)
            models.apply_fsdp(model, job.mesh, FSDPConfig(enable_fsdp=True), precision)
            group = models.ShardGroup(job.mesh)
            models.load_weights(
                model, folder, group, job.device, job.storage_device, False, adapter, peft, 7, precision.frozen
            )
            with CountGathers() as counter:
                model(torch.arange(8).unsqueeze(0))
            counted[name] = counter.gathered
            if job.is_main:
                out.write_text(json.dumps(counted))
