"""`plan_transfer`: a tree of arrays on one mesh becomes another tree on another mesh, planned as one.

Decides the layouts of both ends by rules, which part goes over which plan, who sends it, in which type, and
which arrays travel together. Knows names and shapes, no data and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xshard import dtypes as kinds
from xshard.arguments import lengths_of, limit_of
from xshard.cost.model import Profile
from xshard.cost.profile_files import load_profile
from xshard.errors import NotationError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.plans.expression import sides_or_one
from xshard.plans.plan import find_plan
from xshard.plans.transfer import balanced
from xshard.rules import Rules
from xshard.search.request import Devices, Request, device_numbers
from xshard.state.names import SAME, Names
from xshard.state.parts import part_of
from xshard.state.relations import Made, Piece, Side
from xshard.state.tree_plan import ArrayPlan, PartMove, SourceArray, TreePlan
from xshard.steps.base import REDUCERS
from xshard.trees import groups, place_of

BUCKET = "256MiB"


def plan_transfer(
    shapes: Mapping[str, Sequence[int]],
    rules: Any,
    *,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    names: Names | None = None,
    dtypes: Mapping[str, str] | None = None,
    profile: str | Path | Profile = "h100",
    bucket_bytes: int | str | None = BUCKET,
) -> TreePlan:
    """Global shapes by name, here -> the plan of a tree, whose messages travel together, bucket by bucket.

    rules: patterns over names -> `"layout here -> layout there"`, or one layout for both; with `names`, whose
    arrays have other names there, a pair of rules: layouts by the names here, and by the names there.
    dtypes: by name; float32 by default. Values that `names` casts travel in the smaller type.
    src_devices, dst_devices, profile: as in `xshard.plan`. bucket_bytes: about the most that a device sends
    and receives at once; None: all.

    Raises as `Names.resolve`, `Rules.match` and `xshard.plan` do, with the name of the array.

    >>> shapes = {"a.weight": (8, 6), "a.bias": (8,)}
    >>> rules = {"*.weight": "o/dp i -> o i/tp", "*.bias": "o/dp -> o"}
    >>> there = dict(src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), dst_devices=(2, 3))
    >>> plan = plan_transfer(shapes, rules, **there)
    >>> plan.bytes_received == plan.bytes_lower_bound, plan.messages, len(plan.buckets)
    (True, 6, 1)
    """
    whole = {name: lengths_of(shape) for name, shape in shapes.items()}
    devices = (
        tuple(device_numbers("source", src_mesh, src_devices)),
        tuple(device_numbers("destination", dst_mesh, dst_devices)),
    )
    here, there, made = _layouts(rules, names, whole, dtypes, (src_mesh, dst_mesh))
    sources = {}
    for name, shape in whole.items():
        with located(place_of(name)):
            sources[name] = SourceArray(
                Sharding(here[name], src_mesh, shape), dtypes[name] if dtypes else "float32"
            )
    machine = load_profile(profile)
    arrays = []
    for name, array in made.items():
        with located(place_of(name)):
            target = Sharding(there[name], dst_mesh, array.shape)
            moves = tuple(_move(piece, sources, target, array, devices, machine) for piece in array.pieces)
        arrays.append(ArrayPlan(name, target, array.dtype, moves))
    arrays = _balanced(arrays)
    buckets = groups([array.busy for array in arrays], limit_of(bucket_bytes, "bucket_bytes"))
    together = tuple(tuple(arrays[i] for i in bucket) for bucket in buckets)
    return TreePlan(src_mesh, dst_mesh, *devices, sources, together, machine)


def _layouts(
    rules: Any,
    names: Names | None,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None,
    meshes: tuple[Mesh, Mesh],
) -> tuple[dict[str, Layout], dict[str, Layout], dict[str, Made]]:
    """The layout of every array here and there, and what is made there of what."""
    if isinstance(rules, list | tuple) and len(rules) == 2:
        made = (names or SAME).resolve(shapes, dtypes)
        found = [
            {name: Layout.parse(layout) for name, layout in Rules(rule).match(list(known)).items()}
            for rule, known in zip(rules, (shapes, made), strict=True)
        ]
        return found[0], found[1], made
    if names is not None:
        raise NotationError(
            "with names= an arrow does not say of which array its left side is",
            hint='rules=({"**": layouts by names here}, {"**": layouts by names there})',
        )
    here, there, made = {}, {}, {}
    for name, rule in Rules(rules).match(list(shapes)).items():
        with located(place_of(name)):
            src, dst, text = sides_or_one(rule)
            for end, mesh in zip((src, dst), meshes, strict=True):
                check_axes(end, mesh, text)
            here[name], there[name] = (end.resolved(len(shapes[name])) for end in (src, dst))
        order = tuple(map(here[name].names.index, there[name].names))
        shape = tuple(shapes[name][i] for i in order)
        dtype = dtypes[name] if dtypes else "float32"
        made[name] = Made(shape, dtype, (Piece(Side(name), Side(name), order),))
    return here, there, made


def _move(
    piece: Piece,
    sources: Mapping[str, SourceArray],
    target: Sharding,
    made: Made,
    devices: tuple[Devices, Devices],
    profile: Profile,
) -> PartMove:
    """The cheapest transfer of a piece; of two types the one of fewer bytes travels."""
    sharding, dtype = sources[piece.src.name]
    src, dst = (
        part_of(whole, side._replace(name="")) for whole, side in ((sharding, piece.src), (target, piece.dst))
    )
    # Dims have names of their own at both ends; where one name is at both, it is of one dim.
    at_src = src.sharding.layout.names
    for i, name in enumerate(dst.sharding.layout.names):
        if name in at_src and at_src[piece.order[i]] != name and not name.startswith("_"):
            raise NotationError(
                f"dim {name!r} of '{target.layout}' is dim {at_src[piece.order[i]]!r} of {piece.src.name}",
                hint=f"'{sharding.layout}' names another dim {name!r}: write the dims in their order there, "
                "or by other names; names= says where they change places",
            )
    there = dst.sharding.layout.named([at_src[i] for i in piece.order])
    travels = dtype
    if kinds.itemsize(made.dtype) < kinds.itemsize(dtype) and not sharding.layout.tagged(*REDUCERS):
        travels = made.dtype
    ends = src.sharding.layout, there, sharding.mesh, target.mesh
    request = Request(*ends, *devices, src.sharding.shape, travels, profile)
    return PartMove(piece.src.name, src, dst, find_plan(request, by_transfer=True))


def _balanced(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The same, with senders that share the work of all arrays."""
    moves = [move for array in arrays for move in array.moves]
    found = iter(balanced([m.transfer for m in moves], [m.plan.itemsize for m in moves]))

    def moved(move: PartMove) -> PartMove:
        senders = next(found)
        steps = tuple(replace(s, senders=senders) if s is move.transfer else s for s in move.plan.steps)
        return move._replace(plan=replace(move.plan, steps=steps))

    return [replace(array, moves=tuple(map(moved, array.moves))) for array in arrays]
