"""Imports bitsandbytes without torch's compiler; comes before whatever imports peft, which imports bitsandbytes.

While it is imported it hands functions to torch.compile, for devices on which nothing runs here: 2 s and 40 MiB a rank,
for torch._inductor. With torch's switch off (torch._dynamo.eval_frame._optimize) they stay plain functions.
"""

import os

_SWITCH = "TORCHDYNAMO_DISABLE"
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "1"
try:
    import bitsandbytes  # noqa: F401
finally:
    os.environ.pop(_SWITCH)
    if _before is not None:
        os.environ[_SWITCH] = _before
