"""Contractions of cut arrays: what every device may contract alone, and what it gets."""

from xshard.contractions.types import einsum_type

__all__ = ["einsum_type"]
