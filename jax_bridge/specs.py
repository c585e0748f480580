"""Layouts <-> JAX's `PartitionSpec` and `NamedSharding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_bridge.mesh.axis_types import axes_of_entry
from jax_bridge.mesh.context import AnyJaxMesh, jax_mesh, xshard_mesh
from jax_bridge.versions import cuts_of, unreduced_kind
from xshard import Layout
from xshard.errors import MeshError, PlanError, ShapeError, api_boundary
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim, Shard

__all__ = ["from_partition_spec", "to_named_sharding", "to_partition_spec"]


@api_boundary
def to_partition_spec(layout: Layout | str, ndim: int | None = None) -> PartitionSpec:
    """Convert a layout to the equivalent spec: `sum` is unreduced, `copy` is reduced.

        spec = to_partition_spec("b/dp s c/tp")     # P("dp", None, "tp")

    JAX takes unreduced and reduced specs on Explicit axes only.

    Args:
        layout: The layout.
        ndim: The number of dims of the array, needed for `...`.

    Returns:
        The spec.

    Raises:
        PlanError: No spec can express the layout: it has orders, overlaps, mean, max or min.

    Examples:
        >>> to_partition_spec("n/(dp,tp) d | sum(cp)") == PartitionSpec(
        ...     ("dp", "tp"), None, unreduced={"cp"}
        ... )
        True
    """
    layout = Layout.parse(layout)
    if ndim is None:
        ndim = len(layout.dims)
    layout = layout.resolved(ndim)
    entries = [_entry_of(dim, str(layout)) for dim in layout.dims]
    if layout.tagged("mean", "max", "min"):
        raise PlanError("a PartitionSpec can only have the reduction sum", text=str(layout))
    return PartitionSpec(
        *entries, unreduced=set(layout.tagged("sum")), reduced=set(layout.tagged("copy"))
    )


def _entry_of(dim: Dim, text: str) -> str | tuple[str, ...] | None:
    """Return a dim's entry of a spec: n -> None, n/dp -> "dp", n/(dp,tp) -> ("dp", "tp").

    Raises PlanError for what no spec can say: overlaps, and orders such as zigzag.
    """
    if dim.overlap is not None:
        raise PlanError("a PartitionSpec cannot have overlaps", text=text)
    for shard in dim.shards:
        if shard.order != "block":
            hint = (
                "its blocks are contiguous; reshard keeps a dim of another order in storage order"
            )
            raise PlanError(f"a PartitionSpec cannot have order '{shard}'", text=text, hint=hint)
    if not dim.axes:
        return None
    if len(dim.axes) == 1:
        return dim.axes[0]
    return dim.axes


@api_boundary
def from_partition_spec(
    spec: PartitionSpec, ndim: int, names: Sequence[str] | None = None
) -> Layout:
    """Convert a spec of an array to the equivalent layout.

        layout = from_partition_spec(P("dp", "tp"), 2, ("n", "d"))     # n/dp d/tp

    Args:
        spec: The spec.
        ndim: The number of dims of the array.
        names: The names of its dims; default: `d0`, `d1`, ...

    Returns:
        The layout.

    Raises:
        ShapeError: There are other numbers of names or dims.
        PlanError: The spec leaves a dim open.

    Examples:
        >>> str(from_partition_spec(PartitionSpec("dp", None, ("cp", "tp")), 3))
        'd0/dp d1 d2/(cp,tp)'
    """
    if names is not None and len(names) != ndim:
        raise ShapeError(f"{len(names)} names for {ndim} dims")
    if len(spec) > ndim:
        raise ShapeError(f"{spec} has {len(spec)} dims, the array has {ndim}")

    if not names:
        names = [f"d{i}" for i in range(ndim)]
    dims = []
    # A short spec leaves the last dims whole: `zip_longest` gives them None.
    for name, entry in zip_longest(names, cuts_of(spec)):
        axes = axes_of_entry(entry, spec)
        dims.append(Dim(name, (Shard(axes),) if axes else ()))
    # unreduced={"a"} becomes the tag sum(a), reduced={"b"} the tag copy(b).
    addends = (unreduced_kind(spec), tuple(spec.unreduced))
    copies = ("copy", tuple(spec.reduced))
    return Layout(tuple(dims), (addends, copies))


@api_boundary
def to_named_sharding(
    layout: Layout | str, mesh: AnyJaxMesh, ndim: int | None = None
) -> NamedSharding:
    """Put a layout on a mesh of JAX.

        sharding = to_named_sharding("n/dp d", jax.make_mesh((4,), ("dp",)))

    Args:
        layout: The layout.
        mesh: The mesh.
        ndim: The number of dims of the array, needed for `...`.

    Returns:
        The sharding.

    Raises:
        PlanError: No spec can express the layout.
        MeshError: It is not a mesh of JAX, or the layout has tags and the mesh has Auto axes.
        NotationError: The mesh lacks an axis of the layout.
    """
    spec = to_partition_spec(layout, ndim)
    check_axes(Layout.parse(layout), xshard_mesh(jax_mesh(mesh)))
    # An array on Auto axes has no tags in its type.
    has_tags = spec.unreduced or spec.reduced
    if has_tags and any(kind != AxisType.Explicit for kind in mesh.axis_types):
        hint = "jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Explicit,) * n)"
        reason = f"'{layout}' has a tag, which a jax.Array carries on a mesh of Explicit axes only"
        raise MeshError(reason, hint=hint)
    return NamedSharding(mesh, spec)


def storage_layout(layout: Layout) -> Layout:
    """Return how JAX shards an array of the layout: the same axes, contiguous blocks.

    s/zigzag(cp) -> s/cp
    """
    dims = []
    for dim in layout.dims:
        shards = tuple(Shard(shard.axes) for shard in dim.shards)
        dims.append(replace(dim, shards=shards))
    return replace(layout, dims=tuple(dims))


def storage_sharding(layout: Layout, mesh: AnyJaxMesh) -> NamedSharding:
    """Return JAX's sharding of an array of the layout, with its rows in storage order."""
    return to_named_sharding(storage_layout(layout), mesh)
