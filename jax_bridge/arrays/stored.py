"""A global array at rest: its layout, its mesh, how JAX shards it, and the order of its rows. An array of JAX
is the concatenation of the blocks in device order, so that a dim in zigzag or another order is in storage
order. A move records that order on the array; the results of JAX and tracers are without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from jax.sharding import Sharding as JaxSharding
from numpy.typing import NDArray

from jax_bridge.mesh.context import AnyMesh, axis_span, free_axes, jax_mesh, xshard_mesh
from jax_bridge.specs import from_partition_spec, storage_layout, storage_sharding
from jax_bridge.versions import unreduced_kind, with_sharding
from xshard import Layout, Mesh, Sharding, XshardError
from xshard.arguments import is_on as is_set
from xshard.errors import MeshError, ShapeError
from xshard.layout.runs import row_numbers
from xshard.notation.maps import Maps
from xshard.notation.parser import Dim, Shard, mark_errors

STRICT = is_set("XSHARD_DEBUG")  # unknown orders are refused, too
_RECORD = "_xshard_order"


def stored_as(
    array: jax.Array, layout: Layout | str, mesh: AnyMesh | None = None, *, maps: Maps | None = None
) -> jax.Array:
    """Record in which order the rows of an array are stored -> the same array.

    `reshard` then refuses to read them in another order. Nothing moves; a tracer is returned as it is.
    layout: an order such as `s/zigzag(cp)`, or none, as in `s/cp`. mesh: default: the array's own.
    maps: the `Owners` that it names. Raises NotationError, ShapeError, MeshError.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> stored_as(jax.numpy.arange(4), "s/zigzag(cp)", mesh).tolist()
    [0, 1, 2, 3]
    """
    if isinstance(array, Tracer):
        return array
    if (mesh := _own_mesh(array) if mesh is None else mesh) is None:
        raise MeshError(
            "the array lacks a mesh", text=str(layout), hint="stored_as(array, layout, mesh)"
        )
    return remember(array, Sharding(Layout.parse(layout, maps), xshard_mesh(mesh), array.shape))


def remember(array: Any, stored: Sharding) -> Any:
    """Record the order of the rows -> the same array. stored: the array, or the words of its keys."""
    if not isinstance(array, Tracer):
        if len(stored.shape) > array.ndim:
            layout = replace(stored.layout, dims=stored.layout.dims[: array.ndim])
            stored = Sharding(layout, stored.mesh, array.shape)
        setattr(array, _RECORD, stored)
    return array


def order_of(array: Any) -> Sharding | None:
    """The recorded order of the rows, if any."""
    return None if isinstance(array, Tracer) else getattr(array, _RECORD, None)


def check_order(array: Any, source: Sharding, text: str) -> None:
    """Raise ShapeError for rows in another order than `source`, or under XSHARD_DEBUG, in an unknown one."""
    known = order_of(array)
    if isinstance(array, Tracer) or (known is None and not STRICT):
        return
    if (() if known is None else _orders(known)) != _orders(source):
        unknown = f"nothing says that the rows of the array are stored as '{source.layout}'"
        reason = (
            unknown if known is None else f"the rows of the array are stored as '{known.layout}'"
        )
        hint = (
            f"write their order on the left, or say what it is: stored_as(array, '{source.layout}')"
        )
        raise ShapeError(reason, text=text, hint=hint)


def stored_rows(array: Sharding, dim: int) -> NDArray[np.int64] | None:
    """The rows of a dim, device by device; None if that is their own order."""
    rows = np.concatenate([row_numbers(owned) for owned in array.owners(dim)])
    return None if np.array_equal(rows, np.arange(array.shape[dim])) else rows


@lru_cache(maxsize=4096)
def _orders(stored: Sharding) -> tuple[tuple[int, Shard, tuple[int, ...]], ...]:
    """The shards in another order than their rows' own: the dim, the shard, the sizes of its axes."""
    dims = stored.normal.dims
    ordered = [
        i for i, dim in enumerate(dims) if any(shard.order != "block" for shard in dim.shards)
    ]
    return tuple(
        (i, shard, stored.mesh.sizes_of(shard.axes)) for i in ordered for shard in dims[i].shards
    )


