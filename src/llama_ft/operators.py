"""The namespace of this package's operators, `torch.ops.llama_ft`."""

import torch

LIBRARY = torch.library.Library("llama_ft", "DEF")
