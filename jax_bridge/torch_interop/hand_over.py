"""`to_jax` and `to_torch`: all checks of an array or a tree first, then the hand-over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.stored import are_same_shardings, check_order, record_order
from jax_bridge.state.execute import Blocks, assembled, blocks_of
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import MeshPair, TorchMesh, check_one_block, mesh_pair
from jax_bridge.torch_interop.route import (
    JAX,
    TORCH,
    KnownArray,
    Options,
    Profiles,
    Route,
    by_jax,
    by_torch,
)
from jax_bridge.trees import leaves_with_given_values, never
from torch_bridge.dtensor.function import dtensor_of_block
from torch_bridge.dtensor.placements import checked_global_shape, local_block_under, to_placements
from xshard import Layout, Rules, XshardError
from xshard.errors import DtypeError, MeshError, ShapeError, api_boundary, located
from xshard.plans.expression import Expression, sides_or_one
from xshard.rules import RulesLike
from xshard.state.progress import Progress, reporting

Given = Layout | Expression | RulesLike
Prepare = Callable[[Any, Layout | Expression], Callable[[], Any]]


class HandOverKeywords(TypedDict, total=False):
    """The keywords of both hand-overs on which the type of the result does not depend."""

    copy: bool | None
    profile: Profiles
    via: Literal["torch", "jax"] | None
    progress: Progress


class ToJaxKeywords(HandOverKeywords, total=False):
    """Those of `to_jax`."""

    torch_mesh: TorchMesh | None
    shape: Sequence[int] | None


@overload
def to_jax(
    x: Tensor | list[Tensor],
    layout: Layout | Expression,
    mesh: JaxMesh,
    **options: Unpack[ToJaxKeywords],
) -> jax.Array: ...


@overload
def to_jax(
    x: Mapping[str, Tensor], layout: Given, mesh: JaxMesh, **options: Unpack[ToJaxKeywords]
) -> dict[str, jax.Array]: ...


@overload
def to_jax(x: Any, layout: Given, mesh: JaxMesh, **options: Unpack[ToJaxKeywords]) -> Any: ...


@api_boundary
def to_jax(  # noqa: PLR0913  one option for each decision of the user
    x: Any,
    layout: Given,
    mesh: JaxMesh,
    *,
    torch_mesh: TorchMesh | None = None,
    shape: Sequence[int] | None = None,
    copy: bool | None = None,
    profile: Profiles = "auto",
    via: Literal["torch", "jax"] | None = None,
    progress: Progress = None,
) -> Any:
    """Hand over this process's tensors as a global `jax.Array` with a `NamedSharding`.

        array = to_jax(block, "n/dp c", mesh)     # a block [n/4, c] on each of 4 devices -> [n, c]

    All processes of either mesh call it. It has no gradient: `torch_interop.from_jax` makes a
    differentiable function.

    Args:
        x: The local block; a list with one block per device of the process, in mesh order; a
            DTensor; or a tree of these. A process without a block passes one on `meta`.
        layout: The layout of the blocks and of the array; `"layout -> layout"` moves blocks from
            the first to the second. For a tree: an `xshard.Rules`, or a dict like it, from patterns
            of leaf names (`"layers.*.weight"`) to layouts. In the array, a dim in zigzag or another
            order is in storage order, as with `reshard`.
        mesh: JAX's mesh.
        torch_mesh: The mesh of the blocks if it is not `mesh`: a `DeviceMesh` or an `xshard.Mesh`,
            with the same devices or others. A DTensor brings its own.
        shape: The global shape, needed if blocks differ in size.
        copy: None shares memory if layout, dtype and alignment allow it, and logs a copy with its
            reason in "xshard.interop". True always copies. False raises if a copy cannot be
            avoided. A write to shared memory, `x.add_(1)`, changes the array, which JAX assumes to
            be immutable.
        profile: If blocks have to move, the cheaper side moves them, by the costs of this profile,
            or of one for "torch" and one for "jax".
        via: The side that moves blocks, "torch" or "jax", instead of the cheaper one.
        progress: True for a bar, or a function of the bytes done and the total; None shows a bar
            for large trees on a terminal.

    Returns:
        The array, or a tree of arrays.

    Raises:
        NotationError: The text is wrong. All errors come before anything is sent.
        ShapeError: Blocks do not fit the layout, or JAX's blocks would differ in size.
        DtypeError: JAX lacks the dtype, also 64 bits without jax_enable_x64.
        MeshError: Devices or processes differ.
        PlanError: Neither side can move the blocks.
        XshardError: A copy is not allowed, a leaf lacks a rule, or a rule lacks leaves.

    Examples:
        >>> import torch
        >>> x = torch.arange(4.0)
        >>> array = to_jax(x, "n/dp", jax.make_mesh((1,), ("dp",)))
        >>> array.sharding.spec, array.unsafe_buffer_pointer() == x.data_ptr()
        (P('dp',), True)
    """
    global_shape = None if shape is None else tuple(shape)
    options = Options(copy=copy, shape=global_shape, profile=profile, via=via)

    def is_list_of_blocks(value: Any) -> bool:
        # In a process with one device such a list is a tree.
        return buffers.is_list_of_tensors(value) and len(mesh_pair(mesh).local_positions) > 1

    prepare = partial(prepare_to_jax, mesh=mesh, torch_mesh=torch_mesh, options=options)
    return _hand_over(x, layout, prepare, "to JAX", progress, is_list_of_blocks)


@overload
def to_torch(
    array: jax.Array,
    layout: Layout | Expression,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: Literal[True],
    writable: bool = True,
    **options: Unpack[HandOverKeywords],
) -> DTensor: ...


# A process with several devices gets a list: `| Any` lets others use the tensor without a check.
@overload
def to_torch(
    array: jax.Array,
    layout: Layout | Expression,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: bool = False,
    writable: bool = True,
    **options: Unpack[HandOverKeywords],
) -> Tensor | Any: ...


@overload
def to_torch(
    array: Any,
    layout: Given,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: bool = False,
    writable: bool = True,
    **options: Unpack[HandOverKeywords],
) -> Any: ...


@api_boundary
def to_torch(  # noqa: PLR0913  one option for each decision of the user
    array: Any,
    layout: Given,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: bool = False,
    copy: bool | None = None,
    writable: bool = True,
    profile: Profiles = "auto",
    via: Literal["torch", "jax"] | None = None,
    progress: Progress = None,
) -> Any:
    """Hand over a global `jax.Array` as this process's tensor, a list of tensors, or a DTensor.

        block = to_torch(array, "n/dp c")     # [n, c] -> a block [n/4, c] on each of 4 devices

    Args:
        array: An array sharded by `layout`, or by its left side; or a tree of such arrays.
        layout: As in `to_jax`.
        mesh: The mesh of the tensors if it is not the array's; its devices may be others. JAX's
            mesh for an array without a mesh.
        dtensor: Return a DTensor, on the `DeviceMesh` given.
        copy: As in `to_jax`.
        writable: Without a copy the tensor shares the array's memory, which JAX assumes to be
            immutable: a write changes the array. With False a write raises XshardError instead.
        profile: As in `to_jax`.
        via: As in `to_jax`.
        progress: As in `to_jax`.

    Returns:
        A tensor in a process with one device of the mesh; a list with one tensor per device, in
        mesh order, in a process with several; None in a process without any.

    Raises:
        ShapeError: The array has another sharding.
        XshardError: The array was donated or deleted, or is a tracer; and as `to_jax` does.

    Examples:
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
    progress_title: str,
    progress: Progress,
    is_leaf: Callable[[Any], bool] = never,
) -> Any:
    """Check all leaves of a tree, or one array, and then convert them.

    So an error in any leaf comes before the first one is converted.

    Args:
        tree: The array; with rules a tree.
        layout: Its layout, or rules.
        prepare: Checks an array with its layout, and returns the function that hands it over.
        progress_title: What the bar of progress says.
        progress: As of `to_jax`.
        is_leaf: True for inner nodes that count as leaves, as a list with a block per device.

    Returns:
        The converted array, or the tree of them.
    """
    if not isinstance(layout, Mapping):
        hand_over = prepare(tree, layout)
        return hand_over()
    prepared = []
    leaf_bytes = []
    for leaf in leaves_with_given_values(Rules(layout), tree, never, is_leaf=is_leaf):
        with located(leaf.place):
            prepared.append(prepare(leaf.x, leaf.value))
            leaf_bytes.append(sum(block.nbytes for block in jax.tree.leaves(leaf.x)))
    results = []
    with reporting(progress, sum(leaf_bytes), is_seen=True, what=progress_title) as report:
        for hand_over, n_bytes in zip(prepared, leaf_bytes, strict=True):
            results.append(hand_over())
            report(n_bytes)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), results)


