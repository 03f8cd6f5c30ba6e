"""Imports bitsandbytes without torch's compiler, which would cost 2 s and 40 MiB per rank for functions that nothing
here calls; before peft, which imports bitsandbytes. It also warns of a CPU kernel that nothing here needs.
"""

import logging
import os

_SWITCH = "TORCHDYNAMO_DISABLE"
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "1"
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
try:
    import bitsandbytes  # noqa: F401
finally:
    os.environ.pop(_SWITCH)
    if _before is not None:
        os.environ[_SWITCH] = _before
