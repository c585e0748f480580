"""Rows of an array in the wrong order, and the order's name, if a cut over mesh axes makes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xshard.formatting import range_text
from xshard.layout import Mesh
from xshard.layout.partition import owned_rows
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Dim, Shard
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import Case, Mask, rows_of_dim, wrong_rows

Order = NDArray[np.int64]  # numbers of the rows of a dim

_ORDERS = ("block", "zigzag", "cyclic")
_NOWHERE = -1
# Of the rows with another position this share has to be wrong: attention may leave some right.
_MIN_WRONG_SHARE = 0.75
_MAX_RUNS_SHOWN = 4
_MAX_ROWS_SHOWN = 4
_MAX_AXES = 3  # of a dim's cut, in trying which order is meant


def moved_rows(case: Case) -> str | None:
    """Recognise an array that has the right rows in the wrong order, and say in which order.

    Such as rows that were stored in zigzag order and read as consecutive ones, blocks with swapped
    halves, or all rows off by one. Returns a sentence for the report on the first such dim, or None
    if no dim has its rows in another order.
    """
    if case.whole_got is None:  # replicas differ: the blocks are not one array
        return None
    for d, dim in enumerate(case.dims):
        got_rows = rows_of_dim(case.whole_got, d)
        # Which right row each row equals, [rows]: (1, 0, -1) if row 0 holds row 1, and row 1 row 0.
        origins = _find_origins(got_rows, rows_of_dim(case.whole_want, d), case)
        if np.array_equal(origins, np.arange(len(origins))):
            continue
        if (origins != _NOWHERE).all():
            return _order_text(origins, dim, case.mesh)
        # Rows that equal none of the array may have come in at its ends: all others are then off
        # by the same number of rows.
        offset = _offset(origins, dim)
        if offset is not None:
            return offset
    return None


def _order_text(origins: Order, dim: Dim, mesh: Mesh) -> str | None:
    """Name the order of rows, by the first that fits: a known mistake, an offset, or a list of rows."""
    named = _named_order(origins, dim, mesh)
    if named is not None:
        return named
    offset = _offset(origins, dim)
    return _listed_rows(origins, dim) if offset is None else offset


def positions(case: Case) -> str | None:
    """Find rows that are right only where another order, or the index in the block, has the same position."""
    # Positions matter where blocks are cut: an uncut dim has one index only.
    for d, dim in enumerate(case.dims):
        if not set(dim.axes) & set(case.cut_axes):
            continue
        wrong = wrong_rows(case.whole_wrong, d)
        names = _assumptions_that_explain(wrong, replace(dim, overlap=None), case.mesh)
        if names:
            return (
                f"right in rows {rows_text(~wrong)} of {dim.name!r} alone, where it makes no difference that "
                f"positions are {' or '.join(names)} in place of '{dim}' (rotary embeddings, masks)"
            )
    return None


def _assumptions_that_explain(wrong: Mask, dim: Dim, mesh: Mesh) -> list[str]:
    """Find which wrong positions (row numbers) a function may have used, by the wrong rows.

    A device that takes the index in its own block for the global position is right on the first
    block only: with 4 rows on 2 devices, rows 2 and 3 are wrong. `wrong` says of each row whether it
    is wrong, [rows]. Returns the names of assumptions that explain the wrong rows exactly; if there
    are none, of those that explain most of them.
    """
    exact: list[str] = []
    partial: list[str] = []
    for name, has_right_position in _assumed_positions(dim, len(wrong), mesh):
        # Which rows would be right? Those with the right position; under causal attention, only if
        # all rows before them have theirs, too.
        so_far = np.logical_and.accumulate(has_right_position)
        for expected_right in (has_right_position, so_far):
            if _explains(expected_right, wrong):
                names = exact if (wrong == ~expected_right).all() else partial
                names.append(name)
                break
    return exact if exact else partial


def _explains(right: Mask, wrong: Mask) -> bool:
    """Tell whether rows that should be right are, and most of the others are wrong."""
    if not right.any() or wrong[right].any():
        return False
    return bool(wrong[~right].mean() >= _MIN_WRONG_SHARE)


def _assumed_positions(dim: Dim, n_rows: int, mesh: Mesh) -> Iterator[tuple[str, Mask]]:
    """Yield wrong ways to number the rows of a sharded dim, and which rows they number rightly.

    Such as ("the index in the block", mask): for 4 rows on 2 devices, that numbers them 0, 1, 0, 1,
    so the mask is (True, True, False, False). The mask, [rows], is in the order of the whole array.
    The other ways are the numbers of another shard order: "those of 's/zigzag(cp)'".
    """
    rows_of_blocks = list(_blocks(dim, n_rows, mesh))  # the right numbers: [rows] for each block
    lengths = list(map(len, rows_of_blocks))
    # By name of the way: the numbers that it gives the rows of each block.
    assumed = {"the index in the block": list(map(np.arange, lengths))}
    for order in _ORDERS:
        other = Dim(dim.name, (Shard(dim.axes, order),))
        assumed[f"those of '{other}'"] = list(_blocks(other, n_rows, mesh))

    rows = np.concatenate(rows_of_blocks)
    for name, positions_in_blocks in assumed.items():
        # Positions for blocks of other lengths cannot have been used for these blocks.
        if list(map(len, positions_in_blocks)) != lengths:
            continue
        # From the order of blocks to the order of the array.
        is_right = np.zeros(n_rows, bool)
        is_right[rows] = np.concatenate(positions_in_blocks) == rows
        if not is_right.all():  # else it is not wrong here
            yield name, is_right


def rows_text(rows: Mask) -> str:
    """Write the rows of a mask: [True, True, False, True] -> "0-1, 3"."""
    padded = np.concatenate([[False], rows, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))  # starts and ends of runs, in turn
    runs = []
    for start, end in edges.reshape(-1, 2):
        runs.append(range_text(start, end - 1))
    if not runs:
        return "none"
    if len(runs) > _MAX_RUNS_SHOWN:
        runs = [*runs[:_MAX_RUNS_SHOWN], f"... ({rows.sum()} of {len(rows)})"]
    return ", ".join(runs)


def _find_origins(got_rows: Block, want_rows: Block, case: Case) -> Order:
    """Find for each row of an array the number of the right row that it equals, [rows].

    Rows a, b, c that arrive as b, a, x -> (1, 0, -1): -1 stands for a row that equals none. A row
    that equals several takes the one in its own place. Both arrays are [rows, elements].
    """
    # To find the candidate for each row, compare numbers and not rows: equal rows have equal products
    # with one random vector. Only the nearest candidate is then compared in full.
    probe = np.random.default_rng(0).normal(size=got_rows.shape[1])
    differences = (got_rows @ probe)[:, None] - want_rows @ probe
    nearest = np.abs(differences).argmin(axis=1)
    origins = np.full(len(got_rows), _NOWHERE, np.int64)
    for row, candidate in enumerate(nearest):
        if case.near(got_rows[row], want_rows[row]):
            origins[row] = row
        elif case.near(got_rows[row], want_rows[candidate]):
            origins[row] = candidate
    return origins


def stored_rows(dim: Dim, length: int, mesh: Mesh) -> Order:
    """List the rows of a dim as the devices hold them, in the mesh's order of the dim's axes.

    >>> from xshard.layout.layout import Layout
    >>> stored_rows(Layout.parse("s/zigzag(cp)").dims[0], 8, Mesh(cp=2)).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return np.concatenate(list(_blocks(dim, length, mesh)))


