"""DTensors: their placements as layouts, and redistributions between them."""

from torch_bridge.dtensor.placements import from_placements, to_placements
from torch_bridge.dtensor.redistribution import redistribute

__all__ = ["from_placements", "redistribute", "to_placements"]
