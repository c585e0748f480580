"""Layouts <-> JAX's `PartitionSpec` and `NamedSharding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from jax_bridge.mesh.context import jax_mesh, xshard_mesh
from jax_bridge.versions import cuts_of, unreduced_kind
from xshard import Layout
from xshard.errors import MeshError, NotationError, PlanError, ShapeError
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim, Shard

__all__ = ["from_partition_spec", "to_named_sharding", "to_partition_spec"]


def to_partition_spec(layout: Layout | str, ndim: int | None = None) -> PartitionSpec:
    """A layout -> the equivalent spec: `sum` is unreduced, `copy` is reduced.

    ndim: dims of the array, needed for `...`. JAX takes unreduced and reduced specs on Explicit axes only.
    Raises PlanError for a layout that no spec can express: with orders, overlaps, mean, max or min.

    >>> to_partition_spec("n/(dp,tp) d | sum(cp)") == PartitionSpec(
    ...     ("dp", "tp"), None, unreduced={"cp"}
    ... )
    True
    """
    layout = Layout.parse(layout)
    layout = layout.resolved(len(layout.dims) if ndim is None else ndim)
    hint = "its blocks are contiguous; reshard keeps a dim of another order in storage order"
    for dim in layout.dims:
        if dim.overlap is not None:
            raise PlanError("a PartitionSpec cannot have overlaps", text=str(layout))
        for shard in dim.shards:
            if shard.order != "block":
                raise PlanError(
                    f"a PartitionSpec cannot have order '{shard}'", text=str(layout), hint=hint
                )
    if layout.tagged("mean", "max", "min"):
        raise PlanError("a PartitionSpec can only have the reduction sum", text=str(layout))
    entries = [
        dim.axes if len(dim.axes) > 1 else dim.axes[0] if dim.axes else None for dim in layout.dims
    ]
    return PartitionSpec(
        *entries, unreduced=set(layout.tagged("sum")), reduced=set(layout.tagged("copy"))
    )


def from_partition_spec(
    spec: PartitionSpec, ndim: int, names: Sequence[str] | None = None
) -> Layout:
    """A spec of an array of `ndim` dims -> the layout. names: names of the dims; default: `d0`, `d1`, ...

    Raises ShapeError for other numbers of names or dims, PlanError for an open dim, NotationError for
    anything but a spec.

    >>> str(from_partition_spec(PartitionSpec("dp", None, ("cp", "tp")), 3))
    'd0/dp d1 d2/(cp,tp)'
    """
    if not isinstance(spec, PartitionSpec):
        own = isinstance(spec, NamedSharding)
        hint = "pass its .spec" if own else "as in PartitionSpec('dp', None, ('cp', 'tp'))"
        raise NotationError(f"a {type(spec).__name__} is not a PartitionSpec", hint=hint)
    if names is not None and len(names) != ndim:
        raise ShapeError(f"{len(names)} names for {ndim} dims")
    if len(spec) > ndim:
        raise ShapeError(f"{spec} has {len(spec)} dims, the array has {ndim}")
    entries = [*cuts_of(spec), *[None] * (ndim - len(spec))]
    dims = []
    for name, entry in zip(names or [f"d{i}" for i in range(ndim)], entries, strict=True):
        axes = (entry,) if isinstance(entry, str) else () if entry is None else entry
        if not isinstance(axes, tuple) or not all(isinstance(a, str) for a in axes):
            raise PlanError(f"{entry} in {spec} names no axes")
        dims.append(Dim(name, (Shard(axes),) if axes else ()))
    return Layout(
        tuple(dims), ((unreduced_kind(spec), tuple(spec.unreduced)), ("copy", tuple(spec.reduced)))
    )


def to_named_sharding(
    layout: Layout | str, mesh: JaxMesh | AbstractMesh, ndim: int | None = None
) -> NamedSharding:
    """A layout on a mesh of JAX -> the sharding.

    Raises PlanError; MeshError for anything but a mesh of JAX, and for tags on one with Auto axes;
    NotationError for an axis that the mesh lacks.
    """
    spec = to_partition_spec(layout, ndim)
    check_axes(Layout.parse(layout), xshard_mesh(jax_mesh(mesh)))
    if (spec.unreduced or spec.reduced) and any(
        kind != AxisType.Explicit for kind in mesh.axis_types
    ):
        hint = "jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Explicit,) * n)"
        reason = f"'{layout}' has a tag, which a jax.Array carries on a mesh of Explicit axes only"
        raise MeshError(reason, hint=hint)
    return NamedSharding(mesh, spec)


def storage_layout(layout: Layout) -> Layout:
    """The layout of the array in storage order: the same axes shard each dim, into contiguous blocks."""
    dims = (replace(d, shards=tuple(Shard(s.axes) for s in d.shards)) for d in layout.dims)
    return replace(layout, dims=tuple(dims))


def storage_sharding(layout: Layout, mesh: JaxMesh | AbstractMesh) -> NamedSharding:
    """JAX's sharding of an array in storage order."""
    return to_named_sharding(storage_layout(layout), mesh)
