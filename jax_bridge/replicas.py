"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward. Devices
compare along every axis, and then exchange the differences, so that all of them raise or none. A host
callback that the block depends on gives the verdict. A block that is invariant along an axis is equal by
JAX's own proof, and not compared along it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.function import apply
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.axis_types import bound_sizes, is_typed, varying_axes
from jax_bridge.versions import ACCELERATORS, Batch, batch_first, host_callback, linear_primitive
from xshard import Mesh, Plan, XshardError, replicas
from xshard.replicas import ReplicaCheck, checks_of


def apply_checked(plan: Plan, x: jax.Array, text: str, ad: str) -> jax.Array:
    """`apply`, with checks of `x`, and of cotangents, which raise JAX's error with a ReplicaError's text."""
    entering, returning = checks_of(plan, Mesh(bound_sizes(plan.mesh.axes)), text)
    y = apply(plan, _expect(x, entering=_watched(entering), returning=None), ad)
    return _expect(y, entering=None, returning=_watched(returning)) if returning else y


def _watched(check: ReplicaCheck) -> ReplicaCheck:
    return check if replicas.WATCH is None else check._replace(see=replicas.WATCH(check))


def _compared(x: jax.Array, check: ReplicaCheck | None, on_cpu: bool = False) -> jax.Array:
    """The block, after the comparison."""
    if check is not None and (see := check.see) is not None:
        device = lax.axis_index(check.mesh.axes)
        block = without_padding(x, check.sharding)
        is_seen = _on_host(lambda device, block: see(int(device), block.copy()), device, block)
        return jnp.where(is_seen, x, jnp.zeros_like(x))
    if check is None or not any(_may_differ(x, axis) for axis in check.axes):
        return x
    axes = check.axes
    mesh = check.mesh
    values = _comparable(without_padding(x, check.sharding))
    negated = jnp.negative if jnp.issubdtype(values.dtype, jnp.floating) else jnp.invert
    differences = []
    for axis in axes:
        if not _may_differ(x, axis):
            differences.append(jnp.zeros(2, np.float32))
            continue
        most = lax.pmax(values, axis)
        least = negated(lax.pmax(negated(values), axis))
        # Equal infinities differ by 0. The difference of unequal whole numbers may wrap around, not to 0.
        apart = jnp.abs(jnp.where(most == least, 0, most - least).astype(np.float32))
        size = jnp.maximum(abs(most.astype(np.float32)), abs(least.astype(np.float32)))
        size = jnp.where(jnp.isfinite(size), size, 0)
        differences.append(jnp.stack([apart.max(initial=0), size.max(initial=0)]))
    table = jnp.zeros((mesh.n_devices, len(axes), 2), np.float32)
    table = table.at[lax.axis_index(mesh.axes)].set(jnp.stack(differences))
    for (
        axis
    ) in mesh.axes:  # along all axes: collectives on the plan's other axes wait for each other
        table = lax.pmax(table, axis)
    return jnp.where(_judge(check, table, on_cpu), x, jnp.zeros_like(x))


def _on_host(run: Callable[..., object], *arrays: jax.Array) -> jax.Array:
    """True, after a function of numpy arrays has run on the host."""

    def call(_: Any, result: Any, *arrays: Any) -> None:
        run(*map(np.asarray, arrays))
        np.asarray(result)[...] = True

    return host_callback(call, jax.ShapeDtypeStruct((), bool))(*arrays)


def _judge(check: ReplicaCheck, table: jax.Array, on_cpu: bool) -> jax.Array:
    def call(table: jax.Array) -> np.ndarray:
        if (fault := check.fault(np.asarray(table))) is not None:
            raise fault
        return np.ones((), bool)

    if on_cpu:  # without the traceback that `pure_callback` logs on each device, and again at exit
        return _on_host(call, table)
    return jax.pure_callback(call, jax.ShapeDtypeStruct((), bool), table)


def _may_differ(x: jax.Array, axis: str) -> bool:
    return not is_typed(axis) or axis in varying_axes(x)


def _comparable(x: jax.Array) -> jax.Array:
    """The block in a dtype that has a maximum; NaN, which no comparison finds, becomes infinity."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(np.int32) if x.dtype.itemsize < 4 or x.dtype == bool else x
    wide = x if x.dtype.itemsize >= 4 else x.astype(np.float32)
    return jnp.where(jnp.isnan(wide), jnp.inf, wide)


def _batched(
    x: jax.Array, dim: int | None, along: Batch, **checks: ReplicaCheck | None
) -> tuple[jax.Array, int | None]:
    for check in checks.values():
        if check is not None and check.see is None and along.name in check.axes:
            what = f"check_replicated along {along.name!r}, which is a batch of vmap"
            hint = "it compares devices: use jax.shard_map or jax.pmap over the axis"
            raise XshardError(what, text=check.text, hint=hint)
    return _expect(batch_first(x, dim, along.size), **checks), 0


# The identity: compares the block by `entering`, and its cotangent by `returning`.
_expect: Callable[..., jax.Array] = linear_primitive(
    "xshard_expect",
    run=lambda x, entering, returning: _compared(x, entering, on_cpu=True),
    on_platforms=dict.fromkeys(ACCELERATORS, lambda x, entering, returning: _compared(x, entering)),
    transpose=lambda ct, entering, returning: _expect(ct, entering=returning, returning=entering),
    batch=_batched,
)
