"""A plan of a contraction as a table, with the role of every mesh axis and the costs of other placements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xshard.contractions.placements import EinsumShardings
from xshard.contractions.prices import Prices
from xshard.contractions.search import CandidateSearch
from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.plans.table import HEAD, Row
from xshard.plans.table import rows as move_rows
from xshard.search.request import BOTH

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan, Part  # which shows itself by this

COSTS = ("", "time", "received", "backward", "GFLOP", "computed as")


def text(plan: ContractionPlan) -> str:
    """The whole table, aligned."""
    return "\n".join([title(plan), "", align_columns([HEAD, *rows(plan)]), "", total(plan)])


def title(plan: ContractionPlan) -> str:
    """The expression, the operands' shapes and the mesh."""
    shapes = ", ".join(str(list(array.shape)) for array in plan.arrays[:-1])
    return f"{plan.text.strip()}   {plan.dtype} {shapes} on {plan.mesh}"


def rows(plan: ContractionPlan) -> tuple[Row, ...]:
    """For each local contraction: the moves of its operands, itself, and the move of its result."""
    return tuple(row for part in plan.parts for row in _part_rows(part, plan.itemsize))


def _part_rows(part: Part, itemsize: int) -> list[Row]:
    start, *steps = move_rows(part.result)
    step = f"contract {part.dims}" + (f", {part.ring}" if part.ring else "")
    held = itemsize * sum(array.max_local_size for array in (*part.used, part.result.source))
    costs = {
        "received": format_bytes(0),
        "time": format_seconds(part.work),
        "peak": format_bytes(held),
    }
    contraction = start._replace(step=step, **costs)
    return [*(row for move in part.moves for row in move_rows(move)), contraction, *steps]


def total(plan: ContractionPlan) -> str:
    """The totals of the plan, forward and backward."""
    forward = _pass("forward", plan.bytes_received, plan.flops, plan.forward_cost)
    lines = [f"{forward}, peak {format_bytes(plan.peak_bytes)}"]
    if plan.objective == BOTH:
        lines += [
            _pass("backward", plan.backward_bytes_received, plan.backward_flops, plan.backward_cost)
        ]
    return "\n".join([*lines, f"priced for {plan.profile.name}"])


def _pass(name: str, received: int, flops: int, seconds: float) -> str:
    return f"{name}: received {format_bytes(received)}, {flops / 1e9:.4g} GFLOP, {format_seconds(seconds)}"


def explain(plan: ContractionPlan) -> str:
    """The role of every axis, then the plan and the other placements as a table."""
    lines: list[str] = []
    for part in plan.parts:
        roles = (f"  {axis}: {_role(part, axis)}" for axis in part.result.mesh.long_axes)
        lines += [part.local, *roles]
    return "\n".join(
        [*lines, "", align_columns([COSTS, *(_row(*each) for each in alternatives(plan))])]
    )


def alternatives(plan: ContractionPlan) -> list[tuple[str, ContractionPlan]]:
    """The plan and, for one or two operands, plans in other placements that differ, each with its name."""
    plans = [("the plan", plan)]
    if len(plan.parts) > 1:
        return plans
    [part] = plan.parts
    shardings = EinsumShardings(tuple(move.source for move in part.moves), part.result.target)
    prices = Prices(plan.mesh, plan.dtype, plan.profile)
    names = [
        "all of it on every device",
        *(f"where '{array.layout}' is" for array in shardings.arrays),
    ]
    for name, placement in zip(names, shardings.seeds(), strict=True):
        candidate = CandidateSearch(shardings, prices, plan.objective).candidate(placement)
        *others, result = map(prices.plan, candidate.moves)
        moves = tuple(others)
        if all(moves != known.parts[0].moves for _, known in plans):
            other = replace(part, moves=moves, result=result)
            plans.append((name, replace(plan, parts=(other,), memory_limit=None)))
    return plans


def _row(name: str, plan: ContractionPlan) -> tuple[str, ...]:
    received = format_bytes(plan.bytes_received), format_bytes(plan.backward_bytes_received)
    return name, format_seconds(plan.cost), *received, f"{plan.flops / 1e9:.4g}", plan.local


def _role(part: Part, axis: str) -> str:
    dims = [dim for operand in part.used for dim in operand.layout.dims if axis in dim.axes]
    if not dims:
        held = any(axis in operand.layout.axes for operand in part.used)
        return (
            "holds addends or copies of all operands" if held else "idle: replicas repeat the work"
        )
    sharded = dims[0].name
    role = part.result.dst.role(axis)
    if sharded in part.result.src.names:
        return f"cuts {sharded!r}, which is kept: {_kept_scheme(part, axis, sharded)}"
    scattered = (
        "reduce-scattered" if role and role[0] in part.result.dst.names else "kept as addends"
    )
    result = scattered if role else "reduced"
    return f"cuts {sharded!r}, which is summed: row parallel (Megatron), the result {result}"


def _kept_scheme(part: Part, axis: str, sharded: str) -> str:
    """The name of the scheme of an axis that shards a dim of the result."""
    owners = [i for i, operand in enumerate(part.used) if sharded in operand.layout.names]
    moved = [i for i, move in enumerate(part.moves) if move.src.role(axis) != move.dst.role(axis)]
    if len(owners) == len(part.used) > 1:
        after = ", some after a move (Ulysses, dispatch)" if moved else ""
        return f"every operand has it (experts, heads){after}"
    if owners == [0]:
        return "data parallel, the weight gathered (ZeRO-3)" if 1 in moved else "data parallel"
    gathered = ", the activations gathered (sequence parallel)" if 0 in moved else ""
    return f"column parallel (Megatron){gathered}"
