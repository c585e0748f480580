"""Mesh axes as JAX sees them here: which are manual, in what order, and what a value is along them.

Decides how a value's type along an axis is read and declared. Under `check_vma=True` a value is
invariant, varying, unreduced or reduced along every manual axis; under `check_vma=False`, in `pmap`
and in `vmap` there are no types, and declaring one does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jax_bridge.mesh.sub_axes import long_axes
from jax_bridge.versions import changed_type, cotangent_type, linear_primitive, manual_type, with_manual_type
from xshard.layout.mesh import Mesh
from xshard.layout.sub_axes import unfactored
from xshard.ops import Axes


def bound_size(axis: str) -> int | None:
    """Devices along an axis, None where no collective can name it here."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def axis_size(axis: Axes) -> int:
    """Devices along an axis, or along several as one; 1 along what no collective can name here."""
    return math.prod(bound_size(a) or 1 for a in ([axis] if isinstance(axis, str) else axis))


def bound_sizes(also: Iterable[str] = ()) -> dict[str, int]:
    """Every manual axis in the mesh's order, and those of `also` that are bound otherwise (by vmap)."""
    sizes = {name: bound_size(name) for name in (*_manual(), *also)}
    return {name: size for name, size in sizes.items() if size is not None}


def as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`move`, of short floats as integers: XLA:CPU sends wider ones, and slices and concatenates those."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits not in (8, 16):
        return move(x)
    return lax.bitcast_convert_type(
        move(lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")), x.dtype
    )


def send(x: jax.Array, mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Whole blocks from device to device of `mesh`, (sender, receiver). What others get means nothing."""
    # ppermute counts devices in the order of JAX's own mesh, whatever the order of the axes it is given.
    names = jax.sharding.get_abstract_mesh().axis_names
    mesh = unfactored(mesh, mesh.axes)[0]
    axes = sorted(long_axes(mesh), key=lambda a: names.index(a) if a in names else 0)
    indexed = [(mesh.index(s, axes), mesh.index(d, axes)) for s, d in pairs]
    if any(map(is_vmapped, axes)):  # whose ppermute wants everyone to take part
        idle = [set(range(mesh.size(*axes))).difference(ends) for ends in zip(*indexed, strict=True)]
        indexed += zip(*map(sorted, idle), strict=True)
    return as_bits(lambda x: lax.ppermute(x, tuple(axes), indexed), x)


def is_typed(axis: str) -> bool:
    """Whether values have a type along the axis: inside a shard_map with check_vma=True."""
    if bound_size(axis) is None:
        return False
    # The index along an axis varies where there are types; under vmap it has none.
    found = manual_type(jax.eval_shape(lambda: lax.axis_index(axis)))
    return found is not None and bool(found.varying)


def is_vmapped(axis: str) -> bool:
    """Whether the axis is a batch that `jax.vmap(axis_name=)` has named."""
    return bound_size(axis) is not None and axis not in _manual()


def _manual() -> list[str]:
    """The manual axes of the context's mesh, those of shard_map and pmap, in its order."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Manual]


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes along which the blocks may differ, as far as there are types."""
    return manual_type(x).varying


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same blocks, declared to differ along the axes."""
    axes = [a for a in axes if is_typed(a)]
    found = manual_type(x)
    invariant_ = tuple(a for a in axes if a not in found.vur)
    if invariant_:
        x = lax.pcast(x, invariant_, to="varying")  # its cotangents are added up
    return _retyped(x, "varying", (a for a in axes if a in found.unreduced | found.reduced))


def invariant(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same blocks, declared to be equal along the axes. Has no derivative: `autodiff` is around it.

    No cast of JAX does this, and rightly: it cannot know. A plan can. It was checked when it was
    built, and a plan that ends in replicas leaves equal blocks.
    """
    return _retyped(x, "invariant", (a for a in axes if is_typed(a)))


def unreduced(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Varying blocks, declared to be the addends of one value along the axes."""
    return _retyped(x, "unreduced", axes)


def reduced(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Varying blocks that are equal along the axes, declared to be copies, whose cotangents add up."""
    return _retyped(x, "reduced", axes)


def _retyped(x: jax.Array, kind: str, axes: Iterable[str]) -> jax.Array:
    before, changed = manual_type(x), frozenset(axes)
    kinds = {k: getattr(before, k) - changed for k in ("varying", "unreduced", "reduced")}
    if kind in kinds:
        kinds[kind] |= changed
    return _retype(x, before=before, after=changed_type(before, **kinds)) if changed else x


def _retype_transpose(cotangent: jax.Array, *, before, after) -> jax.Array:
    if before.vur != after.vur:
        raise NotImplementedError("which of the equal blocks an invariant's cotangent goes to is in the plan")
    return _retype(cotangent, before=cotangent_type(after), after=cotangent_type(before))


# The block stays as it is; only its type changes.
_retype: Callable[..., jax.Array] = linear_primitive(
    "xshard_retype",
    run=lambda x, **_: x,
    abstract_eval=lambda x, *, before, after: (with_manual_type(x, after), set()),
    transpose=_retype_transpose,
    batch=lambda x, dim, _, __, **types: (_retype(x, **types), dim),
)
