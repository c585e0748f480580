"""A plan of a contraction as a table, with the role of every mesh axis and the costs of other placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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
    """Return the whole table, aligned."""
    table = align_columns([HEAD, *rows(plan)])
    return "\n".join([title(plan), "", table, "", total(plan)])


def title(plan: ContractionPlan) -> str:
    """Return the expression, the operands' shapes and the mesh."""
    shapes = ", ".join(str(list(array.shape)) for array in plan.arrays[:-1])
    return f"{plan.text.strip()}   {plan.dtype} {shapes} on {plan.mesh}"


def rows(plan: ContractionPlan) -> tuple[Row, ...]:
    """Return a row for each step: for each part the operands' moves, the contraction, the result's move."""
    table: list[Row] = []
    for part in plan.parts:
        for move in part.moves:
            table += move_rows(move)
        table += _result_rows(part, plan.itemsize)
    return tuple(table)


def _result_rows(part: Part, itemsize: int) -> list[Row]:
    """Return the table rows of one local contraction, and of the steps that move its result.

    The first row is the contraction itself, "contract b d, d f -> b f" or so, which receives nothing.

    itemsize: bytes of an element, for the column of peak memory.
    """
    # The first row of a move is the layout at its start, which the contraction gives.
    first_row, *step_rows = move_rows(part.result)
    step = f"contract {part.dims}"
    if part.ring:  # a text: blocks move round a ring, while those that have come are multiplied
        step += f", {part.ring}"
    # While it runs, a device holds its operands and its result.
    elements = sum(
        array.max_local_size for array in (*part.contracted_shardings, part.result.source)
    )
    contraction = first_row._replace(
        step=step,
        received=format_bytes(0),
        time=format_seconds(part.work),
        peak=format_bytes(itemsize * elements),
    )
    return [contraction, *step_rows]


def total(plan: ContractionPlan) -> str:
    """Return the totals of the plan, forward and backward, and the machine that it is priced for."""
    forward = _pass_totals("forward", plan.bytes_received, plan.flops, plan.forward_cost)
    lines = [f"{forward}, peak {format_bytes(plan.peak_bytes)}"]
    if plan.objective == BOTH:
        lines.append(
            _pass_totals(
                "backward", plan.backward_bytes_received, plan.backward_flops, plan.backward_cost
            )
        )
    lines.append(f"priced for {plan.profile.name}")
    return "\n".join(lines)


def _pass_totals(name: str, received: int, flops: int, seconds: float) -> str:
    return f"{name}: received {format_bytes(received)}, {flops / 1e9:.4g} GFLOP, {format_seconds(seconds)}"


def explain(plan: ContractionPlan) -> str:
    """Return the role of every axis, then the plan and the other placements as a table."""
    lines: list[str] = []
    for part in plan.parts:
        lines.append(part.local)
        for axis in part.result.mesh.long_axes:
            lines.append(f"  {axis}: {_role(part, axis)}")
    table: list[tuple[str, ...]] = [COSTS]
    for alternative in alternatives(plan):
        table.append(_costs_row(alternative))
    return "\n".join([*lines, "", align_columns(table)])


class Alternative(NamedTuple):
    """A plan of the table, and its name there."""

    name: str
    plan: ContractionPlan


def alternatives(plan: ContractionPlan) -> list[Alternative]:
    """List the plan and some plans to compare it with, each with a name for the table.

    They differ in the placement, how operands are sharded while they are contracted. The others are:
    all arrays whole on every device, and each of the given layouts imposed on all arrays: for
    `b d, d f/tp -> b f/tp` the operands as they are sharded in `b d`, in `d f/tp`, in `b f/tp`.
    Equal plans are listed once. With three or more operands there is only the plan itself.
    """
    listed = [Alternative("the plan", plan)]
    if len(plan.parts) > 1:  # another placement of one part would change the next ones
        return listed
    [part] = plan.parts  # the only contraction, of one or two operands
    known_moves = [part.moves]
    for name, other_part in _parts_elsewhere(plan, part):
        # Equal moves of operands are the same placement: the result follows from them.
        if other_part.moves not in known_moves:
            known_moves.append(other_part.moves)
            # A placement to compare with may take more memory than the plan is allowed.
            other_plan = replace(plan, parts=(other_part,), memory_limit=None)
            listed.append(Alternative(name, other_plan))
    return listed


