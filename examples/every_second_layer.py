"""Write a model with every second decoder layer of another one: a student to distill into.

python examples/every_second_layer.py HuggingFaceTB/SmolLM2-135M-Instruct student
"""

import sys

from torch.nn import ModuleList
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(name: str, folder: str) -> None:
    """Save layers 0, 2, 4, ... of the model `name`, and its tokenizer, in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(name)
    layers = model.model.layers[::2]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number  # of the key-value cache
    model.model.layers = ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[::2]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
