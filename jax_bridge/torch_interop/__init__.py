"""torch and JAX in one program: arrays handed over, and each inside the other.

The only package that imports both frameworks.
"""

from jax_bridge.torch_interop.start import initialize
from jax_bridge.torch_interop.verbs import to_jax, to_torch

__all__ = ["initialize", "to_jax", "to_torch"]
