"""torch and JAX in one program: arrays handed over, and functions of each inside the other."""

from jax_bridge.torch_interop.devices import initialize
from jax_bridge.torch_interop.from_jax import from_jax
from jax_bridge.torch_interop.from_torch import from_torch
from jax_bridge.torch_interop.hand_over import to_jax, to_torch

__all__ = ["from_jax", "from_torch", "initialize", "to_jax", "to_torch"]
