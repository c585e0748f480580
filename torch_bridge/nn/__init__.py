"""Layers for blocks of arrays that are cut over a mesh, equal to torch's own on the whole array."""

from torch_bridge.nn.attention import attention
from torch_bridge.nn.conv import Convolution, conv, conv_transpose
from torch_bridge.nn.domain_parallel import domain_parallel
from torch_bridge.nn.halo import HaloExchange
from torch_bridge.nn.huggingface import register_attention
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
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    Linear,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    RMSNorm,
    Upsample,
)
from torch_bridge.nn.placed import Placement, placed_as, sharding_of
from torch_bridge.nn.pool import Pool, avg_pool, max_pool
from torch_bridge.nn.propagation import checkpoint
from torch_bridge.nn.resample import interpolate

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
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Placement",
    "Pool",
    "RMSNorm",
    "Upsample",
    "attention",
    "avg_pool",
    "checkpoint",
    "conv",
    "conv_transpose",
    "domain_parallel",
    "interpolate",
    "max_pool",
    "placed_as",
    "register_attention",
    "sharding_of",
]
