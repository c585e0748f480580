"""The mesh around a call inside `shard_map`, `pmap` or `vmap(axis_name=)`, layouts on it, and its machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import Mesh as JaxMesh

from jax_bridge.mesh.axis_types import bound_sizes, is_vmapped
from xshard import Layout, Mesh, Profile, ProfileLike, Sharding, load_profile
from xshard.arguments import lengths_of
from xshard.cost.machine import AUTO, asked_for, machine_of, node_processes
from xshard.errors import MeshError, ShapeError, Span
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import mark_errors, text_spans
from xshard.plans.expression import check_block

AnyMesh = JaxMesh | AbstractMesh | Mesh


def xshard_mesh(mesh: AnyMesh) -> Mesh:
    """The names and sizes of a mesh's axes. Raises MeshError for anything but a mesh."""
    return mesh if isinstance(mesh, Mesh) else Mesh(dict(jax_mesh(mesh).shape))


def jax_mesh(mesh: Any) -> JaxMesh | AbstractMesh:
    """A mesh of JAX, unchanged. Raises MeshError for anything else."""
    if isinstance(mesh, JaxMesh | AbstractMesh):
        return mesh
    why = "lacks devices" if isinstance(mesh, Mesh) else "is not a mesh"
    raise MeshError(
        f"{mesh!r} {why}", hint="pass a jax.sharding.Mesh, or nothing if JAX knows the mesh"
    )


def free_axes(mesh: JaxMesh | AbstractMesh) -> dict[str, int]:
    """Sizes of the axes that may shard arrays: inside a `shard_map` those that are not manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}


def sharding_here(layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None) -> Sharding:
    """The layout of an array of global `shape` on the mesh here. Raises as `redistribute` does."""
    text = str(layout)
    with mark_errors(text):
        lengths = lengths_of(shape)
        resolved = Layout.parse(layout).resolved(len(lengths))
        return Sharding(resolved, _mesh_here(mesh, (resolved,), text)[0], lengths)


def block_sharding_here(
    x: jax.Array, layout: Layout, mesh: AnyMesh | None, shape: Sequence[int | None] | None
) -> Sharding:
    """The layout on the mesh here, for this block. shape: global lengths, None if they follow from blocks."""
    text = str(layout)
    with mark_errors(text):
        here, _ = _mesh_here(mesh, (layout.resolved(x.ndim),), text)
    return block_sharding(x, layout, here, shape)


def block_sharding(
    x: jax.Array, layout: Layout, mesh: Mesh, shape: Sequence[int | None] | None
) -> Sharding:
    """The same on all of a mesh."""
    text = str(layout)
    lengths = x.ndim * (None,) if shape is None else lengths_of(shape)
    if len(lengths) != x.ndim:
        raise ShapeError(f"shape {lengths} of a block with {x.ndim} dims", text=text)
    known = dict(zip(layout.resolved(x.ndim).names, lengths, strict=True))
    lengths = global_shape(layout, mesh, x.shape, text, known)
    sharding = Sharding(layout.resolved(x.ndim), mesh, lengths)
    check_block_here(x.shape, sharding, text, inferred=shape is None)
    return sharding


def check_block_here(
    local_shape: tuple[int, ...], sharding: Sharding, text: str, *, inferred: bool, start: int = 0
) -> None:
    """Raise ShapeError for another shape, marking a dim of the layout, which is at `start` in the text."""
    hint = f"that is the largest block of a {sharding.shape} array on {sharding.mesh!r}"
    expected = sharding.max_local_shape
    names = sharding.layout.names
    check_block(
        "the block", local_shape, expected, names, text, hint, inferred=inferred, start=start
    )


def machine_here(
    mesh: AnyMesh | None, layouts: Sequence[Layout], text: str, profile: ProfileLike
) -> tuple[Mesh, Profile]:
    """The part of the mesh, or of the context's, with the axes of the layouts, and the profile for it."""
    here, context = _mesh_here(mesh, layouts, text)
    # On a part of the mesh devices are renumbered; the links between them stay the same.
    return here, load_profile(machine(profile, mesh)).along(here.axes, context)


