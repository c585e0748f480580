"""Which device provides a row that several hold, and the rows each wants; FILL is in place of others."""

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
    blocks = []
    for all_ in all_row_spans(dim, length, sizes):
        rows = np.concatenate([row_numbers((s.run,)) for s in all_] or [np.zeros(0, np.int64)])
        rank = np.concatenate([np.full(n_rows((s.run,)), _RANK[s.origin]) for s in all_] or [rows])
        flipped = np.concatenate([np.full(n_rows((s.run,)), is_flipped(s, dim)) for s in all_] or [rows == 0])
        rows = np.where(flipped, FILL, rows)
        order = np.argsort(rank, kind="stable")
        _, first = np.unique(rows[order], return_index=True)
        keep = np.zeros(len(rows), bool)
        keep[order[first]] = True
        blocks.append(as_runs(np.where(keep, rows, FILL)))
    return shifted(tuple(blocks), shift, length)


@lru_cache(maxsize=4096)
def provided_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """For every index, the rows of its block that it provides: every row that any device holds, once."""
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    blocks = all_row_spans(dim, length, sizes)
    results = [np.full(sum(n_rows((s.run,)) for s in all_), FILL) for all_ in blocks]
    free = np.ones(length + 1, bool)
    free[FILL] = False  # index -1: the last element stands for FILL
    for rank in sorted(set(_RANK.values())):
        for all_, result in zip(blocks, results, strict=True):
            start = 0
            for span in all_:
                n = n_rows((span.run,))
                if _RANK[span.origin] == rank and not is_flipped(span, dim):
                    rows = row_numbers((span.run,))
                    rows = np.where(free[rows] & _first_of_each(rows), rows, FILL)
                    free[rows] = False
                    result[start : start + n] = rows
                start += n
    return tuple(map(as_runs, results))


def missing_rows(dim: Dim, length: int, sizes: Sizes) -> Runs:
    """Rows that no block holds."""
    rows = np.concatenate([row_numbers(runs) for runs in provided_rows(dim, length, sizes)])
    return as_runs(np.setdiff1d(np.arange(length), rows))


def without(runs: Runs, others: Runs) -> Runs:
    """The rows, with FILL in place of those that are also in `others`."""
    rows = row_numbers(runs)
    return as_runs(np.where(np.isin(rows, row_numbers(others)), FILL, rows))


def as_runs(rows: Numbers) -> Runs:
    """Array of row numbers -> runs."""
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
    """The rows with `shift` added, modulo `length`."""
    if not shift:
        return blocks
    rows = (row_numbers(runs) for runs in blocks)
    return tuple(as_runs(np.where(r == FILL, FILL, (r + shift) % length)) for r in rows)


def _on_side(dim: Dim, length: int, sizes: Sizes, side: str) -> tuple[Runs, ...]:
    def chosen(span: RowSpan) -> Run:
        on = span.origin if is_flipped(span, dim) else STRAIGHT
        return span.run if on == side else Run(FILL, n_rows((span.run,)))

    return tuple(tuple(map(chosen, all_)) for all_ in all_row_spans(dim, length, sizes))


def _layers(runs: Runs) -> tuple[Runs, ...]:
    """Lists of distinct rows that together are all the rows; FILL elsewhere."""
    rows, layers = row_numbers(runs), []
    while (rows != FILL).any():
        now = np.where(_first_of_each(rows), rows, FILL)
        layers.append(as_runs(now))
        rows = np.where(now == FILL, rows, FILL)
    return tuple(layers)


def _first_of_each(rows: Numbers) -> NDArray[np.bool_]:
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    return first
