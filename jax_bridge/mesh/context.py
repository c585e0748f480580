"""The mesh around a call inside `shard_map`, `pmap` or `vmap(axis_name=)`, and its machine.

An axis is manual where code runs per device along it, as inside a `shard_map` over it: only along manual axes
can a device send. Axes of a batch of `vmap` count, too. A plan is for the sub-mesh of the axes that layouts
name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import Mesh as JaxMesh

from jax_bridge.mesh.axis_types import bound_sizes, is_vmapped
from xshard import Layout, Mesh, Profile, ProfileLike, Sharding, load_profile
from xshard.arguments import lengths_of
from xshard.cost.machine import AUTOS, machine_of, node_processes, resolve_profile, with_order_of
from xshard.errors import MeshError, Span
from xshard.layout.layout import check_axes
from xshard.layout.lengths import sharding_of_block
from xshard.notation.parser import mark_errors, text_spans
from xshard.plans.expression import check_block

# A mesh of JAX: one with devices, or as JAX knows it of a traced array, without them.
AnyJaxMesh = JaxMesh | AbstractMesh
AnyMesh = AnyJaxMesh | Mesh

# Meshes of JAX and of xshard.


def xshard_mesh(mesh: AnyMesh) -> Mesh:
    """Return the names and sizes of a mesh's axes. Raises MeshError for anything but a mesh."""
    if isinstance(mesh, Mesh):
        return mesh
    return Mesh(dict(jax_mesh(mesh).shape))


def jax_mesh(mesh: Any) -> AnyJaxMesh:
    """Return a mesh of JAX unchanged. Raises MeshError for anything else."""
    if isinstance(mesh, AnyJaxMesh):
        return mesh
    fault = "lacks devices" if isinstance(mesh, Mesh) else "is not a mesh"
    raise MeshError(
        f"{mesh!r} {fault}", hint="pass a jax.sharding.Mesh, or nothing if JAX knows the mesh"
    )


