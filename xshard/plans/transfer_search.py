"""The ways to get from one mesh to another by a transfer, and the cheapest of them.

Decides what is weighed at either end: addends are reduced before they are sent or where they
arrive; devices that are to hold the same get it whole, or a part each that they then gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from xshard import dtypes
from xshard.cost.device_links import located
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.layout.sharding import Sharding
from xshard.notation.parser import Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.overlap_paths import overlaps
from xshard.search.relabel import relabelled
from xshard.search.solve import check_moves
from xshard.steps.base import REDUCERS, with_inner, without_tags

if TYPE_CHECKING:
    from xshard.plans.transfer_plan import TransferPlan


@dataclass(frozen=True)
class Transfers:
    """The ways to get from one sharding to another by a transfer, and the cheapest of them."""

    source: Sharding
    target: Sharding
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]
    dtype: str
    profile: Profile
    scale: Fraction
    memory_limit: int | None

    def cheapest(self, *, relabel: bool = False) -> TransferPlan | None:
        """Of the ways within the memory limit the one of the fewest seconds; of equals the plainest.

        relabel: the devices of the destination may change places, so that less moves.
        Raises PlanError, DtypeError where there is no way at all.
        """
        self._check()
        best: TransferPlan | None = None
        for leaving, landing in itertools.product(departures(self.source), landings(self.target)):
            ways = replace(self, memory_limit=None)
            if relabel:
                places = relabelled(leaving, landing, self.src_devices, self.dst_devices)
                ways = replace(ways, dst_devices=places)
            plans = ways.at_ends(leaving, landing)
            if best is not None and sum(p.cost for p in plans if p) >= best.cost:
                continue
            found = ways.made(*plans)
            if self.memory_limit is not None and found.peak_bytes > self.memory_limit:
                continue
            if best is None or found.cost < best.cost * (1 - 1e-9):
                best = found
        return best if best is None else replace(best, memory_limit=self.memory_limit)

    def least_peak_bytes(self) -> int:
        """The smallest peak of any way."""
        ways = replace(self, memory_limit=None)
        ends = itertools.product(departures(self.source), landings(self.target))
        return min(ways.made(*ways.at_ends(*both)).peak_bytes for both in ends)

    def made(self, src_plan: Plan | None, dst_plan: Plan | None) -> TransferPlan:
        """The plan with these parts at its ends."""
        from xshard.plans.transfer_plan import TransferPlan

        return TransferPlan(
            self.source.layout,
            self.target.layout,
            self.source.mesh,
            self.target.mesh,
            self.src_devices,
            self.dst_devices,
            self.source.shape,
            self.dtype,
            src_plan,
            dst_plan,
            self.scale,
            self.profile,
            self.memory_limit,
        )

    def _check(self) -> None:
        """Raise for layouts and dtypes that no transfer can bring from mesh to mesh."""
        for end in (self.source, self.target):
            check_moves(end, end, self.dtype)
            if overlaps(end):
                raise PlanError(
                    f"'{end.layout}' overlaps, and overlaps move on one mesh",
                    hint="trim or fold before, widen after",
                )
        for kind, _ in self.source.layout.tags:
            if kind != "copy":
                dtypes.check_reduction(self.dtype, kind)

    def at_ends(self, leaving: Sharding, landing: Sharding) -> tuple[Plan | None, Plan | None]:
        """What leads from the source to where a transfer starts, and from where it ends to the target."""
        reduces, spreads = leaving.layout != self.source.normal, landing.layout != self.target.normal
        src_plan = dst_plan = None
        if reduces:
            src_plan = self._plan(self.source, leaving, self.src_devices, self.scale)
        if spreads or (self.scale != 1 and not reduces):
            rest = Fraction(1) if reduces else self.scale
            dst_plan = self._plan(landing, self.target, self.dst_devices, rest)
        return src_plan, dst_plan

    def _plan(self, start: Sharding, end: Sharding, devices: tuple[int, ...], scale: Fraction) -> Plan:
        profile = located(self.profile, start.mesh, devices)
        ends = start.layout, end.layout, start.mesh, start.shape
        return find_plan(*ends, self.dtype, profile, scale=scale)


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
