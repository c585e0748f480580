"""The paths from one mesh to another by a transfer, and the choice: seconds, traffic of nodes, steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xshard.cost.bounds import shared_elements
from xshard.dtypes import check_reduction
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.notation.parser import Shard
from xshard.plans.transfer import Transfer
from xshard.search.request import Request
from xshard.search.solve import check_moves, solve
from xshard.steps import Step
from xshard.steps.base import REDUCERS, with_inner, without_tags

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which is chosen by this


def relabelled(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> tuple[int, ...]:
    """The destination's devices in the order in which the fewest elements move; PlanError without scipy."""
    position = {device: i for i, device in enumerate(src_devices)}
    shared = shared_elements(source, target)[[position[device] for device in dst_devices]]
    lacking = target.block_sizes - shared
    lacking[:, target.mesh.indices(target.layout.tagged("sum")) > 0] = 0
    return tuple(dst_devices[i] for i in best_places(lacking))


def best_places(lacking: NDArray[np.int64]) -> NDArray[np.int64]:
    """What devices lack at each place -> for each place its device. Raises PlanError without scipy."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        hint = "pip install scipy, or xshard with its extra 'relabel'"
        raise PlanError("relabel=True needs scipy", hint=hint) from None
    # The fewest elements in all; then for the busiest device, never more than if all stay; then fewest moves.
    places = np.arange(len(lacking))
    unit = max(1, int(np.gcd.reduce(lacking, axis=None)))
    # In one number: fewer elements first, then fewer devices that change places.
    weight = lacking // unit * (len(lacking) + 1) + (1 - np.eye(len(lacking), dtype=np.int64))

    def assign(most: int) -> NDArray[np.int64] | None:
        """The best order in which no device lacks more than `most`."""
        try:
            devices, order_found = linear_sum_assignment(np.where(lacking <= most, weight, np.inf))
        except ValueError:  # there is none
            return None
        return np.asarray(devices[np.argsort(order_found)])

    limits = np.unique(lacking[lacking <= lacking.diagonal().max()])
    order = assign(limits[-1])
    assert order is not None  # all may stay
    fewest = lacking[order, places].sum()
    low = 0
    high = len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        order_found = assign(limits[middle])
        if order_found is not None and lacking[order_found, places].sum() == fewest:
            order = order_found
            high = middle
        else:
            low = middle + 1
    return order


_ABOUT = 1.05  # predictions that differ by less count as equal


def transfer_paths(
    request: Request, *, relabel: bool = False
) -> Iterator[tuple[tuple[Step, ...], Split]]:
    """Every path with a transfer: steps, and the source's axes they split. Raises PlanError, DtypeError."""
    _check(request)
    source = request.source
    target = request.target
    factor = request.factor
    for leaving, landing in itertools.product(departures(source), landings(target)):
        src_numbers = tuple(request.src_devices)
        dst_numbers = tuple(request.dst_devices)
        if relabel:
            dst_numbers = relabelled(leaving, landing, src_numbers, dst_numbers)
        stays: tuple[tuple[Step, ...], Split] = (), ()
        reduces = leaving.layout != source.normal
        spreads = landing.layout != target.normal
        first = request.between(source, leaving, src_numbers, factor)
        last = request.between(landing, target, dst_numbers, Fraction(1) if reduces else factor)
        before, src_split = solve(first) if reduces else stays
        after, dst_split = solve(last) if spreads or last.scale != 1 else stays
        endpoints = _normal_on_sub_axes(leaving, src_split), _normal_on_sub_axes(landing, dst_split)
        yield (
            (*before, Transfer(*endpoints, src_numbers, dst_numbers, request.profile), *after),
            src_split,
        )


def _normal_on_sub_axes(sharding: Sharding, split: Split) -> Sharding:
    fine = SubAxisMesh(sharding.mesh, split).factored(sharding) if split else sharding
    return fine.with_layout(fine.normal)


