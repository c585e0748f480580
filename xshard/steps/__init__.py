"""The steps a plan is made of; each file holds one dual pair."""

from xshard.steps.base import Step
from xshard.steps.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, Slice
from xshard.steps.exchange.exchange import Exchange
from xshard.steps.local import Embed, Mask, Retag, Scale, Transpose
from xshard.steps.permute import Permute
from xshard.steps.traffic import Traffic

__all__ = [
    "AllGather", "AllReduce", "AllToAll", "Embed", "Exchange", "Mask", "Permute", "ReduceScatter", "Retag",
    "Scale", "Slice", "Step", "Traffic", "Transpose",
]  # fmt: skip
