"""The arrays of a call: on which mesh they are, and whether they are sharded as an expression says.

Decides what is believed of an array that JAX does not know to be sharded. Moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from jax_bridge.arrays.primitive import Mesh
from jax_bridge.planning import axis_span, free_axes, xshard_mesh
from jax_bridge.versions import unreduced_kind, with_sharding
from xshard import Layout, XshardError
from xshard import Mesh as AxisSizes
from xshard.errors import MeshError, ShapeError


def free_mesh(mesh: Mesh, axes: Sequence[str], text: str) -> AxisSizes:
    """The axes that may cut arrays. Raises MeshError if one of `axes`, those of a text, is manual."""
    here = AxisSizes(free_axes(mesh))
    for axis in axes:
        if axis in mesh.shape and axis not in here.axes:
            raise MeshError(
                f"mesh axis {axis!r} is manual here",
                text=text,
                span=axis_span(axis, text),
                hint="reshard moves an array along the other axes, redistribute its blocks along this one",
            )
    return here


def check_given_mesh(axes: Sequence[str], planned: AxisSizes, here: AxisSizes) -> None:
    """Raise MeshError unless the axes that a given plan uses are those of the mesh here."""
    for axis in axes:
        if axis not in here.axes or here.size(axis) != planned.size(axis):
            raise MeshError(f"the plan is for {planned!r}, the array is on {here!r}")


def check_sharding(
    x: jax.Array, src: Layout, text: str, spec: PartitionSpec, mesh: Mesh, donate: bool = False
) -> None:
    """Raise if the array is known to be sharded differently from the left side."""
    if donate and isinstance(x, Tracer):
        raise XshardError(
            "a traced array cannot be donated",
            text=text,
            hint="donate it to the jit that is being traced: jax.jit(f, donate_argnums=...)",
        )
    if (found := found_elsewhere(x, text, spec, mesh)) is not None:
        raise ShapeError(f"the array is not sharded as '{src}' says", text=text, hint=f"it has {found}")


def found_elsewhere(x: jax.Array, text: str, spec: PartitionSpec, mesh: Mesh) -> Sharding | None:
    """The sharding of an array that is known to have another one; None if it has this, or may have."""
    if isinstance(x, Tracer):
        found = jax.typeof(x).sharding
        if found.mesh.empty or any(kind != AxisType.Explicit for kind in found.mesh.axis_types):
            return None
        source = NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)
    elif not x.committed:
        return None
    elif isinstance(mesh, AbstractMesh):
        raise MeshError(
            "the array is on devices, the mesh given has none",
            text=text,
            hint="pass the jax.Mesh, or nothing",
        )
    else:
        found, source = x.sharding, NamedSharding(mesh, spec)
    return None if are_the_same(found, source, x.ndim) else found


def is_on(x: jax.Array, mesh: Mesh) -> bool:
    """True for an array that is cut over the mesh."""
    own = _own_mesh(x)
    return own is not None and _are_one(own, mesh)


def are_the_same(found: Sharding, source: NamedSharding, ndim: int) -> bool:
    """True if every device has the same part of the array, under the same tags."""
    # JAX's own comparison ignores which axes are unreduced or reduced.
    return found == source or (_tags(found) == _tags(source) and found.is_equivalent_to(source, ndim))


def _tags(sharding: Sharding) -> tuple[frozenset[str], frozenset[str], str]:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        return frozenset(spec.unreduced), frozenset(spec.reduced), unreduced_kind(spec)
    return frozenset(), frozenset(), "sum"


def mesh_of(leaves: Sequence[jax.Array], texts: Sequence[str]) -> Mesh:
    """The mesh of the arrays; that of the context if the arrays have none."""
    found: Mesh | None = None
    for x, text in zip(leaves, texts, strict=True):
        mesh = _own_mesh(x)
        if mesh is None:
            continue
        if found is not None and not _are_one(mesh, found):
            raise MeshError(
                f"the arrays are on several meshes: {found} and {mesh}",
                text=text,
                hint="one call moves the arrays of one mesh",
            )
        found = mesh if found is None or isinstance(found, AbstractMesh) else found
    if found is not None:
        return found
    if not (context := jax.sharding.get_abstract_mesh()).empty:
        return context
    raise MeshError(
        "JAX does not say on which mesh the array is", text=texts[0] if texts else None, hint="pass mesh="
    )


def _are_one(a: Mesh, b: Mesh) -> bool:
    """Of a traced array JAX knows the mesh without its devices."""
    return a == b or (a.abstract_mesh == b.abstract_mesh and AbstractMesh in (type(a), type(b)))


def mesh_here(mesh: Mesh, text: str) -> Mesh:
    """The mesh with the types that its axes have in the context: `auto_axes` and `shard_map` change them."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or mesh.abstract_mesh == context:
        return mesh
    if tuple(mesh.shape.items()) != tuple(context.shape.items()):
        raise MeshError(
            f"the mesh of the array is {xshard_mesh(mesh)!r}, that of the context {xshard_mesh(context)!r}",
            text=text,
            hint="leave the context, or let jax.reshard take the array to its mesh first",
        )
    return context


def brought(x: jax.Array, source: NamedSharding, retyped: bool) -> jax.Array:
    """The array with the type of its source. One on devices keeps its place, in the types of the axes here;
    one that is nowhere yet is put on a mesh with Explicit axes as the source says."""
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.empty if isinstance(x, Tracer) else x.committed:
        if not retyped or mesh.empty or mesh == source.mesh:
            return x
    elif AxisType.Explicit not in source.mesh.axis_types:
        return x
    spec = with_sharding(jax.typeof(x), source).sharding.spec  # of the Explicit axes alone
    return jax.reshard(x, NamedSharding(source.mesh, spec))


def _own_mesh(x: jax.Array) -> Mesh | None:
    if not isinstance(x, Tracer):
        return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    return None if jax.typeof(x).sharding.mesh.empty else jax.typeof(x).sharding.mesh
