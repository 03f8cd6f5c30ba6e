"""Losses and gradients of many architectures, whose packed sequences all ranks share. Arguments: a
directory for the results, how many ranks share a sequence, and names of architectures."""

import sys
from pathlib import Path
from typing import Any

import torch
from models.packing import shared_sequences_job as job
from models.test_architectures import ARCHITECTURES, MULTIMODAL, SHAPE, UNTIED
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft import runtime
from llama_ft.errors import UserError

# Neither 2 nor 4 ranks divide the key heads.
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 192}
SIZES: dict[str, dict[str, Any]] = {
    "Llama 2": {"num_key_value_heads": 12},
    "DeepSeek V3": {"num_key_value_heads": 12},
    "Sarvam MLA": {"num_key_value_heads": 12},
    "OPT": {"word_embed_proj_dim": 192},
    "GPT-2": {"n_embd": 192, "n_head": 12},
    "GPT-J": {"n_embd": 192, "n_head": 12},
    "BLOOM": {"n_head": 12},
}


def make(name: str) -> PreTrainedModel:
    """A random model, with weights so large that a wrong token shows."""
    if name in MULTIMODAL:
        model_type, text, vision, more = MULTIMODAL[name]
        settings: dict[str, Any] = {**UNTIED, "vision_config": vision, **more}
        whole = {**SHAPE, **text, **HEADS}
        settings |= whole if model_type == "phi4_multimodal" else {"text_config": whole}
    else:
        model_type, more = ARCHITECTURES[name]
        settings = {**SHAPE, **more, **HEADS, **SIZES.get(name, {})}
    torch.manual_seed(0)
    known = {key: value for key, value in settings.items() if value is not None}
    auto = AutoModelForMultimodalLM if name in MULTIMODAL else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(model_type, **known))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


if __name__ == "__main__":
    out = Path(sys.argv[1])
    size = int(sys.argv[2])
    job.make = make
    with runtime.start("cpu", "world", sequence_size=size) as ranks:
        for case in sys.argv[3:]:
            try:
                result: Any = job.compute(case, ranks)
            except UserError as error:
                result = str(error)
            if ranks.is_main:
                torch.save(result, out / f"{case}, {size}.pt")
