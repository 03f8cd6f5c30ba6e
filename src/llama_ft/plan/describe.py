"""A plan for people."""

from llama_ft.config.messages import size_text
from llama_ft.phases import MEMORY_CATEGORIES
from llama_ft.plan.types import Peak, Plan


def describe(plan: Plan) -> str:
    """The plan as a table with what else there is to know below it."""
    ranks = f"{plan.world_size} ranks" if plan.world_size > 1 else "1 rank"
    kind = "CUDA" if plan.device == "cuda" else "CPU"
    lines = [
        f"Rank 0 of {ranks} ({kind}), micro-batches of {plan.tokens:,} tokens, all trained on. MiB at the "
        "peak of each phase:",
        *_table(plan.peaks),
        "",
        f"Most at once: {size_text(plan.peak.bytes)} of tensors, {_where(plan.peak)}.",
    ]
    if plan.device == "cuda":
        slack = plan.reserved_bytes - plan.peak.bytes
        lines.append(
            f"A GPU needs {size_text(plan.device_bytes)}: {size_text(slack)} of slack in torch's allocator, and about "
            f"{size_text(plan.outside_bytes)} for CUDA{' and NCCL' if plan.world_size > 1 else ''}."
        )
        lines.append(
            f"Host memory of a rank for tensors: {size_text(plan.host_load_bytes)} while loading, "
            f"{size_text(plan.host_save_bytes)} while saving; Python and its libraries take 1 to 2 GiB beside it."
        )
    else:
        lines.append("All of it is host memory of each rank; Python and its libraries take about 0.5 GiB beside it.")
    lines.append(
        f"The largest unit, {plan.largest_unit or 'the root'}, is {size_text(plan.largest_unit_bytes)} gathered."
    )
    lines.append(
        f"On disk: {size_text(plan.checkpoint_bytes)} a checkpoint, {size_text(plan.result_bytes)} the result."
    )
    if plan.sent_bytes:
        sent = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in plan.sent_bytes.items())
        lines.append(f"Sent by each rank in a step: {sent}.")
    how = ", extrapolated from 3 and 5 layers" if plan.is_quick else ""
    lines.append(f"Planned in {plan.seconds:.0f} s{how}.")
    return "\n".join(lines)


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


def _where(peak: Peak) -> str:
    return f"in phase {peak.phase}" + (f", at {peak.module}" if peak.module else "")
