"""Which device provides a row that several hold, and which rows each device wants.

A block's rows are listed by position, with FILL at positions whose row another block provides, or
that have no row of the array.
"""

from __future__ import annotations

import math

import numpy as np

from xshard.caches import layout_cache
from xshard.layout.block_rows import RowSpan, all_held_rows, all_row_spans, is_flipped
from xshard.layout.partition import Sizes, all_owned_rows
from xshard.layout.pieces import (
    concatenate_tables,
    fill_blocks,
    first_occurrences,
    layers,
    rows_outside,
    runs_by_row,
)
from xshard.layout.runs import (
    FILL,
    AllRuns,
    Rows,
    Run,
    Runs,
    as_runs,
    count_rows,
    interval,
    interval_table,
    row_numbers,
)
from xshard.notation.overlap import Fold, Reads, unfolded
from xshard.notation.parser import Dim

# Who provides a row: its owner, else a neighbour, else who has a copy from beyond an end.
_ORIGINS_BY_RANK = (("own",), ("near",), ("before", "after"))
_ALL_ORIGINS = ("own", "near", "before", "after")

# The `pole_side` of rows that do not come from beyond a pole; others have "before" or "after".
STRAIGHT = "straight"


# ---- what blocks want, offer and have


@layout_cache(maxsize=4096)
def wanted_rows(
    dim: Dim, length: int, sizes: Sizes, pole_side: str = STRAIGHT, shift: int = 0
) -> AllRuns:
    """List, for each block of a dim, the rows that it must receive in a redistribution.

    "n/x" with 8 rows on x=2 -> rows 0-3, rows 4-7; "n/x:halo(1,1)" -> FILL 0-4, 3-7 FILL. FILL is a
    position that wants no row of the array, such as padding. Under a Fold the same row in several
    blocks is an addend of one sum: only one block wants the sum, and the others have FILL.

    Args:
        dim: A dim of the layout of the result.
        length: Its number of rows.
        sizes: The size of each axis of the dim.
        pole_side: Which rows of each block, if the dim ends at a pole of a sphere: "before" or "after"
            for the rows beyond its first or last row, STRAIGHT for all others. A dim without poles
            has STRAIGHT rows only.
        shift: A number that is added to each row, modulo the length.

    Returns:
        The rows of every block, row-major.
    """
    if not isinstance(dim.overlap, Fold):
        blocks = _rows_on_side(dim, length, sizes, pole_side)
    elif pole_side == STRAIGHT:
        blocks = provided_rows(dim, length, sizes)
    else:
        blocks = _no_rows(sizes)  # a sum is stored in the array, never beyond a pole
    return shift_rows(blocks, shift, length)


@layout_cache(maxsize=4096)
def offered_rows(
    dim: Dim, length: int, sizes: Sizes, pole_side: str = STRAIGHT, shift: int = 0
) -> tuple[AllRuns, ...]:
    """List, for each block of a dim, the rows that others may take from it.

    "n/x:halo(1,1)" with 8 rows on x=2: block 0 offers rows 0-3, and not row 4 of its halo, since
    each row is offered once. Under a Fold the same row in several blocks is an addend of one sum,
    and all are offered.

    Args:
        dim: A dim of the layout before.
        length: Its number of rows.
        sizes: The size of each axis of the dim.
        pole_side: As in `wanted_rows`: rows beyond a pole, or all others (STRAIGHT).
        shift: A number that is added to each row, modulo the length.

    Returns:
        For each block a tuple of lists of rows, by local position. No list has a row twice: under a
        Fold, a block with a row n times has n lists.
    """
    if not isinstance(dim.overlap, Fold):
        if pole_side != STRAIGHT:
            return ((),) * math.prod(sizes)  # no lists: copies beyond a pole are never offered
        provided = shift_rows(provided_rows(dim, length, sizes), shift, length)
        return tuple((block,) for block in provided)
    contributed = shift_rows(_rows_on_side(dim, length, sizes, pole_side), shift, length)
    if _are_distinct(dim):
        return tuple((block,) for block in contributed)
    return tuple(map(_distinct_lists, contributed))


def _distinct_lists(block: Runs) -> AllRuns:
    """Split the rows of a block into lists without a row twice: 0 1 0 -> 0 1 FILL and FILL FILL 0."""
    lengths = [count_rows(block)]
    return tuple(fill_blocks(layer, lengths)[0] for layer in layers(interval_table((block,))))


@layout_cache(maxsize=4096)
def distinct_held_rows(dim: Dim, length: int, sizes: Sizes, shift: int = 0) -> AllRuns:
    """List the rows that each block has, each once; its own rows come before copies."""
    if _are_distinct(dim):
        blocks = all_held_rows(dim, length, sizes)
    else:
        blocks = _rows_by_rank(dim, length, sizes, per_block=True)
    return shift_rows(blocks, shift, length)


