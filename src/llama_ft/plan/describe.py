"""A plan for people."""

from llama_ft.config.messages import size_text
from llama_ft.phases import MEMORY_CATEGORIES
from llama_ft.plan.types import Peak, Plan


def describe(plan: Plan) -> str:
    """The plan as a table with what else there is to know below it."""
    is_cuda, peak = plan.device == "cuda", plan.peak
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} ({plan.device.upper()})"
    where = f"in phase {peak.phase}" + (f", at {peak.module}" if peak.module else "")
    slack, outside = size_text(plan.reserved_bytes - peak.bytes), size_text(plan.outside_bytes)
    on_gpu = f"A GPU needs {size_text(plan.device_bytes)}: {slack} of slack in torch's allocator, and about {outside}"
    load, save = size_text(plan.host_load_bytes), size_text(plan.host_save_bytes)
    on_host = f"Host memory of a rank for tensors: {load} while loading, {save} while saving"
    unit, unit_size = plan.largest_unit or "the root", size_text(plan.largest_unit_bytes)
    sent = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in plan.sent_bytes.items())
    lines = [
        f"Rank 0 of {ranks}, micro-batches of {plan.tokens:,} tokens, all trained on. MiB at the peak of each phase:",
        *_table(plan.peaks),
        f"\nMost at once: {size_text(peak.bytes)} of tensors, {where}.",
        f"{on_gpu} for CUDA{' and NCCL' if plan.world_size > 1 else ''}." if is_cuda else "",
        f"{on_host if is_cuda else 'All of it is host memory'}; Python and its libraries take 0.5 to 2 GiB beside it.",
        f"The largest unit, {unit}, is {unit_size} gathered.",
        f"On disk: {size_text(plan.checkpoint_bytes)} a checkpoint, {size_text(plan.result_bytes)} the result.",
        f"Sent by each rank in a step: {sent}." if sent else "",
        f"Planned in {plan.seconds:.0f} s{', extrapolated from 3 and 5 layers' if plan.is_quick else ''}.",
    ]
    return "\n".join(line for line in lines if line)


def _table(peaks: list[Peak]) -> list[str]:
    heads = [peak.phase for peak in peaks]
    widths = [max(9, len(head)) for head in heads]
    held = [holder for holder in MEMORY_CATEGORIES if any(peak.holders[holder] >= 2**19 for peak in peaks)]
    rows: list[tuple[str, list[int]]] = [(holder, [peak.holders[holder] for peak in peaks]) for holder in held]
    rows.append(("all tensors", [peak.bytes for peak in peaks]))
    lines = ["  " + " " * 24 + "".join(f"  {head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for name, values in rows:
        cells = "".join(f"  {value / 2**20:>{width},.0f}" for value, width in zip(values, widths, strict=True))
        lines.append(f"  {name:<24}{cells}")
    return lines
