"""The place of every element of an array: meshes, layouts, and shardings, which are both with a shape."""

from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding

__all__ = ["Layout", "Mesh", "Sharding"]