def planned_mesh_here(mesh: AnyMesh | None, planned: Mesh, axes: Sequence[str], text: str) -> Mesh:
    """The part of a plan's mesh with the axes that the plan uses, after a check that they are manual here."""
    if mesh is not None:
        _named_mesh(xshard_mesh(mesh), axes, text)
    return _named_mesh(planned, axes, text)


def _mesh_here(mesh: AnyMesh | None, layouts: Sequence[Layout], text: str) -> tuple[Mesh, Mesh]:
    """The part with the layouts' axes, and all, of the mesh given or around. Raises as `check_axes` does."""
    named = [axis for layout in layouts for axis in layout.axes]
    if mesh is None:
        manual = bound_sizes(named)
        context = Mesh({**jax.sharding.get_abstract_mesh().shape, **manual})
        if named and not context.axes:
            raise _not_manual(named[0], manual, text)
    else:
        context = xshard_mesh(mesh)
    for layout in layouts:
        check_axes(layout, context, text)
    return _named_mesh(context, named, text), context


def _named_mesh(mesh: Mesh, named: Sequence[str], text: str) -> Mesh:
    """The part of the mesh with the named axes, which must be manual here unless they have one device."""
    manual = bound_sizes(named)
    for axis in named:
        if axis not in mesh.axes:
            raise MeshError(
                f"the plan is for a mesh with axis {axis!r}, {mesh!r} lacks it", text=text
            )
        size = mesh.size(axis)
        if axis not in manual and size > 1:
            raise _not_manual(axis, manual, text)
        if size != manual.get(axis, 1):
            reason = f"axis {axis!r} has size {size} in {mesh!r}, and {manual[axis]} here"
            raise MeshError(reason, text=text, span=axis_span(axis, text))
    here = Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis in named})
    for axis in filter(is_vmapped, here.long_axes if len(here.long_axes) > 1 else ()):
        reason = (
            f"axis {axis!r} is a batch of vmap, and the expression names {len(here.long_axes)} axes"
        )
        hint = "JAX lacks collectives over several axes under vmap; jax.shard_map has them"
        raise MeshError(reason, text=text, span=axis_span(axis, text), hint=hint)
    return here


def _not_manual(axis: str, manual: Mapping[str, int], text: str) -> MeshError:
    where = (
        "redistribute works inside jax.shard_map or jax.pmap over the axis, reshard works outside"
    )
    hint = f"manual are: {Mesh(manual).describe()}; {where}"
    span = axis_span(axis, text)
    return MeshError(f"mesh axis {axis!r} is not manual here", text=text, span=span, hint=hint)


def axis_span(axis: str, text: str, layout: Span | None = None) -> Span | None:
    """The first mention of an axis in the text, or in a layout of the text; else the whole layout."""
    start, stop = layout or (0, len(text))
    spans = (
        span for name, span in text_spans(text).axes if name == axis and start <= span[0] < stop
    )
    return next(spans, layout)


def machine(profile: ProfileLike, mesh: Any = None) -> ProfileLike:
    """The profile; for "auto" the one of the mesh's devices, or of JAX's own if it lacks devices."""
    asked = asked_for(profile)
    if asked != AUTO:
        return asked
    return _found(mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[0])


@functools.lru_cache(maxsize=64)
def _found(device: jax.Device) -> Profile:
    """The machine of a device. A node is a process, several of one host, or what NVLink joins."""
    devices = jax.devices(device.platform)
    of_process = sum(other.process_index == device.process_index for other in devices)
    if (
        device.platform == "cpu"
    ):  # what leaves a process is sent by gloo, also to one of the same host
        return machine_of("host", None if of_process == len(devices) else of_process)
    island = getattr(
        device, "slice_index", None
    )  # of GPUs: their host, or a rack that NVLink joins
    if device.platform == "gpu" and island is not None:
        near = sum(other.slice_index == island for other in devices)
    else:
        near = of_process * (node_processes(len({other.process_index for other in devices})) or 1)
    return machine_of(device.device_kind, near if near > 1 and near < len(devices) else None)
