"""Which device provides a row that several hold, and the rows each wants; FILL is in place of others."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np

from xshard.layout.block_rows import RowSpan, all_held_rows, all_row_spans, is_flipped
from xshard.layout.partition import Sizes, all_owned_rows
from xshard.layout.pieces import ascending, filled, firsts, joined, layers, without
from xshard.layout.runs import (
    FILL,
    AllRuns,
    Rows,
    Run,
    Runs,
    as_runs,
    interval,
    n_rows,
    pieces,
    row_numbers,
)
from xshard.notation.overlap import Fold, Reads, unfolded
from xshard.notation.parser import Dim

# Owners come first, then neighbours, then copies from beyond the ends.
_RANKS: tuple[tuple[str, ...], ...] = (("own",), ("near",), ("before", "after"))

# The side of rows that do not come from beyond a pole; others have "before" or "after".
STRAIGHT = "straight"


@lru_cache(maxsize=4096)
def wanted_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> AllRuns:
    """For every index, the rows it must receive from one side of a pole; in a fold, those it provides."""
    if isinstance(dim.overlap, Fold):
        blocks = provided_rows(dim, length, sizes) if side == STRAIGHT else ((),) * math.prod(sizes)
    else:
        blocks = _on_side(dim, length, sizes, side)
    return shifted(blocks, shift, length)


@lru_cache(maxsize=4096)
def offered_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> tuple[AllRuns, ...]:
    """For every index, lists of distinct rows it offers: each row once, in a fold every contribution."""
    if not isinstance(dim.overlap, Fold):
        once = shifted(provided_rows(dim, length, sizes), shift, length)
        return tuple((runs,) if side == STRAIGHT else () for runs in once)
    sided = shifted(_on_side(dim, length, sizes, side), shift, length)
    if _are_distinct(dim):
        return tuple((runs,) for runs in sided)
    return tuple(
        tuple(filled(x, [n_rows(runs)])[0] for x in layers(pieces((runs,)))) for runs in sided
    )


@lru_cache(maxsize=4096)
def rows_at_hand(dim: Dim, length: int, sizes: Sizes, shift: int = 0) -> AllRuns:
    """For every index, the rows that it has, each once; its own rows come before copies."""
    held = all_held_rows if _are_distinct(dim) else partial(_by_rank, alone=True)
    return shifted(held(dim, length, sizes), shift, length)


@lru_cache(maxsize=4096)
def provided_rows(dim: Dim, length: int, sizes: Sizes) -> AllRuns:
    """For every index, the rows of its block that it provides: every row that any device holds, once."""
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    if _are_distinct(dim):  # every row is there at its owner
        owned = map(row_numbers, all_owned_rows(dim, length, sizes))
        whole = zip(map(n_rows, all_held_rows(dim, length, sizes)), owned, strict=True)
        return tuple(
            as_runs(np.pad(rows, (0, n - len(rows)), constant_values=FILL)) for n, rows in whole
        )
    return _by_rank(dim, length, sizes, alone=False)


@lru_cache(maxsize=4096)
def missing_rows(dim: Dim, length: int, sizes: Sizes) -> Runs:
    """Rows that no block holds."""
    if _are_distinct(dim):
        return ()
    whole = pieces((interval(0, length),))
    return ascending(without(whole, pieces(provided_rows(dim, length, sizes))), 1)[0]


def lacking(runs: Runs, others: Runs) -> Runs:
    """The rows, with FILL in place of those that are also in `others`."""
    if isinstance(runs, Rows) or isinstance(others, Rows):
        rows = row_numbers(runs)
        return as_runs(np.where(np.isin(rows, row_numbers(others), kind="table"), FILL, rows))
    return filled(without(pieces((runs,)), pieces((others,))), [n_rows(runs)])[0]


def shifted(blocks: AllRuns, shift: int, length: int) -> AllRuns:
    """The rows with `shift` added, modulo `length`."""
    if not shift:
        return blocks
    intervals = pieces(blocks)
    start = (intervals.start + shift) % length
    over = np.maximum(start + intervals.length - length, 0)
    inside = intervals.length - over
    wrapped = intervals.take(over > 0)
    beyond = wrapped._replace(local=(intervals.local + inside)[over > 0], start=wrapped.start * 0)
    rows = joined(
        intervals._replace(start=start, length=inside), beyond._replace(length=over[over > 0])
    )
    return filled(rows, list(map(n_rows, blocks)))


def _are_distinct(dim: Dim) -> bool:
    """Whether no block has a row twice or from beyond the ends: its own alone, or also what a map lists."""
    return dim.overlap is None or isinstance(unfolded(dim.overlap), Reads)


def _by_rank(dim: Dim, length: int, sizes: Sizes, *, alone: bool) -> AllRuns:
    """For every index, its rows that come first among its own, or among all; FILL in place of others."""
    table = firsts(
        joined(*(pieces(_chosen(dim, length, sizes, *each)) for each in _RANKS)), alone=alone
    )
    return filled(
        table, [n_rows(s.run for s in spans) for spans in all_row_spans(dim, length, sizes)]
    )


def _on_side(dim: Dim, length: int, sizes: Sizes, side: str) -> AllRuns:
    if _are_distinct(dim):
        return all_held_rows(dim, length, sizes) if side == STRAIGHT else ((),) * math.prod(sizes)
    origins = sum(_RANKS, ()) if side == STRAIGHT else (side,)
    return _chosen(dim, length, sizes, *origins, flipped=side != STRAIGHT)


def _chosen(dim: Dim, length: int, sizes: Sizes, *origins: str, flipped: bool = False) -> AllRuns:
    """The rows with some origins, FILL in place of others. flipped: rows from the far side of a pole."""

    def rows(span: RowSpan) -> Run:
        is_wanted = span.origin in origins and is_flipped(span, dim) == flipped
        return span.run if is_wanted else Run(FILL, span.run.length * span.run.repeats)

    return tuple(tuple(map(rows, spans)) for spans in all_row_spans(dim, length, sizes))
