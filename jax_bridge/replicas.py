"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward.

Devices compare along every axis, and then exchange the differences, so that all of them raise or
none. A host callback that the block depends on gives the verdict. A block that is invariant along
an axis is equal by JAX's own proof, and not compared along it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.function import apply
from jax_bridge.lower.row_tables import with_zero_padding
from jax_bridge.lower.rules import all_reduce
from jax_bridge.mesh.axis_types import bound_sizes, is_typed, varying_axes
from jax_bridge.versions import (
    ACCELERATORS,
    Batch,
    Operation,
    batch_first,
    host_callback,
    linear_primitive,
)
from xshard import Mesh, Plan, XshardError, replicas
from xshard.layout.sub_axes import root_of
from xshard.replicas import ReplicaCheck, checks_of


def apply_checked(plan: Plan, x: jax.Array, text: str, ad: str) -> jax.Array:
    """Run a plan, and check that blocks that are said to be equal on several devices really are.

    Compared are replicas of the input, and in the backward pass those of the result's cotangent.
    Where they differ, JAX raises its own error with the text of a ReplicaError.

    Args:
        plan: The plan.
        x: The block under `plan.src`.
        text: The expression, for errors.
        ad: How the plan is differentiated.

    Returns:
        The block under `plan.dst`.
    """
    check, cotangent_check = checks_of(plan, Mesh(bound_sizes(root_of(plan.mesh).axes)), text)
    x = _expect(x, input_check=_with_watcher(check), cotangent_check=None)
    y = apply(plan, x, ad)
    if cotangent_check is None:
        return y
    # Checks the cotangent, which comes back here.
    return _expect(y, input_check=None, cotangent_check=_with_watcher(cotangent_check))


def _with_watcher(check: ReplicaCheck) -> ReplicaCheck:
    """Let a watcher, if a test has set one, look at the blocks; then they are not compared."""
    if replicas.WATCH is None:
        return check
    return check._replace(see=replicas.WATCH(check))


def _compare(
    x: jax.Array,
    *,
    input_check: ReplicaCheck | None,
    cotangent_check: ReplicaCheck | None,
    on_cpu: bool = True,
) -> jax.Array:
    """Compare a block with those of the other devices along some axes; raise if they differ.

    Args:
        x: The block.
        input_check: The axes along which blocks must be equal, and the text for the error; None to
            compare nothing.
        cotangent_check: The same for the block's cotangent; used by the transpose, in the backward pass.
        on_cpu: Whether the program is for CPUs, which raise in another way.

    Returns:
        The block.
    """
    if input_check is None:
        return x
    if input_check.see is not None:  # a watcher takes the block instead
        is_checked = _show(x, input_check, input_check.see)
    elif any(_may_differ(x, input_check.mesh.origin(axis)) for axis in input_check.axes):
        is_checked = _verdict(input_check, _differences(x, input_check), on_cpu)
    else:
        return x
    # Always x. The result depends on the check, so that XLA cannot leave the check out.
    return jnp.where(is_checked, x, jnp.zeros_like(x))


def _differences(x: jax.Array, check: ReplicaCheck) -> jax.Array:
    """Compare a block with those of the other devices along each axis of a check.

    Returns:
        The largest difference and the largest value, as every device found them: [devices, axes, 2].
    """
    values = _comparable(with_zero_padding(x, check.sharding))
    along_axes = []
    for axis in check.axes:
        if _may_differ(x, check.mesh.origin(axis)):
            along_axes.append(_difference_along(axis, values, check.mesh))
        else:
            along_axes.append(jnp.zeros(2, np.float32))
    whole_axes = root_of(check.mesh).axes
    device = lax.axis_index(whole_axes)
    shape = (check.mesh.n_devices, len(check.axes), 2)
    differences = jnp.zeros(shape, np.float32).at[device].set(jnp.stack(along_axes))
    # Every device gets the findings of all, also along axes that are not compared: then all raise,
    # or none. If some went on, they would wait in the next collective for ever.
    for axis in whole_axes:
        differences = lax.pmax(differences, axis)
    return differences


def _show(x: jax.Array, check: ReplicaCheck, see: Callable[[int, Any], object]) -> jax.Array:
    """Show the block to a watcher on the host; True when it has seen it."""

    def show(device: np.ndarray, block: np.ndarray) -> None:
        see(int(device), block.copy())  # XLA will use the memory again

    device = lax.axis_index(root_of(check.mesh).axes)
    return _on_host(show, device, with_zero_padding(x, check.sharding))


