"""The derivatives of a `max` or `min`: they go to the winners, in equal shares, by linear redistributions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xshard.caches import layout_cache
from xshard.errors import LinearityError, PlanError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR
from xshard.plans.plan import Plan, find_plan


@dataclass(frozen=True)
class MaxMinPlans:
    """Plans for the derivatives of `y = max(x)`, by `won = (x == result(y))`."""

    result: Plan  # the output, as a copy beside every addend; if it lacks rows of the input, `result(x)`
    count: Plan  # the number of winners, beside every addend; 0 for rows that a boundary fills
    cotangent: Plan  # the gradient is `cotangent(g) * won / max(count(won), 1)`
    tangent: Plan  # the tangent is `tangent(t * won / max(count(won), 1))`


@layout_cache(maxsize=1024)
def max_min_plans(plan: Plan) -> MaxMinPlans:
    """The plans for the gradient of a max or min. Raises LinearityError if the destination is one too."""
    if not plan.dst.is_linear:
        reason = f"'{plan.src} -> {plan.dst}' keeps a max or min: its gradient is not defined"
        raise LinearityError(reason, hint="reduce it first, then redistribute")

    def find(src: Layout, dst: Layout) -> Plan:
        shape = plan.shape if src.names == plan.src.names else plan.target.shape
        return find_plan(
            replace(plan.request, src=src, dst=dst, shape=shape, scale=None, memory_limit=None)
        )

    addends, copies = (with_kind(plan.src.tangent, kind) for kind in ("sum", "copy"))
    try:
        result = find(plan.dst, copies)
    except PlanError:  # the output lacks rows
        result = find(plan.src.tangent, copies)
    cotangent = find(plan.dst.dual, addends.dual)
    tangent = find(addends, plan.dst.tangent)
    return MaxMinPlans(result, find(addends, copies), cotangent, tangent)


def with_kind(layout: Layout, kind: str) -> Layout:
    """The layout with its max or min tag replaced."""
    return replace(
        layout, tags=tuple((kind if k in NONLINEAR else k, axes) for k, axes in layout.tags)
    )
