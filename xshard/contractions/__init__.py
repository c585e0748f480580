"""Contractions of sharded arrays."""

from xshard.contractions.types import einsum_type

__all__ = ["einsum_type"]
