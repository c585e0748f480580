"""The steps a plan is made of: one file per collective, with its dual beside it."""

from xshard.steps.all_gather import AllGather, Slice
from xshard.steps.all_reduce import AllReduce
from xshard.steps.all_to_all import AllToAll
from xshard.steps.base import Step
from xshard.steps.exchange.exchange import Exchange
from xshard.steps.local import Embed, Mask, Retag, Scale, Transpose
from xshard.steps.permute import Permute
from xshard.steps.reduce_scatter import ReduceScatter
from xshard.steps.traffic import Traffic

__all__ = [
    "AllGather", "AllReduce", "AllToAll", "Embed", "Exchange", "Mask", "Permute", "ReduceScatter", "Retag",
    "Scale", "Slice", "Step", "Traffic", "Transpose",
]  # fmt: skip
