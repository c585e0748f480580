"""Why a plan is the one: the alternatives that were weighed, priced by the same model.

Decides which alternatives a reader wants to see beside the winner: the direct exchange, the best
path of collectives alone, and all-gather and slice, which every framework can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xshard.errors import PlanError
from xshard.plan import Plan
from xshard.planner import with_copies, with_scale, without_copies
from xshard.search import Search
from xshard.sharding import Sharding
from xshard.space import Space
from xshard.steps import AllGather, AllReduce, Exchange, Mask, Slice, Step
from xshard.steps.exchange import begun, ended
from xshard.table import aligned
from xshard.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Alternative:
    """One way to do what a plan does. plan: None where it is not possible, for the reason in `why_not`."""

    name: str
    plan: Plan | None
    why_not: str = ""

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        if self.plan is None:
            return 0
        levels = self.plan.profile.levels(self.plan.mesh)
        return sum(hop.messages for s in self.plan.stages for hop in s.step.traffic(s.before, levels).hops)


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """The plan itself, then the other ways to do the same, for the same machine.

    >>> from xshard import Mesh, plan
    >>> [a.name for a in alternatives(plan("n/dp d -> n d", Mesh(dp=2), shape=(8, 4)))]
    ['the plan', 'direct exchange', 'collectives alone', 'all-gather and slice']
    """
    start, goal = (s.with_layout(s.normal) for s in (plan.source, plan.target))
    space = Space(without_copies(start), without_copies(goal), plan.dtype, plan.profile)

    ways: dict[str, Callable[[], Sequence[Step]]] = {
        "direct exchange": lambda: (Exchange(space.goal.layout),),
        "collectives alone": Search(space, None, exchanges=False).best_path,
        "all-gather and slice": lambda: gather_and_slice(space.start, space.goal),
    }
    found = [Alternative("the plan", plan)]
    for name, steps in ways.items():
        try:
            scaled = with_scale(with_copies(steps(), start, goal), plan.scale, start, goal)
            found.append(Alternative(name, replace(plan, steps=scaled)))
        except PlanError as error:
            found.append(Alternative(name, None, error.reason))
    return tuple(found)


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
    slices: list[Step] = []
    for here, there in zip(src.dims, dst.dims, strict=True):
        n = 0
        while n < min(len(here.shards), len(there.shards)) and here.shards[n] == there.shards[n]:
            n += 1
        if here.shards[n:]:
            steps.append(AllGather(here.name, here.shards[n:]))
        if there.shards[n:]:
            slices.append(Slice(there.name, there.shards[n:]))
    begins = begun(src, dst)
    return (*steps, *slices, *((Mask(begins),) if begins else ()))


def _row(way: Alternative) -> tuple[str, ...]:
    if way.plan is None:
        return way.name, "-", "-", "-", "-", way.why_not
    p = way.plan
    steps = ", ".join(map(str, p.steps)) or "nothing"
    costs = format_seconds(p.cost), format_bytes(p.bytes_received), format_bytes(p.peak_bytes)
    return way.name, *costs, str(way.messages), steps


def _verdict(plan: Plan, ways: Sequence[Alternative]) -> str:
    others = [w for w in ways[1:] if w.plan is not None and w.plan.steps != plan.steps]
    if not plan.steps:
        return "The layouts mean the same: there is nothing to do."
    if not others:
        return "Every other way is the same plan or not possible."
    best = min(others, key=lambda w: w.plan.cost if w.plan else 0.0)
    assert best.plan is not None
    if best.plan.cost <= plan.cost:
        return f"As fast as {best.name} under '{plan.profile.name}'; it is the plainer of the two."
    saved = format_seconds(best.plan.cost - plan.cost)
    reasons = [
        f"{format_bytes(best.plan.bytes_received - plan.bytes_received)} fewer bytes received"
        * (best.plan.bytes_received > plan.bytes_received),
        f"{best.messages - ways[0].messages} fewer messages" * (best.messages > ways[0].messages),
        f"{len(best.plan.steps) - len(plan.steps)} fewer steps" * (len(best.plan.steps) > len(plan.steps)),
    ]
    why = ", ".join(r for r in reasons if r) or "cheaper launches and copies"
    return f"{saved} faster than {best.name}, the best of the others, under '{plan.profile.name}': {why}."