class ArrayMesh(NamedTuple):
    """The mesh of a call's arrays, and the same mesh with the types that its axes have in the context."""

    own: JaxMesh | AbstractMesh
    here: JaxMesh | AbstractMesh

    @classmethod
    def of(
        cls, arrays: Sequence[jax.Array], texts: Sequence[str], mesh: object = None
    ) -> ArrayMesh:
        """The mesh given, or of the arrays, or of the context. texts: for errors, one per array."""
        own = mesh_of(arrays, texts) if mesh is None else jax_mesh(mesh)
        context = jax.sharding.get_abstract_mesh()
        if context.empty or own.abstract_mesh == context:
            return cls(own, own)
        if tuple(own.shape.items()) != tuple(context.shape.items()):
            reason = (
                f"the array is on {xshard_mesh(own)!r}, the context has {xshard_mesh(context)!r}"
            )
            hint = "leave the context, or let jax.reshard take the array to its mesh first"
            raise MeshError(reason, text=next(iter(texts), None), hint=hint)
        return cls(own, context)

    def free(self, axes: Sequence[str], text: str, planned: Mesh | None = None) -> Mesh:
        """The axes that may shard arrays. Raises MeshError if one of `axes` is manual, or not as planned."""
        free = Mesh(free_axes(self.here))
        for axis in axes:
            if axis in self.here.shape and axis not in free.axes:
                reason = f"mesh axis {axis!r} is manual here"
                span = axis_span(axis, text)
                hint = "reshard moves an array along other axes, redistribute its blocks along this one"
                raise MeshError(reason, text=text, span=span, hint=hint)
            if planned is not None and (
                axis not in free.axes or free.size(axis) != planned.size(axis)
            ):
                raise MeshError(f"the plan is for {planned!r}, the array is on {free!r}", text=text)
        return free


class StoredArray(NamedTuple):
    """A global array at rest. sharding: in storage order. text, path: expression and name, for errors."""

    array: Sharding
    mesh: ArrayMesh
    sharding: NamedSharding
    text: str
    path: str = ""

    @classmethod
    def of(cls, array: Sharding, mesh: ArrayMesh, text: str, path: str = "") -> StoredArray:
        """Raises ShapeError unless all blocks have one size, and as `to_named_sharding` does."""
        check_even(array, text)
        with mark_errors(text):
            return cls(array, mesh, storage_sharding(array.layout, mesh.here), text, path)

    def check(self, x: jax.Array, donate: bool = False) -> None:
        """Raise ShapeError for an array known to be sharded otherwise, XshardError to donate a tracer."""
        if donate and isinstance(x, Tracer):
            hint = "donate it to the jit that is being traced: jax.jit(f, donate_argnums=...)"
            raise XshardError("a traced array cannot be donated", text=self.text, hint=hint)
        if (other := self.other_sharding(x)) is not None:
            reason = f"the array is not sharded as '{self.array.layout}' says"
            raise ShapeError(reason, text=self.text, hint=f"it has {other}")

    def other_sharding(self, x: jax.Array) -> JaxSharding | None:
        """The sharding of an array that is known to have another; None if it has, or may have, this one."""
        if isinstance(x, Tracer):
            known = jax.typeof(x).sharding
            if known.mesh.empty or any(kind != AxisType.Explicit for kind in known.mesh.axis_types):
                return None
            source = NamedSharding(known.mesh, self.sharding.spec, memory_kind=known.memory_kind)
        elif not x.committed:
            return None
        elif isinstance(self.mesh.own, AbstractMesh):
            reason = "the array is on devices, the mesh passed lacks them"
            raise MeshError(reason, text=self.text, hint="pass the jax.Mesh, or nothing")
        else:
            known = x.sharding
            source = NamedSharding(self.mesh.own, self.sharding.spec)
        return None if are_the_same(known, source, x.ndim) else known

    def bring(self, x: jax.Array) -> jax.Array:
        """The array with this sharding as its type; one without devices is put on a mesh of Explicit axes."""
        mesh = jax.typeof(x).sharding.mesh
        target = self.sharding.mesh
        if not mesh.empty if isinstance(x, Tracer) else x.committed:
            if self.mesh.here is self.mesh.own or mesh.empty or mesh == target:
                return x
        elif AxisType.Explicit not in target.axis_types:
            return x
        spec = with_sharding(
            jax.typeof(x), self.sharding
        ).sharding.spec  # of the Explicit axes alone
        return jax.reshard(x, NamedSharding(target, spec))


