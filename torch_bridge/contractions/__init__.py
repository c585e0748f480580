"""Contractions of cut arrays: `einsum`, and how this process executes the plan of one."""

from torch_bridge.contractions.einsum import einsum

__all__ = ["einsum"]
