"""From a call to a plan: the expression, the block, and the mesh that JAX has around them.

Decides which plan a call inside `shard_map` or `pmap` means, and how a wrong call is refused. The plan
covers the axes that the expression names; blocks may differ along the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from jax_bridge.mesh.axis_types import as_varying, axis_size, bound_sizes, is_typed, is_vmapped, varying_axes
from jax_bridge.mesh.machine import machine
from jax_bridge.versions import manual_type, unreduced_kind
from xshard import Layout, Mesh, Plan, Profile, Sharding, load_profile, planner
from xshard.arguments import lengths_of
from xshard.errors import DtypeError, MeshError, NotationError, ShapeError, Span
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation import parser
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, Sides, check_block, sides

AnyMesh = JaxMesh | AbstractMesh | Mesh
NotLayout = PartitionSpec | NamedSharding  # what JAX's own functions take in its place


def xshard_mesh(mesh: AnyMesh) -> Mesh:
    """The names and sizes of a mesh's axes. Raises MeshError for what is not a mesh."""
    return mesh if isinstance(mesh, Mesh) else Mesh(dict(jax_mesh(mesh).shape))


def jax_mesh(mesh: Any) -> JaxMesh | AbstractMesh:
    """A mesh of JAX, as it is. Raises MeshError for anything else."""
    if isinstance(mesh, JaxMesh | AbstractMesh):
        return mesh
    why = "has no devices" if isinstance(mesh, Mesh) else "is not a mesh"
    raise MeshError(f"{mesh!r} {why}", hint="pass a jax.sharding.Mesh, or nothing where JAX knows the mesh")


def parse_call(x: Any, expression: Any) -> Sides:
    """The sides of a call's expression. Raises as `sides` does, and for arguments in each other's place."""
    if isinstance(x, str | Layout | Plan):
        raise NotationError("an expression in place of the array", hint="the array comes first")
    given = expression if isinstance(expression, tuple) else (expression,)
    specs = [one for one in given if isinstance(one, NotLayout)]
    if specs and not isinstance(expression, Sides):
        raise NotationError(
            f"a {type(specs[0]).__name__} in place of a layout",
            hint="write both sides, as in 's/cp c -> s c'; from_partition_spec(spec, ndim) is a layout",
        )
    return sides(expression)