def is_on(x: jax.Array, mesh: JaxMesh | AbstractMesh) -> bool:
    """True for an array that is sharded over the mesh."""
    own = _own_mesh(x)
    return own is not None and _are_one(own, mesh)


def known_layout(x: jax.Array, sharding: JaxSharding | None, default: Sharding) -> Layout:
    """The layout that an array is known to have, by its order or `sharding`, with the names of `default`."""
    known = order_of(x)
    names = default.layout.names
    if known is not None:
        return known.layout.named(names)
    if isinstance(sharding, NamedSharding):
        return from_partition_spec(sharding.spec, x.ndim, names)
    return storage_layout(default.layout)


def check_even(array: Sharding, text: str) -> None:
    """Raise ShapeError unless all devices have blocks of one size."""
    if not array.is_even:
        reason = f"a jax.Array cannot have uneven blocks: {array.shape} does not divide by '{array.layout}'"
        hint = (
            "pad it, or move it at shard_map's border, as in 's -> s/zigzag(cp)', which pads blocks"
        )
        raise ShapeError(reason, text=text, hint=hint)


def at_rest(layout: Layout, mesh: Mesh, shape: tuple[int, ...], text: str) -> Sharding:
    """The array of blocks of a layout, without tags, overlaps, uneven axes. Raises ShapeError."""
    with mark_errors(text):
        dims = zip(layout.resolved(len(shape)).dims, shape, strict=True)
        return Sharding(
            Layout(tuple(_even_dim(dim, mesh, n, text) for dim, n in dims)), mesh, shape
        )


def _even_dim(dim: Dim, mesh: Mesh, length: int, text: str) -> Dim:
    plain = replace(dim, overlap=None)
    alone = Sharding(Layout((plain,)), mesh, (length,))
    if alone.is_even:
        return plain
    if stored_rows(alone, 0) is not None:
        reason = f"a jax.Array cannot have uneven blocks in the order of '{plain}', {length} long"
        raise ShapeError(
            reason, text=text, hint=f"a pair in layouts= may reorder: '{dim.name} -> {plain}'"
        )
    axes = dim.axes
    while length % math.prod(map(mesh.size, axes)):
        axes = axes[:-1]
    return Dim(dim.name, (Shard(axes),) if axes else ())


def are_the_same(a: JaxSharding, b: NamedSharding, ndim: int) -> bool:
    """True if every device has the same part of the array, under the same tags, which JAX would ignore."""
    return a == b or (_tags(a) == _tags(b) and a.is_equivalent_to(b, ndim))


def _tags(sharding: JaxSharding) -> tuple[frozenset[str], frozenset[str], str]:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        return frozenset(spec.unreduced), frozenset(spec.reduced), unreduced_kind(spec)
    return frozenset(), frozenset(), "sum"


def mesh_of(arrays: Sequence[jax.Array], texts: Sequence[str]) -> JaxMesh | AbstractMesh:
    """The mesh of the arrays, or else of the context. texts: expressions for errors, one per array."""
    common: JaxMesh | AbstractMesh | None = None
    for mesh, text in zip(map(_own_mesh, arrays), texts, strict=True):
        if mesh is None:
            continue
        if common is not None and not _are_one(mesh, common):
            reason = f"the arrays are on several meshes: {common} and {mesh}"
            raise MeshError(reason, text=text, hint="one call moves the arrays of one mesh")
        common = mesh if common is None or isinstance(common, AbstractMesh) else common
    context = jax.sharding.get_abstract_mesh()
    if common is None and context.empty:
        first = texts[0] if texts else None
        raise MeshError(
            "JAX does not say on which mesh the array is", text=first, hint="pass mesh="
        )
    return context if common is None else common


def _own_mesh(x: jax.Array) -> JaxMesh | AbstractMesh | None:
    if not isinstance(x, Tracer):
        return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    mesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty else mesh


def _are_one(a: JaxMesh | AbstractMesh, b: JaxMesh | AbstractMesh) -> bool:
    """True for equal meshes; of a traced array JAX knows the mesh without its devices."""
    return a == b or (a.abstract_mesh == b.abstract_mesh and AbstractMesh in (type(a), type(b)))
