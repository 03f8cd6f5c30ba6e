"""Runs a forward and backward pass of models with their layers compiled or not, and saves loss and gradients."""

import json
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from llama_ft import models, runtime
from llama_ft.config import FSDPConfig, ModelConfig, PeftConfig, QuantizationConfig, TrainConfig

if __name__ == "__main__":
    folder, cases, out = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    precision, results = runtime.PRECISIONS["fp32"], {}
    with runtime.start("cpu", "world") as job:
        for name, (mode, how, compile) in cases.items():
            torch._dynamo.reset()
            counters.clear()
            peft = PeftConfig(use_peft=mode != "full", r=4, target_modules="all-linear", lora_dropout=0.0)
            model = models.build_on_meta(models.load_model_config(folder, False), ModelConfig(model_name=str(folder)))
            quantization = QuantizationConfig(mode=mode if mode in ("8bit", "4bit") else "none")
            if chosen := models.choose_quantization(quantization, model.config, peft.use_peft):
                models.quantize_linears(model, chosen)
            models.checkpoint_activations(model, TrainConfig(activation_checkpointing=how))
            adapter = models.inject_lora(model, peft, str(folder)) if peft.use_peft else None
            if compile:
                models.compile_layers(model, backend="aot_eager")
            models.set_storage_dtypes(model, precision)
            models.apply_fsdp(model, job.mesh, FSDPConfig(enable_fsdp=True), precision)
            group = models.ShardGroup(job.mesh)
            models.load_weights(
                model, folder, group, job.device, job.storage_device, False, adapter, peft, 7, precision.frozen
            )
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for name_, parameter in trained.items():
                    if "lora_B" in name_:  # zero at first, and then A has no gradient
                        parameter.fill_(0.02)
            model.train()
            losses = []
            for rows, length in ((2, 9), (3, 5)):  # every rank the same: sums over ranks are multiples
                ids = torch.arange(rows * length).view(rows, length) + 3
                mask = torch.ones_like(ids)
                mask[-1, -2:] = 0
                loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
                (loss / job.world_size).backward()
                losses.append(loss.detach())
            gradients = {
                name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in trained.items()
            }
            graphs = counters["stats"]["unique_graphs"]
            results[name] = (torch.stack(losses), gradients, graphs, sum(counters["graph_break"].values()))
        if job.is_main:
            torch.save(results, out)
