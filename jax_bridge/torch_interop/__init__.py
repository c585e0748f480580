"""torch and JAX in one program: arrays handed over, and functions of each inside the other."""

from jax_bridge.torch_interop.api import to_jax, to_torch
from jax_bridge.torch_interop.from_jax import from_jax
from jax_bridge.torch_interop.from_torch import from_torch
from jax_bridge.torch_interop.initialize import initialize

__all__ = ["from_jax", "from_torch", "initialize", "to_jax", "to_torch"]
