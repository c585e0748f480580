"""Rows of an array in the wrong order, and its name, if a cut over mesh axes makes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xshard.layout import Mesh
from xshard.layout.partition import owned_rows
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Dim, Shard
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import Case, Mask, wrong_rows

Order = NDArray[np.int64]  # of the rows of a dim

_ORDERS = ("block", "zigzag", "cyclic")
_NOWHERE = -1
_MOSTLY = 0.75  # of the rows with another position, which attention may all the same leave right
_RUNS = 4  # of rows that a sentence lists


def moved_rows(case: Case) -> str | None:
    """Rows of a dim in another order: another cut, swapped ends, or an offset."""
    if case.whole_got is None:
        return None
    for d, dim in enumerate(case.sharding.layout.dims):
        came = matched(np.moveaxis(case.whole_got, d, 0), np.moveaxis(case.whole_want, d, 0), case)
        if (came == np.arange(len(came))).all():
            continue
        if (came != _NOWHERE).all():
            return (
                _named(came, dim, case.sharding.mesh) or _shifted(came, dim) or _listed(came, dim)
            )
        if shifted := _shifted(came, dim):
            return shifted
    return None


def positions(case: Case) -> str | None:
    """Right only where another order, or the index in the block, has the same position."""
    for d, dim in enumerate(case.sharding.layout.dims):
        if not set(dim.axes) & set(case.cut_axes):
            continue
        wrong = wrong_rows(case.whole_wrong, d)
        assumed: dict[bool, list[str]] = {True: [], False: []}
        for name, same in _assumed(replace(dim, overlap=None), len(wrong), case.sharding.mesh):
            # Under causal attention a row is right only if all rows before it have their positions.
            for right in (same, np.logical_and.accumulate(same)):
                if right.any() and not wrong[right].any() and wrong[~right].mean() >= _MOSTLY:
                    assumed[bool((wrong == ~right).all())].append(name)
                    break
        if names := assumed[True] or assumed[False]:
            return (
                f"right in rows {rows_text(~wrong)} of {dim.name!r} alone, where it makes no difference that "
                f"positions are {' or '.join(names)} in place of '{dim}' (rotary embeddings, masks)"
            )
    return None


def _assumed(dim: Dim, n: int, mesh: Mesh) -> Iterator[tuple[str, Mask]]:
    """Positions that may have been taken for a dim's, by name, and the rows that they are right for."""
    blocks = list(_blocks(dim, n, mesh))
    own = np.concatenate(blocks)
    named = {"the index in the block": [np.arange(len(block)) for block in blocks]}
    for order in _ORDERS:
        other = Dim(dim.name, (Shard(dim.axes, order),))
        named[f"those of '{other}'"] = list(_blocks(other, n, mesh))
    for name, rows in named.items():
        if list(map(len, rows)) == list(map(len, blocks)):
            same = np.zeros(n, bool)
            same[own] = np.concatenate(rows) == own
            if not same.all():
                yield name, same


def rows_text(rows: Mask) -> str:
    """The rows of a mask in a sentence, as in `0-1, 3`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rows, [False]]).astype(np.int8)))
    runs = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in edges.reshape(-1, 2)]
    more = [f"... ({rows.sum()} of {len(rows)})"] if len(runs) > _RUNS else []
    return ", ".join((*runs[:_RUNS], *more)) or "none"


def matched(got: Block, want: Block, case: Case) -> Order:
    """For every row of `got` the row of `want` that it equals, the one in its place first; -1 for none."""
    n = len(got)
    a = got.reshape(n, -1)
    b = want.reshape(n, -1)
    probe = np.random.default_rng(0).normal(size=a.shape[1])
    seen = a @ probe
    known = b @ probe  # equal rows have equal products
    nearest = np.abs(seen[:, None] - known[None, :]).argmin(axis=1)
    pairs = enumerate(nearest)
    rows = [
        r if case.near(a[r], b[r]) else f if case.near(a[r], b[f]) else _NOWHERE for r, f in pairs
    ]
    return np.array(rows, np.int64)


def stored_rows(dim: Dim, length: int, mesh: Mesh) -> Order:
    """The rows of a dim as the devices hold them, in the mesh's order of the dim's axes.

    >>> from xshard.layout.layout import Layout
    >>> stored_rows(Layout.parse("s/zigzag(cp)").dims[0], 8, Mesh(cp=2)).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return np.concatenate(list(_blocks(dim, length, mesh)) or [np.arange(length)])