@layout_cache(maxsize=4096)
def provided_rows(dim: Dim, length: int, sizes: Sizes) -> AllRuns:
    """List, for each block, the rows that it alone provides, though others may have copies.

    "n/x:halo(1,1)" with 4 rows on x=2: blocks hold FILL 0 1 2 and 1 2 3 FILL, and provide
    FILL 0 1 FILL and FILL 2 3 FILL: at each position the row, or FILL where another block provides
    it. A row is provided by the device that owns it. If that does not hold it, as under a halo of
    negative width, a block with the row as a neighbour's does; else one that copies it from beyond
    an end of the array.
    """
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    if not _are_distinct(dim):
        return _rows_by_rank(dim, length, sizes, per_block=False)
    # The remaining overlap is a map of rows to read: a block is its own rows, then others' rows.
    owned = all_owned_rows(dim, length, sizes)
    held = all_held_rows(dim, length, sizes)
    blocks = []
    for owned_block, held_block in zip(owned, held, strict=True):
        rows = row_numbers(owned_block)
        n_others = count_rows(held_block) - len(rows)
        blocks.append(as_runs(np.pad(rows, (0, n_others), constant_values=FILL)))
    return tuple(blocks)


@layout_cache(maxsize=4096)
def missing_rows(dim: Dim, length: int, sizes: Sizes) -> Runs:
    """List the rows that no block holds, as under a halo of negative width."""
    if _are_distinct(dim):
        return ()
    all_rows = interval_table((interval(0, length),))
    provided = interval_table(provided_rows(dim, length, sizes))
    return runs_by_row(rows_outside(all_rows, provided), 1)[0]


# ---- rows of blocks in general


def rows_without(runs: Runs, excluded: Runs) -> Runs:
    """Replace the rows that are also in `excluded` by FILL: 4 5 6 without 5 -> 4 FILL 6."""
    if isinstance(runs, Rows) or isinstance(excluded, Rows):
        row_array = row_numbers(runs)
        is_excluded = np.isin(row_array, row_numbers(excluded), kind="table")
        return as_runs(np.where(is_excluded, FILL, row_array))
    remaining = rows_outside(interval_table((runs,)), interval_table((excluded,)))
    return fill_blocks(remaining, [count_rows(runs)])[0]


def shift_rows(blocks: AllRuns, shift: int, length: int) -> AllRuns:
    """Add `shift` to the row numbers of all blocks, modulo `length`.

    Rows 2 to 5 of 8, shifted by 4 -> 6 7 0 1: an interval that reaches over the end becomes two.
    Positions of FILL, which is no row, stay as they are.
    """
    if not shift:
        return blocks
    table = interval_table(blocks)
    start = (table.start + shift) % length
    rows_over_end = np.maximum(start + table.length - length, 0)
    rows_before_end = table.length - rows_over_end
    # The rows before the end of the array, and those that go on at its beginning.
    heads = table._replace(start=start, length=rows_before_end)
    tails = table._replace(
        local=table.local + rows_before_end, start=np.zeros_like(start), length=rows_over_end
    )
    shifted_table = concatenate_tables(heads, tails.take(rows_over_end > 0))
    return fill_blocks(shifted_table, list(map(count_rows, blocks)))


def _no_rows(sizes: Sizes) -> AllRuns:
    """Return no rows for every block."""
    return ((),) * math.prod(sizes)


def _are_distinct(dim: Dim) -> bool:
    """Return whether no block has a row twice, or from beyond the ends of the array.

    A dim without an overlap has owned rows alone, and a map lists rows of other parts.
    """
    return dim.overlap is None or isinstance(unfolded(dim.overlap), Reads)


def _rows_by_rank(dim: Dim, length: int, sizes: Sizes, *, per_block: bool) -> AllRuns:
    """List the rows of each block that come first, by rank of their origin; FILL elsewhere.

    First in each block if `per_block`, else first in any block.
    """
    tables = []
    for origins in _ORIGINS_BY_RANK:
        tables.append(interval_table(_rows_of_origins(dim, length, sizes, origins, flipped=False)))
    # The tables are in the order of ranks: a row comes first where it has the best origin.
    table = first_occurrences(concatenate_tables(*tables), per_block=per_block)
    return fill_blocks(table, list(map(count_rows, all_held_rows(dim, length, sizes))))


def _rows_on_side(dim: Dim, length: int, sizes: Sizes, pole_side: str) -> AllRuns:
    """List the rows of each block from beyond a pole, or all others (STRAIGHT); FILL elsewhere."""
    if _are_distinct(dim):  # no rows from beyond the ends of the array
        return all_held_rows(dim, length, sizes) if pole_side == STRAIGHT else _no_rows(sizes)
    origins = _ALL_ORIGINS if pole_side == STRAIGHT else (pole_side,)
    return _rows_of_origins(dim, length, sizes, origins, flipped=pole_side != STRAIGHT)


def _rows_of_origins(
    dim: Dim, length: int, sizes: Sizes, origins: tuple[str, ...], *, flipped: bool
) -> AllRuns:
    """List the rows of each block that come from some origins (see `RowSpan`); FILL elsewhere.

    flipped: only rows from the far side of a pole; else only rows that are not.
    """
    blocks = []
    for spans in all_row_spans(dim, length, sizes):
        blocks.append(tuple(_run_or_fill(span, dim, origins, flipped) for span in spans))
    return tuple(blocks)


def _run_or_fill(span: RowSpan, dim: Dim, origins: tuple[str, ...], flipped: bool) -> Run:
    """Return the rows of a span if they are wanted, else as many rows of FILL."""
    if span.origin in origins and is_flipped(span, dim) == flipped:
        return span.run
    return Run(FILL, span.run.length * span.run.repeats)
