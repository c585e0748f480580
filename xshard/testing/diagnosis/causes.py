"""Likely causes of wrong blocks: the classic mistakes of sharded code, each by the trace that it leaves.

Each finder is a pure function of a `Case`. It returns a sentence if its mistake turns the wanted
blocks into the given ones, and None otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xshard.testing.diagnosis import orders, placement, sums
from xshard.testing.diagnosis.evidence import Case

# The first that fits is reported: those that explain every number come before those that only
# say where the errors are, and statistics come last.
_FINDERS: tuple[Callable[[Case], str | None], ...] = (
    sums.zero,
    sums.only_first,
    sums.not_summed,
    sums.not_averaged,
    sums.summed,
    sums.averaged,
    sums.scaled,
    sums.other_axes,
    sums.own_factors,
    placement.stale,
    orders.moved_rows,
    placement.exchanged,
    placement.transposed,
    sums.counted_argument,
    sums.own_statistics,
    placement.halo_rows,
    placement.seam,
    sums.rounded,
    placement.first_only_right,
    orders.positions,
    sums.one_addend,
)
CAUSES = {finder.__name__.replace("_", " "): finder for finder in _FINDERS}


class Cause(NamedTuple):
    """A likely mistake.

    Attributes:
        name: The kind: a name of `CAUSES`, or one that only further runs of the function show.
        text: A sentence with the axes, dims and devices of this case.
    """

    name: str
    text: str


def likely_cause(case: Case) -> Cause | None:
    """Guess which sharding mistake made these wrong blocks, by comparing them with the right ones.

    Mistakes leave traces: a sum done twice doubles all values, a missing one leaves addends.

        likely_cause(case).text  # "2 times too large, and 2 is the size of dp: ..."

    Args:
        case: The blocks as they are and as they should be, both `[devices]` arrays of local shapes.

    Returns:
        The first of `CAUSES` that leaves the trace of these blocks, or None.

    Examples:
        >>> import numpy as np
        >>> from xshard import Layout, Mesh, Sharding
        >>> want = (np.arange(1.0, 5.0),) * 2
        >>> got = tuple(2 * block for block in want)
        >>> case = Case(got, want, Sharding(Layout.parse("n"), Mesh(dp=2), (4,)), 1e-6)
        >>> likely_cause(case).name
        'summed'
    """
    for name, find in CAUSES.items():
        text = find(case)
        if text is not None:
            return Cause(name, text)
    return None
