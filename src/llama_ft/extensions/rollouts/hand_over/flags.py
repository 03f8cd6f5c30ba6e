"""Flags of servers that answer."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.value_types import STRICT, Count, Duration


@dataclass(config=STRICT, kw_only=True)
class PolicyServerFlags:
    """Servers that answer during reinforcement learning."""

    server: list[str] = Field(default_factory=list)
    """grpo: URLs of vLLM, such as http://localhost:8000,http://gpu2:8000, which answers in place of the
    model itself. Before each step it loads the trained adapter. Servers share the prompts.
    OPENAI_API_KEY has their key, if they want one."""

    server_timeout: Duration = "10m"
    """grpo: with --server: longest time of a request."""

    server_requests: Count = 32
    """grpo: with --server: requests at the same time, per server."""

    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """grpo: with --server: 0: the answers of a step are sampled with the weights before it. 1: with
    those before the previous step, so that servers answer while that is trained."""
