"""Functions of other systems under their own names, a module per system; mesh axes replace groups."""

from jax_bridge.compat import credit, ksuit, nvsubquadratic, poptorch

__all__ = ["credit", "ksuit", "nvsubquadratic", "poptorch"]