def _blocks(dim: Dim, length: int, mesh: Mesh) -> Iterator[Order]:
    """Yield the rows of every block of a dim, in the mesh's order of the dim's axes."""
    axes = sorted(dim.axes, key=mesh.position)
    sizes = mesh.sizes_of(dim.axes)
    for coordinates in itertools.product(*map(range, mesh.sizes_of(axes))):
        index = dict(zip(axes, coordinates, strict=True))
        yield row_numbers(owned_rows(dim, length, sizes, [index[axis] for axis in dim.axes]))


def _named_order(origins: Order, dim: Dim, mesh: Mesh) -> str | None:
    """Say in a sentence which known mistake put rows in this order, or None if it is none of them.

    Known are reversed rows, swapped halves of each block, and rows that are stored in one shard
    order (consecutive, zigzag, cyclic) and read in another. `origins` says for each row of the
    array which row it holds, [rows]: (3, 2, 1, 0) is the reverse of 4 rows.
    """
    n_rows = len(origins)
    if np.array_equal(origins[::-1], np.arange(n_rows)):
        return f"rows of {dim.name!r} are in reverse order"

    # A cut is a way to shard the dim: `s/cp`, `s/zigzag(cp)`, ... The layout's own comes first.
    declared = replace(dim, overlap=None)
    cuts = list(dict.fromkeys([declared, *_cuts(declared, mesh)]))
    # The layout of an unsharded dim does not say in which order the function itself sharded it, so
    # all orders are tried.
    for cut in [declared] if declared.axes else cuts:
        blocks = list(_blocks(cut, n_rows, mesh))
        if _halves_swapped(origins[np.concatenate(blocks)], blocks):
            return (
                f"the first and the second half of every block of '{cut}' have changed places: "
                "head and tail swapped"
            )
    orders = {cut: stored_rows(cut, n_rows, mesh) for cut in cuts}  # the rows, block after block
    for meant, stored in _pairs_of_cuts(cuts):
        if np.array_equal(orders[meant], orders[stored]):
            continue  # two notations of one order
        # If so, place i of the array holds the row that the stored order has at that place.
        if np.array_equal(origins[orders[meant]], orders[stored]):
            return (
                f"rows of {dim.name!r} that are stored as '{stored}' are taken for '{meant}': "
                "another shard order"
            )
    return None


