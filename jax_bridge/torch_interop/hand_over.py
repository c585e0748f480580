"""One array from torch to JAX or back: all checks before anything is sent, then the hand-over itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.stored import are_the_same, check_order, remember
from jax_bridge.state.execute import Blocks, assembled, blocks_of
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import MeshPair, TorchMesh, check_one_block, mesh_pair
from jax_bridge.torch_interop.route import Options, Route, by_jax, by_torch
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import local_of, to_placements, whole_of
from xshard import Layout, XshardError
from xshard.errors import DtypeError, MeshError, ShapeError
from xshard.plans.expression import Expression, sides_or_one


def prepare_to_jax(
    x: Any, layout: Layout | Expression, mesh: JaxMesh, torch_mesh: TorchMesh | None, options: Options
) -> Callable[[], jax.Array]:
    """Check the arguments and return the function that makes the array. Raises as `to_jax` does."""
    shape = options.shape
    if isinstance(x, DTensor):
        torch_mesh, shape = x.device_mesh, whole_of(x, torch_mesh, shape, "torch_mesh")
    meshes = mesh_pair(mesh, torch_mesh)
    blocks = _local_blocks(x, layout, meshes)
    dtype = _common_dtype(blocks)
    local_shape = tuple(blocks[0].shape)
    blocks = blocks if meshes.local else []  # without the meta tensor
    devices = [meshes.devices[i] for i in meshes.local]
    for block in blocks:
        if block.device.type != meshes.kind:
            raise MeshError(
                f"the tensor is on {block.device}, JAX's mesh has {devices[0]}",
                hint=f"move the tensor: x.to({meshes.kind!r}), or make the mesh of other devices",
            )
    route = options.route(layout, meshes, local_shape, shape, dtype, to_jax=True)
    _check_shapes(blocks, route, meshes)
    if route.side is not None:
        options.check_moved(route)
    elif options.copy is False:
        for block, device in zip(blocks, devices, strict=True):
            buffers.check_shared(block, device)

    def run() -> jax.Array:
        tensors, on, copy = blocks, devices, options.copy if route.side is None else None
        if route.side == "torch":
            moved = by_torch(blocks[0] if blocks else None, route.plan)
            tensors = [] if moved is None else [moved]
            on = [d for d in meshes.jax_devices if d.process_index == jax.process_index()]
        parts: Blocks = {d: buffers.array_over(t, d, copy) for t, d in zip(tensors, on, strict=True)}
        if route.side == "jax":
            parts = by_jax(parts, route.plan, meshes.by_number)
        return remember(assembled(parts, route.shape, dtype, route.array), route.stored)

    return run


def prepare_to_torch(
    array: jax.Array, layout: Layout | Expression, mesh: TorchMesh | JaxMesh | None, options: Options
) -> Callable[[], Any]:
    """Check the arguments and return the function that makes the tensors. Raises as `to_torch` does."""
    _check_array(array)
    jax_mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    if isinstance(mesh, JaxMesh):
        jax_mesh, mesh = mesh, None
    if not isinstance(jax_mesh, JaxMesh):
        raise MeshError(
            f"the array is not on a mesh: {array.sharding}", hint="pass the jax.sharding.Mesh that it is on"
        )
    meshes = mesh_pair(jax_mesh, mesh)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    if device_mesh is not None:
        check_one_block(meshes, "a DeviceMesh has")
    elif options.dtensor:
        raise MeshError(
            "a DTensor is on a DeviceMesh", hint="to_torch(array, layout, device_mesh, dtensor=True)"
        )
    buffers.torch_dtype(array.dtype)
    _ = meshes.kind  # raises for devices that torch lacks
    route = options.route(layout, meshes, (), array.shape, array.dtype.name, to_jax=False)
    if not are_the_same(array.sharding, route.array, array.ndim):
        reason = f"the array is not sharded as '{route.src}' says"
        raise ShapeError(reason, text=route.text, hint=f"it has {array.sharding}")
    check_order(array, route.stored, route.text)
    if device_mesh is not None and options.dtensor:
        to_placements(route.blocks.layout, device_mesh, array.shape)  # raises before anything is sent
    if route.side is not None:
        options.check_moved(route)

    def run() -> Any:
        parts = blocks_of(array)
        if route.side == "torch":
            local = [buffers.tensor_over(parts[d], None, True) for d in meshes.jax_devices if d in parts]
            moved = by_torch(local[0] if local else None, route.plan)
            blocks = [] if moved is None else [moved]
        else:
            copy, writable = options.copy, options.writable
            if route.side == "jax":
                parts, copy, writable = by_jax(parts, route.plan, meshes.by_number), None, True
            blocks = [buffers.tensor_over(parts[meshes.devices[i]], copy, writable) for i in meshes.local]
        if not blocks:
            return None
        if device_mesh is not None and options.dtensor:
            return as_dtensor(blocks[0], route.blocks.layout, device_mesh, array.shape)
        return blocks[0] if len(blocks) == 1 else blocks

    return run


def _local_blocks(x: Any, layout: Layout | Expression, meshes: MeshPair) -> list[Tensor]:
    """This process's tensors, one per device. Raises ShapeError for another number of tensors."""
    if isinstance(x, DTensor):
        check_one_block(meshes, "a DTensor has")
        src, _, text = sides_or_one(layout)
        return [local_of(x, src, text).detach()]
    blocks = [*x] if isinstance(x, list | tuple) else [x]
    if not meshes.local and len(blocks) == 1 and getattr(blocks[0], "is_meta", False):
        return blocks
    for block in blocks:
        if not isinstance(block, Tensor):
            raise XshardError(
                f"{type(block).__name__} is not a tensor", hint="to_jax takes tensors, or a tree and rules"
            )
        buffers.check_dense(block)
    if len(blocks) != len(meshes.local):
        raise ShapeError(
            f"{len(blocks)} tensors of torch for {len(meshes.local)} devices of its mesh in this process",
            hint="pass a tensor for one device, a list in mesh order for several; for none, one on meta",
        )
    return blocks


