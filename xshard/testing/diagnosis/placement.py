"""Mistakes of place: another device's block, swapped dims, a local index, wrong rows at seams.

Each public function is a finder, see `causes`.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from xshard.layout.block_rows import all_row_spans
from xshard.layout.partition import owner_of_rows
from xshard.steps.base import Block
from xshard.steps.exchange.sources import dim_end
from xshard.testing.diagnosis.evidence import (
    Case,
    Mask,
    names_of,
    rows_of_dim,
    subsets,
    wrong_rows,
)

_SEAMS = ("seams",)  # where blocks meet
_ENDS = ("ends",)  # of the array
_MAX_NEAR_SHARE = 0.75  # of the array near a seam: of more, nearness says nothing
_MIN_WRONG_SHARE = 0.25  # of the elements near a seam
_MAX_MOVES_SHOWN = 3


def stale(case: Case) -> str | None:
    """Find the block of one device on all devices along an axis."""
    mesh = case.mesh
    for axes in subsets(case.cut_axes):
        for index in range(mesh.size(*axes)):
            # Within its group along the axes, each device holds what this member should.
            members = [mesh.group(device, axes)[index] for device in range(mesh.n_devices)]
            if case.all_near(case.got, [case.want[member] for member in members]):
                owner = "the first device" if index == 0 else f"device {index}"
                return (
                    f"all devices along {names_of(axes)} hold the block of {owner} there: a broadcast in "
                    "place of a scatter, a stale buffer, or an index that is the same on all"
                )
    return None


def exchanged(case: Case) -> str | None:
    """Find whole blocks on the wrong devices."""
    mesh = case.mesh
    moves = []
    for device, got in enumerate(case.got):
        owners = [other for other, want in enumerate(case.want) if case.near(got, want)]
        if not owners:
            return None
        if device not in owners:  # several owners hold equal blocks
            moves.append(f"{mesh.place(device)} has the block of {mesh.place(owners[0])}")
    if not moves:
        return None
    shown = "; ".join(moves[:_MAX_MOVES_SHOWN])
    return f"blocks are on other devices: {shown}: axes in another order, or another rank's index"


def transposed(case: Case) -> str | None:
    """Find two dims of equal length that are swapped in every block."""
    names = case.sharding.layout.names
    for a, b in itertools.combinations(range(len(names)), 2):
        swapped = [np.swapaxes(block, a, b) for block in case.got]
        if case.all_near(swapped, case.want):
            return (
                f"dims {names[a]!r} and {names[b]!r} have changed places in every block: transposed"
            )
    return None


def first_only_right(case: Case) -> str | None:
    """Find blocks that are right on the first devices along an axis, and wrong on all others."""
    mesh = case.mesh
    for axis in case.cut_axes:
        if case.wrong_devices == tuple(np.flatnonzero(mesh.indices((axis,)))):
            return (
                f"right where {axis}=0, wrong on all other devices along {axis}: the index in the block is "
                "used where the one in the array was meant (positions, masks, offsets)"
            )
    return None


def halo_rows(case: Case) -> str | None:
    """Find blocks whose own rows are right and whose borrowed rows are wrong."""
    for d, dim in enumerate(case.dims):
        if dim.overlap is None:
            continue
        if not _has_wrong_own_rows(case, d):
            found = _found_in_halo(case, d, case.wrong_devices[0])
            return f"only the rows that blocks of '{dim}' borrow are wrong: {found}"
    return None


def _has_wrong_own_rows(case: Case, dim: int) -> bool:
    """Tell whether a row is wrong that its device owns."""
    for device, mask in enumerate(case.wrong):
        wrong_own_rows = wrong_rows(mask, dim) & ~_borrowed_rows(case, dim, device)
        if wrong_own_rows.any():
            return True
    return False


def seam(case: Case) -> str | None:
    """Recognise errors that are only near the borders of blocks, or near the ends of the array.

    They point at a missing or wrong halo exchange (rows of neighbours that a convolution needs), or
    at a wrong rule beyond the ends. Returns a sentence for the report, or None.
    """
    if not case.whole_wrong.any():
        return None
    cut_dims = [d for d, dim in enumerate(case.dims) if dim.axes]
    candidates = [[d] for d in cut_dims]
    if len(cut_dims) > 1:
        candidates.append(cut_dims)
    # The simplest explanation first: borders between blocks, the array's ends, or both; of one dim
    # before all dims.
    for places in (_SEAMS, _ENDS, _SEAMS + _ENDS):
        for dims in candidates:
            reach = _reach_of_errors(case, dims, places)
            if reach is not None:
                return _seam_text(case, dims, places, reach)
    return None


def _seam_text(case: Case, dims: list[int], places: tuple[str, ...], reach: int) -> str:
    """Write a sentence on errors that are within `reach` rows of the borders of blocks.

    Such as "wrong only within 1 row of the seams between blocks along 's': a halo is missing, ...".

    `places` says which borders: `_SEAMS`, between blocks, `_ENDS`, of the array, or both as one
    tuple. `dims` are the numbers of the dims whose borders these are.
    """
    names = " or ".join(repr(case.sharding.layout.names[d]) for d in dims)
    rows = "row" if reach == 1 else "rows"
    within = f"wrong only within {reach} {rows} of"
    if places == _ENDS:
        return f"{within} the ends of {names}: the rule beyond the boundary is another"
    detail = ""
    if places != _SEAMS:
        detail = " and the ends of the array"
    elif len(dims) == 1:
        detail = _side_of_seams(case, dims[0])
    return (
        f"{within} the seams between blocks along {names}{detail}: "
        "a halo is missing, too narrow, stale or from the wrong neighbour"
    )


def _reach_of_errors(case: Case, dims: list[int], places: tuple[str, ...]) -> int | None:
    """Return the fewest rows around seams or ends that hold all errors; None if these do not explain them."""
    wrong = case.whole_wrong
    distance = np.full(wrong.shape, max(wrong.shape))  # of each element to the nearest place
    for d in dims:
        shape = [1] * wrong.ndim
        shape[d] = -1
        distance = np.minimum(distance, _distances(case, d, places).reshape(shape))
    largest_distance = int(distance[wrong].max())
    near = distance <= largest_distance
    # Otherwise errors lie far from a seam, or are few among the rows near it.
    if near.mean() > _MAX_NEAR_SHARE or wrong[near].mean() < _MIN_WRONG_SHARE:
        return None
    return largest_distance + 1


def _distances(case: Case, dim: int, places: tuple[str, ...]) -> NDArray[np.int64]:
    """Count the rows between each row of a dim and the nearest seam or end: 0 beside it."""
    n_rows = case.sharding.shape[dim]
    boundaries: list[int] = []  # the row after each
    if "seams" in places:
        boundaries += _block_starts(case, dim)
    if "ends" in places:
        boundaries += [0, n_rows]
    rows = np.arange(n_rows)
    distances = np.full(n_rows, n_rows)
    for boundary in boundaries:
        distance = np.where(rows >= boundary, rows - boundary, boundary - 1 - rows)
        distances = np.minimum(distances, distance)
    return distances


def _block_starts(case: Case, dim: int) -> list[int]:
    """List the rows at which another device's block begins."""
    end = dim_end(case.sharding, dim)
    owners = owner_of_rows(end.dim, end.length, end.sizes)
    return (np.flatnonzero(np.diff(owners)) + 1).tolist()


