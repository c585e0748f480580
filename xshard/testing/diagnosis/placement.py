"""Mistakes of place: another device's block, swapped dims, a local index, wrong rows at seams."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from xshard.layout.block_rows import all_row_spans
from xshard.layout.partition import owner_of_rows
from xshard.steps.exchange.sources import dim_end
from xshard.testing.diagnosis.evidence import Case, Mask, in_double, names_of, subsets, wrong_rows


def stale(case: Case) -> str | None:
    """All devices hold the block of one."""
    mesh = case.sharding.mesh
    for axes in subsets(case.cut_axes):
        for index in range(mesh.size(*axes)):
            held = [mesh.group(d, axes)[index] for d in range(mesh.n_devices)]
            if all(case.near(got, case.want[h]) for got, h in zip(case.got, held, strict=True)):
                which = "the first device" if index == 0 else f"device {index}"
                return (
                    f"all devices along {names_of(axes)} hold the block of {which} there: a broadcast in "
                    "place of a scatter, a stale buffer, or an index that is the same on all"
                )
    return None


def exchanged(case: Case) -> str | None:
    """Whole blocks on the wrong devices."""
    mesh = case.sharding.mesh
    owners = [[d for d, want in enumerate(case.want) if case.near(got, want)] for got in case.got]
    moved = [(d, own[0]) for d, own in enumerate(owners) if own and d not in own]
    if not moved or not all(owners):
        return None
    places = "; ".join(f"{mesh.place(d)} has the block of {mesh.place(h)}" for d, h in moved[:3])
    return f"blocks are on other devices: {places}: axes in another order, or another rank's index"


def transposed(case: Case) -> str | None:
    """Two dims of equal length are swapped."""
    names = case.sharding.layout.names
    for a, b in itertools.combinations(range(len(names)), 2):
        if all(
            case.near(np.swapaxes(x, a, b), y) for x, y in zip(case.got, case.want, strict=True)
        ):
            return (
                f"dims {names[a]!r} and {names[b]!r} have changed places in every block: transposed"
            )
    return None


def first_only_right(case: Case) -> str | None:
    """Right on the first devices along an axis, wrong on all others."""
    mesh = case.sharding.mesh
    for axis in case.cut_axes:
        if case.wrong_devices == tuple(d for d in range(mesh.n_devices) if mesh.index(d, (axis,))):
            return (
                f"right where {axis}=0, wrong on all other devices along {axis}: the index in the block is "
                "used where the one in the array was meant (positions, masks, offsets)"
            )
    return None


_SEAMS = ("seams",)
_ENDS = ("ends",)
_MOST = 0.75
_LEAST = 0.25  # the largest part of the array near a seam; the least part of that to be wrong


def halo_rows(case: Case) -> str | None:
    """Blocks with right rows of their own and wrong borrowed rows."""
    for d, dim in enumerate(case.sharding.layout.dims):
        if dim.overlap is None:
            continue
        bad = [wrong_rows(mask, d) for mask in case.wrong]
        if not any((rows & ~_borrowed(case, d, device)).any() for device, rows in enumerate(bad)):
            device = case.wrong_devices[0]
            instead = _borrowed_instead(case, d, device, bad[device])
            return f"only the rows that blocks of '{dim}' borrow are wrong: {instead}"
    return None


def seam(case: Case) -> str | None:
    """Wrong near the ends of blocks, or near the ends of the array."""
    if not case.whole_wrong.any():
        return None
    cut = [d for d, dim in enumerate(case.sharding.layout.dims) if dim.axes]
    for place in (_SEAMS, _ENDS, _SEAMS + _ENDS):
        for dims in [[d] for d in cut] + ([cut] if len(cut) > 1 else []):
            if (reach := _reach(case, dims, place)) is None:
                continue
            names = " or ".join(f"{case.sharding.layout.names[d]!r}" for d in dims)
            within = f"wrong only within {reach} row{'s' * (reach > 1)} of"
            if place == _ENDS:
                return f"{within} the ends of {names}: the rule beyond the boundary is another"
            side = _side(case, dims[0]) if place == _SEAMS and len(dims) == 1 else ""
            more = "" if place == _SEAMS else " and the ends of the array"
            return (
                f"{within} the seams between blocks along {names}{more}{side}: "
                "a halo is missing, too narrow, stale or from the wrong neighbour"
            )
    return None


def _reach(case: Case, dims: list[int], place: tuple[str, ...]) -> int | None:
    """The fewest rows around the seams that hold all errors; None if the seams do not explain them."""
    wrong = case.whole_wrong
    distance = np.full(wrong.shape, max(wrong.shape))
    for d in dims:
        shape = [-1 if i == d else 1 for i in range(wrong.ndim)]
        distance = np.minimum(distance, _distances(case, d, place).reshape(shape))
    reach = int(distance[wrong].max())
    near = distance <= reach
    # Errors elsewhere lie far from a seam, or are few among the rows near it.
    return reach + 1 if near.mean() <= _MOST and wrong[near].mean() >= _LEAST else None


def _distances(case: Case, dim: int, place: tuple[str, ...]) -> NDArray[np.int64]:
    """Rows between each row of a dim and the next seam or end: 0 beside it."""
    n = case.sharding.shape[dim]
    starts = _starts(case, dim) * ("seams" in place) + [0, n] * ("ends" in place)
    rows = np.arange(n)
    distances = [np.full(n, n), *(np.where(rows >= s, rows - s, s - 1 - rows) for s in starts)]
    return np.asarray(np.min(distances, axis=0))


def _starts(case: Case, dim: int) -> list[int]:
    """Rows at which another device's block begins."""
    owner = owner_of_rows(*dim_end(case.sharding, dim)[:3])
    return (np.flatnonzero(np.diff(owner)) + 1).tolist()


