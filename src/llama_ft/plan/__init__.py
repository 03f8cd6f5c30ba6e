"""What a run will cost, before it starts: its own code on fake tensors, one rank of as many as are asked for."""

from llama_ft.plan.at_start import StartPlan
from llama_ft.plan.choose import choose_checkpointing, free_bytes, is_open
from llama_ft.plan.describe import describe
from llama_ft.plan.explain import explaining
from llama_ft.plan.fit import find_fits
from llama_ft.plan.predict import PlanRequest, predict
from llama_ft.plan.record import Change, Moment, Peak, Plan, read_plan

__all__ = [
    "Change",
    "Moment",
    "Peak",
    "Plan",
    "PlanRequest",
    "StartPlan",
    "choose_checkpointing",
    "describe",
    "explaining",
    "find_fits",
    "free_bytes",
    "is_open",
    "predict",
    "read_plan",
]
