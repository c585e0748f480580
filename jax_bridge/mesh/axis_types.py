"""Mesh axes around a call: which are manual, in what order, their sub-axes, and a value's type along them.
Under `check_vma=True` a value is invariant, varying, unreduced or reduced along every manual axis. Under
`check_vma=False`, in `pmap` and in `vmap` there are no types, and declaring one does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jax_bridge import versions
from jax_bridge.versions import linear_primitive, manual_type
from xshard import Layout, Mesh
from xshard.layout.sub_axes import SubAxisMesh, unfactored
from xshard.ops import Axes


def bound_size(axis: str) -> int | None:
    """Devices along an axis; None if no collective here can name it."""
    return lax.axis_size(axis) if axis in versions.named_axes() else None


def axis_size(axis: Axes) -> int:
    """Devices along an axis, or along several together; an axis that no collective here can name counts 1."""
    return math.prod(bound_size(a) or 1 for a in ([axis] if isinstance(axis, str) else axis))


def bound_sizes(also: Iterable[str] = ()) -> dict[str, int]:
    """Sizes of the manual axes in mesh order, then of the axes of `also` that vmap has bound."""
    return {name: size for name in (*_manual(), *also) if (size := bound_size(name)) is not None}


def as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `move` to the bits of an array."""
    return from_bits(move(to_bits(x)), x.dtype)


def to_bits(x: jax.Array) -> jax.Array:
    """Short floats as integers, and numbers of 4 bits as bytes; all others as they are."""
    # XLA:CPU would send, slice and concatenate wider floats; NCCL has nothing shorter than a byte.
    if jnp.issubdtype(x.dtype, jnp.floating) and (bits := jnp.finfo(x.dtype).bits) <= 16:
        x = lax.bitcast_convert_type(x, f"uint{bits}")
    return x.astype(jnp.uint8) if _is_short(x.dtype) else x


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    if jnp.issubdtype(dtype, jnp.floating) and (n := jnp.finfo(dtype).bits) <= 16:
        return lax.bitcast_convert_type(from_bits(bits, jnp.dtype(f"uint{n}")), dtype)
    return bits.astype(dtype) if _is_short(dtype) else bits


def _is_short(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8


def ppermute(x: jax.Array, mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Send whole blocks between devices of `mesh`: pairs (sender, receiver). Other results mean nothing."""
    # JAX's ppermute numbers devices in the order of its own mesh, whatever the order of the axes given.
    names = jax.sharding.get_abstract_mesh().axis_names
    mesh = unfactored(mesh, mesh.axes)[0]
    axes = sorted(long_axes(mesh), key=lambda a: names.index(a) if a in names else 0)
    indexed = [(mesh.index(s, axes), mesh.index(d, axes)) for s, d in pairs]
    if any(map(is_vmapped, axes)):  # under vmap every device must take part
        idle = [
            set(range(mesh.size(*axes))).difference(busy) for busy in zip(*indexed, strict=True)
        ]
        indexed += zip(*map(sorted, idle), strict=True)
    return as_bits(lambda x: lax.ppermute(x, tuple(axes), indexed), x)


def is_typed(axis: str) -> bool:
    """True if values have a type along the axis, as inside a shard_map with check_vma=True."""
    if bound_size(axis) is None:
        return False
    # With types the index along an axis is varying; under vmap it has no type.
    index_type = manual_type(jax.eval_shape(lambda: lax.axis_index(axis)))
    return index_type is not None and bool(index_type.varying)


def is_vmapped(axis: str) -> bool:
    """True if the axis is a batch named by `jax.vmap(axis_name=)`."""
    return bound_size(axis) is not None and axis not in _manual()


def _manual() -> list[str]:
    """The manual axes of the context's mesh (of shard_map and pmap), in its order."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Manual]


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes along which the blocks may differ by their type; none without types."""
    return manual_type(x).varying


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare that the blocks may differ along the axes."""
    axes = [a for a in axes if is_typed(a)]
    block_type = manual_type(x)
    if invariant := tuple(a for a in axes if a not in block_type.vur):
        x = lax.pcast(x, invariant, to="varying")  # its cotangents are added up
    return _retyped(
        x, "varying", (a for a in axes if a in block_type.unreduced | block_type.reduced)
    )


def as_invariant(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare that the blocks are equal along the axes. This has no derivative: `autodiff` wraps it."""
    return _retyped(x, "invariant", (a for a in axes if is_typed(a)))


def as_tagged(x: jax.Array, layout: Layout) -> jax.Array:
    """Declare that varying blocks are addends or copies along the axes that the layout tags so."""
    return _retyped(
        _retyped(x, "unreduced", layout.tagged("sum")), "reduced", layout.tagged("copy")
    )


def _retyped(x: jax.Array, kind: str, axes: Iterable[str]) -> jax.Array:
    before = manual_type(x)
    changed = frozenset(axes)
    kinds = {k: getattr(before, k) - changed for k in ("varying", "unreduced", "reduced")}
    if kind in kinds:
        kinds[kind] |= changed
    return _retype(x, before=before, after=versions.changed_type(before, **kinds)) if changed else x


def _retype_transpose(cotangent: jax.Array, *, before, after) -> jax.Array:
    if before.vur != after.vur:
        raise NotImplementedError("the cast to invariant cannot be transposed: the plan can")
    return _retype(
        cotangent, before=versions.cotangent_type(after), after=versions.cotangent_type(before)
    )


# The identity on blocks; only the type changes.
_retype: Callable[..., jax.Array] = linear_primitive(
    "xshard_retype",
    run=lambda x, **_: x,
    abstract_eval=lambda x, *, before, after: (versions.with_manual_type(x, after), set()),
    transpose=_retype_transpose,
)


def long_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device, as JAX knows them, in mesh order."""
    return unfactored(mesh, mesh.axes)[0].long_axes


def group(mesh: Mesh, axes: Sequence[str]) -> dict[str, Any]:
    """Arguments of a collective of `jax.lax` along axes of a plan's mesh; the first axis is the slowest.

    >>> fine = SubAxisMesh(Mesh(x=4, y=2), (("x", (2, 2)),))
    >>> group(fine, ("x_0", "x_1")), group(fine, ("x_1",))["axis_index_groups"]
    ({'axis_name': ('x',)}, ((0, 1), (2, 3)))
    """
    whole, names = unfactored(mesh, axes)
    if whole is not mesh or not isinstance(mesh, SubAxisMesh):
        return {"axis_name": names}
    return subgroups(mesh, axes, lambda device: mesh.group(device, axes))


def subgroups(
    mesh: Mesh, axes: Sequence[str], members: Callable[[int], Sequence[int]]
) -> dict[str, Any]:
    """Arguments of a collective among the members that each device has along the axes, in their order."""
    parts, names = spanned(mesh, [axis for axis in mesh.axes if axis in axes])
    # JAX names the devices of a group by their index along the axes that span it.
    groups = {
        tuple(mesh.index(d, parts) for d in members(device)): () for device in mesh.group(0, parts)
    }
    if tuple(groups) == (tuple(range(mesh.size(*parts))),):
        return {"axis_name": names}
    return {"axis_name": names, "axis_index_groups": tuple(groups)}


def spanned(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All sub-axes of the whole axes that these are part of, and the whole axes: the same devices."""
    if not isinstance(mesh, SubAxisMesh):
        return tuple(axes), tuple(axes)
    names = tuple(dict.fromkeys(map(mesh.origin, axes)))
    return tuple(part for name in names for part in mesh.sub_axes[name]), names
