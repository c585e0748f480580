"""DTensors: their placements as layouts, and redistributions between them."""

from torch_bridge.dtensor.placements import from_placements, to_placements

__all__ = ["from_placements", "to_placements"]
