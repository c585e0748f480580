"""torch and JAX in one program: arrays handed over, and each inside the other.

The only package that imports both frameworks.
"""

from jax_bridge.torch_interop.callbacks import from_torch
from jax_bridge.torch_interop.calls import from_jax
from jax_bridge.torch_interop.start import initialize
from jax_bridge.torch_interop.verbs import to_jax, to_torch

__all__ = ["from_jax", "from_torch", "initialize", "to_jax", "to_torch"]
