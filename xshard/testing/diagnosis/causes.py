"""Likely causes of wrong blocks: the classic mistakes of sharded code, each by the trace that it leaves.
Each is a pure function of a `Case`: a sentence if its mistake makes these blocks of the wanted ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xshard.testing.diagnosis import orders, placement, sums
from xshard.testing.diagnosis.evidence import Case

_FINDERS: tuple[Callable[[Case], str | None], ...] = (
    sums.zero, sums.only_first, sums.not_summed, sums.not_averaged, sums.summed, sums.averaged, sums.scaled,
    sums.other_axes, sums.own_factors, placement.stale, orders.moved_rows, placement.exchanged,
    placement.transposed, sums.counted_argument, sums.own_statistics, placement.halo_rows, placement.seam,
    sums.rounded, placement.first_only_right, orders.positions, sums.one_addend,
)  # fmt: skip
CAUSES = {find.__name__.replace("_", " "): find for find in _FINDERS}


class Cause(NamedTuple):
    """name: the kind, as in `CAUSES`. text: a sentence with the axes, dims and devices of this case."""

    name: str
    text: str


def likely_cause(case: Case) -> Cause | None:
    """The first of `CAUSES` that leaves the trace of these blocks, or None.

    >>> import numpy as np
    >>> from xshard import Layout, Mesh, Sharding
    >>> want = (np.arange(1.0, 5.0),) * 2
    >>> got = tuple(2 * block for block in want)
    >>> case = Case(got, want, Sharding(Layout.parse("n"), Mesh(dp=2), (4,)), 1e-6)
    >>> likely_cause(case).name
    'summed'
    """
    return next((Cause(name, text) for name, find in CAUSES.items() if (text := find(case))), None)
