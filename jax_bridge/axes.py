"""Mesh axes as JAX sees them here: which are manual, in what order, and what a value is along them.

Decides how a value's type along an axis is read and declared. Under `check_vma=True` a value is
invariant, varying, unreduced or reduced along every manual axis; under `check_vma=False`, in `pmap`
and in `vmap` there are no types, and declaring one does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from xshard.mesh import Mesh


def bound_size(axis: str) -> int | None:
    """Devices along an axis, None where no collective can name it here."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def bound_sizes(also: Iterable[str] = ()) -> dict[str, int]:
    """Every manual axis in the mesh's order, and those of `also` that are bound otherwise (by vmap)."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = [name for name, kind in kinds if kind == AxisType.Manual]
    sizes = {name: bound_size(name) for name in (*manual, *also)}
    return {name: size for name, size in sizes.items() if size is not None}


def send(x: jax.Array, mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Whole blocks from device to device of `mesh`, (sender, receiver); zeros where none arrives."""
    # ppermute counts devices in the order of JAX's own mesh, whatever the order of the axes it is given.
    names = jax.sharding.get_abstract_mesh().axis_names
    long = [a for a, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1]
    axes = sorted(long, key=lambda a: names.index(a) if a in names else 0)
    return lax.ppermute(x, tuple(axes), [(mesh.index(s, axes), mesh.index(d, axes)) for s, d in pairs])


def is_typed(axis: str) -> bool:
    """Whether values have a type along the axis: inside a shard_map with check_vma=True."""
    if bound_size(axis) is None:
        return False
    found = jax.eval_shape(lambda: lax.axis_index(axis)).manual_axis_type  # None under vmap
    return found is not None and bool(found.varying)


def varies(x: jax.Array, axis: str) -> bool:
    return axis in jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same blocks, declared to differ along the axes."""
    axes = [a for a in axes if is_typed(a)]
    found = jax.typeof(x).manual_axis_type
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
    before, changed = jax.typeof(x).manual_axis_type, frozenset(axes)
    kinds = {k: getattr(before, k) - changed for k in ("varying", "unreduced", "reduced")}
    if kind in kinds:
        kinds[kind] |= changed
    return _retype.bind(x, before=before, after=before.update(**kinds)) if changed else x


# The block stays as it is; only its type changes.
_retype = Primitive("xshard_retype")
_retype.def_impl(lambda x, **_: x)
_retype.def_abstract_eval(lambda x, *, before, after: x.update(manual_axis_type=after))
mlir.register_lowering(_retype, lambda _, x, **__: [x])
batching.primitive_batchers[_retype] = lambda xs, dims, **types: (_retype.bind(*xs, **types), *dims)


def _retype_transpose(cotangent, _, *, before, after):
    if before.vur != after.vur:
        raise NotImplementedError("which of the equal blocks an invariant's cotangent goes to is in the plan")
    return [_retype.bind(cotangent, before=after.to_ct_mat(), after=before.to_ct_mat())]


ad.deflinear2(_retype, _retype_transpose)