def _difference_along(axis: str, values: jax.Array, mesh: Mesh) -> jax.Array:
    """Compare blocks along an axis of a check's mesh.

    Returns:
        Two float32: the largest difference of an element between two devices, and the largest
        absolute value.
    """
    # The minimum is computed as a maximum in reversed order: of -x for floats, of ~x for integers,
    # since the lowest integer has no negative.
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    reversed_order = jnp.negative if is_float else jnp.invert
    largest = all_reduce(values, "max", mesh, (axis,))
    smallest = reversed_order(all_reduce(reversed_order(values), "max", mesh, (axis,)))
    # Equal infinities differ by 0. A difference of whole numbers may wrap around, but not to 0.
    difference = jnp.where(largest == smallest, 0, largest - smallest)
    difference = jnp.abs(difference.astype(np.float32))
    size = jnp.abs(jnp.stack([largest, smallest]).astype(np.float32)).max(0)
    size = jnp.where(jnp.isfinite(size), size, 0)
    # `initial` for blocks without elements, which have no maximum.
    return jnp.stack([difference.max(initial=0), size.max(initial=0)])


def _on_host(run: Callable[..., object], *arrays: jax.Array) -> jax.Array:
    """Run a function of numpy arrays on the host; the result is True once it has run."""

    def call(_: Any, result: Any, *arrays: Any) -> None:
        run(*map(np.asarray, arrays))
        np.asarray(result)[...] = True  # the callback's result is memory to write to

    return host_callback(call, jax.ShapeDtypeStruct((), bool))(*arrays)


def _verdict(check: ReplicaCheck, findings: jax.Array, on_cpu: bool) -> jax.Array:
    """Let the host judge the findings: True, or it raises ReplicaError."""

    def judge(findings: jax.Array) -> np.ndarray:
        fault = check.fault(np.asarray(findings))
        if fault is not None:
            raise fault
        return np.array(True)

    if on_cpu:
        # `pure_callback` would log a traceback on each device, and again at exit.
        return _on_host(judge, findings)
    return jax.pure_callback(judge, jax.ShapeDtypeStruct((), bool), findings)


def _may_differ(x: jax.Array, axis: str) -> bool:
    """Return whether JAX has no proof that the blocks are equal along an axis."""
    return not is_typed(axis) or axis in varying_axes(x)


def _comparable(x: jax.Array) -> jax.Array:
    """Convert a block to a dtype in which a maximum over devices can be taken.

    complex -> [real, imaginary]; shorter than 4 bytes -> float32 or int32. NaN becomes infinity,
    since comparisons with NaN are never true.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # complex numbers have no order
        x = jnp.stack([x.real, x.imag])
    is_short = x.dtype.itemsize < 4
    if jnp.issubdtype(x.dtype, jnp.floating):
        if is_short:
            x = x.astype(np.float32)
        return jnp.where(jnp.isnan(x), jnp.inf, x)
    if is_short:  # booleans, too
        x = x.astype(np.int32)
    return x


def _batch_rule(
    bind: Operation,
    x: jax.Array,
    dim: int | None,
    batch: Batch,
    **checks: ReplicaCheck | None,
) -> tuple[jax.Array, int | None]:
    """Compare a batch of blocks as one block with one more dim, the first (the rule of `jax.vmap`).

    Raises XshardError if the batch itself is the devices along an axis to compare, as in
    vmap(axis_name="dp"): this rule is given all of them at once.

    Args:
        bind: The operation, `_expect`.
        x: The blocks.
        dim: The batch dim of `x`; None if `x` is the same for the whole batch.
        batch: The batch.
        **checks: `input_check` and `cotangent_check`, as of `_compare`.

    Returns:
        The blocks, and their batch dim: 0.
    """
    for check in checks.values():
        if check is not None and check.see is None and batch.name in check.axes:
            reason = f"check_replicated along {batch.name!r}, which is a batch of vmap"
            hint = "it compares devices: use jax.shard_map or jax.pmap over the axis"
            raise XshardError(reason, text=check.text, hint=hint)
    return bind(batch_first(x, dim, batch.size), **checks), 0


def _compare_cotangent(
    cotangent: jax.Array, *, input_check: ReplicaCheck | None, cotangent_check: ReplicaCheck | None
) -> jax.Array:
    return _expect(cotangent, input_check=cotangent_check, cotangent_check=input_check)


# The identity: compares the block by `input_check`, and its cotangent by `cotangent_check`.
_expect: Operation = linear_primitive(
    "xshard_expect",
    run=_compare,
    on_platforms=dict.fromkeys(ACCELERATORS, partial(_compare, on_cpu=False)),
    transpose=_compare_cotangent,
    batch=_batch_rule,
)
