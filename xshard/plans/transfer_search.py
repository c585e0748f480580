"""The paths from one mesh to another by a transfer.

Addends are reduced before they are sent, or where they arrive. Devices that will hold the same rows receive
all of them, or a part each that they then gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from xshard.dtypes import check_reduction
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.notation.parser import Shard
from xshard.plans.transfer import Transfer
from xshard.search.overlap_paths import overlaps
from xshard.search.relabel import relabelled
from xshard.search.request import Request
from xshard.search.solve import check_moves, solve
from xshard.steps import Step
from xshard.steps.base import REDUCERS, with_inner, without_tags


def transfer_ways(request: Request, *, relabel: bool = False) -> Iterator[tuple[tuple[Step, ...], Split]]:
    """The steps of every way, one of them a transfer, and the axes of the source's mesh that they split.

    relabel: devices change places in the destination's mesh, so that less moves.
    Raises PlanError, DtypeError where there is no way at all.
    """
    _check(request)
    source, target, factor = request.source, request.target, request.factor
    for leaving, landing in itertools.product(departures(source), landings(target)):
        givers, takers = tuple(request.src_devices), tuple(request.dst_devices)
        if relabel:
            takers = relabelled(leaving, landing, givers, takers)
        before: tuple[Step, ...] = ()
        after: tuple[Step, ...] = ()
        src_split: Split = ()
        dst_split: Split = ()
        reduces, spreads = leaving.layout != source.normal, landing.layout != target.normal
        if reduces:
            before, src_split = solve(request.between(source, leaving, givers, factor))
        if spreads or (factor != 1 and not reduces):
            rest = Fraction(1) if reduces else factor
            after, dst_split = solve(request.between(landing, target, takers, rest))
        ends = _normal_on_sub_axes(leaving, src_split), _normal_on_sub_axes(landing, dst_split)
        yield (*before, Transfer(*ends, givers, takers, request.profile), *after), src_split


def _normal_on_sub_axes(sharding: Sharding, split: Split) -> Sharding:
    fine = SubAxisMesh(sharding.mesh, split).factored(sharding) if split else sharding
    return fine.with_layout(fine.normal)


def _check(request: Request) -> None:
    """Raise for layouts and dtypes that no transfer can bring from mesh to mesh."""
    for end in (request.source, request.target):
        check_moves(end, end, request.dtype)
        if overlaps(end):
            raise PlanError(
                f"'{end.layout}' overlaps, and overlaps move on one mesh",
                hint="trim or fold before, widen after",
            )
    for kind, _ in request.source.layout.tags:
        if kind != "copy":
            check_reduction(request.dtype, kind)


def departures(source: Sharding) -> Iterator[Sharding]:
    """What may be sent: the blocks as they are; addends also reduced, to parts or to replicas."""
    normal = source.with_layout(source.normal)
    yield normal
    sums = tuple(a for a in source.mesh.axes if a in normal.layout.tagged(*REDUCERS))
    if sums:
        yield from _cut_over(normal, sums)
        yield normal.with_layout(without_tags(normal.layout, sums))


def landings(target: Sharding) -> Iterator[Sharding]:
    """What may arrive: the blocks as they are to be; or, of what several devices hold, a part at each."""
    normal = target.with_layout(target.normal)
    yield normal
    mesh, sums = normal.mesh, normal.layout.tagged("sum")
    busy = {a for dim in normal.layout.dims for a in dim.axes} | set(normal.layout.tagged("max", "min"))
    free = tuple(a for a in mesh.axes if a not in busy and mesh.size(a) > 1)
    alike = tuple(a for a in free if a not in sums)
    for axes in dict.fromkeys((free, alike, sums, *((a,) for a in free))):
        if axes:
            yield from _cut_over(normal, axes)


def _cut_over(sharding: Sharding, axes: tuple[str, ...]) -> Iterator[Sharding]:
    """The sharding with each of its dims in turn cut further, over axes that hold addends or replicas."""
    mesh = sharding.mesh
    layout = without_tags(sharding.layout, (*axes, *sharding.layout.tagged("copy")))
    for d, dim in enumerate(layout.dims):
        lengths = set(sharding.local_sizes[d])
        if max(lengths) < mesh.size(*axes):
            continue
        even = len(lengths) == 1 and max(lengths) % mesh.size(*axes) == 0
        cut = tuple(Shard((a,)) for a in axes) if even else (Shard(axes, "balanced"),)
        yield sharding.with_layout(with_inner(layout, dim.name, cut))
