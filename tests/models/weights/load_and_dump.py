"""Loads a model in several ways and saves what each rank then holds: name -> local shard, one file
a rank and case."""

import json
import sys
from pathlib import Path

import torch

from llama_ft import models, runtime
from llama_ft.config import FSDPConfig, ModelConfig, PeftConfig, QuantizationConfig
from llama_ft.models.base.shards import local_shard

if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[1]).parent
    for name, case in cases.items():
        with runtime.start("cpu", case["shard_degree"]) as ranks:
            folder = Path(case["model"])
            precision = runtime.PRECISIONS[case["precision"]]
            model_config = models.load_model_config(folder, False)
            settings = ModelConfig(model_name=str(folder))
            built = models.build_on_meta(model_config, settings, folder=folder)
            model = built.model
            peft = PeftConfig(**case["peft"])
            quantization = QuantizationConfig(**case.get("quantization", {}))
            if chosen := models.choose_quantization(quantization, model.config, peft.use_peft):
                models.quantize_linears(built, chosen)
            if peft.use_peft:
                built.adapter = models.inject_lora(built, peft, str(folder))
            models.set_storage_dtypes(model, precision)
            models.apply_fsdp(
                built, ranks.mesh, FSDPConfig(enable_fsdp=True, min_num_params=1000), precision
            )
            how = models.LoadSettings(peft, 7, precision.frozen, case["scatter"])
            models.load_weights(built, ranks, how)
            held = {
                name: local_shard(parameter).clone() for name, parameter in model.named_parameters()
            }
            held |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            torch.save(held, out / f"{name}-rank{ranks.rank}.pt")
