"""Memory that a call takes, by torch's profiler."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that a call holds at once, by torch's profiler."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        results = call()
    del results
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))
