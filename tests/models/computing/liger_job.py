"""liger-kernel itself, its kernels run by Triton's interpreter on the CPU (TRITON_INTERPRET=1): the
architectures in argv, compared with transformers' own. Prints lines of JSON: losses, and the error
of the gradients."""

import json
import sys
from typing import Any

import liger_kernel.ops.geglu as liger_mlp
import liger_kernel.ops.rms_norm as liger_norm
import numpy as np
import torch
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from llama_ft.config import ModelConfig, TrainConfig
from llama_ft.models import BuiltModel, checkpoint_activations, choose_liger, fuse_layers
from llama_ft.runtime import Target

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SHAPE |= {
    "num_hidden_layers": 1,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
convert = interpreter._implicit_cvt


def convert_floats(value: Any) -> Any:
    """As the compiler does; the interpreter leaves them as they are."""
    if not isinstance(value, float):
        return convert(value)
    return tl.tensor(
        interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32
    )


def gradients(kind: str, how: str, is_fused: bool) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a small model with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SHAPE), attn_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    settings: Any = {"activation_checkpointing": how}
    if is_fused:
        fuse_layers(model, ModelConfig(use_liger=True), TrainConfig(**settings))
    checkpoint_activations(BuiltModel(model), TrainConfig(**settings))
    ids = torch.arange(3, 15).view(2, 6)
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


if __name__ == "__main__":
    interpreter._implicit_cvt = convert_floats
    # The device library's functions are for GPUs.
    liger_norm.rsqrt = lambda value: tl.rsqrt(value)
    liger_mlp.tanh = lambda value: 2 * tl.sigmoid(2 * value) - 1
    for kind in sys.argv[1:]:
        config = AutoConfig.for_model(kind, **SHAPE)
        choice = choose_liger("auto", config, False, Target("cuda"))
        # first: Liger replaces functions of modules, too
        plain, expected = gradients(kind, "off", is_fused=False)
        for how in ("selective", "off"):
            fused, found = gradients(kind, how, is_fused=True)
            errors = [
                ((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
            ]
            print(
                json.dumps(
                    {"kind": kind, "choice": choice, "loss": [plain, fused], "error": max(errors)}
                ),
                flush=True,
            )
