"""Ranks on one machine, and the equivalence kit for torch."""

from torch_bridge.testing.launch import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
