"""What a run will cost, before it starts: its own code on fake tensors, one rank of as many as are asked for."""

from llama_ft.plan.record import Moment, Peak, Plan, read_plan

__all__ = ["Moment", "Peak", "Plan", "read_plan"]
