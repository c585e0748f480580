"""What torch.compile has to be told, and what it knows about symbols. Slow to import: Dynamo is."""

from __future__ import annotations

from typing import Any

import torch._dynamo
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.versions.support import private_names

with private_names():
    from torch.utils._pytree import register_constant

    # A decorator: Dynamo does not look inside a function, and records the operations that it runs.
    # The public `allow_in_graph` passes on no DeviceMesh. Without it, Dynamo would trace the
    # planner itself, and fail.
    nonstrict_trace = torch._dynamo.nonstrict_trace

# torch 2.13 registers this by itself; before, Dynamo refuses a DeviceMesh in a recorded function.
if not hasattr(device_mesh, "_register_distributed_opaque_types"):
    register_constant(DeviceMesh)


def first_value(symbol: Any) -> int:
    """Return the length with which torch first traced a symbolic one: a plan needs some number.

    Without it every length would have to be a constant of the graph.
    """
    first: int = symbol.node.hint
    return first


def unwrapped_mesh(mesh: Any) -> Any:
    """Return the DeviceMesh that Dynamo passed to a recorded function; other values as they are.

    Dynamo wraps it from torch 2.13 on. Without this the wrapper would be refused as a mesh.
    """
    return getattr(mesh, "real_obj", mesh)
