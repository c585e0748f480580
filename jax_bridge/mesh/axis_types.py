"""Mesh axes around a call: which are manual, in what order, and what type a value has along them.

Under `check_vma=True` JAX types every value along every manual axis: invariant (equal on all
devices), varying, unreduced (addends) or reduced (copies). Under `check_vma=False`, in `pmap` and
in `vmap` there are no such types, and declaring one does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from numpy.typing import NDArray

from jax_bridge import versions
from jax_bridge.versions import linear_primitive, manual_type
from xshard import Layout, Mesh
from xshard.errors import PlanError
from xshard.layout.sub_axes import SubAxisMesh, unfactored
from xshard.ops import Axes

# Axes around a call.


def bound_size(axis: str) -> int | None:
    """Return the number of devices along an axis; None if no collective can name the axis here."""
    if axis not in versions.named_axes():
        return None
    return lax.axis_size(axis)


def axis_size(axis: Axes) -> int:
    """Return the number of devices along an axis or several.

    An axis that no collective can name counts 1.
    """
    axes = (axis,) if isinstance(axis, str) else axis
    sizes = (bound_size(name) for name in axes)
    return math.prod(size for size in sizes if size is not None)


def bound_sizes(vmap_axes: Iterable[str]) -> dict[str, int]:
    """Return the sizes of the manual axes in mesh order, then of axes that vmap has bound.

    Args:
        vmap_axes: Names that may be axes of vmap.
    """
    sizes: dict[str, int] = {}
    for name in (*_manual_axes(), *vmap_axes):
        size = bound_size(name)
        if size is not None:
            sizes[name] = size
    return sizes


def is_typed(axis: str) -> bool:
    """Return whether values have a type along the axis, as in a shard_map with check_vma=True."""
    if bound_size(axis) is None:
        return False
    # With types the index along an axis is varying; under vmap it has no type.
    index_type = manual_type(jax.eval_shape(lambda: lax.axis_index(axis)))
    return index_type is not None and bool(index_type.varying)


def is_vmapped(axis: str) -> bool:
    """Return whether the axis is a batch named by `jax.vmap(axis_name=)`."""
    return bound_size(axis) is not None and axis not in _manual_axes()


def _manual_axes() -> list[str]:
    """List the manual axes of the context's mesh (of shard_map and pmap), in its order."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, axis_type in types if axis_type == AxisType.Manual]


