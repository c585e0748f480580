"""DTensors: placements and results that have no public name. Slow to import: DTensor is."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from torch_bridge.versions.support import private_names

with private_names():
    # AsyncCollectiveTensor: the result of a collective of DTensor that may still be under way.
    # Without it, a block could be read before it has arrived.
    # StridedShard: the placement of a dim that later mesh axes have cut before. Without it, a
    # nesting of cuts that is not in mesh order, as FSDP with tensor parallelism makes it, could not
    # be said or read.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["AsyncCollectiveTensor", "StridedShard", "shard_order"]


def shard_order(x: DTensor) -> tuple[Any, ...]:
    """Return the dims that several mesh dims cut, each with the order in which they do.

    Newer releases of torch have it; for older ones it is empty. Without it, blocks in another order
    than placements say would be moved as if they were in order.
    """
    order = getattr(x._spec, "shard_order", None)
    return () if order is None else tuple(order)