# ---- to JAX


def prepare_to_jax(
    x: Any,
    layout: Layout | Expression,
    mesh: JaxMesh,
    torch_mesh: TorchMesh | None,
    options: Options,
) -> Callable[[], jax.Array]:
    """Check the arguments of `to_jax`, and return a function that makes the array.

    Nothing is sent or copied before that function is called. Raises as `to_jax` does.

    Args:
        x: This process's block, a list of one per device, or a DTensor.
        layout: The layout of the blocks and the array, or "layout -> layout".
        mesh: JAX's mesh.
        torch_mesh: The mesh of the blocks if it is another one. A DTensor brings its own.
        options: The other arguments of `to_jax`.
    """
    shape = options.shape
    if isinstance(x, DTensor):
        shape = checked_global_shape(x, torch_mesh, shape, "torch_mesh")
        torch_mesh = x.device_mesh
    meshes = mesh_pair(mesh, torch_mesh)
    blocks = _local_blocks(x, layout, meshes)
    known_array = KnownArray(_common_dtype(blocks), shape, tuple(blocks[0].shape))
    if not meshes.local_positions:
        # A process without devices has passed a tensor on `meta` only to tell shape and dtype.
        blocks = []
    _check_devices(blocks, meshes)
    route = options.route(layout, meshes, known_array, to_jax=True)
    _check_shapes(blocks, route, meshes)
    # A mover is set if blocks have to move first: that makes copies, which copy=False forbids.
    if route.mover is not None:
        options.check_moved(route)
    elif options.copy is False:
        _check_need_no_copy(blocks, meshes)
    return partial(_make_array, blocks, route, meshes, known_array.dtype, options.copy)


