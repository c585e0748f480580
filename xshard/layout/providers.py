"""Which device provides a row that several hold, and the rows each wants; FILL is in place of others."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from xshard.layout.block_rows import RowSpan, Sizes, all_row_spans, is_flipped
from xshard.layout.partition import all_owned_rows
from xshard.layout.pieces import ascending, filled, firsts, joined, layers, without
from xshard.layout.runs import FILL, Pieces, Run, Runs, interval, n_rows, pieces
from xshard.notation.overlap import Fold
from xshard.notation.parser import Dim

_RANK = {"own": 0, "near": 1, "before": 2, "after": 2}

# The side of rows that do not come from beyond a pole; others have "before" or "after".
STRAIGHT = "straight"


@lru_cache(maxsize=4096)
def wanted_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> tuple[Runs, ...]:
    """For every index, the rows it must receive from one side of a pole; in a fold, those it provides."""
    if isinstance(dim.overlap, Fold):
        blocks = provided_rows(dim, length, sizes) if side == STRAIGHT else ((),) * math.prod(sizes)
    else:
        blocks = _on_side(dim, length, sizes, side)
    return shifted(blocks, shift, length)


@lru_cache(maxsize=4096)
def offered_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> tuple[tuple[Runs, ...], ...]:
    """For every index, lists of distinct rows it offers: each row once, in a fold every contribution."""
    if not isinstance(dim.overlap, Fold):
        once = shifted(provided_rows(dim, length, sizes), shift, length)
        return tuple((runs,) if side == STRAIGHT else () for runs in once)
    return tuple(_layers(runs) for runs in shifted(_on_side(dim, length, sizes, side), shift, length))


@lru_cache(maxsize=4096)
def rows_at_hand(dim: Dim, length: int, sizes: Sizes, shift: int = 0) -> tuple[Runs, ...]:
    """For every index, the rows that it has, each once; its own rows come before copies."""
    return shifted(_by_rank(dim, length, sizes, alone=True), shift, length)


@lru_cache(maxsize=4096)
def provided_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """For every index, the rows of its block that it provides: every row that any device holds, once."""
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    return _by_rank(dim, length, sizes, alone=False)


@lru_cache(maxsize=4096)
def missing_rows(dim: Dim, length: int, sizes: Sizes) -> Runs:
    """Rows that no block holds."""
    whole = pieces((interval(0, length),))
    return ascending(without(whole, pieces(provided_rows(dim, length, sizes))), 1)[0]


def lacking(runs: Runs, others: Runs) -> Runs:
    """The rows, with FILL in place of those that are also in `others`."""
    return filled(without(pieces((runs,)), pieces((others,))), [n_rows(runs)])[0]


def shifted(blocks: tuple[Runs, ...], shift: int, length: int) -> tuple[Runs, ...]:
    """The rows with `shift` added, modulo `length`."""
    if not shift:
        return blocks
    intervals = pieces(blocks)
    start = (intervals.start + shift) % length
    over = np.maximum(start + intervals.length - length, 0)
    inside, wrapped = intervals.length - over, intervals.take(over > 0)
    beyond = wrapped._replace(
        local=(intervals.local + inside)[over > 0], start=wrapped.start * 0, length=over[over > 0]
    )
    rows = joined(intervals._replace(start=start, length=inside), beyond)
    return filled(rows, list(map(n_rows, blocks)))


def _by_rank(dim: Dim, length: int, sizes: Sizes, *, alone: bool) -> tuple[Runs, ...]:
    """For every index, the rows of its block that come first among its own, or among all: owners, then
    neighbours, then copies from beyond the ends; FILL elsewhere."""
    blocks = all_row_spans(dim, length, sizes)

    def at(rank: int) -> Pieces:
        return pieces(
            [s.run if _RANK[s.origin] == rank and not is_flipped(s, dim) else _fill(s.run) for s in spans]
            for spans in blocks
        )

    table = joined(*map(at, sorted(set(_RANK.values()))))
    return filled(firsts(table, alone=alone), [n_rows(s.run for s in spans) for spans in blocks])


def _on_side(dim: Dim, length: int, sizes: Sizes, side: str) -> tuple[Runs, ...]:
    def chosen(span: RowSpan) -> Run:
        on = span.origin if is_flipped(span, dim) else STRAIGHT
        return span.run if on == side else _fill(span.run)

    return tuple(tuple(map(chosen, all_)) for all_ in all_row_spans(dim, length, sizes))


def _layers(runs: Runs) -> tuple[Runs, ...]:
    """Lists of distinct rows that together are all the rows; FILL elsewhere."""
    return tuple(filled(layer, [n_rows(runs)])[0] for layer in layers(pieces((runs,))))


def _fill(run: Run) -> Run:
    """As many rows outside the array."""
    return Run(FILL, run.length * run.repeats)
