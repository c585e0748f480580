"""Functions of other systems under their own names, for JAX: a mesh axis replaces the process group."""

from jax_bridge.compat.credit import gather_tensor, halo_exchange, shard_batch, shard_tensor, trim
from jax_bridge.compat.ksuit import (
    all_gather_grad,
    all_gather_grad_autograd,
    all_gather_grad_overwrite,
    all_gather_nograd,
    all_gather_nograd_clipped,
    all_reduce_mean_grad,
    all_reduce_mean_nograd,
    all_reduce_sum_grad,
    all_reduce_sum_nograd,
)
from jax_bridge.compat.nvsubquadratic import (
    all_to_all_single_fn,
    zigzag_gather_from_group_ranks,
    zigzag_split_across_group_ranks,
)
from jax_bridge.compat.poptorch import (
    all_gather_cross_replica,
    all_gather_cross_replica_identical_grads_in,
    all_reduce_cross_replica_sum,
    all_to_all_single_cross_replica,
)

__all__ = [
    "all_gather_cross_replica",
    "all_gather_cross_replica_identical_grads_in",
    "all_gather_grad",
    "all_gather_grad_autograd",
    "all_gather_grad_overwrite",
    "all_gather_nograd",
    "all_gather_nograd_clipped",
    "all_reduce_cross_replica_sum",
    "all_reduce_mean_grad",
    "all_reduce_mean_nograd",
    "all_reduce_sum_grad",
    "all_reduce_sum_nograd",
    "all_to_all_single_cross_replica",
    "all_to_all_single_fn",
    "gather_tensor",
    "halo_exchange",
    "shard_batch",
    "shard_tensor",
    "trim",
    "zigzag_gather_from_group_ranks",
    "zigzag_split_across_group_ranks",
]
