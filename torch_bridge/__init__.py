"""torch_bridge: torch carries out the plans of xshard, forward and backward."""

from torch_bridge import nn
from torch_bridge.dtensor import from_placements, to_placements
from torch_bridge.launch import RankError, run_ranks
from torch_bridge.nn.halo import HaloExchange
from torch_bridge.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    halo_exchange,
    reduce_from,
    reduce_scatter,
    slice,
    trim_halo,
)
from torch_bridge.positions import positions
from torch_bridge.redistribution import redistribute
from torch_bridge.transfer import redistribute_between

__all__ = [
    "HaloExchange",
    "RankError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "from_placements",
    "halo_exchange",
    "nn",
    "positions",
    "redistribute",
    "redistribute_between",
    "reduce_from",
    "reduce_scatter",
    "run_ranks",
    "slice",
    "to_placements",
    "trim_halo",
]