def free_axes(mesh: JaxMesh | AbstractMesh) -> dict[str, int]:
    """The axes that may cut arrays, with their sizes: inside a `shard_map` those that are not manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}


def as_array(x: Any, text: str) -> jax.Array:
    """A block or array, maybe of numpy, as one of JAX.

    Raises DtypeError if JAX would narrow its dtype, and for what JAX can make no array of.
    """
    if isinstance(x, jax.Array):
        return x
    try:
        found = jnp.asarray(x)
    except (TypeError, ValueError):
        if isinstance(x, np.ndarray):
            check_dtype(x.dtype, text)
        hint = "pass an array"
        raise DtypeError(f"JAX sees no numbers in a {type(x).__name__}", text=text, hint=hint) from None
    if isinstance(x, np.ndarray | np.generic):
        check_dtype(x.dtype, text)
    return found


def check_dtype(dtype: np.dtype, text: str) -> None:
    """Raise DtypeError if JAX would narrow the dtype, or has no such numbers."""
    if dtype.kind in "OSUMm":
        raise DtypeError(f"JAX sees no numbers of {dtype}", text=text, hint="pass an array")
    if (found := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise DtypeError(
            f"the block is {dtype.name}, which JAX would make {found.name}",
            text=text,
            hint='jax.config.update("jax_enable_x64", True), or convert it',
        )


def plan_here(
    x: jax.Array,
    expression: Expression,
    parsed: Sides,
    mesh: AnyMesh | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
) -> Plan:
    """The plan for this block: a new one, or the given one after a check. Raises as `redistribute` does.

    parsed: the sides of the expression.
    """
    src, dst, text = parsed
    with mark_errors(text):
        if isinstance(expression, Plan):
            here = given_mesh_here(mesh, expression.mesh, expression.axes, text)
            plan = replace(expression, mesh=here, devices=())
            check_given(plan, "the block", shape, x.dtype.name)
        else:
            here, machine = machine_here(mesh, (src, dst), text, profile)
            whole = global_shape(src, here, x.shape, text) if shape is None else shape
            plan = planner.plan(parsed, here, whole, x.dtype.name, profile=machine)
    check_block_here(x.shape, plan.source, text, inferred=shape is None)
    return plan


def check_given(plan: Plan, what: str, shape: Sequence[int] | None, dtype: str) -> None:
    """Raise for an array of another shape or dtype than a given plan is for."""
    if dtype != plan.dtype:
        raise DtypeError(f"{what} is {dtype}, the plan is for {plan.dtype}")
    if shape is not None and (lengths := lengths_of(shape)) != plan.shape:
        raise ShapeError(f"the plan is for a {plan.shape} array, not {lengths}")


def sharding_here(layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None) -> Sharding:
    """The layout of an array of global `shape` on the mesh here. Raises as `plan_here` does."""
    text = str(layout)
    with mark_errors(text):
        lengths = lengths_of(shape)
        found = Layout.parse(layout).resolved(len(lengths))
        return Sharding(found, _mesh_here(mesh, (found,), text), lengths)


def block_sharding_here(
    x: jax.Array, layout: Layout | str, mesh: AnyMesh | None, shape: Sequence[int] | None
) -> Sharding:
    """The layout on the mesh here, for this block; without `shape`, assuming all blocks are equal."""
    layout = Layout.parse(layout)
    text = str(layout)
    with mark_errors(text):
        here = _mesh_here(mesh, (layout.resolved(x.ndim),), text)
        whole = global_shape(layout, here, x.shape, text) if shape is None else shape
    sharding = sharding_here(layout, whole, here)
    check_block_here(x.shape, sharding, text, inferred=shape is None)
    return sharding


def with_entry_type(
    x: jax.Array, plan: Plan, text: str, axes: Sequence[str] | None = None, layout: Span | None = None
) -> jax.Array:
    """The block, declared as `apply` needs it: varying along the source's axes, invariant along others.

    axes: the others, by default the plan's. layout: the place in the text that errors mark, by default all.
    """
    found = manual_type(x)
    kind = unreduced_kind(found)
    for axis in plan.axes if axes is None else axes:
        if kind != "sum" and axis in found.unreduced and axis not in plan.src.tagged(kind):
            raise NotationError(
                f"the block is unreduced along {axis!r}: its {kind} is still to be taken",
                text=text,
                span=axis_span(axis, text, layout),
                hint=f"write it on the left: {kind}({axis})",
            )
        if axis in plan.src.axes or not is_typed(axis) or axis not in varying_axes(x):
            continue
        if axis_size(axis) > 1:
            raise NotationError(
                f"the block varies along {axis!r}, where the source holds one value",
                text=text,
                span=axis_span(axis, text, layout),
                hint=f"if each device has its own copy, write copy({axis}) on the left",
            )
        x = lax.psum(x, axis)  # over one device: changes the type only
    return as_varying(x, plan.src.axes)


def machine_here(
    mesh: AnyMesh | None, layouts: Sequence[Layout], text: str, profile: str | Path | Profile
) -> tuple[Mesh, Profile]:
    """The axes that the layouts name, on the mesh given or the one of the context, and the machine there."""
    context = _context(mesh, layouts, text)
    here = _named_mesh(context, _named(layouts), text)
    # On a part of the mesh devices are renumbered; the links between them stay the same.
    return here, load_profile(machine(profile, mesh)).along(here.axes, context)


def given_mesh_here(mesh: AnyMesh | None, planned: Mesh, axes: Sequence[str], text: str) -> Mesh:
    """The part of the mesh of a given plan with the axes that it uses, all of them manual here."""
    if mesh is not None:
        _named_mesh(xshard_mesh(mesh), axes, text)
    return _named_mesh(planned, axes, text)


def _mesh_here(mesh: AnyMesh | None, layouts: Sequence[Layout], text: str) -> Mesh:
    """The axes that the layouts name, on the mesh given or the one of the context."""
    return _named_mesh(_context(mesh, layouts, text), _named(layouts), text)


def _context(mesh: AnyMesh | None, layouts: Sequence[Layout], text: str) -> Mesh:
    """The mesh given, or the one around the call; it has every axis that the layouts name."""
    named = _named(layouts)
    if mesh is None:
        here = bound_sizes(named)
        context = Mesh({**jax.sharding.get_abstract_mesh().shape, **here})
        if named and not context.axes:
            raise _not_manual(named[0], here, text)
    else:
        context = xshard_mesh(mesh)
    for layout in layouts:
        check_axes(layout, context, text)
    return context


def _named(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(axis for layout in layouts for axis in layout.axes)


def _named_mesh(mesh: Mesh, named: Sequence[str], text: str) -> Mesh:
    """The part of the mesh with the named axes, which must be manual here unless they have one device."""
    here = bound_sizes(named)
    for axis in named:
        if axis not in mesh.axes:
            raise MeshError(f"the plan is for a mesh with axis {axis!r}, {mesh!r} has none", text=text)
        size = mesh.size(axis)
        if axis not in here and size > 1:
            raise _not_manual(axis, here, text)
        if size != here.get(axis, 1):
            raise MeshError(
                f"axis {axis!r} has size {size} in {mesh!r}, and {here[axis]} here",
                text=text,
                span=axis_span(axis, text),
            )
    found = Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis in named})
    long = [axis for axis in found.axes if found.size(axis) > 1]
    for axis in long:
        if len(long) > 1 and is_vmapped(axis):
            raise MeshError(
                f"axis {axis!r} is a batch of vmap, and the expression names {len(long)} axes",
                text=text,
                span=axis_span(axis, text),
                hint="JAX has no collectives over several axes under vmap; jax.shard_map has",
            )
    return found


def _not_manual(axis: str, here: Mapping[str, int], text: str) -> MeshError:
    return MeshError(
        f"mesh axis {axis!r} is not manual here",
        text=text,
        span=axis_span(axis, text),
        hint=f"manual are: {Mesh(here).describe()}; redistribute works inside jax.shard_map or jax.pmap "
        "over the axis, reshard works outside",
    )


def check_block_here(
    local_shape: tuple[int, ...], sharding: Sharding, text: str, *, inferred: bool, start: int = 0
) -> None:
    """Raise ShapeError, marking a dim, for a block that its layout, at `start`, gives another shape."""
    check_block(
        "the block",
        local_shape,
        sharding.max_local_shape,
        sharding.layout.names,
        text,
        f"that is the largest block of a {sharding.shape} array on {sharding.mesh!r}",
        inferred=inferred,
        start=start,
    )


def axis_span(axis: str, text: str, layout: Span | None = None) -> Span | None:
    """Where an axis stands first: in the text, or in a layout, which is all marked if it lacks the axis."""
    start, stop = layout or (0, len(text))
    found = (at for name, at in parser.text_spans(text).axes if name == axis and start <= at[0] < stop)
    return next(found, layout)
