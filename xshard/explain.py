"""Why a plan is the one: the alternatives that were weighed, priced by the same model.

Decides which alternatives a reader wants to see beside the winner: the direct exchange, the best
path of collectives alone, all-gather and slice, which every framework can do, and the best path that divides
no axis where the winner does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xshard import overlapped
from xshard.errors import PlanError
from xshard.overlapped import overlaps
from xshard.plan import Plan
from xshard.planner import with_copies, with_scale, without_copies
from xshard.search import Search
from xshard.sharding import Sharding
from xshard.space import Space
from xshard.steps import AllGather, AllReduce, Mask, Slice, Step
from xshard.steps.base import DimCut
from xshard.steps.reach import begun, ended
from xshard.table import aligned
from xshard.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Alternative:
    """One way to do what a plan does. plan: None where it is not possible, for the reason in `why_not`."""

    name: str
    plan: Plan | None
    why_not: str = ""

    @property
    def cost(self) -> float:
        """Predicted seconds."""
        return self.plan.cost if self.plan else math.inf

    @property
    def swells(self) -> bool:
        """Whether it holds a block larger than both ends on the way."""
        if self.plan is None:
            return False
        largest = max(self.plan.source.max_local_size, self.plan.target.max_local_size)
        return any(stage.after.max_local_size > largest for stage in self.plan.stages)

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        if self.plan is None:
            return 0
        lanes = self.plan.profile.lanes(self.plan.steps_mesh)
        return sum(hop.messages for s in self.plan.stages for hop in s.step.traffic(s.before, lanes).hops)


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """The plan itself, then the other ways to do the same, for the same machine.

    >>> from xshard import Mesh, plan
    >>> [a.name for a in alternatives(plan("n/dp d -> n d", Mesh(dp=2), shape=(8, 4)))]
    ['the plan', 'direct exchange', 'collectives alone', 'all-gather and slice']
    """
    start, goal = (s.with_layout(s.normal) for s in (plan.source, plan.target))
    ways = _ways(without_copies(start), without_copies(goal), plan)
    found = [Alternative("the plan", plan)]
    for name, steps in ways.items():
        try:
            scaled = with_scale(with_copies(steps(), start, goal), plan.scale, start, goal)
            found.append(Alternative(name, replace(plan, steps=scaled, split=())))
        except PlanError as error:
            found.append(Alternative(name, None, error.reason))
    return tuple(found)


def _ways(start: Sharding, goal: Sharding, plan: Plan) -> dict[str, Callable[[], Sequence[Step]]]:
    if overlaps(start) or overlaps(goal):
        made = overlapped.ways(start, goal, plan.dtype, plan.profile)
        return {name: functools.partial(tuple[Step, ...], steps) for name, steps in made.items()}
    space = Space(start, goal, plan.dtype, plan.profile)
    whole = {"whole axes": Search(space, None).best_path} if plan.split else {}
    return {
        **whole,
        "direct exchange": lambda: (space.exchange(goal.layout),),
        "collectives alone": Search(space, None, exchanges=False).best_path,
        "all-gather and slice": lambda: gather_and_slice(start, goal),
    }


def explain(plan: Plan) -> str:
    """The alternatives as a table, and why the plan won."""
    ways = alternatives(plan)
    head = ("", "time", "received", "peak", "messages", "steps")
    return "\n".join([aligned([head, *map(_row, ways)]), "", _verdict(plan, ways)])


def gather_and_slice(start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """Reduce what ends, gather every dim to what both ends share, slice to the goal. Normal forms."""
    src, dst = start.layout, goal.layout
    steps: list[Step] = []
    for kind, axes in src.tags:
        over = tuple(a for a in axes if a in ended(src, dst))
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
    begins = begun(src, dst)
    sliced = (Slice(tuple(slices)),) if slices else ()
    return (*steps, *sliced, *((Mask(begins),) if begins else ()))


def _row(way: Alternative) -> tuple[str, ...]:
    if way.plan is None:
        return way.name, "-", "-", "-", "-", way.why_not
    p = way.plan
    steps = ", ".join(map(str, p.steps)) or "nothing"
    costs = format_seconds(p.cost), format_bytes(p.bytes_received), format_bytes(p.peak_bytes)
    return way.name, *costs, str(way.messages), steps


def _verdict(plan: Plan, ways: Sequence[Alternative]) -> str:
    if not plan.steps:
        return "The layouts mean the same: there is nothing to do."
    others = [w for w in ways[1:] if w.plan is not None and w.plan.steps != plan.steps]
    allowed = [w for w in others if not w.swells]
    return "\n".join(
        [_against_best(plan, ways[0], allowed), *(_too_large(plan, w) for w in others if w.swells)]
    )


def _against_best(plan: Plan, mine: Alternative, others: Sequence[Alternative]) -> str:
    best = min(others, key=lambda w: w.cost, default=None)
    if best is None or best.plan is None:
        return "Every other way within the memory of both ends is the same plan or not possible."
    if best.cost <= plan.cost:
        smaller = plan.peak_bytes < best.plan.peak_bytes
        why = "holds less" if smaller else "is the plainer of the two"
        return f"As fast as {best.name} under '{plan.profile.name}'; it {why}."
    fewer = (
        (best.plan.bytes_received - plan.bytes_received, "bytes received"),
        (best.messages - mine.messages, "messages"),
        (len(best.plan.steps) - len(plan.steps), "steps"),
    )
    why = ", ".join(f"{n} fewer {what}" for n, what in fewer if n > 0) or "cheaper launches and copies"
    saved = format_seconds(best.cost - plan.cost)
    return f"{saved} faster than {best.name}, the best of the others, under '{plan.profile.name}': {why}."


def _too_large(plan: Plan, way: Alternative) -> str:
    gain = plan.cost - way.cost
    would = f"would be {format_seconds(gain)} faster, but" if gain > 0 else "also"
    return f"{way.name.capitalize()} {would} holds a block larger than both ends, which no plan does."
