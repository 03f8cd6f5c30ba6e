"""Imports bitsandbytes without torch's compiler; comes before whatever imports peft, which imports bitsandbytes.

While it is imported it hands functions to torch.compile, for devices on which nothing runs here: 2 s and 40 MiB a rank,
for torch._inductor. With torch's switch off (torch._dynamo.eval_frame._optimize) they stay plain functions.

On CPUs with AVX512-BF16 it also warns that a kernel of the hub for its own 4-bit layers is not there. Layers here have
no use for it.
"""

import logging
import os

_SWITCH = "TORCHDYNAMO_DISABLE"
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "1"
_logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
_logger.setLevel(logging.ERROR)
try:
    import bitsandbytes  # noqa: F401
finally:
    _logger.setLevel(logging.NOTSET)
    os.environ.pop(_SWITCH)
    if _before is not None:
        os.environ[_SWITCH] = _before
