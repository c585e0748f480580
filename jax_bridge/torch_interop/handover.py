"""Blocks of torch <-> one global `jax.Array`.

Decides what is checked before anything is sent, and in which order blocks are brought to their layout
and handed over. Each function prepares one array and returns what does it, so that of a whole tree all
is checked before anything is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jax_bridge.program import stored
from jax_bridge.reshard import are_the_same, reshard
from jax_bridge.sharding import to_named_sharding
from jax_bridge.torch_interop import arrange, buffers
from jax_bridge.torch_interop.arrange import Arrangement
from jax_bridge.torch_interop.places import Ends, TorchMesh, check_one_block, ends_of
from jax_bridge.torch_interop.route import Profiles, Route, jax_mesh_of
from torch_bridge.dtensor import as_dtensor, local_of, to_placements
from torch_bridge.transfer import on_ranks, redistribute_between
from xshard import DtypeError, Layout, MeshError, Plan, ShapeError, TransferPlan, XshardError
from xshard.spelling import Expression

LOG = logging.getLogger("xshard.interop")

Blocks = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Options:
    """How to hand over: copy, writable, dtensor, shape, profile and via of `to_jax` and `to_torch`."""

    copy: bool | None = None
    writable: bool = True
    dtensor: bool = False
    shape: tuple[int, ...] | None = None
    profile: Profiles = "h100"
    via: str | None = None


def prepare_to_jax(
    x: Blocks, layout: Layout | Expression, mesh: JaxMesh, torch_mesh: TorchMesh | None, options: Options
) -> Callable[[], jax.Array]:
    """What makes the array. Raises as `to_jax` does."""
    shape = options.shape
    if isinstance(x, DTensor):
        torch_mesh, shape = _of_dtensor(x, torch_mesh, shape)
    ends = ends_of(mesh, torch_mesh)
    if isinstance(x, DTensor):
        check_one_block(ends, "a DTensor has")
        src, _, text = arrange.layouts_of(layout)
        x = local_of(x.detach(), src, text)
    blocks = local_blocks(x, ends)
    dtype = _common_dtype(blocks)
    devices = [ends.devices[i] for i in ends.local]
    _check_kinds(blocks, ends)
    found = arrange.to_jax(layout, ends, tuple(blocks[0].shape), shape, dtype, options.profile, options.via)
    route = found.route
    _check_blocks(blocks, found, ends)
    if route.side is not None:
        _check_moved(found, options)
    elif not options.copy:
        for i, block, device in zip(ends.local, blocks, devices, strict=True):
            buffers.check_copy(block, device, options.copy, f"the tensor for device {i}")

    def run() -> jax.Array:
        if route.side is None:
            return _assembled(blocks, devices, found.shape, found.array, options.copy)
        if route.side == "torch":
            moved = redistribute_between(blocks[0].detach(), _transfer(route, ends, ends.devices))
            return _assembled([moved], _local(ends.jax_devices), found.shape, found.array, None)
        between, start = _in_jax(route, ends, to_jax=True)
        array = reshard(_assembled(blocks, devices, found.shape, start, None), route.plan, between)
        return _relabelled(array, found.array)

    return run


def prepare_to_torch(
    array: jax.Array, layout: Layout | Expression, mesh: TorchMesh | JaxMesh | None, options: Options
) -> Callable[[], Blocks]:
    """What makes the tensors. Raises as `to_torch` does."""
    check_array(array)
    own = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    if isinstance(mesh, JaxMesh):
        own, mesh = mesh, None
    if not isinstance(own, JaxMesh):
        raise MeshError(
            f"the array has no mesh: {array.sharding}", hint="pass the jax.sharding.Mesh that it is on"
        )
    if options.dtensor and not isinstance(mesh, DeviceMesh):
        raise MeshError(
            "a DTensor is on a DeviceMesh", hint="to_torch(array, layout, device_mesh, dtensor=True)"
        )
    ends = ends_of(own, mesh)
    if isinstance(mesh, DeviceMesh):
        check_one_block(ends, "a DeviceMesh has")
    buffers.torch_dtype(array.dtype)
    _ = ends.kind  # refused here, if at all
    devices = [ends.devices[i] for i in ends.local]
    found = arrange.to_torch(layout, ends, array.shape, array.dtype.name, options.profile, options.via)
    route = found.route
    if not are_the_same(array.sharding, found.array, array.ndim):
        src, _, text = arrange.layouts_of(layout)
        raise ShapeError(
            f"the array is not sharded as '{src}' says", text=text, hint=f"it has {array.sharding}"
        )
    if options.dtensor:
        to_placements(found.dst, mesh, array.shape)
    if route.side is not None:
        _check_moved(found, options)

    def run() -> Blocks:
        held, order = array, devices
        copy, writable = (options.copy, options.writable) if route.side is None else (None, True)
        if route.side == "jax":
            between, start = _in_jax(route, ends, to_jax=False)
            held = reshard(_relabelled(array, start), route.plan, between)
        elif route.side == "torch":
            order = _local(ends.jax_devices)
        parts = {shard.device: shard.data for shard in held.addressable_shards}
        blocks = [buffers.as_tensor(parts[device], copy, writable) for device in order]
        if route.side == "torch":
            blocks = [redistribute_between(blocks[0], _transfer(route, ends, ends.jax_devices))]
        if options.dtensor:
            return as_dtensor(blocks[0], found.dst, mesh, array.shape)
        return blocks[0] if len(blocks) == 1 else blocks

    return run


def check_array(array: Any) -> None:
    """Raise XshardError for what has no memory that torch could read."""
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


def local_blocks(x: Any, ends: Ends) -> list[Tensor]:
    """This process's tensors, one for each of its devices. Raises ShapeError for another number of them."""
    blocks = [x] if isinstance(x, Tensor) else [*x] if isinstance(x, list | tuple) else [x]
    for block in blocks:
        if not isinstance(block, Tensor):
            raise XshardError(
                f"{type(block).__name__} is no tensor", hint="to_jax takes tensors, or a tree and rules"
            )
        buffers.check_dense(block)
    if len(blocks) != len(ends.local):
        raise ShapeError(
            f"{len(blocks)} tensors of torch for {len(ends.local)} devices of JAX's mesh in this process",
            hint="a tensor where the process has one device, a list where it has several, in the mesh's order",
        )
    return blocks


