"""`to_jax` and `to_torch`: all checks of an array or a tree before anything is sent, then the hand-over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from jax_bridge.torch_interop.route import Options, Profiles, by_jax, by_torch
from jax_bridge.trees import leaves_of
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import local_of, to_placements, whole_of
from xshard import Layout, Rules, XshardError
from xshard.errors import DtypeError, MeshError, ShapeError, located
from xshard.plans.expression import Expression, sides_or_one
from xshard.rules import Pattern
from xshard.state.progress import Progress, reporting

Given = Layout | Expression | Mapping[Pattern, Layout | Expression]
Prepare = Callable[[Any, Layout | Expression], Callable[[], Any]]


def to_jax(
    x: Any,
    layout: Given,
    mesh: JaxMesh,
    *,
    torch_mesh: TorchMesh | None = None,
    shape: Sequence[int] | None = None,
    copy: bool | None = None,
    profile: Profiles = "auto",
    via: str | None = None,
    progress: Progress = None,
) -> Any:
    """Hand over this process's tensors as a global `jax.Array` with a `NamedSharding`.

    x: the local block; a list with one block per device of the process, in mesh order; a DTensor; or a tree
    of these. All processes of either mesh call it; a process without a block passes one on `meta`. layout:
    the layout of the blocks and of the array; `"layout -> layout"` moves blocks from the first to the second.
    For a tree: an `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.weight"`) to
    layouts. In the array, a dim in zigzag or another order is in storage order, as with `reshard`.
    torch_mesh: the mesh of the blocks if it is not `mesh`: a `DeviceMesh` or an `xshard.Mesh`, with the same
    devices or others; a DTensor brings its own. shape: the global shape, needed if blocks differ in size.
    copy: None shares memory if layout, dtype and alignment allow it, and logs a copy with its reason in
    "xshard.interop"; True always copies; False raises if a copy cannot be avoided. A write to shared memory,
    `x.add_(1)`, changes the array, which JAX assumes to be immutable.
    profile, via: if blocks have to move, the cheaper side moves them, by the costs of this profile (or of one
    for "torch" and one for "jax"); `via` names the side instead. progress: True for a bar, or a function of
    the bytes done and the total; None shows a bar for large trees on a terminal.

    It has no gradient: `torch_interop.from_jax` makes a differentiable function.
    Raises, before anything is sent, NotationError, ShapeError, DtypeError (also for 64 bits without
    jax_enable_x64), MeshError (devices or processes differ), PlanError, XshardError (a copy that is not
    allowed, leaves without a rule, rules without a leaf).

    >>> import torch
    >>> x = torch.arange(4.0)
    >>> array = to_jax(x, "n/dp", jax.make_mesh((1,), ("dp",)))
    >>> array.sharding.spec, array.unsafe_buffer_pointer() == x.data_ptr()
    (P('dp',), True)
    """
    options = Options(
        copy=copy, shape=None if shape is None else tuple(shape), profile=profile, via=via
    )

    def is_leaf(value: Any) -> bool:
        is_list = isinstance(value, list) and any(isinstance(block, Tensor) for block in value)
        return is_list and len(mesh_pair(mesh).local) > 1

    prepare = partial(prepare_to_jax, mesh=mesh, torch_mesh=torch_mesh, options=options)
    return _hand_over(x, layout, prepare, "to JAX", progress, is_leaf)


def to_torch(
    array: Any,
    layout: Given,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: bool = False,
    copy: bool | None = None,
    writable: bool = True,
    profile: Profiles = "auto",
    via: str | None = None,
    progress: Progress = None,
) -> Any:
    """Hand over a global `jax.Array` as this process's tensor, a list of tensors, or a DTensor.

    array: an array sharded by `layout`, or by its left side; or a tree of such arrays. A process with one
    device of the mesh gets a tensor, a process with several a list with one tensor per device, in mesh order.
    layout, copy, profile, via, progress: as in `to_jax`.
    mesh: the mesh of the tensors if it is not the array's; its devices may be others, and a process without
    any of them gets None. JAX's mesh for an array without a mesh.
    dtensor: return a DTensor, on the `DeviceMesh` given.
    writable: without a copy the tensor shares the array's memory, which JAX assumes to be immutable: a write
    changes the array. With `writable=False` a write raises XshardError instead.

    Raises as `to_jax` does; ShapeError for an array with another sharding, XshardError for one that was
    donated or deleted, and for a tracer.

    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> array = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("dp")))
    >>> to_torch(array, "n/dp", writable=False).sum()
    tensor(6.)
    """
    options = Options(copy=copy, writable=writable, dtensor=dtensor, profile=profile, via=via)
    prepare = partial(prepare_to_torch, mesh=mesh, options=options)
    return _hand_over(array, layout, prepare, "to torch", progress)


def _hand_over(
    tree: Any,
    layout: Given,
    prepare: Prepare,
    what: str,
    progress: Progress,
    is_leaf: Any = lambda _: False,
) -> Any:
    """Check one array, or all leaves of a tree, before the first is handed over."""
    if not isinstance(layout, Mapping):
        return prepare(tree, layout)()
    work = []
    for leaf in leaves_of(Rules(layout), tree, lambda _: False, is_leaf=is_leaf):
        with located(leaf.place):
            work.append(
                (prepare(leaf.x, leaf.given), sum(x.nbytes for x in jax.tree.leaves(leaf.x)))
            )
    results = []
    with reporting(progress, sum(n_bytes for _, n_bytes in work), True, what) as report:
        for run, n_bytes in work:
            results.append(run())
            report(n_bytes)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), results)


def prepare_to_jax(
    x: Any,
    layout: Layout | Expression,
    mesh: JaxMesh,
    torch_mesh: TorchMesh | None,
    options: Options,
) -> Callable[[], jax.Array]:
    """Check the arguments and return the function that makes the array. Raises as `to_jax` does."""
    shape = options.shape
    if isinstance(x, DTensor):
        torch_mesh, shape = x.device_mesh, whole_of(x, torch_mesh, shape, "torch_mesh")
    meshes = mesh_pair(mesh, torch_mesh)
    blocks = _local_blocks(x, layout, meshes)
    dtypes = sorted({buffers.jax_name(block.dtype) for block in blocks})
    local_shape = tuple(blocks[0].shape)
    if len(dtypes) > 1:
        raise DtypeError(
            f"the tensors are of several dtypes: {', '.join(dtypes)}", hint="one array has one"
        )
    blocks = blocks if meshes.local else []  # without the meta tensor
    devices = [meshes.devices[i] for i in meshes.local]
    if wrong := [block.device for block in blocks if block.device.type != meshes.kind]:
        hint = f"move the tensor: x.to({meshes.kind!r}), or make the mesh of other devices"
        raise MeshError(f"the tensor is on {wrong[0]}, JAX's mesh has {devices[0]}", hint=hint)
    route = options.route(layout, meshes, local_shape, shape, dtypes[0], to_jax=True)
    for i, block in zip(meshes.local, blocks, strict=True):
        if tuple(block.shape) != (expected := route.blocks.local_shape(i)):
            what = f"torch's tensor for {meshes.devices[i]} has shape {tuple(block.shape)}, not {expected}"
            hint = f"under '{route.blocks.layout}' that is the part of device {i} of {meshes.axes!r} of a "
            hint += f"{route.blocks.shape} array; if blocks differ in size, pass shape= (the global shape)"
            raise ShapeError(what, text=route.text, hint=hint)
    if route.side is not None:
        options.check_moved(route)
    elif options.copy is False:
        for block, device in zip(blocks, devices, strict=True):
            if (cause := buffers.why_copied(block, device)) is not None:
                reason = f"the tensor for {device} cannot be handed over without a copy: {cause}"
                raise XshardError(reason, hint="copy=None allows one, and logs it")

    def run() -> jax.Array:
        tensors = blocks
        on = devices
        copy = options.copy if route.side is None else None
        if route.side == "torch":
            tensors = by_torch(blocks, route.plan)
            on = [d for d in meshes.jax_devices if d.process_index == jax.process_index()]
        parts: Blocks = {
            d: buffers.array_over(t, d, copy) for t, d in zip(tensors, on, strict=True)
        }
        if route.side == "jax":
            parts = by_jax(parts, route.plan, meshes.by_number)
        return remember(assembled(parts, route.blocks.shape, dtypes[0], route.array), route.stored)

    return run


def prepare_to_torch(
    array: jax.Array,
    layout: Layout | Expression,
    mesh: TorchMesh | JaxMesh | None,
    options: Options,
) -> Callable[[], Any]:
    """Check the arguments and return the function that makes the tensors. Raises as `to_torch` does."""
    _check_array(array)
    jax_mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    if isinstance(mesh, JaxMesh):
        jax_mesh = mesh
        mesh = None
    if not isinstance(jax_mesh, JaxMesh):
        hint = "pass the jax.sharding.Mesh that it is on"
        raise MeshError(f"the array is not on a mesh: {array.sharding}", hint=hint)
    meshes = mesh_pair(jax_mesh, mesh)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    if device_mesh is not None:
        check_one_block(meshes, "a DeviceMesh has")
    elif options.dtensor:
        hint = "to_torch(array, layout, device_mesh, dtensor=True)"
        raise MeshError("a DTensor is on a DeviceMesh", hint=hint)
    buffers.torch_dtype(array.dtype)
    _ = meshes.kind  # raises for devices that torch lacks
    route = options.route(layout, meshes, (), array.shape, array.dtype.name, to_jax=False)
    if not are_the_same(array.sharding, route.array, array.ndim):
        reason = f"the array is not sharded as '{route.src}' says"
        raise ShapeError(reason, text=route.text, hint=f"it has {array.sharding}")
    check_order(array, route.stored, route.text)
    if device_mesh is not None and options.dtensor:
        to_placements(
            route.blocks.layout, device_mesh, array.shape
        )  # raises before anything is sent
    if route.side is not None:
        options.check_moved(route)

    def run() -> Any:
        parts = blocks_of(array)
        if route.side == "torch":
            local = [
                buffers.tensor_over(parts[d], None, True) for d in meshes.jax_devices if d in parts
            ]
            blocks = by_torch(local, route.plan)
        else:
            copy = options.copy
            writable = options.writable
            if route.side == "jax":
                parts = by_jax(parts, route.plan, meshes.by_number)
                copy = None
                writable = True
            blocks = [
                buffers.tensor_over(parts[meshes.devices[i]], copy, writable) for i in meshes.local
            ]
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
            hint = "to_jax takes tensors, or a tree and rules"
            raise XshardError(f"{type(block).__name__} is not a tensor", hint=hint)
        buffers.check_dense(block)
    if len(blocks) != len(meshes.local):
        reason = f"{len(blocks)} tensors of torch for {len(meshes.local)} devices of its mesh in this process"
        hint = (
            "pass a tensor for one device, a list in mesh order for several; for none, one on meta"
        )
        raise ShapeError(reason, hint=hint)
    return blocks


def _check_array(array: Any) -> None:
    """Raise XshardError for an argument without memory that torch could read."""
    if isinstance(array, Tracer):
        hint = "hand it over outside of jit and grad; inside, torch_interop.from_torch calls torch"
        raise XshardError(
            f"the array is a tracer, {jax.typeof(array)}: torch cannot read it", hint=hint
        )
    if not isinstance(array, jax.Array):
        hint = "to_torch takes an array, or a tree and rules"
        raise XshardError(f"{type(array).__name__} is not a jax.Array", hint=hint)
    if array.is_deleted():
        what = f"the array, {array.dtype.name}{list(array.shape)}, was donated or deleted"
        hint = "hand it over before, and donate a copy: jnp.array(x, copy=True)"
        raise XshardError(f"{what}: torch cannot read it", hint=hint)