def _local_blocks(x: Any, layout: Layout | Expression, meshes: MeshPair) -> list[Tensor]:
    """Return this process's tensors, one per device of torch's mesh in this process.

    A process without devices has none; a single tensor on `meta` is then returned as it is, since
    it tells shape and dtype.

    Raises:
        ShapeError: There are more or fewer tensors than devices.
        XshardError: Something is not a tensor with memory of its own.
    """
    if isinstance(x, DTensor):
        check_one_block(meshes, "a DTensor has")
        src, _, text = sides_or_one(layout)
        return [local_block_under(x, src, text).detach()]
    blocks = list(x) if isinstance(x, list | tuple) else [x]
    n_devices = len(meshes.local_positions)
    is_on_meta = len(blocks) == 1 and getattr(blocks[0], "is_meta", False)
    if n_devices == 0 and is_on_meta:
        return blocks
    for block in blocks:
        if not isinstance(block, Tensor):
            reason = f"{type(block).__name__} is not a tensor"
            raise XshardError(reason, hint="to_jax takes tensors, or a tree and rules")
        buffers.check_dense(block)
    if len(blocks) != n_devices:
        devices = f"{n_devices} devices of its mesh in this process"
        hint = (
            "pass a tensor for one device, a list in mesh order for several; for none, one on meta"
        )
        raise ShapeError(f"{len(blocks)} tensors of torch for {devices}", hint=hint)
    return blocks


