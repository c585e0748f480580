"""Rows of blocks in pictures: as text, by their owners, and as lanes for overlapping dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.formatting import range_text
from xshard.layout import Sharding
from xshard.layout.block_rows import RowSpan, all_row_spans, boundary_at
from xshard.layout.runs import (
    FILL,
    IntervalTable,
    Run,
    Runs,
    count_rows,
    interval_table,
    merge_adjacent,
    unroll,
)
from xshard.notation.overlap import Fold, Overlap, unfolded

Ints = NDArray[np.int64]
MAX_BLOCKS = 64  # drawn along a dim: a cyclic cut of a long dim has as many blocks as rows
MAX_LANES = 16
NO_OWNER = -1  # of rows outside the array


class RowGroup(NamedTuple):
    """Consecutive rows of a block of an overlapping dim, all with one owner, in local order.

    Attributes:
        rows: How many rows.
        origin: As in `RowSpan`: "own", "near", "before" or "after".
        owner: The devices that own the rows; none for rows that a boundary fills.
        text: The value or the rows in the place of rows beyond the array; "" inside it.
    """

    rows: int
    origin: str
    owner: tuple[int, ...]
    text: str = ""


class Lane(NamedTuple):
    """The block of some devices along an overlapping dim. `start` is the position of its first row."""

    devices: tuple[int, ...]
    start: int
    groups: tuple[RowGroup, ...]


def rows_text(runs: Runs, max_texts: int = 6) -> str:
    """Write runs in local order as text, at most `max_texts` pieces: "1 fill, 0-2, 4-24 step 8"."""
    texts: list[str] = []
    for run in merge_adjacent(runs):
        texts += _run_texts(run, max_texts)
    if len(texts) > max_texts:
        texts = [*texts[:max_texts], "..."]
    return ", ".join(texts) or "none"


def devices_text(devices: Sequence[int]) -> str:
    """Write device numbers as text, with ranges and even steps: "0-3", "0,4", "0-12 step 4"."""
    steps = set(np.diff(devices).tolist())
    if len(devices) > 2 and len(steps) == 1:
        (step,) = steps
        device_runs: Runs = (Run(devices[0], length=1, repeats=len(devices), stride=step),)
    else:
        device_runs = tuple(Run(device, length=1) for device in devices)
    return rows_text(device_runs, max_texts=3).replace(", ", ",")


def rows_in_order(sharding: Sharding, dim_index: int) -> IntervalTable:
    """Sort the rows of a dim, as far as a strip can reach, with their owners along the dim's axes."""
    rows = interval_table(
        tuple(map(_first_repeats, runs)) for runs in sharding.owned_by_position(dim_index)
    )
    return rows.take(np.argsort(rows.start, kind="stable"))


def _first_repeats(run: Run) -> Run:
    """Cut off the repeats of a run that come behind the last block that is drawn."""
    if run.stride <= 0:
        return run
    return run._replace(repeats=min(run.repeats, MAX_BLOCKS + 1))


class OwnedRun(NamedTuple):
    """Consecutive rows of a block with one owner: an index along the dim's axes, or NO_OWNER."""

    origin: str
    owner: int
    run: Run


def lanes_of(sharding: Sharding, dim_index: int, device_numbers: Ints) -> Iterator[Lane]:
    """Yield, for each block of a dim with halos, which rows it holds and which device owns them.

    8 rows on 2 devices with a halo of 1: block 0 holds 4 rows of its own and 1 of device 1. Rows
    beyond the ends of the array have no owner. Without halos, nothing is yielded.

    Args:
        sharding: The sharding.
        dim_index: The number of the dim.
        device_numbers: The device's number at each position of the mesh, [positions]: (4, 5) if a mesh of
            two devices is made of devices 4 and 5.
    """
    dim = sharding.layout.dims[dim_index]
    if dim.overlap is None:
        return
    length = sharding.shape[dim_index]
    block_of_device = sharding.mesh.indices(dim.axes)  # [positions]

    def devices_of(block: int) -> tuple[int, ...]:
        # () for NO_OWNER, which is no block's number.
        return tuple(device_numbers[block_of_device == block].tolist())

    # For each block its rows in local order, as spans: rows with their origin, "own", "near" (of a
    # neighbour), or "before" and "after" the array.
    spans_of_blocks = all_row_spans(dim, length, sharding.mesh.sizes_of(dim.axes))
    owners = rows_in_order(sharding, dim_index)
    for block, spans in enumerate(spans_of_blocks[:MAX_LANES]):
        owned_runs = list(itertools.islice(_owned_runs(spans, owners), MAX_BLOCKS))
        groups = _row_groups(owned_runs, dim.overlap, devices_of)
        yield Lane(devices_of(block), _lane_start(groups, owned_runs, length), groups)


