"""The choice among the paths between two meshes: seconds, then traffic between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from xshard.layout.sub_axes import Split
from xshard.plans.transfer import Transfer
from xshard.plans.transfer_search import transfer_ways
from xshard.search.request import Request
from xshard.steps import Step

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which is chosen by this

_ABOUT = 1.05  # predictions that differ by less may be one


def cheapest(
    request: Request, made: Callable[[Request, tuple[Step, ...], Split], Plan], *, relabel: bool
) -> Plan | None:
    """The plan with a transfer of the fewest seconds within the memory limit; among equals the plainest.

    Of plans that take about as long, that which sends least between nodes: devices may share that link.
    """
    limit, free = request.memory_limit, replace(request, memory_limit=None)
    found: list[Plan] = []
    best_s = math.inf
    for way in transfer_ways(free, relabel=relabel):
        plan = made(free, *way)
        ends = (plan.price_of(i).seconds for i, step in enumerate(plan.steps) if step is not plan.transfer)
        if sum(ends) >= best_s * _ABOUT:
            continue  # whatever the transfer costs, which is the longest to find out
        if limit is None or plan.peak_bytes <= limit:
            found.append(plan)
            best_s = min(best_s, plan.cost)
    if not found:
        return None
    found = [plan for plan in found if plan.cost <= best_s * _ABOUT]
    if request.profile.across is not None:
        crossing = [_between_nodes(plan) for plan in found]
        found = [plan for plan, n in zip(found, crossing, strict=True) if n == min(crossing)]
    best_s = min(plan.cost for plan in found)
    return replace(next(p for p in found if p.cost <= best_s * (1 + 1e-9)), memory_limit=limit)


def _between_nodes(plan: Plan) -> int:
    """Elements that enter a node, of the messages of a transfer and the collectives around it."""
    total = 0
    for (step, before, _), machine in zip(plan.stages, plan.machines, strict=True):
        if isinstance(step, Transfer):
            total += step.between_nodes
        else:
            fabric = machine.fabric(before.mesh)
            total += (machine.node_devices or 1) * fabric.between_nodes(step.traffic(before, fabric.spans))
    return total
