"""What a plan is to be best at: the move alone, or the move and that of its gradient.

Decides the words. The gradient's plan is made of layouts, not of the steps of the move, so both are
cheapest when each is: they share a choice only where devices are relabelled.
"""

from __future__ import annotations

from xshard.errors import PlanError

FORWARD, BOTH = "forward", "forward+backward"
OBJECTIVES = (FORWARD, BOTH)


def check_objective(objective: str) -> None:
    """Raise PlanError for what is none."""
    if objective not in OBJECTIVES:
        raise PlanError(f"no objective {objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}")
