"""`plan_transfer`: a tree of arrays on one mesh becomes another tree on another mesh, planned as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xshard import arguments, trees
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile, ProfileLike
from xshard.dtypes import itemsize
from xshard.errors import NotationError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.plans.expression import sides_or_one
from xshard.plans.plan import find_plan
from xshard.plans.transfer_senders import balanced
from xshard.rules import Rules, RulesLike
from xshard.search.request import Devices, Request, device_numbers
from xshard.state.names import SAME, Names
from xshard.state.relations import ArrayPart, PartMapping, Shape, TargetArray
from xshard.state.tree_plan import ArrayPlan, PartMove, SourceArray, TreePlan, part_of
from xshard.steps.base import REDUCERS

BUCKET = "256MiB"
Dtypes = Mapping[str, str]  # by name


def plan_transfer(
    shapes: Mapping[str, Sequence[int]],
    rules: RulesLike | tuple[RulesLike | None, RulesLike],
    *,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    names: Names | None = None,
    dtypes: Dtypes | None = None,
    profile: ProfileLike = "h100",
    bucket_bytes: int | str | None = BUCKET,
) -> TreePlan:
    """Plan the transfer of a tree to another mesh; its messages travel together, bucket by bucket.

    shapes: global shapes by name. rules: patterns over names -> `"source layout -> target layout"`, or one
    layout for both; with `names`, a pair of rules: layouts by source names, and layouts by target names.
    dtypes: by name; float32 by default. Values that `names` casts travel in the smaller dtype. src_devices,
    dst_devices, profile: as in `xshard.plan`. bucket_bytes: about the most that a device sends and receives
    at once; None: no limit.
    Raises as `Names.resolve`, `Rules.match` and `xshard.plan` do, with the name of the array.

    >>> shapes = {"a.weight": (8, 6), "a.bias": (8,)}
    >>> rules = {"*.weight": "o/dp i -> o i/tp", "*.bias": "o/dp -> o"}
    >>> meshes = dict(src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), dst_devices=(2, 3))
    >>> plan = plan_transfer(shapes, rules, **meshes)
    >>> plan.bytes_received == plan.bytes_lower_bound, plan.messages, len(plan.buckets)
    (True, 6, 1)
    """
    global_shapes = {name: arguments.lengths_of(shape) for name, shape in shapes.items()}
    kinds = dtypes or dict.fromkeys(shapes, "float32")
    senders = tuple(device_numbers("source", src_mesh, src_devices))
    devices = senders, tuple(device_numbers("destination", dst_mesh, dst_devices))
    src_layouts, dst_layouts, targets = _layouts(
        rules, names, global_shapes, kinds, (src_mesh, dst_mesh)
    )
    sources = {}
    machine = load_profile(profile)
    arrays = []
    for name, shape in global_shapes.items():
        with located(trees.place_of(name)):
            sources[name] = SourceArray(Sharding(src_layouts[name], src_mesh, shape), kinds[name])
    for name, target in targets.items():
        with located(trees.place_of(name)):
            sharding = Sharding(dst_layouts[name], dst_mesh, target.shape)
            moves = tuple(
                _move(p, sources, sharding, target.dtype, devices, machine) for p in target.pieces
            )
        arrays.append(ArrayPlan(name, sharding, target.dtype, moves))
    arrays = _balanced(arrays)
    limit = arguments.limit_of(bucket_bytes, "bucket_bytes")
    buckets = trees.groups([array.bytes_by_device(sent=True) for array in arrays], limit)
    together = tuple(tuple(arrays[i] for i in bucket) for bucket in buckets)
    return TreePlan(src_mesh, dst_mesh, *devices, sources, together, machine)


def _layouts(
    rules: Any,
    names: Names | None,
    shapes: Mapping[str, Shape],
    dtypes: Dtypes,
    meshes: tuple[Mesh, Mesh],
) -> tuple[dict[str, Layout], dict[str, Layout], dict[str, TargetArray]]:
    """The layouts of all source arrays, the layouts of all target arrays, and the target arrays."""
    if isinstance(rules, list | tuple) and len(rules) == 2:
        targets = (names or SAME).resolve(shapes, dtypes)
        src, dst = (
            {name: Layout.parse(layout) for name, layout in Rules(rule).match(list(arrays)).items()}
            for rule, arrays in zip(rules, (shapes, targets), strict=True)
        )
        return src, dst, targets
    if names is not None:
        hint = 'rules=({"**": layouts by source names}, {"**": layouts by target names})'
        raise NotationError(
            "with names=, the two sides of an arrow are about different arrays", hint=hint
        )
    src = {}
    dst = {}
    targets = {}
    for name, rule in Rules(rules).match(list(shapes)).items():
        with located(trees.place_of(name)):
            *sides, text = sides_or_one(rule)
            for layout, mesh in zip(sides, meshes, strict=True):
                check_axes(layout, mesh, text)
            src[name], dst[name] = (layout.resolved(len(shapes[name])) for layout in sides)
        order = tuple(map(src[name].names.index, dst[name].names))
        whole = ArrayPart(name)
        shape = tuple(shapes[name][i] for i in order)
        targets[name] = TargetArray(shape, dtypes[name], (PartMapping(whole, whole, order),))
    return src, dst, targets


def _move(
    piece: PartMapping,
    sources: Mapping[str, SourceArray],
    target: Sharding,
    dtype: str,
    devices: tuple[Devices, Devices],
    profile: Profile,
) -> PartMove:
    """The cheapest transfer of a part; it travels in the smaller of both dtypes. dtype: the target's."""
    source, src_dtype = sources[piece.src.name]
    src = part_of(source, piece.src._replace(name=""))
    dst = part_of(target, piece.dst._replace(name=""))
    # Dims of the two arrays have names of their own; a name that is in both must be of the same dim.
    src_names = src.sharding.layout.names
    for i, name in enumerate(dst.sharding.layout.names):
        if name in src_names and src_names[piece.order[i]] != name and not name.startswith("_"):
            here = f"dim {src_names[piece.order[i]]!r} of {piece.src.name}"
            hint = f"'{source.layout}' has another dim {name!r}: write the target's dims in the target's "
            hint += "order, or use other names; names= says which dims are transposed"
            raise NotationError(f"dim {name!r} of '{target.layout}' is {here}", hint=hint)
    dst_layout = dst.sharding.layout.named([src_names[i] for i in piece.order])
    casts_first = itemsize(dtype) < itemsize(src_dtype) and not source.layout.tagged(*REDUCERS)
    sides = src.sharding.layout, dst_layout, source.mesh, target.mesh, *devices
    request = Request(*sides, src.sharding.shape, dtype if casts_first else src_dtype, profile)
    return PartMove(piece.src.name, src, dst, find_plan(request, by_transfer=True))


def _balanced(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The same arrays, with senders that share the work of all of them."""
    moves = [move for array in arrays for move in array.moves]
    senders_of = iter(balanced([m.transfer for m in moves], [m.plan.itemsize for m in moves]))

    def moved(move: PartMove) -> PartMove:
        senders = next(senders_of)
        steps = tuple(
            replace(s, senders=senders) if s is move.transfer else s for s in move.plan.steps
        )
        return move._replace(plan=replace(move.plan, steps=steps))

    return [replace(array, moves=tuple(map(moved, array.moves))) for array in arrays]