def _row_groups(
    owned_runs: Sequence[OwnedRun], overlap: Overlap, devices_of: Callable[[int], tuple[int, ...]]
) -> tuple[RowGroup, ...]:
    """Join neighbouring runs with one origin and one owner; `devices_of` returns an owner's devices."""
    groups = []
    by_owner = itertools.groupby(owned_runs, attrgetter("origin", "owner"))
    for (origin, owner), owned_runs_of_group in by_owner:
        runs = tuple(owned.run for owned in owned_runs_of_group)
        is_beyond = origin in ("before", "after")
        text = _beyond_text(overlap, origin, runs) if is_beyond else ""
        groups.append(RowGroup(count_rows(runs), origin, devices_of(owner), text))
    return tuple(groups)


def _lane_start(groups: Sequence[RowGroup], owned_runs: Sequence[OwnedRun], length: int) -> int:
    """Return the position of a block's first row; negative if the block begins before the array."""
    n_before = 0
    for group in groups:
        if group.origin != "before":
            break
        n_before += group.rows
    if n_before:
        return -n_before
    for owned in owned_runs:
        if owned.origin in ("own", "near"):
            return owned.run.start
    return length


def _owned_runs(spans: Iterable[RowSpan], owners: IntervalTable) -> Iterator[OwnedRun]:
    """Divide the rows of a block into runs with one owner each."""
    for span_rows, origin in spans:
        if span_rows.start == FILL:
            yield OwnedRun(origin, NO_OWNER, span_rows)
            continue
        for interval in unroll((span_rows,)):
            yield from _divide_by_owner(interval, origin, owners)


def _divide_by_owner(run: Run, origin: str, owners: IntervalTable) -> Iterator[OwnedRun]:
    """Divide consecutive rows into ranges that one block owns each.

    Rows 2-5, where block 0 owns rows 0-3 and block 1 rows 4-7 -> rows 2-3 of 0, and 4-5 of 1.

    `origin` says how these rows came into the block that holds them ("own", "near", ...); each result
    has it too. `owners` has the rows of each block, [intervals], sorted by their first row. It ends
    with the last row that is drawn: rows after that get NO_OWNER.
    """
    stops_of_owned = owners.start + owners.length
    start = run.start
    stop = run.start + run.length
    while start < stop:
        # The first interval that ends after `start` has this row.
        interval_index = int(np.searchsorted(stops_of_owned, start, side="right"))
        owner = NO_OWNER
        owned_stop = stop
        if interval_index < len(stops_of_owned):
            owner = int(owners.block[interval_index])
            owned_stop = min(stop, int(stops_of_owned[interval_index]))
        yield OwnedRun(origin, owner, Run(start, owned_stop - start))
        start = owned_stop


def _beyond_text(overlap: Overlap, origin: str, boundary_runs: Runs) -> str:
    """Say what stands in the place of rows beyond an end of the array.

    A value ("0"), rows ("r15", with a sign "-r15"), or × for nothing.
    """
    boundary = boundary_at(unfolded(overlap), origin)
    if boundary_runs[0].start == FILL:
        return "×" if isinstance(overlap, Fold) else f"{boundary.value:g}"
    sign = "-" if boundary.sign < 0 else ""
    return f"{sign}r{rows_text(boundary_runs, max_texts=2)}".replace(", ", ",")


def _run_texts(run: Run, max_texts: int) -> list[str]:
    """Write the row numbers of one run as texts, such as ["0-3", "8-11"].

    A run is `length` consecutive rows, repeated every `stride` rows. Single rows 0, 2, 4 are
    ["0-4 step 2"], row 0 three times is ["0 x3"]. A run that starts at FILL, a negative number, is of
    rows that a boundary fills, such as ["2 fill"]. At most `max_texts` + 1 texts are returned, so that
    the caller sees whether there are too many.
    """
    if run.start == FILL:
        return [f"{run.length * run.repeats} fill"]
    if run.length == 1 and run.repeats > 1:
        if run.stride == 0:
            return [f"{run.start} x{run.repeats}"]
        last_row = run.start + run.stride * (run.repeats - 1)
        step = "" if run.stride == 1 else f" step {run.stride}"
        return [f"{run.start}-{last_row}{step}"]
    texts = []
    for rows in itertools.islice(unroll((run,)), max_texts + 1):
        texts.append(range_text(rows.start, rows.start + rows.length - 1))
    return texts
