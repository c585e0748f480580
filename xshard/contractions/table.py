"""A plan of a contraction as rows of a table: moves of the operands, the contraction, the result's move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.plans import table
from xshard.plans.table import HEAD, Row
from xshard.search.request import BOTH

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan, Part  # which prints itself by this table


def text(plan: ContractionPlan) -> str:
    """The whole table, aligned."""
    return "\n".join([title(plan), "", align_columns([HEAD, *rows(plan)]), "", total(plan)])


def title(plan: ContractionPlan) -> str:
    """The expression, the operands' shapes and the mesh."""
    shapes = ", ".join(str(list(shape)) for shape in plan.shapes)
    return f"{plan.text.strip()}   {plan.dtype} {shapes} on {plan.mesh}"


def rows(plan: ContractionPlan) -> tuple[Row, ...]:
    """For each local contraction: the moves of its operands, itself, and the move of its result."""
    return tuple(row for part in plan.parts for row in _part_rows(part, plan.itemsize))


def _part_rows(part: Part, itemsize: int) -> list[Row]:
    start, *steps = table.rows(part.result)
    contraction = start._replace(
        step=f"contract {part.dims}" + (f", {part.ring}" if part.ring else ""),
        received=format_bytes(0),
        time=format_seconds(part.work),
        peak=format_bytes(itemsize * sum(a.max_local_size for a in (*part.used, part.result.source))),
    )
    return [*(row for move in part.moves for row in table.rows(move)), contraction, *steps]


def total(plan: ContractionPlan) -> str:
    """The totals of the plan, forward and backward."""
    forward = _pass("forward", plan.bytes_received, plan.flops, plan.forward_cost)
    lines = [f"{forward}, peak {format_bytes(plan.peak_bytes)}"]
    if plan.objective == BOTH:
        lines += [_pass("backward", plan.backward_bytes_received, plan.backward_flops, plan.backward_cost)]
    return "\n".join([*lines, f"priced for {plan.profile.name}"])


def _pass(name: str, received: int, flops: int, seconds: float) -> str:
    return f"{name}: received {format_bytes(received)}, {flops / 1e9:.4g} GFLOP, {format_seconds(seconds)}"
