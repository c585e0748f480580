"""torch_bridge: torch carries out the plans of xshard, forward and backward."""

from torch_bridge.dtensor import from_placements, to_placements
from torch_bridge.launch import RankError, run_ranks
from torch_bridge.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    reduce_from,
    reduce_scatter,
    slice,
)
from torch_bridge.redistribution import redistribute
from torch_bridge.transfer import redistribute_between

__all__ = [
    "RankError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "from_placements",
    "redistribute",
    "redistribute_between",
    "reduce_from",
    "reduce_scatter",
    "run_ranks",
    "slice",
    "to_placements",
]
