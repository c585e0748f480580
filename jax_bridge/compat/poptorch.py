"""`poptorch_experimental_addons.collectives` for JAX: collectives across replicas along a mesh axis."""

from __future__ import annotations

import jax

from jax_bridge.mesh.axis_types import axis_size
from jax_bridge.ops import all_gather, all_reduce, all_to_all, copy_to
from xshard import compat
from xshard.errors import api_boundary
from xshard.ops import Axes


@api_boundary
def all_gather_cross_replica(x: jax.Array, axis: Axes) -> jax.Array:
    """Stack every replica's array on all of them: [...] -> [N, ...].

    The gradient is the sum over replicas (reduce-scatter).

    Args:
        x: This replica's array.
        axis: The mesh axis of replicas.

    Returns:
        The arrays of all replicas.

    Examples:
        >>> import jax.numpy as jnp
        >>> stack = jax.pmap(lambda x: all_gather_cross_replica(x, "replica"), "replica")
        >>> stack(jnp.ones((1, 2))).shape
        (1, 1, 2)
    """
    return all_gather(x[None], 0, axis, grad="sum")


@api_boundary
def all_gather_cross_replica_identical_grads_in(x: jax.Array, axis: Axes) -> jax.Array:
    """Stack every replica's array on all of them: [...] -> [N, ...].

    The gradient is the slice of the own cotangent. With types the result is invariant along the
    axis.
    """
    return all_gather(x[None], 0, axis, grad="replicated")


@api_boundary
def all_reduce_cross_replica_sum(
    x: jax.Array, axis: Axes, insert_in_grad_graph: bool = False
) -> jax.Array:
    """Sum over replicas, either arrays or their gradients: [...] -> [...].

    Args:
        x: This replica's array.
        axis: The mesh axis of replicas.
        insert_in_grad_graph: Sum the gradients; values pass unchanged, and with types x must be
            invariant along the axis. Else values are summed, and gradients pass unchanged.
    """
    if insert_in_grad_graph:
        return copy_to(x, axis)
    return all_reduce(x, axis, grad="replicated")


@api_boundary
def all_to_all_single_cross_replica(x: jax.Array, axis: Axes) -> jax.Array:
    """Exchange parts of the leading dim between replicas: [N k, ...] -> [N k, ...].

    Part j of replica i becomes part i of replica j. It is its own adjoint.

    Args:
        x: This replica's array.
        axis: The mesh axis of replicas.

    Raises:
        ShapeError: N does not divide the leading dim.
    """
    parts = x.reshape(compat.equal_parts(x.shape, axis_size(axis)))  # [N, k, ...]
    return all_to_all(parts, 1, 0, axis).reshape(x.shape)
