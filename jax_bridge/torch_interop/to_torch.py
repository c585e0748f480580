"""A global `jax.Array` -> blocks of torch: the checks before anything is sent, and the hand-over itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from torch.distributed.device_mesh import DeviceMesh

from jax_bridge.arrays.order import check_order
from jax_bridge.arrays.stored import are_the_same
from jax_bridge.state.execute import blocks_of
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import TorchMesh, check_one_block, ends_of
from jax_bridge.torch_interop.handover import Options
from jax_bridge.torch_interop.route import by_jax, by_torch
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import to_placements
from xshard import Layout, XshardError
from xshard.errors import MeshError, ShapeError
from xshard.plans.expression import Expression


def prepare_to_torch(
    array: jax.Array, layout: Layout | Expression, mesh: TorchMesh | JaxMesh | None, options: Options
) -> Callable[[], Any]:
    """Check the arguments and return the function that makes the tensors. Raises as `to_torch` does."""
    check_array(array)
    own = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    if isinstance(mesh, JaxMesh):
        own, mesh = mesh, None
    if not isinstance(own, JaxMesh):
        raise MeshError(
            f"the array has no mesh: {array.sharding}", hint="pass the jax.sharding.Mesh that it is on"
        )
    ends = ends_of(own, mesh)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    if device_mesh is not None:
        check_one_block(ends, "a DeviceMesh has")
    elif options.dtensor:
        raise MeshError(
            "a DTensor is on a DeviceMesh", hint="to_torch(array, layout, device_mesh, dtensor=True)"
        )
    buffers.torch_dtype(array.dtype)
    _ = ends.kind  # refused here, if at all
    found = options.arranged(layout, ends, (), array.shape, array.dtype.name, to_jax=False)
    route = found.route
    if not are_the_same(array.sharding, found.array, array.ndim):
        raise ShapeError(
            f"the array is not sharded as '{found.src}' says",
            text=found.text,
            hint=f"it has {array.sharding}",
        )
    check_order(array, found.stored, found.text)
    if device_mesh is not None and options.dtensor:
        to_placements(found.blocks.layout, device_mesh, array.shape)  # refused here, before anything is sent
    if route.side is not None:
        options.check_moved(found)

    def run() -> Any:
        parts = blocks_of(array)
        if route.side == "jax":
            parts = by_jax(parts, route.plan, ends.by_number)
        # Moved blocks belong to nobody else.
        shared = (options.copy, options.writable) if route.side is None else (None, True)
        if route.side == "torch":
            mine = [
                buffers.tensor_over(x, None, True)
                for d in ends.jax_devices
                if (x := parts.get(d)) is not None
            ]
            moved = by_torch(mine[0] if mine else None, route.plan)
            blocks = [] if moved is None else [moved]
        else:
            blocks = [buffers.tensor_over(parts[ends.devices[i]], *shared) for i in ends.local]
        if not blocks:
            return None
        if device_mesh is not None and options.dtensor:
            return as_dtensor(blocks[0], found.blocks.layout, device_mesh, array.shape)
        return blocks[0] if len(blocks) == 1 else blocks

    return run


def check_array(array: Any) -> None:
    """Raise XshardError for an argument without memory that torch could read."""
    if isinstance(array, Tracer):
        raise XshardError(
            f"the array is a tracer, {jax.typeof(array)}: it has no memory that torch could read",
            hint="hand it over outside of jit and grad; inside, jax_bridge.from_torch calls torch",
        )
    if not isinstance(array, jax.Array):
        raise XshardError(
            f"{type(array).__name__} is no jax.Array", hint="to_torch takes an array, or a tree and rules"
        )
    if array.is_deleted():
        raise XshardError(
            f"the array, {array.dtype.name}{list(array.shape)}, was donated or deleted: torch cannot read it",
            hint="hand it over before, and donate a copy: jnp.array(x, copy=True)",
        )
