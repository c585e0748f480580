"""`check_replicated=True`: blocks that a layout holds to be equal are compared, going in and coming back.

Decides how devices compare: along every axis, then what all of them have found, so that every device raises
or none. The verdict is made on the host, in a callback on which the block depends; it works in eager and
jitted programs. Where axes have types, what is invariant is equal by JAX's own proof and not compared.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.function import apply
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.axis_types import bound_sizes, is_typed, varying_axes
from jax_bridge.versions import batch_first, linear_primitive
from xshard import Mesh, Plan, XshardError
from xshard.replicas import ReplicaCheck


def apply_checked(plan: Plan, x: jax.Array, text: str, ad: str) -> jax.Array:
    """What `apply` returns. When it or its transpose runs, ReplicaError, in the text of JAX's own error.

    Compared are `x` where the left side has replicas or copies, and the cotangents of the result where
    its dual has. text: what the error marks.
    """
    everyone = Mesh(bound_sizes(plan.mesh.axes))
    x = _expect(
        x, entering=ReplicaCheck(plan.source, everyone, plan.dtype, text, cotangents=False), returning=None
    )
    y = apply(plan, x, ad)
    if not plan.dst.is_linear:
        return y
    dual = plan.target.with_layout(plan.target.layout.dual)
    return _expect(
        y, entering=None, returning=ReplicaCheck(dual, everyone, plan.dtype, text, cotangents=True)
    )


def _compared(x: jax.Array, held: ReplicaCheck | None) -> jax.Array:
    """The block, after it was compared."""
    if held is None or not any(_may_differ(x, axis) for axis in held.axes):
        return x
    axes, mesh = held.axes, held.mesh
    values = _comparable(without_padding(x, held.sharding))
    flipped = -values if jnp.issubdtype(values.dtype, jnp.floating) else ~values
    found = []
    for axis in axes:
        if not _may_differ(x, axis):
            found.append(jnp.zeros(2, np.float32))
            continue
        most, least = lax.pmax(values, axis), lax.pmax(flipped, axis)
        least = -least if jnp.issubdtype(values.dtype, jnp.floating) else ~least
        # Equal infinities differ by nothing. Whole numbers wrap around, but not to 0.
        apart = jnp.abs(jnp.where(most == least, 0, most - least).astype(np.float32))
        size = jnp.maximum(abs(most.astype(np.float32)), abs(least.astype(np.float32)))
        size = jnp.where(jnp.isfinite(size), size, 0)
        found.append(jnp.stack([apart.max(initial=0), size.max(initial=0)]))
    everywhere = jnp.zeros((mesh.n_devices, len(axes), 2), np.float32)
    everywhere = everywhere.at[lax.axis_index(mesh.axes)].set(jnp.stack(found))
    for axis in mesh.axes:  # also along those that the plan leaves alone: they wait for each other
        everywhere = lax.pmax(everywhere, axis)

    def judge(table: jax.Array) -> np.ndarray:
        fault = held.fault(np.asarray(table))
        if fault is not None:
            raise fault
        return np.ones((), bool)

    right = jax.pure_callback(judge, jax.ShapeDtypeStruct((), bool), everywhere)
    return jnp.where(right, x, jnp.zeros_like(x))


def _may_differ(x: jax.Array, axis: str) -> bool:
    return not is_typed(axis) or axis in varying_axes(x)


def _comparable(x: jax.Array) -> jax.Array:
    """The block in a dtype that has a maximum; NaN, which is larger than nothing, as infinity."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(np.int32) if x.dtype.itemsize < 4 or x.dtype == bool else x
    wide = x if x.dtype.itemsize >= 4 else x.astype(np.float32)
    return jnp.where(jnp.isnan(wide), jnp.inf, wide)


def _batched(
    x: jax.Array,
    dim: int | None,
    size: int,
    name: object,
    *,
    entering: ReplicaCheck | None,
    returning: ReplicaCheck | None,
) -> tuple[jax.Array, int | None]:
    for held in (entering, returning):
        if held is not None and name in held.axes:
            raise XshardError(
                f"check_replicated along {name!r}, which is a batch of vmap",
                text=held.text,
                hint="it compares devices: use jax.shard_map or jax.pmap over the axis",
            )
    return _expect(batch_first(x, dim, size), entering=entering, returning=returning), 0


# The block itself, which `entering` says to compare, and its cotangent, which `returning` does.
_expect: Callable[..., jax.Array] = linear_primitive(
    "xshard_expect",
    run=lambda x, entering, returning: _compared(x, entering),
    abstract_eval=lambda x, **_: (x, set()),
    transpose=lambda cotangent, entering, returning: _expect(
        cotangent, entering=returning, returning=entering
    ),
    batch=_batched,
)
