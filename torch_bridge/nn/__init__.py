"""Layers for blocks of arrays that are cut over a mesh, equal to torch's own on the whole array."""

from torch_bridge.nn.checkpointing import checkpoint
from torch_bridge.nn.convolution import Convolution, conv, conv_transpose
from torch_bridge.nn.domain import domain_parallel
from torch_bridge.nn.halo import HaloExchange
from torch_bridge.nn.layers import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    GroupNorm,
    LayerNorm,
    Linear,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    Upsample,
)
from torch_bridge.nn.placed import Placed, placed_as, sharding_of
from torch_bridge.nn.pooling import Pool, avg_pool, max_pool
from torch_bridge.nn.resizing import interpolate

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Convolution",
    "GroupNorm",
    "HaloExchange",
    "LayerNorm",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Placed",
    "Pool",
    "Upsample",
    "avg_pool",
    "checkpoint",
    "conv",
    "conv_transpose",
    "domain_parallel",
    "interpolate",
    "max_pool",
    "placed_as",
    "sharding_of",
]