def _of_dtensor(
    x: DTensor, torch_mesh: TorchMesh | None, shape: tuple[int, ...] | None
) -> tuple[DeviceMesh, tuple[int, ...]]:
    """The mesh and the global shape that a DTensor brings."""
    if torch_mesh is not None and torch_mesh != x.device_mesh:
        raise MeshError(
            f"the DTensor is on {x.device_mesh!r}, not on {torch_mesh!r}", hint="leave torch_mesh out"
        )
    if shape is not None and tuple(shape) != tuple(x.shape):
        raise ShapeError(
            f"the DTensor has shape {tuple(x.shape)}, not {tuple(shape)}", hint="leave shape out"
        )
    return x.device_mesh, tuple(x.shape)


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
                f"the tensor for device {i} ({ends.devices[i]}) has shape {tuple(block.shape)}, not {expected}",
                text=found.text,
                hint=f"under '{found.blocks.layout}' that is the part of device {i} of torch's {ends.axes!r} of a "
                f"{found.shape} array; where blocks differ in size, pass shape= (the global shape)",
            )


def _check_moved(found: Arrangement, options: Options) -> None:
    """Log the plan that runs first; raise XshardError where nothing may be copied."""
    side, made = found.route.side, found.route.plan
    if options.copy is False:
        raise XshardError(
            f"the blocks cannot be handed over without a copy: they move from '{made.src}' to '{made.dst}'",
            text=found.text,
            hint="copy=None allows that",
        )
    LOG.info("%s moves the blocks first: %s -> %s", side, made.src, made.dst)


def _in_jax(route: Route, ends: Ends, *, to_jax: bool) -> tuple[JaxMesh, NamedSharding]:
    """The mesh on which JAX carries the route's plan out, and the sharding at its beginning."""
    mesh = jax_mesh_of(route.plan, ends, to_jax=to_jax)
    return mesh, to_named_sharding(stored(route.plan.source.layout), mesh)


def _assembled(
    blocks: Sequence[Tensor],
    devices: Sequence[jax.Device],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    copy: bool | None,
) -> jax.Array:
    parts = [buffers.as_array(block, device, copy) for block, device in zip(blocks, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _relabelled(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same blocks on the same devices under another sharding."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    return [d for d in devices if d.process_index == jax.process_index()]


def _transfer(route: Route, ends: Ends, devices: Sequence[jax.Device]) -> TransferPlan:
    """A route as torch carries it out: devices are ranks."""
    found = route.plan
    return on_ranks(found, ends.numbers(devices)) if isinstance(found, Plan) else found
