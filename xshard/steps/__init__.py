"""The steps a plan is made of; each file holds one dual pair."""

from xshard.steps.all_to_all import AllToAll
from xshard.steps.base import Step
from xshard.steps.embed import Embed, Mask
from xshard.steps.exchange.exchange import Exchange
from xshard.steps.gather import AllGather, Slice
from xshard.steps.permute import Permute
from xshard.steps.reduce import AllReduce, ReduceScatter
from xshard.steps.retag import Retag, Scale
from xshard.steps.traffic import Traffic
from xshard.steps.transpose import Transpose

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Embed",
    "Exchange",
    "Mask",
    "Permute",
    "ReduceScatter",
    "Retag",
    "Scale",
    "Slice",
    "Step",
    "Traffic",
    "Transpose",
]
