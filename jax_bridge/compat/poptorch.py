"""`poptorch_experimental_addons.collectives` for JAX: collectives across the replicas along a mesh axis."""

from __future__ import annotations

import jax

from jax_bridge.mesh.axis_types import axis_size
from jax_bridge.ops import all_gather, all_reduce, all_to_all, copy_to
from xshard import compat
from xshard.ops import Axes


def all_gather_cross_replica(x: jax.Array, axis: Axes) -> jax.Array:
    """Stack every replica's array: [...] -> [N, ...]; the gradient is the sum over replicas (reduce-scatter).

    >>> import jax.numpy as jnp
    >>> jax.pmap(lambda x: all_gather_cross_replica(x, "replica"), "replica")(
    ...     jnp.ones((1, 2))
    ... ).shape
    (1, 1, 2)
    """
    return all_gather(x[None], 0, axis, grad="sum")


def all_gather_cross_replica_identical_grads_in(x: jax.Array, axis: Axes) -> jax.Array:
    """Stack every replica's array: [...] -> [N, ...]; the gradient is the slice of the own cotangent. With
    types the result is invariant along the axis.
    """
    return all_gather(x[None], 0, axis, grad="replicated")


def all_reduce_cross_replica_sum(
    x: jax.Array, axis: Axes, insert_in_grad_graph: bool = False
) -> jax.Array:
    """The sum over replicas; the gradient passes unchanged: [...] -> [...].

    insert_in_grad_graph: the reverse: x passes unchanged, its gradient is summed. With types x must then be
    invariant along the axis.
    """
    return copy_to(x, axis) if insert_in_grad_graph else all_reduce(x, axis, grad="replicated")


def all_to_all_single_cross_replica(x: jax.Array, axis: Axes) -> jax.Array:
    """Part j of replica i's leading dim becomes part i of replica j's: [N k, ...] -> [N k, ...]. Its own
    adjoint. Raises ShapeError if N does not divide the leading dim.
    """
    return all_to_all(x.reshape(compat.equal_parts(x.shape, axis_size(axis))), 1, 0, axis).reshape(
        x.shape
    )
