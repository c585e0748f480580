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
    """Plans for the derivatives of `y = max(x)`, where `won = (x == result(y))` marks the winners.

    Attributes:
        result: Brings the output to every addend, as a copy beside it. If the output lacks rows of
            the input, it reduces the input once more: `result(x)`.
        count: Counts the winners, beside every addend; 0 for rows that a boundary fills.
        cotangent: The gradient is `cotangent(g) * won / max(count(won), 1)`.
        tangent: The tangent is `tangent(t * won / max(count(won), 1))`.
    """

    result: Plan
    count: Plan
    cotangent: Plan
    tangent: Plan


@layout_cache(maxsize=1024)
def max_min_plans(plan: Plan) -> MaxMinPlans:
    """Plan what the gradient of a redistribution with a max or min over devices needs.

    With y = max over the devices of x, the gradient goes to the devices where x equals y, divided
    by their number where several are equal. So y is brought to every device that has an x, the
    equal ones are counted by a sum, and the gradients move as those of a sum do.

    Raises:
        LinearityError: The destination holds a max or min too, so the gradient is not defined.
    """
    if not plan.dst.is_linear:
        raise LinearityError(
            f"'{plan.src} -> {plan.dst}' keeps a max or min: its gradient is not defined",
            hint="reduce it first, then redistribute",
        )

    def find(src: Layout, dst: Layout) -> Plan:
        shape = plan.shape if src.names == plan.src.names else plan.target.shape
        # The scale follows from the layouts; the limit is for the move that the user asked for.
        request = replace(
            plan.request, src=src, dst=dst, shape=shape, scale=None, memory_limit=None
        )
        return find_plan(request)

    candidates = plan.src.tangent  # what the max is taken over
    addends = with_kind(candidates, "sum")
    copies = with_kind(candidates, "copy")
    try:
        result = find(plan.dst, copies)
    except PlanError:
        # The output lacks rows of x, so y cannot be made from it: it is reduced again from x.
        result = find(candidates, copies)
    return MaxMinPlans(
        result=result,
        count=find(addends, copies),
        cotangent=find(plan.dst.dual, addends.dual),
        tangent=find(addends, plan.dst.tangent),
    )


def with_kind(layout: Layout, kind: str) -> Layout:
    """Replace the max or min tag of a layout: "n | max(x)" with "sum" -> "n | sum(x)"."""
    tags = tuple((kind if k in NONLINEAR else k, axes) for k, axes in layout.tags)
    return replace(layout, tags=tags)