def _parts_elsewhere(plan: ContractionPlan, part: Part) -> Iterator[tuple[str, Part]]:
    """Yield the contraction of a plan in each placement to compare with, and that one's name."""
    shardings = EinsumShardings(tuple(move.source for move in part.moves), part.result.target)
    prices = Prices(plan.mesh, plan.dtype, plan.profile)
    search = CandidateSearch(shardings, prices, plan.objective)
    # In the order of `seeds`: the idle placement, then that of each array.
    names = ["all of it on every device"]
    names += [f"where '{array.layout}' is" for array in shardings.arrays]
    for name, placement in zip(names, shardings.seeds(), strict=True):
        # Plans that move each operand to the placement, and the result from there to its layout.
        *moves, result = map(prices.plan, search.candidate(placement).moves)
        # A ring is of one placement: in another one its axis may have nothing to pass on.
        yield name, replace(part, moves=tuple(moves), result=result, ring=None)


def _costs_row(alternative: Alternative) -> tuple[str, ...]:
    plan = alternative.plan
    return (
        alternative.name,
        format_seconds(plan.cost),
        format_bytes(plan.bytes_received),
        format_bytes(plan.backward_bytes_received),
        f"{plan.flops / 1e9:.4g}",
        plan.local,
    )


def _role(part: Part, axis: str) -> str:
    """Say in words what a mesh axis does in one local contraction, by the names of known schemes.

    `b s d, d f/tp -> b s f/tp`, axis tp: "cuts 'f', which is kept: column parallel (Megatron)".
    """
    dim_name = _sharded_dim(part, axis)
    if dim_name is None:
        if any(axis in operand.layout.axes for operand in part.contracted_shardings):
            return "holds addends or copies of all operands"
        return "idle: replicas repeat the work"
    if dim_name in part.result.src.names:
        return f"cuts {dim_name!r}, which is kept: {_kept_scheme(part, axis, dim_name)}"
    # The axis shards a dim that is summed, so that each device has an addend of the result. What
    # the axis does in the wanted result says how they end.
    role = part.result.dst.role(axis)
    if not role:
        result_ending = "reduced"
    elif role[0] in part.result.dst.names:
        result_ending = "reduce-scattered"
    else:
        result_ending = "kept as addends"
    return (
        f"cuts {dim_name!r}, which is summed: row parallel (Megatron), the result {result_ending}"
    )


def _sharded_dim(part: Part, axis: str) -> str | None:
    """Return the name of the dim that an axis shards while operands are contracted."""
    for operand in part.contracted_shardings:
        for dim in operand.layout.dims:
            if axis in dim.axes:
                return dim.name
    return None


def _kept_scheme(part: Part, axis: str, dim_name: str) -> str:
    """Name the scheme of a mesh axis that shards a dim of the result, such as "data parallel".

    It depends on which operands have the dim, and on which of them are moved along the axis first:
    a dim of operand 0 alone (activations), with the weight gathered, is ZeRO-3.

    dim_name: the dim, which is not summed, so that the result has it too.
    """
    # The operands (by index) that have the dim, and those in whose layout the axis does something
    # else before they are contracted.
    operands_with_dim = [
        i for i, operand in enumerate(part.contracted_shardings) if dim_name in operand.layout.names
    ]
    moved_operands = [
        i for i, move in enumerate(part.moves) if move.src.role(axis) != move.dst.role(axis)
    ]
    if len(operands_with_dim) == len(part.contracted_shardings) > 1:
        some_moved = ", some after a move (Ulysses, dispatch)" if moved_operands else ""
        return f"every operand has it (experts, heads){some_moved}"
    # By convention activations are operand 0, and the weight is operand 1.
    if operands_with_dim == [0]:
        gathered = ", the weight gathered (ZeRO-3)" if 1 in moved_operands else ""
        return f"data parallel{gathered}"
    gathered = ", the activations gathered (sequence parallel)" if 0 in moved_operands else ""
    return f"column parallel (Megatron){gathered}"