def axes_of_entry(entry: Any, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a spec names. Raises PlanError for an open dim."""
    if entry is None:
        return ()
    axes = (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
        raise PlanError(f"{entry} in {spec} names no axes")
    return axes


# Types of values along axes.


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the axes along which blocks may differ by their type; none if there are no types."""
    return manual_type(x).varying


def axes_of_equal_blocks(x: jax.Array, axes: Iterable[str]) -> list[str]:
    """Return those of some axes along which several devices have equal blocks, as their type says."""
    block_type = manual_type(x)
    different = block_type.varying | block_type.unreduced
    return [
        axis for axis in axes if axis not in different and is_typed(axis) and axis_size(axis) > 1
    ]


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare to JAX's type checker that blocks may differ along mesh axes (`lax.pcast`).

    Values stay. Axes without types, as under check_vma=False, are left out.
    """
    typed_axes = list(filter(is_typed, axes))
    block_type = manual_type(x)
    invariant = tuple(axis for axis in typed_axes if axis not in block_type.vur)
    if invariant:
        # One value on many devices has as gradient the sum over devices: pcast's transpose is psum.
        x = lax.pcast(x, invariant, to="varying")
    # Axes along which the value is unreduced (addends) or reduced (copies): only the type changes.
    tagged = block_type.unreduced | block_type.reduced
    return _retyped(x, "varying", tagged.intersection(typed_axes))


def as_invariant(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare that the blocks are equal along the axes.

    This has no derivative: `autodiff` wraps it.
    """
    return _retyped(x, "invariant", filter(is_typed, axes))


def as_tagged(x: jax.Array, layout: Layout) -> jax.Array:
    """Declare varying blocks to be addends or copies along the axes that the layout tags so."""
    x = _retyped(x, "unreduced", layout.tagged("sum"))
    return _retyped(x, "reduced", layout.tagged("copy"))


def _retyped(x: jax.Array, kind: str, axes: Iterable[str]) -> jax.Array:
    """Give a value another type along mesh axes, without any change of its elements.

    Args:
        x: The value.
        kind: "invariant" (equal on all devices), "varying", "unreduced" (addends) or "reduced"
            (copies).
        axes: The axes.
    """
    changed = frozenset(axes)
    if not changed:
        return x
    old = manual_type(x)
    # A type has three sets of axes. An axis is in one of them; an invariant one is in none.
    sets = {
        "varying": old.varying - changed,
        "unreduced": old.unreduced - changed,
        "reduced": old.reduced - changed,
    }
    if kind != "invariant":
        sets[kind] |= changed
    return _retype(x, before=old, after=versions.changed_type(old, **sets))


def _retype_transpose(cotangent: jax.Array, *, before: Any, after: Any) -> jax.Array:
    """Retype a cotangent backwards: from the cotangent type of `after` to the one of `before`."""
    if before.vur != after.vur:
        # What was varying becomes invariant: only the plan knows that the blocks are equal.
        raise NotImplementedError("the cast to invariant cannot be transposed: the plan can")
    return _retype(
        cotangent, before=versions.cotangent_type(after), after=versions.cotangent_type(before)
    )


# The identity on blocks; only the type changes. JAX has no public operation for it.
_retype: versions.Operation = linear_primitive(
    "xshard_retype",
    run=lambda x, **_: x,
    abstract_eval=lambda x, *, before, after: (versions.with_manual_type(x, after), set()),
    transpose=_retype_transpose,
)


# Collectives along axes of a plan's mesh.


def as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a function that only moves elements to the bits of an array."""
    return from_bits(move(to_bits(x)), x.dtype)


def to_bits(x: jax.Array) -> jax.Array:
    """View floats of up to 16 bits as integers, and store 4-bit numbers as bytes.

    bfloat16 -> uint16, float8 -> uint8, int4 -> uint8; float32 stays. XLA:CPU would send, slice and
    concatenate short floats as wider floats; NCCL sends nothing shorter than a byte.
    """
    if _is_short_float(x.dtype):
        n_bits = jnp.finfo(x.dtype).bits
        x = lax.bitcast_convert_type(x, f"uint{n_bits}")
    if _is_short_integer(x.dtype):  # also the bits of a float of 4 bits
        x = x.astype(jnp.uint8)
    return x


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Undo `to_bits` for an array of `dtype`."""
    if _is_short_float(dtype):
        n_bits = jnp.finfo(dtype).bits
        integers = from_bits(bits, jnp.dtype(f"uint{n_bits}"))
        return lax.bitcast_convert_type(integers, dtype)
    if _is_short_integer(dtype):
        return bits.astype(dtype)
    return bits


def _is_short_float(dtype: Any) -> bool:
    """Return whether the dtype is a float of up to 16 bits, such as bfloat16 or float8."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def _is_short_integer(dtype: Any) -> bool:
    """Return whether the dtype is an integer shorter than a byte, such as int4."""
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8


def ppermute(x: jax.Array, mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Send whole blocks between devices of `mesh`.

    Args:
        x: This device's block.
        mesh: The mesh that numbers the devices in `pairs`.
        pairs: (sender, receiver) of each block. What other devices get means nothing.

    Returns:
        The block that arrives here.
    """
    mesh, _ = unfactored(mesh, mesh.axes)  # with the axes that JAX knows
    axes = list(mesh.long_axes)
    jax_order = jax.sharding.get_abstract_mesh().axis_names
    # An axis that is a batch of vmap is not in JAX's mesh. It is then the only one.
    if set(axes) <= set(jax_order):
        axes.sort(key=jax_order.index)
    # With the axes in another order JAX numbers the devices differently.
    number_of = partial(mesh.index, axes=axes)
    jax_pairs = [(number_of(sender), number_of(receiver)) for sender, receiver in pairs]
    if any(map(is_vmapped, axes)):
        jax_pairs += _idle_pairs(jax_pairs, mesh.size(*axes))
    return as_bits(lambda bits: lax.ppermute(bits, tuple(axes), jax_pairs), x)


def _idle_pairs(pairs: Sequence[tuple[int, int]], n_devices: int) -> list[tuple[int, int]]:
    """Complete a permutation: pair the devices that do not send with those that do not receive.

    [(0, 1)] of 3 devices -> [(1, 0), (2, 2)]. Under vmap JAX wants every device to take part.
    """
    senders = {sender for sender, _ in pairs}
    receivers = {receiver for _, receiver in pairs}
    not_sending = [device for device in range(n_devices) if device not in senders]
    not_receiving = [device for device in range(n_devices) if device not in receivers]
    return list(zip(not_sending, not_receiving, strict=True))


def long_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of more than one device under the names that JAX knows, in mesh order."""
    return unfactored(mesh, mesh.axes)[0].long_axes


def group_arguments(mesh: Mesh, axes: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that run a collective of `jax.lax` along axes of a plan's mesh.

    A plan may split an axis into sub-axes, which JAX does not know: it is given groups of devices
    instead.

    Args:
        mesh: The plan's mesh.
        axes: Its axes; the first is the slowest.

    Examples:
        >>> fine = SubAxisMesh(Mesh(x=4, y=2), (("x", (2, 2)),))
        >>> group_arguments(fine, ("x_0", "x_1"))
        {'axis_name': ('x',)}
        >>> group_arguments(fine, ("x_1",))["axis_index_groups"]
        ((0, 1), (2, 3))
    """
    span = whole_axes(mesh, axes)
    if span.sub_axes == tuple(axes):  # JAX knows these axes, as a whole
        return {"axis_name": span.names}
    return subgroup_arguments(mesh, axes, lambda device: mesh.group(device, axes))


def subgroup_arguments(
    mesh: Mesh, axes: Sequence[str], members: Callable[[int], Sequence[int]]
) -> dict[str, Any]:
    """Return the arguments that run a collective of `jax.lax` within groups of devices.

    These are `axis_name`, and `axis_index_groups` unless one group has all devices. Within pairs of
    4 devices along x: ("x",) and ((0, 1), (2, 3)).

    Args:
        mesh: The plan's mesh, which may split an axis of JAX's into sub-axes: x=4 into x_0=2 and
            x_1=2.
        axes: The axes of `mesh` along which the members of a group differ: ("x_1",) for the pairs.
        members: Device -> the devices of its group, in their order.
    """
    # JAX's axes that have these as parts, ("x",), and all parts of them, ("x_0", "x_1").
    span = whole_axes(mesh, [axis for axis in mesh.axes if axis in axes])
    # JAX numbers the devices of groups along the whole axes, x here.
    number_of = partial(mesh.index, axes=span.sub_axes)
    devices = mesh.group(0, span.sub_axes)
    # Every member of a group gives the same group: the keys of a dict keep it once, in order.
    groups = dict.fromkeys(tuple(map(number_of, members(device))) for device in devices)

    # JAX compiles a collective over whole axes without a list of groups.
    if tuple(groups) == (tuple(range(len(devices))),):
        return {"axis_name": span.names}
    return {"axis_name": span.names, "axis_index_groups": tuple(groups)}


def over_whole_axes(
    values: NDArray[Any], axes: Sequence[str], mesh: Mesh
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return a table of the devices along sub-axes as one of those along JAX's axes, with their names.

    Over x_1=2 of x split into x_0=2 and x_1=2, [a, b] -> [a, b, a, b] over x.
    """
    span = whole_axes(mesh, axes)
    if span.sub_axes == tuple(axes):
        return values, span.names
    rows = [mesh.index(device, axes) for device in mesh.group(0, span.sub_axes)]
    return values[rows], span.names


class AxisSpan(NamedTuple):
    """Whole axes of JAX's mesh, and the sub-axes of a plan's mesh that they are split into."""

    sub_axes: tuple[str, ...]
    names: tuple[str, ...]


def whole_axes(mesh: Mesh, axes: Sequence[str]) -> AxisSpan:
    """Return the axes of JAX's mesh that contain these sub-axes of a plan's, and all their parts.

    ("x_1",) of x split into x_0, x_1 -> names ("x",), sub_axes ("x_0", "x_1")
    """
    if not isinstance(mesh, SubAxisMesh):
        return AxisSpan(tuple(axes), tuple(axes))
    names = tuple(dict.fromkeys(map(mesh.origin, axes)))  # a dict keeps their order
    sub_axes: list[str] = []
    for name in names:
        sub_axes += mesh.sub_axes[name]
    return AxisSpan(tuple(sub_axes), names)