def _side(case: Case, dim: int) -> str:
    """The side of the seams, if all errors are on one."""
    bad = np.flatnonzero(wrong_rows(case.whole_wrong, dim))
    seams = np.array(_starts(case, dim))
    nearest = seams[np.abs(seams[None, :] - 0.5 - bad[:, None]).argmin(axis=1)]
    if (bad >= nearest).all():
        return ", at the beginning of blocks (rows of the previous one)"
    if (bad < nearest).all():
        return ", at the end of blocks (rows of the next one)"
    return ""


def _borrowed(case: Case, dim: int, device: int) -> Mask:
    """The rows of a block that another device owns, or that lie beyond the ends of the array."""
    spans = all_row_spans(*dim_end(case.sharding, dim)[:3])[case.sharding.dim_device(dim, device)]
    borrowed = [np.full(span.run.length * span.run.repeats, span.origin != "own") for span in spans]
    return np.concatenate(borrowed) if borrowed else np.zeros(0, bool)


def _borrowed_instead(case: Case, dim: int, device: int, bad: Mask) -> str:
    """The values that the wrong rows of a block hold instead."""
    got, want = (np.moveaxis(in_double(x[device]), dim, 0) for x in (case.got, case.want))
    if not got[bad].any():
        return "zeros: nothing was exchanged"
    first, last = np.flatnonzero(bad)[[0, -1]]
    if first != last and case.near(got[first], want[last]) and case.near(got[last], want[first]):
        return "rows of the previous and of the next block have changed places"
    known = case.whole_want
    for other in range(known.ndim):
        if other != dim:
            known = known.take(case.rows(other, device), axis=other)
    known = np.moveaxis(known, dim, 0)
    rows = case.rows(dim, device)
    for i in np.flatnonzero(bad):
        for row, values in enumerate(known):
            if row != rows[i] and case.near(got[i], values):
                by = abs(row - int(rows[i]))
                return f"as on device {device}, where row {row} stands in place of row {rows[i]}: off by {by}"
    return "of no row of the array: stale, or computed"