def _common_dtype(blocks: Sequence[Tensor]) -> str:
    """Return JAX's name for the dtype of all blocks. Raises DtypeError if they have several."""
    dtypes = sorted({buffers.jax_name(block.dtype) for block in blocks})
    if len(dtypes) > 1:
        reason = f"the tensors are of several dtypes: {', '.join(dtypes)}"
        raise DtypeError(reason, hint="one array has one")
    return dtypes[0]


def _check_devices(blocks: Sequence[Tensor], meshes: MeshPair) -> None:
    """Raise MeshError for a block on another kind of device than JAX's."""
    for block in blocks:
        if block.device.type != meshes.kind:
            reason = f"the tensor is on {block.device}, JAX's mesh has {meshes.local_devices[0]}"
            hint = f"move the tensor: x.to({meshes.kind!r}), or make the mesh of other devices"
            raise MeshError(reason, hint=hint)


def _check_shapes(blocks: Sequence[Tensor], route: Route, meshes: MeshPair) -> None:
    """Raise ShapeError for a block that has not the shape of its device's block."""
    sharding = route.torch_sharding
    for i, block in zip(meshes.local_positions, blocks, strict=True):
        expected = sharding.local_shape(i)
        actual = tuple(block.shape)
        if actual != expected:
            device = meshes.torch_devices[i]
            reason = f"torch's tensor for {device} has shape {actual}, not {expected}"
            hint = f"under '{sharding.layout}' that is the part of device {i} of {meshes.torch_axes!r} "
            hint += f"of a {sharding.shape} array; "
            hint += "if blocks differ in size, pass shape= (the global shape)"
            raise ShapeError(reason, text=route.text, hint=hint)


def _check_need_no_copy(blocks: Sequence[Tensor], meshes: MeshPair) -> None:
    """Raise XshardError for a block whose memory JAX cannot use."""
    for block, device in zip(blocks, meshes.local_devices, strict=True):
        cause = buffers.why_copied(block, device)
        if cause is not None:
            reason = f"the tensor for {device} cannot be handed over without a copy: {cause}"
            raise XshardError(reason, hint="copy=None allows one, and logs it")


def _make_array(
    blocks: list[Tensor], route: Route, meshes: MeshPair, dtype: str, copy: bool | None
) -> jax.Array:
    """Make the global array of JAX from checked blocks.

    If the layout or the devices change, blocks are moved by torch before JAX gets them, or by JAX
    after it (`route.mover`); with None they stay where they are.

    Args:
        blocks: This process's blocks.
        route: The shardings on both sides, and the side that moves.
        meshes: The meshes of torch and JAX.
        dtype: The dtype's name.
        copy: As of `to_jax`.
    """
    if route.mover is not None:
        copy = None  # blocks that have moved are in new memory already
    devices = meshes.local_devices
    if route.mover == TORCH:
        blocks = by_torch(blocks, route.plan)
        devices = meshes.local_jax_devices
    devices_and_blocks = zip(devices, blocks, strict=True)
    block_of_device: Blocks = {
        device: buffers.array_over(x, device, copy) for device, x in devices_and_blocks
    }
    if route.mover == JAX:
        block_of_device = by_jax(block_of_device, route.plan, meshes.by_number)
    array = assembled(block_of_device, route.torch_sharding.shape, dtype, route.named_sharding)
    return record_order(array, route.jax_sharding)


# ---- to torch


