"""Expressions as users write them -> both layouts, and the check of a block against its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xshard.errors import DtypeError, MeshError, NotationError, PlanError, ShapeError, Span
from xshard.layout import Layout, Mesh
from xshard.layout.layout import parse_expression
from xshard.layout.sub_axes import root_of
from xshard.layout.validation import check_dims
from xshard.notation.parser import ARROW, ELLIPSIS, text_spans
from xshard.plans.plan import Plan
from xshard.signatures import short_repr


class Sides(NamedTuple):
    """A parsed expression: both layouts, and the text that errors mark."""

    src: Layout
    dst: Layout
    text: str


LayoutPair = str | tuple[Layout | str, Layout | str] | Sides  # "layout -> layout", or both sides
Expression = LayoutPair | Plan
# For one array, or nested like a tree of arrays; None for what is no array. `Rules` are a mapping.
LayoutsLike = Expression | Layout | Mapping[Any, "LayoutsLike"] | Sequence["LayoutsLike | None"]


def as_expression(expression: Any) -> Any:
    """Return an expression as a key of caches: a list of two layouts becomes a pair.

    Raises:
        NotationError: It is no expression.
    """
    if isinstance(expression, str | Plan | Sides):
        return expression
    if isinstance(expression, list | tuple) and len(expression) == 2:
        return tuple(map(Layout.parse, expression))
    raise NotationError(
        f"{short_repr(expression)} is no expression",
        hint='"layout -> layout", a pair of layouts, or a plan',
    )


def sides(expression: Expression) -> Sides:
    """Parse what a user passed as "layout -> layout" into two layouts and a text for errors.

    "n/dp -> n" gives the layouts n/dp (rows sharded over axis dp) and n (replicated), and the text
    itself. A pair of layouts and a plan give their two layouts, and a text written from them. A
    result of this function is returned as it is.

    Raises:
        NotationError: The text is wrong, marked with a caret.
        PlanError: It is a plan between two meshes, which has no expression on one mesh.
    """
    if isinstance(expression, Sides):
        return expression
    if isinstance(expression, str):
        return Sides(*parse_expression(expression), expression)
    if isinstance(expression, Plan):
        if expression.transfer:
            raise PlanError(
                f"the plan leads from {expression.src_mesh} to {expression.dst_mesh}",
                hint="torch_bridge.redistribute(x, plan) runs it",
            )
        expression = expression.src, expression.dst
    src, dst = as_expression(expression)
    text = f"{src} -> {dst}"  # errors mark a pair of layouts as the expression that it is
    check_dims(src.dims, dst.dims, text)
    return Sides(src, dst, text)


def sides_or_one(layout: Layout | Expression) -> Sides:
    """Parse an expression, or one layout, under which blocks stay as they are: both sides are equal."""
    if isinstance(layout, str) and ARROW not in layout:
        layout = Layout.parse(layout)
    if isinstance(layout, Layout):
        return Sides(layout, layout, str(layout))
    return sides(layout)


def check_given(
    subject: str, plan: Any, dtype: str, shape: Any = None, mesh: Mesh | None = None, **about: Any
) -> None:
    """Check that a plan that the user passed is for this array: its mesh, dtype and global shape.

    Args:
        subject: The subject of the error on the dtype, as "the block is".
        plan: A plan, or a contraction's plan.
        dtype: The array's dtype.
        shape: The global shape, or None if it is not known.
        mesh: The mesh, or None if the plan decides it.
        **about: The text and the place that the error marks.

    Raises:
        MeshError: The plan is for another mesh.
        DtypeError: The plan is for another dtype.
        ShapeError: The plan is for another shape.
    """
    # The plan of a contraction has a shape for each operand.
    planned = plan.shape if isinstance(plan, Plan) else plan.shapes
    if mesh not in (None, root_of(plan.mesh)):
        raise MeshError(f"the plan is for {plan.mesh!r}, this is {mesh!r}", **about)
    if dtype != plan.dtype:
        raise DtypeError(f"{subject} {dtype}, the plan is for {plan.dtype}", **about)
    if shape not in (None, planned):
        raise ShapeError(f"the plan is for shape {planned}, not {shape}", **about)


def check_block(
    subject: str,
    local_shape: tuple[int, ...],
    expected: tuple[int, ...],
    names: Sequence[str],
    text: str,
    hint: str,
    *,
    inferred: bool,
    start: int = 0,
) -> None:
    """Check that one device's block has the local shape that its layout gives it.

    Under n/dp, 8 rows on 4 devices are 2 rows on each: a block of 3 rows is refused, with a caret
    below the dim n in the user's text.

    Args:
        subject: The subject of the error, as "this process's block".
        local_shape: The block's shape.
        expected: The shape by the layout.
        names: The dims' names, in the block's order.
        text: The user's expression, in which the error marks the first wrong dim.
        hint: The way out.
        inferred: Whether the global shape was inferred from this block, and not passed.
        start: Where the layout begins in the text: dims before it belong to another layout.

    Raises:
        ShapeError: The block has another shape.
    """
    if local_shape == expected:
        return
    span_of: dict[str, Span] = {}
    for name, name_span in text_spans(text).dims:
        if name_span[0] >= start:
            span_of.setdefault(name, name_span)  # of a dim on both sides of the arrow, the first
    span = None  # if only the number of dims is wrong, no single dim is marked
    for name, length, expected_length in zip(names, local_shape, expected, strict=False):
        if length != expected_length:
            # A dim that the text does not name stands for the ellipsis.
            span = span_of.get(name, span_of.get(ELLIPSIS))
            break
    if inferred:
        hint += "; if blocks differ in size, pass shape= (the global shape)"
    message = f"{subject} has shape {local_shape}, not {expected}"
    raise ShapeError(message, text=text, span=span, hint=hint)
