"""Who gives the rows of a dim that several devices hold, and who wants them.

Decides that a row is given by its owner where the owner holds it, that a device keeps what it has,
and that contributions to a fold are all given. Lists of rows are runs in which FILL marks rows that
are not meant, so that local positions stay.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from xshard.layout.block_rows import RowSpan, Sizes, all_row_spans, is_flipped
from xshard.layout.partition import all_owned_rows
from xshard.layout.runs import FILL, Run, Runs, n_rows, row_numbers
from xshard.notation.overlap import Fold
from xshard.notation.parser import Dim

Numbers = NDArray[np.int64]

_RANK = {"own": 0, "near": 1, "before": 2, "after": 2}

# Which rows of a block are meant: all that are not from beyond a pole, or those from beyond one.
STRAIGHT = "straight"


@lru_cache(maxsize=4096)
def wanted_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> tuple[Runs, ...]:
    """For every index, the rows that it must get, FILL where it gets none.

    Of a fold only the one device that gives a row has it: the others contribute nothing.
    side: of rows from beyond a pole, which (`before`, `after`). shift: added to every row, modulo `length`.
    """
    if isinstance(dim.overlap, Fold):
        found = provided_rows(dim, length, sizes) if side == STRAIGHT else ((),) * math.prod(sizes)
    else:
        found = _on_side(dim, length, sizes, side)
    return shifted(found, shift, length)


@lru_cache(maxsize=4096)
def offered_rows(
    dim: Dim, length: int, sizes: Sizes, side: str = STRAIGHT, shift: int = 0
) -> tuple[tuple[Runs, ...], ...]:
    """For every index, the rows that it gives to whoever wants them: lists of distinct rows.

    Each row is given once, by the device that owns it if it holds it; of a fold every
    contribution is given, a row's second one in a second list.
    """
    if not isinstance(dim.overlap, Fold):
        once = shifted(provided_rows(dim, length, sizes), shift, length)
        return tuple((runs,) if side == STRAIGHT else () for runs in once)
    return tuple(_layers(runs) for runs in shifted(_on_side(dim, length, sizes, side), shift, length))


@lru_cache(maxsize=4096)
def rows_at_hand(dim: Dim, length: int, sizes: Sizes, shift: int = 0) -> tuple[Runs, ...]:
    """For every index, the rows that it need not ask others for, each once, its own before copies."""
    found = []
    for all_ in all_row_spans(dim, length, sizes):
        rows = np.concatenate([row_numbers((s.run,)) for s in all_] or [np.zeros(0, np.int64)])
        rank = np.concatenate([np.full(n_rows((s.run,)), _RANK[s.origin]) for s in all_] or [rows])
        flipped = np.concatenate([np.full(n_rows((s.run,)), is_flipped(s, dim)) for s in all_] or [rows == 0])
        rows = np.where(flipped, FILL, rows)
        order = np.argsort(rank, kind="stable")
        _, first = np.unique(rows[order], return_index=True)
        keep = np.zeros(len(rows), bool)
        keep[order[first]] = True
        found.append(as_runs(np.where(keep, rows, FILL)))
    return shifted(tuple(found), shift, length)


@lru_cache(maxsize=4096)
def provided_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """For every index, the rows of its block that it gives; every row that anyone holds once."""
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    blocks = all_row_spans(dim, length, sizes)
    results = [np.full(sum(n_rows((s.run,)) for s in all_), FILL) for all_ in blocks]
    free = np.ones(length + 1, bool)
    free[FILL] = False  # the last place stands for FILL
    for rank in sorted(set(_RANK.values())):
        for all_, result in zip(blocks, results, strict=True):
            at = 0
            for stretch in all_:
                n = n_rows((stretch.run,))
                if _RANK[stretch.origin] == rank and not is_flipped(stretch, dim):
                    rows = row_numbers((stretch.run,))
                    rows = np.where(free[rows] & _first_of_each(rows), rows, FILL)
                    free[rows] = False
                    result[at : at + n] = rows
                at += n
    return tuple(map(as_runs, results))


def missing_rows(dim: Dim, length: int, sizes: Sizes) -> Runs:
    """Rows that no block holds."""
    rows = np.concatenate([row_numbers(runs) for runs in provided_rows(dim, length, sizes)])
    return as_runs(np.setdiff1d(np.arange(length), rows))


def without(runs: Runs, others: Runs) -> Runs:
    """The rows with FILL where `others` have them too."""
    rows = row_numbers(runs)
    return as_runs(np.where(np.isin(rows, row_numbers(others)), FILL, rows))


def as_runs(rows: Numbers) -> Runs:
    """Rows, written out -> runs."""
    if len(rows) == 0:
        return ()
    fill = rows == FILL
    joins = np.where(fill[1:], fill[:-1], (np.diff(rows) == 1) & ~fill[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~joins]))
    return tuple(
        Run(int(start), int(n))
        for start, n in zip(rows[heads], np.diff(np.append(heads, len(rows))), strict=True)
    )


def shifted(blocks: tuple[Runs, ...], shift: int, length: int) -> tuple[Runs, ...]:
    """Rows moved on by `shift`, around the end."""
    if not shift:
        return blocks
    rows = (row_numbers(runs) for runs in blocks)
    return tuple(as_runs(np.where(r == FILL, FILL, (r + shift) % length)) for r in rows)


def _on_side(dim: Dim, length: int, sizes: Sizes, side: str) -> tuple[Runs, ...]:
    def chosen(stretch: RowSpan) -> Run:
        on = stretch.origin if is_flipped(stretch, dim) else STRAIGHT
        return stretch.run if on == side else Run(FILL, n_rows((stretch.run,)))

    return tuple(tuple(map(chosen, all_)) for all_ in all_row_spans(dim, length, sizes))


def _layers(runs: Runs) -> tuple[Runs, ...]:
    """Lists of distinct rows that together are the rows, FILL elsewhere."""
    rows, found = row_numbers(runs), []
    while (rows != FILL).any():
        now = np.where(_first_of_each(rows), rows, FILL)
        found.append(as_runs(now))
        rows = np.where(now == FILL, rows, FILL)
    return tuple(found)


def _first_of_each(rows: Numbers) -> NDArray[np.bool_]:
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    return first
