"""Why a contraction is computed where it is: the role of every mesh axis, the costs of other placements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xshard.contractions.placements import EinsumShardings
from xshard.contractions.prices import Prices
from xshard.contractions.search import candidate_at
from xshard.formatting import align_columns, format_bytes, format_seconds

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan, Part  # which explains itself by this

HEAD = ("", "time", "received", "backward", "GFLOP", "computed as")


def explain(plan: ContractionPlan) -> str:
    """The role of every axis, then the plan and the other placements as a table."""
    parts = [f"{part.local}\n{_axes_text(part)}" for part in plan.parts]
    return "\n".join([*parts, "", align_columns([HEAD, *(_row(*each) for each in alternatives(plan))])])


def alternatives(plan: ContractionPlan) -> list[tuple[str, ContractionPlan]]:
    """The plan and, for one or two operands, plans in other placements that differ, each with its name."""
    plans = [("the plan", plan)]
    if len(plan.parts) > 1:
        return plans
    [part] = plan.parts
    shardings = EinsumShardings(tuple(move.source for move in part.moves), part.result.target)
    prices = Prices(plan.mesh, plan.dtype, plan.profile)
    names = ["all of it on every device", *(f"where '{array.layout}' is" for array in shardings.arrays)]
    for name, placement in zip(names, shardings.seeds(), strict=True):
        candidate = candidate_at(shardings, placement, prices, plan.objective, stays=False)
        moves, result = tuple(map(prices.plan, candidate.moves)), prices.plan(candidate.result)
        if all(moves != known.parts[0].moves for _, known in plans):
            other = replace(part, moves=moves, result=result)
            plans.append((name, replace(plan, parts=(other,), memory_limit=None)))
    return plans


def _row(name: str, plan: ContractionPlan) -> tuple[str, ...]:
    received = format_bytes(plan.bytes_received), format_bytes(plan.backward_bytes_received)
    return name, format_seconds(plan.cost), *received, f"{plan.flops / 1e9:.4g}", plan.local


def _axes_text(part: Part) -> str:
    """A line for every axis: its role, and the name of the scheme."""
    mesh = part.result.mesh
    axes = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    return "\n".join(f"  {axis}: {_role(part, axis)}" for axis in axes)


def _role(part: Part, axis: str) -> str:
    sharded = next(
        (dim.name for operand in part.used for dim in operand.layout.dims if axis in dim.axes), None
    )
    if sharded is None:
        held = any(axis in operand.layout.axes for operand in part.used)
        return "holds addends or copies of all operands" if held else "idle: replicas repeat the work"
    kept = sharded in part.result.src.names
    scheme = _kept_scheme(part, axis, sharded) if kept else _row_parallel(part, axis)
    return f"cuts {sharded!r}, which is {'kept' if kept else 'summed'}: {scheme}"


def _row_parallel(part: Part, axis: str) -> str:
    role = part.result.dst.role(axis)
    if not role:
        return "row parallel (Megatron), the result reduced"
    scattered = role[0] in part.result.dst.names
    return f"row parallel (Megatron), the result {'reduce-scattered' if scattered else 'kept as addends'}"


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
