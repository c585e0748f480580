"""Likely causes of wrong blocks: the classic mistakes of sharded code, each by the trace that it leaves.

Every cause is a pure function of a `Case`, numpy alone: a sentence if its mistake turns the wanted blocks
into those that came, else None. Decides the order in which they are tried: exact traces before vague ones.
They are in `sums` (sums and factors), `placement` (blocks and dims), `orders` (rows) and `seams` (halos).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xshard.testing.diagnosis import orders, placement, seams, sums
from xshard.testing.diagnosis.evidence import Case

CAUSES: dict[str, Callable[[Case], str | None]] = {
    "zero": sums.zero,
    "only first": sums.only_first,
    "not summed": sums.not_summed,
    "not averaged": sums.not_averaged,
    "summed": sums.summed,
    "averaged": sums.averaged,
    "scaled": sums.scaled,
    "other axes": sums.other_axes,
    "own factors": sums.own_factors,
    "stale": placement.stale,
    "moved rows": orders.moved_rows,
    "exchanged": placement.exchanged,
    "transposed": placement.transposed,
    "counted argument": sums.counted_argument,
    "halo rows": seams.halo_rows,
    "seam": seams.seam,
    "rounded": sums.rounded,
    "first only right": placement.first_only_right,
    "positions": orders.positions,
    "one addend": sums.one_addend,
}


class Cause(NamedTuple):
    """name: of the kind, as in `CAUSES`. text: a sentence with the axes, dims and devices of this case."""

    name: str
    text: str


def likely_cause(case: Case) -> Cause | None:
    """The first of `CAUSES` whose trace the blocks show, or None.

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