def _halves_swapped(rows: Order, blocks: list[Order]) -> bool:
    """Tell whether the rows are those of the blocks with their halves exchanged."""
    if any(len(block) % 2 for block in blocks):
        return False
    swapped = [np.roll(block, len(block) // 2) for block in blocks]
    return np.array_equal(rows, np.concatenate(swapped))


def _pairs_of_cuts(cuts: list[Dim]) -> Iterator[tuple[Dim, Dim]]:
    """Yield pairs of cuts that may be taken for each other: over the same axes, then with the whole dim.

    `s/cp` taken for `s/zigzag(cp)` says more than `s` taken for it.
    """
    pairs = list(itertools.product(cuts, cuts))
    for meant, stored in pairs:
        if sorted(meant.axes) == sorted(stored.axes):
            yield meant, stored
    for meant, stored in pairs:
        if bool(meant.axes) != bool(stored.axes):
            yield meant, stored


def _offset(origins: Order, dim: Dim) -> str | None:
    """Find one offset that all rows found elsewhere have, and at least half of the rows are found."""
    # Rows that have come in at one end may equal no row of the array.
    found_rows = np.flatnonzero(origins != _NOWHERE)
    offsets = np.unique(origins[found_rows] - found_rows)
    if len(offsets) != 1 or offsets[0] == 0 or 2 * len(found_rows) < len(origins):
        return None
    offset = offsets[0]
    return (
        f"row r of {dim.name!r} holds what belongs to row r{offset:+d}: off by {abs(offset)} "
        "(a halo one wider at one end and narrower at the other, an offset, "
        "a window that begins elsewhere)"
    )


def _listed_rows(origins: Order, dim: Dim) -> str | None:
    """List the first rows of an order without a name."""
    if len(np.unique(origins)) < len(origins):
        return None  # some rows twice: then the block's owner tells more
    moved = np.flatnonzero(origins != np.arange(len(origins)))
    rows = ", ".join(f"{row} holds {origins[row]}" for row in moved[:_MAX_ROWS_SHOWN])
    return f"rows of {dim.name!r} are in another order: {rows}, ..."


def _cuts(dim: Dim, mesh: Mesh) -> Iterator[Dim]:
    """Yield cuts of a dim over the mesh's axes: in every order, axes in every order, together and nested."""
    for n_axes in range(1, _MAX_AXES + 1):
        for axes in itertools.permutations(mesh.long_axes, n_axes):
            for order in _ORDERS:
                yield Dim(dim.name, (Shard(axes, order),))
            if n_axes == 2:
                for outer, inner in itertools.product(_ORDERS, _ORDERS):
                    yield Dim(dim.name, (Shard(axes[:1], outer), Shard(axes[1:], inner)))
