"""The plans that a calibration times: some to fit a profile to, others to test it."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xshard.cost.model import ProfileLike
from xshard.errors import MeshError
from xshard.layout import Layout, Mesh
from xshard.notation.parser import Dim, Shard
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)

SIZES = tuple(4**i * 1024 for i in range(8))  # bytes of the larger block: 1 KiB .. 16 MiB
HELD_OUT = 20  # plans that a fit does not see
DTYPE = "float32"
ITEMSIZE = 4
_MAX_DRAWS = 20  # per held-out plan, before plans of several steps are given up
_ROWS_PER_DEVICE = 16  # of a dim that is cut


class OneStep(NamedTuple):
    """A step with the layouts before and after it."""

    src: Layout
    dst: Layout
    step: Step


def fitted_plans(mesh: Mesh, sizes: Sequence[int] = SIZES) -> tuple[Plan, ...]:
    """Make the plans whose measured times a machine's constants are fitted to.

    Each has one step, such as an all-gather. There are all kinds of steps, over each axis of the
    mesh and over all axes together, in every size.

    Args:
        mesh: The mesh.
        sizes: About the bytes of a device's block before or after the step, whichever is larger.

    Raises:
        MeshError: The mesh has one device.
    """
    _check_several_devices(mesh)
    axes = mesh.long_axes  # those of more than one device
    axis_groups: list[tuple[str, ...]] = [(axis,) for axis in axes]
    if len(axes) > 1:
        axis_groups.append(axes)
    over_groups = itertools.chain.from_iterable(map(_communicating_steps, axis_groups))
    communicating = [*over_groups, *_permutations(mesh, axes)]
    copying = itertools.chain.from_iterable(map(_copying_steps, axis_groups))
    # The time of a small copy is mostly overhead, which the cost model of a local step leaves out.
    large_sizes = [size for size in sizes if size >= max(sizes) / 16]
    samples = [*itertools.product(communicating, sizes), *itertools.product(copying, large_sizes)]
    return tuple(_plan(mesh, step, size) for step, size in samples)


def held_out_plans(
    mesh: Mesh,
    sizes: Sequence[int] = SIZES,
    count: int = HELD_OUT,
    seed: int = 0,
    profile: Any = "h100",
) -> tuple[Plan, ...]:
    """Draw random plans to check a fitted profile with: they are measured, but not fitted.

    All of them communicate. At least a third has several steps, if the mesh has such plans.

    Args:
        mesh: The mesh.
        sizes: The range of the bytes of a block.
        count: How many plans.
        seed: The seed of the random numbers: equal seeds draw equal plans.
        profile: The machine to plan for.

    Raises:
        MeshError: The mesh has one device.
    """
    _check_several_devices(mesh)
    rng = random.Random(seed)
    max_singles = count - count // 3  # plans of a single step
    plans: list[Plan] = []
    n_singles = 0
    n_draws = 0
    while len(plans) < count:
        plan = _random_plan(mesh, sizes, rng, profile)
        is_single = len(plan.steps) == 1
        # A mesh of one axis may have too few plans of several steps. After many draws, plans of one
        # step are no longer refused.
        takes_single = n_singles < max_singles or n_draws >= _MAX_DRAWS * count
        n_draws += 1
        if is_single and not takes_single:
            continue
        if plan.bytes_received and plan not in plans:
            plans.append(plan)
            if is_single:
                n_singles += 1
    return tuple(plans)


def _random_plan(
    mesh: Mesh, sizes: Sequence[int], rng: random.Random, profile: ProfileLike
) -> Plan:
    """Draw two layouts and a shape of three dims (a, b, c), and plan the move between the layouts.

    sizes: a device's block before or after the move, whichever is larger, has between the least and
    the most of these bytes, drawn evenly by their logarithms.
    """
    # A letter is what a mesh axis may do: shard the dim a, b or c, hold replicas (-) or addends (+).
    # A plan sums addends up and makes none, so the destination has no "+".
    src = _random_layout(mesh.long_axes, "abc-+", rng)
    dst = _random_layout(mesh.long_axes, "abc-", rng)
    least_bytes = min(sizes)
    block_bytes = least_bytes * (max(sizes) / least_bytes) ** rng.random()
    elements = block_bytes / ITEMSIZE * _n_larger_blocks(mesh, src, dst)
    # Lengths are multiples of the number of devices, which divide evenly however axes cut them.
    n_devices = mesh.n_devices
    a = n_devices * rng.choice((1, 2, 4, 6))
    b = n_devices * rng.choice((1, 2, 4, 6))
    c = n_devices * max(1, round(elements / (a * b * n_devices)))  # makes up the size
    return make_plan((src, dst), mesh, (a, b, c), DTYPE, profile=profile)


def _n_larger_blocks(mesh: Mesh, src: Layout, dst: Layout) -> int:
    """Return how many blocks an array has under the layout that cuts it into fewer."""
    return min(mesh.size(*layout.sharding_axes) for layout in (src, dst))


def _check_several_devices(mesh: Mesh) -> None:
    """Raise MeshError for a mesh of one device."""
    if not mesh.long_axes:
        raise MeshError(
            f"nothing to measure on {mesh!r}: it has one device", hint="as in --mesh dp=2,cp=2"
        )


def _shards(axes: Sequence[str]) -> tuple[Shard, ...]:
    return tuple(Shard((axis,)) for axis in axes)


def _layout(
    row_axes: Sequence[str] = (), column_axes: Sequence[str] = (), sums: Sequence[str] = ()
) -> Layout:
    """Make a layout of two dims, each cut by axes, and a sum over others."""
    dims = (Dim("n", _shards(row_axes)), Dim("d", _shards(column_axes)))
    return Layout(dims, (("sum", tuple(sums)),))  # without axes there is no sum


def _communicating_steps(axes: tuple[str, ...]) -> Iterator[OneStep]:
    """Yield every kind of step that sends data over `axes`, with the layouts before and after it.

    Such as an all-gather from rows sharded over `axes` to the whole array. Permutations are made
    elsewhere, since they are not over a set of axes.
    """
    shards = _shards(axes)
    unsharded = _layout()
    by_rows = _layout(row_axes=axes)
    by_columns = _layout(column_axes=axes)
    addends = _layout(sums=axes)
    yield OneStep(by_rows, unsharded, AllGather("n", shards))
    yield OneStep(by_columns, unsharded, AllGather("d", shards))
    yield OneStep(addends, unsharded, AllReduce(axes))
    yield OneStep(addends, by_rows, ReduceScatter("n", shards))
    yield OneStep(addends, by_columns, ReduceScatter("d", shards))
    yield OneStep(by_rows, by_columns, AllToAll("n", shards, "d", shards))
    yield OneStep(by_rows, by_columns, Exchange(by_columns))
    yield OneStep(by_columns, unsharded, Exchange(unsharded))


def _copying_steps(axes: tuple[str, ...]) -> Iterator[OneStep]:
    """Yield the steps over some axes that only copy."""
    shards = _shards(axes)
    by_columns = _layout(column_axes=axes)
    yield OneStep(_layout(), by_columns, Slice((("d", shards),)))
    yield OneStep(by_columns, _layout(sums=axes), Embed("d", shards))


def _permutations(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[OneStep]:
    """Yield permutations of devices: all axes change roles, and pairs of axes of one size."""
    if len(axes) > 1:
        yield _permutation(axes, axes[::-1])
    for a, b in itertools.permutations(axes, 2):
        if mesh.size(a) == mesh.size(b):
            yield _permutation((a,), (b,))


def _permutation(src_axes: Sequence[str], dst_axes: Sequence[str]) -> OneStep:
    dst = _layout(row_axes=dst_axes)
    return OneStep(_layout(row_axes=src_axes), dst, Permute(dst))


def _plan(mesh: Mesh, sample: OneStep, size: int) -> Plan:
    """Make a plan of one step; the larger of a device's two blocks has about `size` bytes."""
    src, dst, step = sample
    n = mesh.n_devices
    elements = size // ITEMSIZE * _n_larger_blocks(mesh, src, dst)
    rows = n
    if elements > _ROWS_PER_DEVICE * n**2:  # each device has a column at least
        rows = n * _ROWS_PER_DEVICE
    columns = n * max(1, elements // (rows * n))
    return Plan(src, dst, mesh, shape=(rows, columns), dtype=DTYPE, steps=(step,))


def _random_layout(axes: Sequence[str], roles: str, rng: random.Random) -> Layout:
    """Draw a role for each axis: it cuts a dim a, b or c, holds replicas (-) or addends (+)."""
    axes_of = defaultdict[str, list[str]](list)  # by role
    for axis in rng.sample(axes, len(axes)):
        axes_of[rng.choice(roles)].append(axis)
    dims = tuple(Dim(name, _shards(axes_of[name])) for name in "abc")
    return Layout(dims, (("sum", tuple(axes_of["+"])),))
