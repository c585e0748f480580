"""Expressions as users write them -> both layouts, and the check of a block against its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xshard.arguments import shown
from xshard.errors import DtypeError, MeshError, NotationError, PlanError, ShapeError
from xshard.layout import Layout, Mesh
from xshard.layout.layout import parse_expression
from xshard.layout.validation import check_dims
from xshard.notation.parser import ARROW, ELLIPSIS, text_spans
from xshard.plans.plan import Plan


class Sides(NamedTuple):
    """A parsed expression: both layouts, and the text that errors mark."""

    src: Layout
    dst: Layout
    text: str


LayoutPair = str | tuple[Layout | str, Layout | str] | Sides  # "layout -> layout", or both sides
Expression = LayoutPair | Plan


def as_expression(expression: Any) -> Any:
    """An expression as a key of caches: a list of both sides becomes a pair. Raises NotationError."""
    if isinstance(expression, str | Plan | Sides):
        return expression
    if isinstance(expression, list | tuple) and len(expression) == 2:
        return tuple(map(Layout.parse, expression))
    hint = '"layout -> layout", a pair of layouts, or a plan'
    raise NotationError(f"{shown(expression)} is no expression", hint=hint)


def sides(expression: Expression) -> Sides:
    """Parse an expression, if it is not yet. Raises NotationError, and PlanError for two meshes."""
    if isinstance(expression, Sides):
        return expression
    if isinstance(expression, str):
        return Sides(*parse_expression(expression), expression)
    if isinstance(expression, Plan):
        if expression.transfer:
            why = f"the plan leads from {expression.src_mesh} to {expression.dst_mesh}"
            raise PlanError(why, hint="torch_bridge.redistribute(x, plan) runs it")
        expression = expression.src, expression.dst
    src, dst = as_expression(expression)
    check_dims(src.dims, dst.dims, text := f"{src} -> {dst}")
    return Sides(src, dst, text)


def sides_or_one(layout: Layout | Expression) -> Sides:
    """The sides of an expression; equal ones for a layout, under which blocks stay as they are."""
    if isinstance(layout, str) and ARROW not in layout:
        layout = Layout.parse(layout)
    return Sides(layout, layout, str(layout)) if isinstance(layout, Layout) else sides(layout)


def check_given(
    what: str, plan: Any, dtype: str, shape: Any = None, mesh: Mesh | None = None, **about: Any
) -> None:
    """Raise MeshError, DtypeError or ShapeError unless a plan that was passed is for these; None: for any."""
    planned = plan.shape if isinstance(plan, Plan) else plan.shapes
    if mesh not in (None, plan.mesh):
        raise MeshError(f"the plan is for {plan.mesh!r}, this is {mesh!r}", **about)
    if dtype != plan.dtype:
        raise DtypeError(f"{what} {dtype}, the plan is for {plan.dtype}", **about)
    if shape not in (None, planned):
        raise ShapeError(f"the plan is for shape {planned}, not {shape}", **about)


def check_block(
    what: str,
    local_shape: tuple[int, ...],
    expected: tuple[int, ...],
    names: Sequence[str],
    text: str,
    hint: str,
    *,
    inferred: bool,
    start: int = 0,
) -> None:
    """Raise ShapeError, marking the first wrong dim after `start`, for a block of another shape."""
    if local_shape == expected:
        return
    wrong = [n for n, have, want in zip(names, local_shape, expected, strict=False) if have != want]
    # A dim is marked where it comes first.
    where = {name: span for name, span in reversed(text_spans(text).dims) if span[0] >= start}
    span = where.get(wrong[0], where.get(ELLIPSIS)) if wrong else None
    hint += "; if blocks differ in size, pass shape= (the global shape)" if inferred else ""
    raise ShapeError(
        f"{what} has shape {local_shape}, not {expected}", text=text, span=span, hint=hint
    )
