"""The paths from one mesh to another by a transfer, and the choice among them.

A path reduces and moves on the first mesh, sends, and moves on the second mesh. The choice goes by
seconds, then by traffic between nodes, then by the number of steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.bounds import shared_elements
from xshard.dtypes import check_reduction
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split, split_by, split_of
from xshard.notation.parser import Shard
from xshard.plans.transfer import Transfer
from xshard.search.request import Request
from xshard.search.solve import check_moves, solve
from xshard.steps import Step
from xshard.steps.base import REDUCERS, with_inner, without_tags

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which is chosen by this

SAME_TIME = 1.05  # predictions are no better than this: what differs by less counts as equal
ROUNDING = 1 + 1e-9


class TransferPath(NamedTuple):
    """Steps with a transfer, and the source's axes that they split into sub-axes."""

    steps: tuple[Step, ...]
    split: Split


def relabelled(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> tuple[int, ...]:
    """Order the destination's devices so that the fewest elements move.

    Raises:
        PlanError: scipy is not installed.
    """
    position = {device: i for i, device in enumerate(src_devices)}
    shared = shared_elements(source, target)[[position[device] for device in dst_devices]]
    lacking = target.block_sizes - shared  # [devices, places]
    # A new sum goes to the first device along it; the others get zeros, which nobody sends.
    lacking[:, target.mesh.indices(target.layout.tagged("sum")) > 0] = 0
    return tuple(dst_devices[i] for i in best_positions(lacking))


def best_positions(lacking: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose which device takes which position on the destination's mesh, so that little is received.

    With `lacking` ((4, 0), (0, 4)), device 0 has all that position 1 needs, and 1 all that 0 needs:
    the result is (1, 0), and nothing is sent.

    No device may receive more than the busiest one would if all devices stayed where they are. Of
    the orders that obey this, one wins by the fewest elements received in all, then by the fewest
    that the busiest device receives, then by the fewest devices that move.

    Args:
        lacking: Elements that each device lacks at each position, [devices, positions]. On the
            diagonal, devices stay.

    Returns:
        For each position its device, [positions].

    Raises:
        PlanError: scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise PlanError(
            "relabel=True needs scipy", hint="pip install scipy, or xshard with its extra 'relabel'"
        ) from None
    positions = np.arange(len(lacking))
    # The solver minimises one sum of weights, [devices, positions]. In it, the fewest elements come
    # before the fewest devices that move: elements count n + 1 times, more than all n moves together.
    # Divided by their common divisor, weights stay small enough to be exact as floats.
    common_divisor = max(1, int(np.gcd.reduce(lacking, axis=None)))
    is_change = positions[:, None] != positions  # on the diagonal, devices stay
    weight = lacking // common_divisor * (len(lacking) + 1) + is_change

    def best_order_within(limit: int) -> NDArray[np.int64] | None:
        """Return the best order in which no device lacks more than `limit`, or None."""
        try:
            devices, position_of = linear_sum_assignment(np.where(lacking <= limit, weight, np.inf))
        except ValueError:  # no order obeys the limit
            return None
        # From positions by device to devices by position.
        return np.asarray(devices[np.argsort(position_of)])

    limits = np.unique(lacking[lacking <= lacking.diagonal().max()])
    best = best_order_within(limits[-1])  # the most that a device lacks if all stay
    assert best is not None  # at least the order in which all stay obeys it
    min_received = lacking[best, positions].sum()
    # Bisect for the smallest limit with which the sum is still the least.
    low_index = 0
    high_index = len(limits) - 1
    while low_index < high_index:
        middle = (low_index + high_index) // 2
        order = best_order_within(limits[middle])
        if order is not None and lacking[order, positions].sum() == min_received:
            best = order
            high_index = middle
        else:
            low_index = middle + 1
    return best


def transfer_paths(request: Request, *, relabel: bool = False) -> Iterator[TransferPath]:
    """Yield every path with a transfer.

    Raises:
        PlanError: No transfer brings such layouts from mesh to mesh.
        DtypeError: The dtype has no arithmetic for the reduction.
    """
    _check(request)
    for leaving, landing in itertools.product(departures(request.source), landings(request.target)):
        yield _path_by(request, leaving, landing, relabel=relabel)


def _path_by(
    request: Request, leaving: Sharding, landing: Sharding, *, relabel: bool
) -> TransferPath:
    """Plan one way between two meshes: collectives, a transfer, collectives.

    The first collectives, on the source's mesh, lead from the user's layout to `leaving`, which is
    sent. The last, on the destination's mesh, lead from `landing`, which is received, to the user's
    layout. Either may be none: if `leaving` is the user's layout, nothing comes before the transfer.

    With `relabel`, devices may change places on the destination's mesh. The result has the steps,
    and the source's mesh axes that they split into sub-axes, such as dp=8 into 2 x 4.
    """
    source = request.source
    target = request.target
    src_devices = tuple(request.src_devices)
    dst_devices = tuple(request.dst_devices)
    if relabel:
        dst_devices = relabelled(leaving, landing, src_devices, dst_devices)
    steps_before: tuple[Step, ...] = ()
    src_split = split_of(source.mesh)
    # A mean is a sum times a factor such as 1/4. It is applied once: by the steps before the
    # transfer, which reduce the sums (the factor that is left is then 1), or if there are none, by
    # the steps after it. In a fixed order it is applied to the addends, as on one mesh.
    factor = request.factor
    scales_addends = request.profile.adds_in_order and factor != 1
    if leaving.layout != source.normal_layout or scales_addends:
        leaving_request = request.for_part(source, leaving, src_devices, factor)
        steps_before, src_split = solve(leaving_request)
        factor = Fraction(1)
    landing_request = request.for_part(landing, target, dst_devices, factor)
    steps_after: tuple[Step, ...] = ()
    dst_split = split_of(target.mesh)
    if landing.layout != target.normal_layout or landing_request.scale != 1:
        steps_after, dst_split = solve(landing_request)
    transfer = Transfer(
        source=_normal_on_sub_axes(leaving, src_split),
        target=_normal_on_sub_axes(landing, dst_split),
        src_devices=src_devices,
        dst_devices=dst_devices,
        profile=request.profile,
    )
    return TransferPath((*steps_before, transfer, *steps_after), src_split)


def _normal_on_sub_axes(sharding: Sharding, split: Split) -> Sharding:
    """Return the normal form of a sharding, written with sub-axes if steps split axes."""
    sharding = sharding.on_sub_axes(split_by(sharding.mesh, split))
    return sharding.with_layout(sharding.normal_layout)


def _check(request: Request) -> None:
    """Raise for layouts and dtypes that no transfer can bring from mesh to mesh."""
    for sharding in (request.source, request.target):
        check_moves(sharding, sharding, request.dtype)
        if sharding.layout.has_overlap:
            raise PlanError(
                f"'{sharding.layout}' overlaps, and overlaps move on one mesh",
                hint="trim or fold before, widen after",
            )
    for tag, _ in request.source.layout.tags:
        if tag != "copy":
            check_reduction(request.dtype, tag)


def departures(source: Sharding) -> Iterator[Sharding]:
    """Yield the shardings to send from: the blocks as they are; addends also reduced.

    Addends are reduced to parts, over each dim that is long enough, or to replicas.
    """
    normal = source.with_layout(source.normal_layout)
    yield normal
    reduced_axes = normal.layout.tagged(*REDUCERS)
    sums = tuple(axis for axis in source.mesh.axes if axis in reduced_axes)
    if sums:
        yield from _cut_over(normal, sums)
        yield normal.with_layout(without_tags(normal.layout, sums))


def landings(target: Sharding) -> Iterator[Sharding]:
    """Yield the shardings to send to: the final blocks; or, of replicated rows, a part for each device."""
    normal = target.with_layout(target.normal_layout)
    yield normal
    sums = normal.layout.tagged("sum")
    used_axes = {*normal.layout.sharding_axes, *normal.layout.tagged("max", "min")}
    free_axes = tuple(axis for axis in normal.mesh.long_axes if axis not in used_axes)
    replicated = tuple(axis for axis in free_axes if axis not in sums)
    candidates = [free_axes, replicated, sums]
    candidates += [(axis,) for axis in free_axes]
    for axes in dict.fromkeys(candidates):
        if axes:
            yield from _cut_over(normal, axes)


def _cut_over(sharding: Sharding, axes: tuple[str, ...]) -> Iterator[Sharding]:
    """Yield, for each dim, the sharding in which that dim is sharded over `axes` as well.

    On these axes devices have held addends or replicas until now. "n c" with axes (tp,) yields
    "n/tp c" and "n c/tp". A dim is left out if its blocks are too short to give each device a row.
    """
    n_parts = sharding.mesh.size(*axes)
    # The tags of `axes` end, since blocks along them become parts of a dim. Copy tags say something
    # about gradients only, and go too.
    layout = without_tags(sharding.layout, (*axes, *sharding.layout.tagged("copy")))
    for dim_index, dim in enumerate(layout.dims):
        lengths = set(sharding.local_sizes[dim_index])
        max_rows = max(lengths)
        if max_rows < n_parts:
            continue
        # Equal blocks that divide evenly are cut axis by axis; others into parts whose lengths
        # differ by one row at most.
        if len(lengths) == 1 and max_rows % n_parts == 0:
            shards = tuple(Shard((axis,)) for axis in axes)
        else:
            shards = (Shard(axes, "balanced"),)
        yield sharding.with_layout(with_inner(layout, dim.name, shards))


def cheapest(
    request: Request,
    make_plan: Callable[[Request, tuple[Step, ...], Split], Plan],
    *,
    relabel: bool,
) -> Plan | None:
    """Return the best plan from one mesh to another within the memory limit, or None if none fits.

    Plans within 5 % of the fastest (`SAME_TIME` is the factor, 1.05) count as equally fast. Of these,
    on machines with several nodes, the ones with the fewest elements between nodes are kept. The
    fastest of what is left wins. If one plan takes 100 us and sends 8 elements between nodes, and
    another takes 103 us and sends 4, the second wins.

    Args:
        request: Layouts, meshes, dtype, and the memory limit in bytes, or None.
        make_plan: Makes a plan from a request, its steps and the mesh axes that they split.
        relabel: Whether the devices of the destination's mesh may be reordered.
    """
    limit = request.memory_limit
    # A plan above its limit raises when it is made. So plans have none here, and are compared below.
    unlimited = replace(request, memory_limit=None)
    plans: list[Plan] = []  # those that fit the limit
    best_s = math.inf
    for steps, split in transfer_paths(unlimited, relabel=relabel):
        plan = make_plan(unlimited, steps, split)
        # `plan.cost` is slow, as it prices the transfer. Skip it if the other steps take too long.
        if _seconds_around_transfer(plan) >= best_s * SAME_TIME:
            continue
        if limit is None or plan.peak_bytes <= limit:
            plans.append(plan)
            best_s = min(best_s, plan.cost)
    if not plans:
        return None
    plans = [plan for plan in plans if plan.cost <= best_s * SAME_TIME]
    if request.profile.across is not None:  # the machine has several nodes
        plans = _with_fewest_between_nodes(plans)
    best_s = min(plan.cost for plan in plans)
    # Of plans that are equal but for rounding, the first one: paths with fewer steps come first.
    best = next(plan for plan in plans if plan.cost <= best_s * ROUNDING)
    return replace(best, memory_limit=limit)


def _seconds_around_transfer(plan: Plan) -> float:
    """Return the seconds of the steps before and after the transfer."""
    return sum(
        plan.price_of(i).seconds for i, step in enumerate(plan.steps) if step is not plan.transfer
    )


def _with_fewest_between_nodes(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with the fewest elements that enter nodes."""
    plans_by_elements: dict[int, list[Plan]] = {}
    for plan in plans:
        plans_by_elements.setdefault(_elements_between_nodes(plan), []).append(plan)
    return plans_by_elements[min(plans_by_elements)]


def _elements_between_nodes(plan: Plan) -> int:
    """Count the elements that enter a node, by the transfer and by the collectives around it."""
    n_elements = 0
    for stage, machine in zip(plan.stages, plan.machines, strict=True):
        if isinstance(stage.step, Transfer):
            n_elements += stage.step.between_nodes
        else:
            fabric = machine.fabric(stage.before.mesh)
            traffic = stage.step.traffic(stage.before, fabric.spans)
            n_elements += (machine.node_devices or 1) * fabric.between_nodes(traffic)
    return n_elements
