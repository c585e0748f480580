"""From a call to a plan: the expression, the block, and the mesh that JAX has around them.

Decides which plan a call inside `shard_map` or `pmap` means, and what a wrong call is told. The
plan is made on the axes that the expression names; blocks may differ along the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh

from jax_bridge.axes import bound_sizes, is_typed, varies, varying
from xshard import (
    DtypeError,
    Layout,
    Mesh,
    MeshError,
    NotationError,
    Plan,
    Profile,
    ShapeError,
    XshardError,
    notation,
    planner,
)
from xshard.layout import check_axes
from xshard.spelling import Expression, sides, whole_shape

AnyMesh = JaxMesh | AbstractMesh | Mesh


def xshard_mesh(mesh: AnyMesh) -> Mesh:
    """The mesh by names and sizes alone."""
    return mesh if isinstance(mesh, Mesh) else Mesh(dict(mesh.shape))


def plan_here(
    x: jax.Array,
    expression: Expression,
    mesh: AnyMesh | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
) -> Plan:
    """The plan for this block, made or, where one is given, checked. Raises as `redistribute` does."""
    src, dst, text = sides(expression)
    with marked(text):
        if isinstance(expression, Plan):
            if mesh is not None:
                _named_mesh(xshard_mesh(mesh), src, dst, text)
            used = _named_mesh(expression.mesh, src, dst, text, expression.axes)
            plan = replace(expression, mesh=used)
            if x.dtype.name != plan.dtype:
                raise DtypeError(f"the block is {x.dtype.name}, the plan is for {plan.dtype}")
            if shape is not None and tuple(shape) != plan.shape:
                raise ShapeError(f"the plan is for a {plan.shape} array, not {tuple(shape)}")
        else:
            named = _named_mesh(None if mesh is None else xshard_mesh(mesh), src, dst, text)
            whole = whole_shape(src, named, x.shape, text) if shape is None else shape
            plan = planner.plan(expression, named, whole, x.dtype.name, profile=profile)
    _check_block(x.shape, plan, text, inferred=shape is None)
    return plan


def entered(x: jax.Array, plan: Plan, text: str) -> jax.Array:
    """The block with the types that `apply` wants: varying along the source's axes, invariant along
    all others that the plan uses."""
    for axis in plan.axes:
        if axis in plan.src.axes or not is_typed(axis) or not varies(x, axis):
            continue
        if plan.mesh.size(axis) > 1:
            raise NotationError(
                f"the block varies along {axis!r}, where the source holds one value",
                text=text,
                span=_axis_span(axis, text),
                hint=f"if each device has a copy of its own, say so: copy({axis}) on the left",
            )
        x = lax.psum(x, axis)  # over one device: it makes the type say so
    return varying(x, plan.src.axes)


@contextmanager
def marked(text: str) -> Iterator[None]:
    """Errors that know no text get the user's."""
    try:
        yield
    except XshardError as error:
        if error.text is not None:
            raise
        raise type(error)(error.reason, text=text, hint=error.hint) from None


def _named_mesh(mesh: Mesh | None, src: Layout, dst: Layout, text: str, also: Sequence[str] = ()) -> Mesh:
    """The axes that the expression names, and `also`: manual here, unless they have one device."""
    named = (*src.axes, *dst.axes, *also)
    here = bound_sizes(named)
    if mesh is None:
        mesh = Mesh({**jax.sharding.get_abstract_mesh().shape, **here})
        if named and not mesh.axes:
            raise _not_manual(named[0], here, text)
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    for axis in named:
        size = mesh.size(axis)
        if axis not in here and size > 1:
            raise _not_manual(axis, here, text)
        if size != here.get(axis, 1):
            raise MeshError(
                f"axis {axis!r} has size {size} in {mesh!r}, and {here[axis]} here",
                text=text,
                span=_axis_span(axis, text),
            )
    return Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis in named})


def _not_manual(axis: str, here: Mapping[str, int], text: str) -> MeshError:
    return MeshError(
        f"mesh axis {axis!r} is not manual here",
        text=text,
        span=_axis_span(axis, text),
        hint=f"manual are: {Mesh(here).describe()}; redistribute works inside jax.shard_map or jax.pmap "
        "over the axis, reshard works outside",
    )


def _check_block(local_shape: tuple[int, ...], plan: Plan, text: str, *, inferred: bool) -> None:
    expected = plan.source.max_local_shape
    if local_shape == expected:
        return
    names = plan.source.layout.names
    wrong = [n for n, have, want in zip(names, local_shape, expected, strict=False) if have != want]
    where = dict(reversed(notation.spans(text).dims))  # the left side's, which come first
    raise ShapeError(
        f"the block has shape {local_shape}, not {expected}",
        text=text,
        span=where.get(wrong[0], where.get(notation.ELLIPSIS)) if wrong else None,
        hint=f"that is the largest block of a {plan.shape} array on {plan.mesh!r}"
        + ("; where blocks differ in size, pass shape= (the global shape)" if inferred else ""),
    )


def _axis_span(axis: str, text: str) -> tuple[int, int] | None:
    return next((span for name, span in notation.spans(text).axes if name == axis), None)
