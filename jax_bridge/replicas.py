"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward.

Decides how devices compare: along every axis, and then they exchange what they found, so that all of them
raise or none. A host callback that the block depends on gives the verdict, in eager and jitted programs.
A block that is invariant along an axis is equal by JAX's own proof, and not compared along it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.function import apply
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.axis_types import bound_sizes, is_typed, varying_axes
from jax_bridge.versions import Batch, batch_first, host_callback, linear_primitive
from xshard import Mesh, Plan, XshardError, replicas
from xshard.replicas import ReplicaCheck


def apply_checked(plan: Plan, x: jax.Array, text: str, ad: str) -> jax.Array:
    """`apply`, with checks at run time, which raise JAX's error with the text of a ReplicaError.

    The forward pass compares `x` along the replicas and copies of the left side; the backward pass compares
    the result's cotangents along those of the right side's dual. text: what the error marks.
    """
    everyone = Mesh(bound_sizes(plan.mesh.axes))
    check = ReplicaCheck(plan.source, everyone, plan.dtype, text, cotangents=False)
    x = _expect(x, entering=_held(check), returning=None)
    y = apply(plan, x, ad)
    if not plan.dst.is_linear:
        return y
    dual = plan.target.with_layout(plan.target.layout.dual)
    return _expect(y, entering=None, returning=_held(check._replace(sharding=dual, cotangents=True)))


class _Watched(NamedTuple):
    """What stands in the place of a check where `replicas.WATCH` is told the blocks."""

    tell: Callable[[int, Any], object]
    check: ReplicaCheck


def _held(check: ReplicaCheck) -> ReplicaCheck | _Watched:
    return check if replicas.WATCH is None else _Watched(replicas.WATCH(check), check)


Verdict = Callable[[ReplicaCheck, jax.Array], jax.Array]


def _compared(x: jax.Array, held: ReplicaCheck | _Watched | None, verdict: Verdict) -> jax.Array:
    """The block, once it has been compared."""
    if isinstance(held, _Watched):
        return _told(x, held)
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
        # Equal infinities differ by 0. The difference of unequal whole numbers may wrap around, not to 0.
        apart = jnp.abs(jnp.where(most == least, 0, most - least).astype(np.float32))
        size = jnp.maximum(abs(most.astype(np.float32)), abs(least.astype(np.float32)))
        size = jnp.where(jnp.isfinite(size), size, 0)
        found.append(jnp.stack([apart.max(initial=0), size.max(initial=0)]))
    everywhere = jnp.zeros((mesh.n_devices, len(axes), 2), np.float32)
    everywhere = everywhere.at[lax.axis_index(mesh.axes)].set(jnp.stack(found))
    for axis in mesh.axes:  # along all axes: collectives on the plan's other axes wait for each other
        everywhere = lax.pmax(everywhere, axis)

    return jnp.where(verdict(held, everywhere), x, jnp.zeros_like(x))


def _told(x: jax.Array, held: _Watched) -> jax.Array:
    """The block, once it has been seen."""

    def see(_: Any, right: Any, device: Any, block: Any) -> None:
        held.tell(int(np.asarray(device)), np.asarray(block).copy())
        np.asarray(right)[...] = True

    index, block = lax.axis_index(held.check.mesh.axes), without_padding(x, held.check.sharding)
    seen = host_callback(see, jax.ShapeDtypeStruct((), bool))(index, block)
    return jnp.where(seen, x, jnp.zeros_like(x))


def _verdict(held: ReplicaCheck, table: jax.Array) -> jax.Array:
    """True, or the error."""

    def judge(table: jax.Array) -> np.ndarray:
        _raise_fault(held, table)
        return np.ones((), bool)

    return jax.pure_callback(judge, jax.ShapeDtypeStruct((), bool), table)


def _verdict_on_cpu(held: ReplicaCheck, table: jax.Array) -> jax.Array:
    """The same, without the traceback that `pure_callback` logs on each device, and again at exit."""

    def judge(_: Any, right: Any, table: Any) -> None:
        _raise_fault(held, table)
        np.asarray(right)[...] = True

    return host_callback(judge, jax.ShapeDtypeStruct((), bool))(table)


def _raise_fault(held: ReplicaCheck, table: Any) -> None:
    fault = held.fault(np.asarray(table))
    if fault is not None:
        raise fault


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
    x: jax.Array,
    dim: int | None,
    along: Batch,
    *,
    entering: ReplicaCheck | _Watched | None,
    returning: ReplicaCheck | _Watched | None,
) -> tuple[jax.Array, int | None]:
    for held in (entering, returning):
        if isinstance(held, ReplicaCheck) and along.name in held.axes:
            raise XshardError(
                f"check_replicated along {along.name!r}, which is a batch of vmap",
                text=held.text,
                hint="it compares devices: use jax.shard_map or jax.pmap over the axis",
            )
    return _expect(batch_first(x, dim, along.size), entering=entering, returning=returning), 0


# The identity: compares the block by `entering`, and its cotangent by `returning`.
_expect: Callable[..., jax.Array] = linear_primitive(
    "xshard_expect",
    run=lambda x, entering, returning: _compared(x, entering, _verdict_on_cpu),
    on_platforms=dict.fromkeys(
        ("cuda", "rocm", "tpu"), lambda x, entering, returning: _compared(x, entering, _verdict)
    ),
    abstract_eval=lambda x, **_: (x, set()),
    transpose=lambda cotangent, entering, returning: _expect(
        cotangent, entering=returning, returning=entering
    ),
    batch=_batched,
)