def _check(request: Request) -> None:
    """Raise for layouts and dtypes that no transfer can bring from mesh to mesh."""
    for end in (request.source, request.target):
        check_moves(end, end, request.dtype)
        if end.layout.overlaps:
            reason = f"'{end.layout}' overlaps, and overlaps move on one mesh"
            raise PlanError(reason, hint="trim or fold before, widen after")
    for kind, _ in request.source.layout.tags:
        if kind != "copy":
            check_reduction(request.dtype, kind)


def departures(source: Sharding) -> Iterator[Sharding]:
    """Shardings to send from: the blocks as they are; addends also reduced, to parts or to replicas."""
    normal = source.with_layout(source.normal)
    yield normal
    sums = tuple(a for a in source.mesh.axes if a in normal.layout.tagged(*REDUCERS))
    if sums:
        yield from _cut_over(normal, sums)
        yield normal.with_layout(without_tags(normal.layout, sums))


def landings(target: Sharding) -> Iterator[Sharding]:
    """Shardings to send to: the final blocks; or, of replicated rows, a part for each device."""
    normal = target.with_layout(target.normal)
    yield normal
    mesh = normal.mesh
    sums = normal.layout.tagged("sum")
    busy = *normal.layout.cut_axes, *normal.layout.tagged("max", "min")
    free = tuple(a for a in mesh.long_axes if a not in busy)
    alike = tuple(a for a in free if a not in sums)
    for axes in dict.fromkeys((free, alike, sums, *((a,) for a in free))):
        if axes:
            yield from _cut_over(normal, axes)


def _cut_over(sharding: Sharding, axes: tuple[str, ...]) -> Iterator[Sharding]:
    """The sharding with each of its dims in turn sharded further, over axes that hold addends or replicas."""
    mesh = sharding.mesh
    layout = without_tags(sharding.layout, (*axes, *sharding.layout.tagged("copy")))
    for d, dim in enumerate(layout.dims):
        lengths = set(sharding.local_sizes[d])
        if max(lengths) < mesh.size(*axes):
            continue
        even = len(lengths) == 1 and max(lengths) % mesh.size(*axes) == 0
        cut = tuple(Shard((a,)) for a in axes) if even else (Shard(axes, "balanced"),)
        yield sharding.with_layout(with_inner(layout, dim.name, cut))


def cheapest(
    request: Request, made: Callable[[Request, tuple[Step, ...], Split], Plan], *, relabel: bool
) -> Plan | None:
    """The best plan with a transfer within the memory limit, made by `made`; None if none fits."""
    limit = request.memory_limit
    free = replace(request, memory_limit=None)
    plans: list[Plan] = []
    best_s = math.inf
    for way in transfer_paths(free, relabel=relabel):
        plan = made(free, *way)
        other_s = (
            plan.price_of(i).seconds
            for i, step in enumerate(plan.steps)
            if step is not plan.transfer
        )
        if sum(other_s) >= best_s * _ABOUT:
            continue  # whatever the transfer costs, which is the longest to find out
        if limit is None or plan.peak_bytes <= limit:
            plans.append(plan)
            best_s = min(best_s, plan.cost)
    if not plans:
        return None
    plans = [plan for plan in plans if plan.cost <= best_s * _ABOUT]
    if request.profile.across is not None:
        crossing = [_between_nodes(plan) for plan in plans]
        plans = [plan for plan, n in zip(plans, crossing, strict=True) if n == min(crossing)]
    best_s = min(plan.cost for plan in plans)
    return replace(next(p for p in plans if p.cost <= best_s * (1 + 1e-9)), memory_limit=limit)


def _between_nodes(plan: Plan) -> int:
    """Elements that enter a node, of the messages of a transfer and the collectives around it."""
    total = 0
    for (step, before, _), machine in zip(plan.stages, plan.machines, strict=True):
        if isinstance(step, Transfer):
            total += step.between_nodes
        else:
            fabric = machine.fabric(before.mesh)
            total += (machine.node_devices or 1) * fabric.between_nodes(
                step.traffic(before, fabric.spans)
            )
    return total