def free_axes(mesh: AnyJaxMesh) -> dict[str, int]:
    """Return the sizes of the axes that may shard arrays: the axes that are not manual."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, axis_type in types if axis_type != AxisType.Manual}


# Layouts on the mesh of the context.


def sharding_in_context(
    layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None
) -> Sharding:
    """Put the layout of an array of global `shape` on the context's mesh.

    Raises as `redistribute` does.
    """
    text = str(layout)
    with mark_errors(text):
        lengths = lengths_of(shape)
        resolved = Layout.parse(layout).resolved(len(lengths))
        return Sharding(resolved, _mesh_in_context(mesh, (resolved,), text).named, lengths)


def block_sharding_in_context(
    x: jax.Array, layout: Layout, mesh: AnyMesh | None, shape: Sequence[int | None] | None
) -> Sharding:
    """Infer the global array's shape and sharding from one device's block, inside `shard_map`.

    A block [2, 3] under "n/dp d" on 4 devices along dp belongs to an array [8, 3].

    Args:
        x: This device's block.
        layout: The layout of the global array.
        mesh: The mesh; None for the one of the context.
        shape: Global lengths; None for lengths that follow from the blocks.
    """
    text = str(layout)
    with mark_errors(text):
        named_mesh = _mesh_in_context(mesh, (layout.resolved(x.ndim),), text).named
    return block_sharding(x, layout, named_mesh, shape)


def block_sharding(
    x: jax.Array, layout: Layout, mesh: Mesh, shape: Sequence[int | None] | None
) -> Sharding:
    """Infer the sharding of the global array that a block is a part of.

    A block [2, 3] under "n/dp d" on 4 devices along dp belongs to an array [8, 3].

    Args:
        x: This device's block.
        layout: The layout of the global array.
        mesh: A mesh with the layout's axes.
        shape: Global lengths; None for lengths that follow from the blocks.
    """
    text = str(layout)
    # A length of None follows from the blocks, which are then equal.
    lengths = x.ndim * (None,) if shape is None else lengths_of(shape)
    sharding = sharding_of_block(layout, mesh, x.shape, lengths, text)
    check_block_shape(x.shape, sharding, text, inferred=shape is None)
    return sharding


def check_block_shape(
    local_shape: tuple[int, ...], sharding: Sharding, text: str, *, inferred: bool, start: int = 0
) -> None:
    """Raise ShapeError for a block that is not as large as the largest block of its array.

    On 4 devices all blocks of an array [10, 3] under "n/dp d" are [3, 3], padded where they lack rows.

    Args:
        local_shape: The block's shape.
        sharding: The global array.
        text: The expression, for the error, which marks the dim.
        inferred: Whether the global shape follows from the blocks.
        start: Where the array's layout begins in the text.
    """
    hint = f"that is the largest block of a {sharding.shape} array on {sharding.mesh!r}"
    check_block(
        "the block",
        local_shape,
        sharding.max_local_shape,
        sharding.layout.names,
        text,
        hint,
        inferred=inferred,
        start=start,
    )


class MeshAndMachine(NamedTuple):
    """The sub-mesh that a plan is for, and the machine to plan for."""

    mesh: Mesh
    machine: Profile


def mesh_and_machine(
    mesh: AnyMesh | None, layouts: Sequence[Layout], text: str, profile: ProfileLike
) -> MeshAndMachine:
    """Find the mesh around a call, reduced to the axes that layouts name, and its link speeds.

    On a mesh (dp=2, tp=4) the layout "n/tp" needs the sub-mesh (tp=4), a group of 4 devices.

    Args:
        mesh: The mesh; None for the one of the context.
        layouts: The layouts, whose axes must be manual here.
        text: The expression, for errors.
        profile: The machine that the user asks for.
    """
    context = _mesh_in_context(mesh, layouts, text)
    # On nodes of 4 devices dp=2 of the whole mesh joins two nodes, though a mesh of dp=2 alone would
    # fit into one: `for_axes` keeps the links that axes have in the whole mesh.
    whole_machine = load_profile(machine_profile(profile, mesh))
    machine = whole_machine.for_axes(context.named.axes, context.whole)
    return MeshAndMachine(context.named, machine)


def planned_mesh_in_context(
    mesh: AnyMesh | None, planned: Mesh, axes: Sequence[str], text: str
) -> Mesh:
    """Return the sub-mesh of a plan's mesh on which it runs here.

    Args:
        mesh: The mesh that the user passed; it must have the plan's axes. None: no such check.
        planned: The plan's mesh.
        axes: The axes that the plan uses; they must be manual here.
        text: The expression, for errors.
    """
    if mesh is not None:
        _named_sub_mesh(xshard_mesh(mesh), axes, text)  # raises if it has other axes or sizes
    return _named_sub_mesh(planned, axes, text)


class _ContextMesh(NamedTuple):
    """The whole mesh around a call, and the sub-mesh of the axes that layouts name."""

    named: Mesh
    whole: Mesh


def _mesh_in_context(mesh: AnyMesh | None, layouts: Sequence[Layout], text: str) -> _ContextMesh:
    """Return the mesh that the user passed, or the one of the context, and its named sub-mesh.

    On a mesh (dp=2, tp=4) the layout "n/tp" names the sub-mesh (tp=4).

    Args:
        mesh: The mesh; None for the one of the context, with the axes that vmap has bound.
        layouts: The layouts.
        text: The expression, for errors.

    Raises:
        MeshError: An axis is not manual here, or has another size.
        NotationError: The mesh lacks an axis.
    """
    named_axes: list[str] = []  # in the order of the text: errors name the first
    for layout in layouts:
        named_axes += layout.axes

    if mesh is None:
        manual_sizes = bound_sizes(named_axes)
        # Manual axes may also be those that vmap has bound, which the mesh of the context lacks.
        whole_mesh = Mesh({**jax.sharding.get_abstract_mesh().shape, **manual_sizes})
        if named_axes and not whole_mesh.axes:
            raise _not_manual(named_axes[0], manual_sizes, text)
    else:
        whole_mesh = xshard_mesh(mesh)

    for layout in layouts:
        check_axes(layout, whole_mesh, text)
    return _ContextMesh(_named_sub_mesh(whole_mesh, named_axes, text), whole_mesh)


def _named_sub_mesh(mesh: Mesh, named_axes: Sequence[str], text: str) -> Mesh:
    """Return the sub-mesh of the named axes, in the order of the mesh.

    Raises:
        MeshError: The mesh lacks an axis, or an axis of several devices is not manual here (no
            `shard_map` over it is around the call) or has another size here.
    """
    manual_sizes = bound_sizes(named_axes)
    for axis in named_axes:
        if axis not in mesh.axes:
            raise MeshError(
                f"the plan is for a mesh with axis {axis!r}, {mesh!r} lacks it", text=text
            )
        size = mesh.size(axis)
        bound_size = manual_sizes.get(axis)
        # Along an axis of one device nothing is sent: it need not be manual.
        if bound_size is None and size > 1:
            raise _not_manual(axis, manual_sizes, text)
        if bound_size is not None and bound_size != size:
            reason = f"axis {axis!r} has size {size} in {mesh!r}, and {bound_size} here"
            raise MeshError(reason, text=text, span=axis_span(axis, text))

    sub_mesh = Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis in named_axes})
    _check_vmapped_alone(sub_mesh.long_axes, text)
    return sub_mesh


def _check_vmapped_alone(axes: Sequence[str], text: str) -> None:
    """Raise MeshError if one of several axes is a batch of vmap."""
    for axis in axes:
        if len(axes) > 1 and is_vmapped(axis):
            reason = f"axis {axis!r} is a batch of vmap, and the expression names {len(axes)} axes"
            hint = "JAX lacks collectives over several axes under vmap; jax.shard_map has them"
            raise MeshError(reason, text=text, span=axis_span(axis, text), hint=hint)


def _not_manual(axis: str, manual_sizes: Mapping[str, int], text: str) -> MeshError:
    """Return the error for an axis that no `shard_map` around the call makes manual."""
    way_out = (
        "redistribute works inside jax.shard_map or jax.pmap over the axis, reshard works outside"
    )
    hint = f"manual are: {Mesh(manual_sizes).describe()}; {way_out}"
    span = axis_span(axis, text)
    return MeshError(f"mesh axis {axis!r} is not manual here", text=text, span=span, hint=hint)


def axis_span(axis: str, text: str, layout: Span | None = None) -> Span | None:
    """Find the first mention of an axis in an expression, for an error to mark.

    Args:
        axis: The name of the axis.
        text: The expression.
        layout: The part of the text to search; also the result if that part does not name the axis.
    """
    start, stop = (0, len(text)) if layout is None else layout
    for name, span in text_spans(text).axes:
        if name == axis and start <= span[0] < stop:
            return span
    return layout


# The machine that a mesh is.


def machine_profile(profile: ProfileLike, mesh: Any = None) -> ProfileLike:
    """Return the profile to plan for: as given, or for "auto" that of the devices in use.

    Args:
        profile: A profile, its name, or "auto".
        mesh: The mesh whose devices count; one without devices, or None: JAX's default ones.
    """
    requested = resolve_profile(profile)
    if requested not in AUTOS:
        return requested
    device = jax.devices()[0]
    if isinstance(mesh, jax.sharding.Mesh):
        device = mesh.devices.flat[0]
    return with_order_of(requested, _machine_of_device(device))


# Cached, since each call with profile="auto" asks: all devices of JAX are looked at.
@functools.lru_cache(maxsize=64)
def _machine_of_device(device: jax.Device) -> Profile:
    """Return the profile of a device's kind, with the number of devices that fast links join.

    With None as the number fast links join all devices.
    """
    devices = jax.devices(device.platform)
    n_in_process = sum(peer.process_index == device.process_index for peer in devices)
    if device.platform == "cpu":
        # Gloo sends whatever leaves a process, also to another process of the same host.
        is_one_process = n_in_process == len(devices)
        return machine_of("host", None if is_one_process else n_in_process)

    slice_index = getattr(device, "slice_index", None)
    if device.platform == "gpu" and slice_index is not None:
        # A slice of GPUs is their host, or a rack that NVLink joins.
        n_in_node = sum(peer.slice_index == slice_index for peer in devices)
    else:
        # A node is a host, with one process or several.
        n_processes = len({peer.process_index for peer in devices})
        n_processes_of_node = node_processes(n_processes)
        if n_processes_of_node is None:  # nothing says how many
            n_processes_of_node = 1
        n_in_node = n_in_process * n_processes_of_node
    has_several_nodes = 1 < n_in_node < len(devices)
    return machine_of(device.device_kind, n_in_node if has_several_nodes else None)
