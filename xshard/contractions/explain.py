"""Why a contraction is computed where it is: the part of every mesh axis, and what other places would cost.

Decides which names the parts of axes have, and which places are shown beside the plan's: where an end already
is, and where every device computes all. The names of schemes take the second operand for the weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xshard.contractions.places import Ends
from xshard.contractions.prices import Prices
from xshard.contractions.search import found_at
from xshard.formatting import align_columns, format_bytes, format_seconds

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan, Part  # which explains itself by this

HEAD = ("", "time", "received", "backward", "GFLOP", "computed as")


def explain(plan: ContractionPlan) -> str:
    """The part of every axis, then the plan and the other places as a table."""
    parts = [f"{part.local}\n{_axes_text(part)}" for part in plan.parts]
    return "\n".join([*parts, "", align_columns([HEAD, *(_row(*way) for way in alternatives(plan))])])


def alternatives(plan: ContractionPlan) -> list[tuple[str, ContractionPlan]]:
    """The plan, then with one or two operands the same in other places, each by what is computed there.

    >>> from xshard import Mesh, plan
    >>> sizes = {"b": 8, "s": 512, "d": 256, "f": 1024}
    >>> made = plan("b s/tp d, d f/tp -> b s f/tp", Mesh(tp=4), sizes=sizes)
    >>> [name for name, _ in alternatives(made)]
    ['the plan', 'all of it on every device', "where 'b s/tp d' is"]
    """
    found = [("the plan", plan)]
    if len(plan.parts) > 1:
        return found
    [part] = plan.parts
    ends = Ends(tuple(move.source for move in part.moves), part.result.target)
    prices = Prices(plan.mesh, plan.dtype, plan.profile)
    names = [
        "all of it on every device",
        *(f"where '{end.layout}' is" for end in (*ends.operands, ends.result)),
    ]
    for name, place in zip(names, ends.seeds(), strict=True):
        at = found_at(ends, place, prices, plan.objective, stays=False)
        moves, result = tuple(map(prices.plan, at.moves)), prices.plan(at.result)
        other = replace(part, moves=moves, result=result)
        if all(other.moves != known.parts[0].moves for _, known in found):
            found.append((name, replace(plan, parts=(other,), memory_limit=None)))
    return found


def _row(name: str, plan: ContractionPlan) -> tuple[str, ...]:
    received = format_bytes(plan.bytes_received), format_bytes(plan.backward_bytes_received)
    return name, format_seconds(plan.cost), *received, f"{plan.flops / 1e9:.4g}", plan.local


def _axes_text(part: Part) -> str:
    """A line for every axis: its part, and the name of the scheme."""
    mesh = part.result.mesh
    axes = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    return "\n".join(f"  {axis}: {_scheme(part, axis)}" for axis in axes)


def _scheme(part: Part, axis: str) -> str:
    cut = next((dim.name for use in part.used for dim in use.layout.dims if axis in dim.axes), None)
    if cut is None:
        held = any(axis in use.layout.axes for use in part.used)
        return "holds addends or copies of all operands" if held else "idle: replicas repeat the work"
    owners = [i for i, use in enumerate(part.used) if cut in use.layout.names]
    kept = cut in part.result.src.names
    moved = [i for i, move in enumerate(part.moves) if move.src.role(axis) != move.dst.role(axis)]
    what = f"cuts {cut!r}, which is {'kept' if kept else 'summed'}"
    return f"{what}: {_name(part, axis, owners, moved, kept=kept)}"


def _name(part: Part, axis: str, owners: list[int], moved: list[int], *, kept: bool) -> str:
    """What the field calls it."""
    if not kept:
        end = part.result.dst.role(axis)
        how = (
            "reduce-scattered"
            if end and end[0] in part.result.dst.names
            else "kept as addends"
            if end
            else "reduced"
        )
        return f"row parallel (Megatron), the result {how}"
    if len(owners) == len(part.used) > 1:
        return "every operand has it (experts, heads)" + (
            ", some after a move (Ulysses, dispatch)" if moved else ""
        )
    if owners == [0]:
        return "data parallel, the weight gathered (ZeRO-3)" if 1 in moved else "data parallel"
    gathered = ", the activations gathered (sequence parallel)" if 0 in moved else ""
    return f"column parallel (Megatron){gathered}"
