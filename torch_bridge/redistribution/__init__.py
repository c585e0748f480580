"""`redistribute`: one verb for tensors, DTensors and trees, on one mesh or between two."""

from torch_bridge.redistribution.verb import redistribute

__all__ = ["redistribute"]