def _blocks(dim: Dim, length: int, mesh: Mesh) -> Iterator[Order]:
    axes = sorted(dim.axes, key=mesh.position)
    for coords in itertools.product(*map(range, mesh.sizes_of(axes))):
        index = dict(zip(axes, coords, strict=True))
        yield row_numbers(
            owned_rows(dim, length, mesh.sizes_of(dim.axes), [index[a] for a in dim.axes])
        )


def _named(came: Order, dim: Dim, mesh: Mesh) -> str | None:
    """Which order is taken for which: `came[order it should have] == order it has`."""
    n = len(came)
    own = replace(dim, overlap=None)
    if np.array_equal(came, np.arange(n)[::-1]):
        return f"rows of {dim.name!r} are in reverse order"
    cuts = tuple(dict.fromkeys((own, *_cuts(own, mesh))))
    orders = {cut: stored_rows(cut, n, mesh) for cut in cuts}
    for meant in (own,) if own.axes else cuts:
        halves = [np.roll(block, len(block) // 2) for block in _blocks(meant, n, mesh)]
        is_even = all(len(half) % 2 == 0 for half in halves)
        if is_even and np.array_equal(came[orders[meant]], np.concatenate(halves)):
            swapped = (
                f"the first and the second half of every block of '{meant}' have changed places"
            )
            return f"{swapped}: head and tail swapped"
    # Orders over the same axes come before the whole dim: `s/cp` says more than `s`.
    pairs = sorted(
        itertools.product(cuts, cuts), key=lambda pair: bool(pair[0].axes) != bool(pair[1].axes)
    )
    for meant, other in pairs:
        if meant.axes and other.axes and sorted(meant.axes) != sorted(other.axes):
            continue
        rows = orders[meant]
        stored = orders[other]
        if not np.array_equal(rows, stored) and np.array_equal(came[rows], stored):
            stored_as = f"rows of {dim.name!r} that are stored as '{other}'"
            return f"{stored_as} are taken for '{meant}': another shard order"
    return None


def _shifted(came: Order, dim: Dim) -> str | None:
    matched_rows = np.flatnonzero(came != _NOWHERE)
    steps = np.unique(came[matched_rows] - matched_rows)
    if len(steps) != 1 or steps[0] == 0 or 2 * len(matched_rows) < len(came):
        return None
    off = f"row r of {dim.name!r} holds what belongs to row r{steps[0]:+d}: off by {abs(steps[0])}"
    why = "a halo one wider at one end and narrower at the other, an offset, a window that begins elsewhere"
    return f"{off} ({why})"


def _listed(came: Order, dim: Dim) -> str | None:
    moved = np.flatnonzero(came != np.arange(len(came)))
    if len(np.unique(came)) < len(came):
        return None  # some rows twice: then the block's owner tells more
    rows = ", ".join(f"{r} holds {came[r]}" for r in moved[:4])
    return f"rows of {dim.name!r} are in another order: {rows}, ..."


def _cuts(dim: Dim, mesh: Mesh) -> Iterator[Dim]:
    """Cuts of a dim over the mesh's axes: in every order, axes in every order, together and nested."""
    for count in (1, 2, 3):
        for axes in itertools.permutations(mesh.long_axes, count):
            for order in _ORDERS:
                yield Dim(dim.name, (Shard(axes, order),))
            if count == 2:
                for outer, inner in itertools.product(_ORDERS, _ORDERS):
                    yield Dim(dim.name, (Shard(axes[:1], outer), Shard(axes[1:], inner)))