def prepare_to_torch(
    array: jax.Array,
    layout: Layout | Expression,
    mesh: TorchMesh | JaxMesh | None,
    options: Options,
) -> Callable[[], Any]:
    """Check the arguments of `to_torch`, and return a function that makes the tensors.

    Args:
        array: The array.
        layout: The layout of the array and of the blocks, or "layout -> layout".
        mesh: As of `to_torch`.
        options: The other arguments of `to_torch`.

    Raises:
        XshardError: As `to_torch` does.
    """
    _check_array(array)
    meshes = _meshes_of(array, mesh)
    device_mesh = None  # of the DTensor to return
    if isinstance(mesh, DeviceMesh):
        check_one_block(meshes, "a DeviceMesh has")
        if options.dtensor:
            device_mesh = mesh
    elif options.dtensor:
        hint = "to_torch(array, layout, device_mesh, dtensor=True)"
        raise MeshError("a DTensor is on a DeviceMesh", hint=hint)
    buffers.torch_dtype(array.dtype)  # raises for a dtype that torch lacks
    _ = meshes.kind  # raises for devices that torch lacks
    known_array = KnownArray(array.dtype.name, array.shape)
    route = options.route(layout, meshes, known_array, to_jax=False)
    if not are_same_shardings(array.sharding, route.named_sharding, array.ndim):
        reason = f"the array is not sharded as '{route.src}' says"
        raise ShapeError(reason, text=route.text, hint=f"it has {array.sharding}")
    check_order(array, route.jax_sharding, route.text)
    if device_mesh is not None:
        # Raises for a layout that a DTensor cannot have.
        to_placements(route.torch_sharding.layout, device_mesh, array.shape)
    if route.mover is not None:
        options.check_moved(route)
    return partial(_make_tensors, array, route, meshes, options, device_mesh)


def _check_array(array: Any) -> None:
    """Raise XshardError for an argument without memory that torch could read."""
    if isinstance(array, Tracer):
        reason = f"the array is a tracer, {jax.typeof(array)}: torch cannot read it"
        hint = "hand it over outside of jit and grad; inside, torch_interop.from_torch calls torch"
        raise XshardError(reason, hint=hint)
    if not isinstance(array, jax.Array):
        hint = "to_torch takes an array, or a tree and rules"
        raise XshardError(f"{type(array).__name__} is not a jax.Array", hint=hint)
    if array.is_deleted():
        described = f"{array.dtype.name}{list(array.shape)}"
        reason = f"the array, {described}, was donated or deleted: torch cannot read it"
        hint = "hand it over before, and donate a copy: jnp.array(x, copy=True)"
        raise XshardError(reason, hint=hint)


def _meshes_of(array: jax.Array, mesh: TorchMesh | JaxMesh | None) -> MeshPair:
    """Return the meshes of JAX and torch for an array.

    Args:
        array: The array.
        mesh: Torch's mesh; or JAX's, for an array that does not know its mesh; or None if torch
            uses the array's mesh.
    """
    sharding = array.sharding
    if isinstance(mesh, JaxMesh):
        return mesh_pair(mesh)  # of an array without one, on a single device
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, JaxMesh):
        return mesh_pair(sharding.mesh, mesh)
    hint = "pass the jax.sharding.Mesh that it is on"
    raise MeshError(f"the array is not on a mesh: {sharding}", hint=hint)


def _make_tensors(
    array: jax.Array,
    route: Route,
    meshes: MeshPair,
    options: Options,
    device_mesh: DeviceMesh | None,
) -> Any:
    """Make torch's tensors from the blocks of a checked array.

    If the layout or the devices change, blocks are moved by torch after it gets them, or by JAX
    before (`route.mover`); with None they stay where they are.

    Returns:
        A tensor, a list of several, or None if this process has none; a DTensor on `device_mesh`.
    """
    copy = options.copy
    writable = options.writable
    if route.mover is not None:
        # Blocks that have moved are in new memory, which may be written to.
        copy = None
        writable = True
    blocks = blocks_of(array)
    devices = meshes.local_devices
    if route.mover == JAX:
        blocks = by_jax(blocks, route.plan, meshes.by_number)
    elif route.mover == TORCH:
        devices = meshes.local_jax_devices
    tensors = [buffers.tensor_over(blocks[device], copy, writable) for device in devices]
    if route.mover == TORCH:
        tensors = by_torch(tensors, route.plan)
    if not tensors:
        return None
    if device_mesh is not None:
        return dtensor_of_block(tensors[0], route.torch_sharding.layout, device_mesh, array.shape)
    return tensors[0] if len(tensors) == 1 else tensors
