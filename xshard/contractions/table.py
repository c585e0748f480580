"""A plan of a contraction as the rows of a table: the moves of the operands, the contraction, the result's.

Decides the rows that a contraction adds to those of its moves. Who prints them aligns or colours them.
"""

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
    """What is contracted, and where."""
    shapes = ", ".join(str(list(shape)) for shape in plan.shapes)
    return f"{plan.text.strip()}   {plan.dtype} {shapes} on {plan.mesh}"


def rows(plan: ContractionPlan) -> tuple[Row, ...]:
    """Per local contraction: the moves of its operands, itself, and the move of what it gives."""
    return tuple(row for part in plan.parts for row in _part_rows(plan, part))


def _part_rows(plan: ContractionPlan, part: Part) -> list[Row]:
    found = [row for move in part.moves for row in table.rows(move)]
    held = sum(end.max_local_size for end in (*part.used, part.result.source)) * plan.itemsize
    seconds = format_seconds(part.work)
    contracted, *steps = table.rows(part.result)
    where = f", {part.ring}" if part.ring else ""
    row = contracted._replace(step=f"contract {part.dims}{where}", received=format_bytes(0))
    return [*found, row._replace(time=seconds, peak=format_bytes(held)), *steps]


def total(plan: ContractionPlan) -> str:
    """What the whole plan costs, forward and backward."""
    lines = [_pass("forward", plan.bytes_received, plan.flops, plan.forward_cost)]
    lines[0] += f", peak {format_bytes(plan.peak_bytes)}"
    if plan.objective == BOTH:
        lines += [_pass("backward", plan.backward_bytes_received, plan.backward_flops, plan.backward_cost)]
    return "\n".join([*lines, f"priced for {plan.profile.name}"])


def _pass(name: str, received: int, flops: int, seconds: float) -> str:
    return f"{name}: received {format_bytes(received)}, {flops / 1e9:.4g} GFLOP, {format_seconds(seconds)}"