def _common_dtype(blocks: Sequence[Tensor]) -> str:
    dtypes = {buffers.jax_name(block.dtype) for block in blocks}
    if len(dtypes) > 1:
        raise DtypeError(
            f"the tensors are of several dtypes: {', '.join(sorted(dtypes))}", hint="one array has one"
        )
    return dtypes.pop()


def _check_shapes(blocks: Sequence[Tensor], route: Route, meshes: MeshPair) -> None:
    for i, block in zip(meshes.local, blocks, strict=True):
        expected = route.blocks.local_shape(i)
        if tuple(block.shape) != expected:
            raise ShapeError(
                f"torch's tensor for {meshes.devices[i]} has shape {tuple(block.shape)}, not {expected}",
                text=route.text,
                hint=f"under '{route.blocks.layout}' that is the part of device {i} of {meshes.axes!r} "
                f"of a {route.shape} array; if blocks differ in size, pass shape= (the global shape)",
            )


def _check_array(array: Any) -> None:
    """Raise XshardError for an argument without memory that torch could read."""
    if isinstance(array, Tracer):
        raise XshardError(
            f"the array is a tracer, {jax.typeof(array)}: torch cannot read it",
            hint="hand it over outside of jit and grad; inside, torch_interop.from_torch calls torch",
        )
    if not isinstance(array, jax.Array):
        raise XshardError(
            f"{type(array).__name__} is not a jax.Array", hint="to_torch takes an array, or a tree and rules"
        )
    if array.is_deleted():
        raise XshardError(
            f"the array, {array.dtype.name}{list(array.shape)}, was donated or deleted: torch cannot read it",
            hint="hand it over before, and donate a copy: jnp.array(x, copy=True)",
        )
