"""Why a plan won: its alternatives, priced by the same model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split
from xshard.search import overlap_paths
from xshard.search.a_star import Search
from xshard.search.overlap_paths import overlaps
from xshard.search.solve import with_copies, with_scale, without_copies
from xshard.search.states import Space
from xshard.steps import AllGather, AllReduce, Mask, Slice, Step
from xshard.steps.base import DimCut
from xshard.steps.exchange.traffic import begun_axes, ended_axes

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which explains itself by this


@dataclass(frozen=True)
class Alternative:
    """One alternative to a plan; without a plan it is not possible, for the reason in `why_not`."""

    name: str
    plan: Plan | None
    why_not: str = ""

    @property
    def cost(self) -> float:
        """Predicted seconds."""
        return self.plan.cost if self.plan else math.inf


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """The plan, then its alternatives for the same machine. Raises PlanError between two meshes."""
    if plan.transfer:
        raise PlanError(
            f"no alternatives from {plan.mesh!r} to {plan.dst_mesh!r}", hint="they are ways on one mesh"
        )
    target = plan.target.in_order(plan.source.layout.names)
    start, goal = (s.with_layout(s.normal) for s in (plan.source, target))
    last = plan.steps[-1:] if target is not plan.target else ()  # the transposition
    endpoints = without_copies(start), without_copies(goal)
    ways = _alternative_steps(*endpoints, plan.dtype, plan.request.machine, plan.split)
    options: list[Alternative] = [Alternative("the plan", plan)]
    for name, steps in ways.items():
        try:
            scaled = with_scale(with_copies(steps(), start, goal), plan.scale, start, goal)
            options.append(Alternative(name, replace(plan, steps=(*scaled, *last), split=())))
        except PlanError as error:
            options.append(Alternative(name, None, error.reason))
    return tuple(options)


def _alternative_steps(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, split: Split
) -> dict[str, Callable[[], Sequence[Step]]]:
    """Every alternative by name, as a function that makes its steps, or raises PlanError."""
    if overlaps(start) or overlaps(goal):
        made = overlap_paths.ways(start, goal, dtype, profile)
        return {name: functools.partial(tuple[Step, ...], steps) for name, steps in made.items()}
    space = Space(start, goal, dtype, profile)
    whole = {"whole axes": Search(space, None).best_path} if split else {}
    return {
        **whole,
        "direct exchange": lambda: (space.exchange(goal.layout),),
        "collectives alone": Search(space, None, exchanges=False).best_path,
        "all-gather and slice": lambda: _gather_and_slice(start, goal),
    }


def _gather_and_slice(start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """Reduce sums that end, gather every dim to the common shards, slice to the goal. Normal forms."""
    src, dst = start.layout, goal.layout
    steps: list[Step] = []
    for kind, axes in src.tags:
        over = tuple(a for a in axes if a in ended_axes(src, dst))
        if over:
            steps.append(AllReduce(over, kind))
    slices: list[DimCut] = []
    for here, there in zip(src.dims, dst.dims, strict=True):
        n = 0
        while n < min(len(here.shards), len(there.shards)) and here.shards[n] == there.shards[n]:
            n += 1
        if here.shards[n:]:
            steps.append(AllGather(here.name, here.shards[n:]))
        if there.shards[n:]:
            slices.append((there.name, there.shards[n:]))
    begins = begun_axes(src, dst)
    sliced = (Slice(tuple(slices)),) if slices else ()
    return (*steps, *sliced, *((Mask(begins),) if begins else ()))


def explain(plan: Plan) -> str:
    """The alternatives as a table, and why the plan won."""
    ways = alternatives(plan)
    head = ("", "time", "received", "peak", "messages", "steps")
    return "\n".join([align_columns([head, *map(_row, ways)]), "", _verdict(plan, ways)])


def _row(way: Alternative) -> tuple[str, ...]:
    if way.plan is None:
        return way.name, "-", "-", "-", "-", way.why_not
    p = way.plan
    steps = ", ".join(map(str, p.steps)) or "nothing"
    costs = format_seconds(p.cost), format_bytes(p.bytes_received), format_bytes(p.peak_bytes)
    return way.name, *costs, str(p.messages), steps


def _verdict(plan: Plan, ways: Sequence[Alternative]) -> str:
    if not plan.steps:
        return "The layouts mean the same: there is nothing to do."
    others = [w for w in ways[1:] if w.plan is not None and w.plan.steps != plan.steps]
    swelling = [w for w in others if w.plan is not None and w.plan.exceeds_endpoints]
    allowed = [w for w in others if w not in swelling]
    return "\n".join([_against_best(plan, allowed), *(_too_large(plan, w) for w in swelling)])


def _against_best(plan: Plan, others: Sequence[Alternative]) -> str:
    best = min(others, key=lambda w: w.cost, default=None)
    if best is None or best.plan is None:
        return "Every other way within the memory of both ends is the same plan or not possible."
    if best.cost <= plan.cost:
        smaller = plan.peak_bytes < best.plan.peak_bytes
        why = "holds less" if smaller else "is the plainer of the two"
        return f"As fast as {best.name} under '{plan.profile.name}'; it {why}."
    fewer = (
        (best.plan.bytes_received - plan.bytes_received, "bytes received"),
        (best.plan.messages - plan.messages, "messages"),
        (len(best.plan.steps) - len(plan.steps), "steps"),
    )
    why = ", ".join(f"{n} fewer {what}" for n, what in fewer if n > 0) or "cheaper launches and copies"
    saved = format_seconds(best.cost - plan.cost)
    return f"{saved} faster than {best.name}, the best of the others, under '{plan.profile.name}': {why}."


def _too_large(plan: Plan, way: Alternative) -> str:
    gain = plan.cost - way.cost
    would = f"would be {format_seconds(gain)} faster, but" if gain > 0 else "also"
    return f"{way.name.capitalize()} {would} holds a block larger than both ends, which no plan does."
