"""Layers and models on blocks of sharded arrays, equal to torch's own on the whole array."""

from torch_bridge.nn.attention import attention, joint_attention
from torch_bridge.nn.cross_entropy import cross_entropy
from torch_bridge.nn.domain_parallel import domain_parallel
from torch_bridge.nn.fft import fft
from torch_bridge.nn.huggingface import register_attention
from torch_bridge.nn.layers import HaloExchange
from torch_bridge.nn.placed import sharding_of
from torch_bridge.nn.propagation import checkpoint

__all__ = [
    "HaloExchange", "attention", "checkpoint", "cross_entropy", "domain_parallel", "fft",
    "joint_attention",
    "register_attention", "sharding_of",
]  # fmt: skip
