"""Trees of containers: torch documents `torch.utils._pytree` and has no public address for it.

The same containers count as trees as in torch.func, torch.export and DCP. Without it, each room
would need its own walk through them, and classes that users have registered with torch would be
leaves.
"""

from __future__ import annotations

from torch_bridge.versions.support import private_names

with private_names():
    from torch.utils._pytree import (
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_map_with_path,
        tree_structure,
        tree_unflatten,
        treespec_dumps,
        treespec_loads,
    )

__all__ = [
    "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only", "tree_map_with_path",
    "tree_structure", "tree_unflatten", "treespec_dumps", "treespec_loads",
]  # fmt: skip
