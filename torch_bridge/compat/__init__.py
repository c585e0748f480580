"""Drop-in replacements for functions and classes of other systems: a module per system."""

from torch_bridge.compat import credit, ksuit, nvsubquadratic, poptorch, spmd_types

__all__ = ["credit", "ksuit", "nvsubquadratic", "poptorch", "spmd_types"]
