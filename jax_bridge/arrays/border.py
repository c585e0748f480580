"""The border between global arrays and blocks: how JAX holds an array under any layout.

Decides what of a layout a `jax.Array` can keep, and what the move across the border does for the rest: it
fills and trims overlaps, pads blocks that differ in size, and takes pending reductions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import Sharding as JaxSharding

from jax_bridge.arrays.given import brought, found_elsewhere, free_mesh, is_on
from jax_bridge.arrays.order import check_order, order_of, stored_rows
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.arrays.reshard import reshard
from jax_bridge.keys import are_keys, as_words
from jax_bridge.planning import plan_here, with_entry_type
from jax_bridge.redistribution import carry_out
from jax_bridge.specs import from_partition_spec, storage_layout, to_named_sharding
from xshard import Layout, Profile, Sharding
from xshard import Mesh as AxisSizes
from xshard.errors import MeshError, ShapeError, located
from xshard.layout.layout import check_axes
from xshard.layout.lengths import Lengths, global_shape
from xshard.notation.parser import Dim, Shard, mark_errors
from xshard.plans.expression import Sides, sides_or_one


class Crossing(NamedTuple):
    """One array at the border: its blocks before and after, the array outside, and how JAX shards that.

    place: of the array, in errors.
    """

    place: str
    sides: Sides
    array: Sharding
    source: NamedSharding

    def across(self, x: jax.Array, axes: tuple[str, ...], profile: str | Path | Profile) -> jax.Array:
        """This device's block under the left layout -> its block under the right one. axes: of the mesh."""
        given, back = self.sides, None
        lengths = dict(zip(self.array.layout.names, self.array.shape, strict=True))
        shape = tuple(lengths[name] for name in given.src.names)
        with located(self.place):
            if are_keys(x):
                x, given, back = as_words(x, given)
                shape = (*shape, x.shape[-1])
            plan = plan_here(x, given, given, None, shape, profile)
            x = with_entry_type(x, plan, given.text, axes)
            if given.src != given.dst:
                x = carry_out(plan, x, given.text)
        return x if back is None else back(x)


def entering(place: str, said: Any, mesh: Mesh, shape: tuple[int, ...], typed: bool) -> Crossing:
    """An array of this shape on its way to the blocks that are said. typed: whether blocks have types."""
    with located(place):
        src, dst, text, axes = _sides(said, len(shape), mesh)
        array = held(src, axes, shape, text)
        source = to_named_sharding(storage_layout(array.layout), mesh)
        return Crossing(place, Sides(_bordering(array, typed), dst, text), array, source)


def leaving(
    place: str, said: Any, mesh: Mesh, block: tuple[int, ...], typed: bool, lengths: Lengths
) -> Crossing:
    """Blocks on their way to the array that is said. lengths: that its dims may have, by name."""
    with located(place):
        src, dst, text, axes = _sides(said, len(block), mesh)
        hint = "dims are as long as arguments have them: take another name, or say sizes={{dim}: ...}"
        shape = global_shape(src, axes, block, text, lengths, hint)
        by_name = dict(zip(src.names, shape, strict=True))
        array = held(dst, axes, tuple(by_name[name] for name in dst.names), text)
        source = to_named_sharding(storage_layout(array.layout), mesh)
        return Crossing(place, Sides(src, _bordering(array, typed), text), array, source)


def _sides(said: Any, ndim: int, mesh: Mesh) -> tuple[Layout, Layout, str, AxisSizes]:
    """Both sides of what is said of an array, their text, and the axes that they may name."""
    src, dst, text = sides_or_one(said)
    axes = free_mesh(mesh, (*src.axes, *dst.axes), text)
    with mark_errors(text):
        for side in (src, dst):
            check_axes(side, axes, text)
        return src.resolved(ndim), dst.resolved(ndim), text, axes


def _bordering(array: Sharding, typed: bool) -> Layout:
    """The layout of blocks as they cross. Without types JAX takes every device's value for its own, on both
    sides of a derivative: that is what `copy` says."""
    rest = () if typed else tuple(axis for axis in array.mesh.axes if axis not in array.layout.axes)
    return replace(array.layout, tags=(("copy", rest),) if rest else ())


def held(layout: Layout, mesh: AxisSizes, shape: tuple[int, ...], text: str) -> Sharding:
    """The global array whose blocks have the layout: without its tags and overlaps.

    A dim whose blocks differ in size is cut evenly, over as many of its axes as divide it.
    Raises ShapeError for one in another order, and as `Sharding` does.
    """
    with mark_errors(text):
        dims = zip(layout.resolved(len(shape)).dims, shape, strict=True)
        return Sharding(Layout(tuple(_held(dim, mesh, n, text) for dim, n in dims)), mesh, shape)


def _held(dim: Dim, mesh: AxisSizes, length: int, text: str) -> Dim:
    plain = replace(dim, overlap=None)
    alone = Sharding(Layout((plain,)), mesh, (length,))
    if alone.is_even:
        return plain
    if stored_rows(alone, 0) is not None:
        raise ShapeError(
            f"a jax.Array has no uneven blocks to keep the order of '{plain}', {length} long",
            text=text,
            hint=f"the move may make this order of the rows' own: '{dim.name} -> {plain}'",
        )
    axes = dim.axes
    while length % math.prod(map(mesh.size, axes)):
        axes = axes[:-1]
    return Dim(dim.name, (Shard(axes),) if axes else ())


def arrived(x: jax.Array, crossing: Crossing, mesh: Mesh, here: Mesh) -> jax.Array:
    """The array, moved by a plan if it is known to be sharded differently.

    here: the mesh with the types that its axes have in the context.
    Raises ShapeError if its rows are known to be in another order, MeshError for another mesh.
    """
    at, text = crossing.array, crossing.sides.text
    with located(crossing.place):
        check_order(x, at, text)
        found = found_elsewhere(x, text, crossing.source.spec, mesh)
        if found is not None:
            if not is_on(x, mesh):
                raise MeshError(
                    f"the array is not on the mesh: {found}", text=text, hint="place puts it there"
                )
            dst = storage_layout(at.layout) if order_of(x) is None else at.layout
            x = reshard(x, (where(x, found, at), dst), mesh)
        return brought(x, crossing.source, here is not mesh)


def where(x: jax.Array, found: JaxSharding | None, at: Sharding) -> Layout:
    """The layout of an array, which is to be held as `at`, with its names.

    found: its sharding, if that is known to be another one. Rows of which no order is known are contiguous.
    """
    known, names = order_of(x), at.layout.names
    if known is not None:
        return known.layout.named(names)
    if isinstance(found, NamedSharding):
        return from_partition_spec(found.spec, x.ndim, names)
    return storage_layout(at.layout)
