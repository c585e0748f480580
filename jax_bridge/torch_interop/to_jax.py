"""Blocks of torch -> one global `jax.Array`: the checks before anything is sent, and the hand-over itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.order import remember
from jax_bridge.state.execute import Blocks, assembled
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import Ends, TorchMesh, check_one_block, ends_of
from jax_bridge.torch_interop.handover import Arrangement, Options
from jax_bridge.torch_interop.route import by_jax, by_torch
from torch_bridge.dtensor.placements import local_of, whole_of
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
    ends = ends_of(mesh, torch_mesh)
    blocks = _blocks(x, layout, ends)
    dtype = _common_dtype(blocks)
    local_shape = tuple(blocks[0].shape)
    blocks = blocks if ends.local else []  # what stood for them
    devices = [ends.devices[i] for i in ends.local]
    _check_kinds(blocks, ends)
    found = options.arranged(layout, ends, local_shape, shape, dtype, to_jax=True)
    route = found.route
    _check_blocks(blocks, found, ends)
    if route.side is not None:
        options.check_moved(found)
    elif options.copy is False:
        for block, device in zip(blocks, devices, strict=True):
            buffers.check_shared(block, device)

    def run() -> jax.Array:
        given, there, copy = blocks, devices, options.copy if route.side is None else None
        if route.side == "torch":
            moved = by_torch(blocks[0] if blocks else None, route.plan)
            given = [] if moved is None else [moved]
            there = [d for d in ends.jax_devices if d.process_index == jax.process_index()]
        parts: Blocks = {d: buffers.array_over(x, d, copy) for x, d in zip(given, there, strict=True)}
        if route.side == "jax":
            parts = by_jax(parts, route.plan, ends.by_number)
        return remember(assembled(parts, found.shape, dtype, found.array), found.stored)

    return run


def _blocks(x: Any, layout: Layout | Expression, ends: Ends) -> list[Tensor]:
    """This process's tensors, one per device. Raises ShapeError for another number of tensors."""
    if isinstance(x, DTensor):
        check_one_block(ends, "a DTensor has")
        src, _, text = sides_or_one(layout)
        return [local_of(x, src, text).detach()]
    blocks = [*x] if isinstance(x, list | tuple) else [x]
    if not ends.local and len(blocks) == 1 and getattr(blocks[0], "is_meta", False):
        return blocks
    for block in blocks:
        if not isinstance(block, Tensor):
            raise XshardError(
                f"{type(block).__name__} is no tensor", hint="to_jax takes tensors, or a tree and rules"
            )
        buffers.check_dense(block)
    if len(blocks) != len(ends.local):
        raise ShapeError(
            f"{len(blocks)} tensors of torch for {len(ends.local)} devices of its mesh in this process",
            hint="pass a tensor for one device, a list in mesh order for several; for none, one on meta",
        )
    return blocks


def _common_dtype(blocks: Sequence[Tensor]) -> str:
    found = {buffers.jax_name(block.dtype) for block in blocks}
    if len(found) > 1:
        raise DtypeError(
            f"the tensors are of several dtypes: {', '.join(sorted(found))}", hint="one array has one"
        )
    return found.pop()


def _check_kinds(blocks: Sequence[Tensor], ends: Ends) -> None:
    for block in blocks:
        if block.device.type != ends.kind:
            raise MeshError(
                f"the tensor is on {block.device}, JAX's mesh has {ends.devices[ends.local[0]]}",
                hint=f"move the tensor: x.to({ends.kind!r}), or make the mesh of other devices",
            )


def _check_blocks(blocks: Sequence[Tensor], found: Arrangement, ends: Ends) -> None:
    for i, block in zip(ends.local, blocks, strict=True):
        expected = found.blocks.local_shape(i)
        if tuple(block.shape) != expected:
            raise ShapeError(
                f"torch's tensor for {ends.devices[i]} has shape {tuple(block.shape)}, not {expected}",
                text=found.text,
                hint=f"under '{found.blocks.layout}' that is the part of device {i} of {ends.axes!r} "
                f"of a {found.shape} array; where blocks differ in size, pass shape= (the global shape)",
            )
