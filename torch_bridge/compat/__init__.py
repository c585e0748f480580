"""Drop-in replacements for functions and classes of other systems, under their own names."""

from torch_bridge.compat.credit import (
    DomainParallelManager,
    HaloExchange,
    convert_to_domain_parallel,
    gather_tensor,
    get_domain_parallel_manager,
    initialize_domain_parallel,
    shard_batch,
    shard_tensor,
    sync_domain_gradients,
)
from torch_bridge.compat.ksuit import (
    AllGatherGradAutograd,
    AllGatherGradOverwrite,
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
from torch_bridge.compat.nvsubquadratic import (
    AllToAllSingleFunction,
    all_to_all_single_fn,
    zigzag_gather_from_group_ranks,
    zigzag_split_across_group_ranks,
)
from torch_bridge.compat.poptorch import (
    all_gather_cross_replica,
    all_gather_cross_replica_identical_grads_in,
    all_reduce_cross_replica_sum,
    all_to_all_single_cross_replica,
)

__all__ = [
    "AllGatherGradAutograd",
    "AllGatherGradOverwrite",
    "AllToAllSingleFunction",
    "DomainParallelManager",
    "HaloExchange",
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
    "convert_to_domain_parallel",
    "gather_tensor",
    "get_domain_parallel_manager",
    "initialize_domain_parallel",
    "shard_batch",
    "shard_tensor",
    "sync_domain_gradients",
    "zigzag_gather_from_group_ranks",
    "zigzag_split_across_group_ranks",
]