def _side_of_seams(case: Case, dim: int) -> str:
    """Name the side of the seams, if all errors are on one; "" if not."""
    wrong = np.flatnonzero(wrong_rows(case.whole_wrong, dim))
    seams = np.array(_block_starts(case, dim))
    # A seam lies between two rows: half a row before the one that follows it.
    distances = np.abs(seams - 0.5 - wrong[:, None])  # [wrong rows, seams]
    nearest = seams[distances.argmin(axis=1)]
    if (wrong >= nearest).all():
        return ", at the beginning of blocks (rows of the previous one)"
    if (wrong < nearest).all():
        return ", at the end of blocks (rows of the next one)"
    return ""


def _borrowed_rows(case: Case, dim: int, device: int) -> Mask:
    """Mark the rows of a block that another device owns, or that lie beyond the ends of the array."""
    end = dim_end(case.sharding, dim)
    spans = all_row_spans(end.dim, end.length, end.sizes)[case.sharding.dim_device(dim, device)]
    is_borrowed: list[bool] = []
    for span in spans:
        is_borrowed += [span.origin != "own"] * (span.run.length * span.run.repeats)
    return np.array(is_borrowed, bool)


def _found_in_halo(case: Case, dim: int, device: int) -> str:
    """Say in words what one device's block holds in place of the rows of its neighbours (the halo).

    Such as "zeros: nothing was exchanged", or which other row of the array stands there. The text
    goes into the report on errors near the borders of blocks.
    """
    got_rows = rows_of_dim(case.got[device], dim)
    want_rows = rows_of_dim(case.want[device], dim)
    wrong_indices = np.flatnonzero(wrong_rows(case.wrong[device], dim))
    if not got_rows[wrong_indices].any():
        return "zeros: nothing was exchanged"
    # A halo is at both ends of the block: its first wrong row should be one of the previous block, its
    # last one of the next. Is each of them in the place of the other?
    ends = wrong_indices[[0, -1]]
    if ends[0] != ends[1] and case.near(got_rows[ends], want_rows[ends[::-1]]):
        return "rows of the previous and of the next block have changed places"

    # A row of another place in the array means an exchange with a wrong offset.
    array_rows = _rows_beside_block(case, dim, device)
    meant_rows = case.rows(dim, device)  # the global row number of each row of the block
    for i in wrong_indices:
        meant = int(meant_rows[i])
        row = _row_equal_to(case, got_rows[i], array_rows, meant)
        if row is not None:
            return (
                f"as on device {device}, where row {row} stands in place of row {meant}: "
                f"off by {abs(row - meant)}"
            )
    return "of no row of the array: stale, or computed"


def _rows_beside_block(case: Case, dim: int, device: int) -> Block:
    """Return all rows of a dim of the right array, [rows, elements], as far as a block has their elements."""
    array = case.whole_want
    for other in range(array.ndim):
        if other != dim:
            array = array.take(case.rows(other, device), axis=other)
    return rows_of_dim(array, dim)


def _row_equal_to(case: Case, values: Block, array_rows: Block, meant: int) -> int | None:
    """Find the first row with these values, other than the one that was meant."""
    for row, row_values in enumerate(array_rows):
        if row != meant and case.near(values, row_values):
            return row
    return None
