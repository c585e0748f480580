"""`layout, layout -> layout`: operands, and the result in which dims that it lacks are summed.

Decides which expressions are contractions. Knows no mesh and no shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xshard.arguments import lengths_of, shown, whole_number
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR, check_form
from xshard.notation.parser import ELLIPSIS, check_text, parse_operands, text_spans


@dataclass(frozen=True)
class Contraction:
    """The layouts of operands and result, and the text that errors mark."""

    operands: tuple[Layout, ...]
    result: Layout
    text: str


def is_contraction(expression: Any) -> bool:
    """Whether an expression has several operands, or one with dims that the result lacks."""
    return isinstance(expression, str) and _is_contraction(expression)


@lru_cache(maxsize=4096)
def _is_contraction(text: str) -> bool:
    depths = itertools.accumulate((char in "([") - (char in ")]") for char in text)
    if any(char == "," and not depth for char, depth in zip(text, depths, strict=True)):
        return True  # or meant as one, so that errors speak of operands
    try:
        (dims, _), (kept, _) = *parse_operands(text)[0], parse_operands(text)[1]
    except NotationError:
        return False
    return {dim.name for dim in kept} < {dim.name for dim in dims} - {ELLIPSIS}


def contraction(text: str) -> Contraction:
    """Text -> the contraction that it says. Raises NotationError, marking the place.

    The result has its dims in any order; `()` or nothing for a scalar.

    >>> both = contraction("b s/tp d, d f/tp -> s/tp b f")
    >>> [str(layout) for layout in (*both.operands, both.result)]
    ['b s/tp d', 'd f/tp', 's/tp b f']
    """
    check_text("a contraction", text, 'it comes first: "layout, layout -> layout"')
    return _parsed(text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Contraction:
    given, result = parse_operands(text)
    spans = text_spans(text)
    for parsed, span in zip((*given, result), spans.layouts, strict=False):  # nothing has no span
        check_form(*parsed, text, slice(*span))
    made = Contraction(tuple(Layout(*parsed) for parsed in given), Layout(*result), text)
    for dim, span in spans.full_dims:
        if dim.overlap is not None or dim.name == ELLIPSIS:
            odd = "'...'" if dim.name == ELLIPSIS else "an overlap"
            raise NotationError(
                f"{odd} in a contraction", text=text, span=span, hint="name every dim, and trim halos first"
            )
    for layout, span in zip((*made.operands, made.result), spans.layouts, strict=False):
        if layout.tagged(*NONLINEAR):
            hint = "max and min are not linear in each operand: reduce them first"
            raise NotationError(f"'{layout}' in a contraction", text=text, span=span, hint=hint)
    known = {name for layout in made.operands for name in layout.names}
    for name in made.result.names:
        if name not in known:
            span = [at for found, at in spans.dims if found == name][-1]
            raise NotationError(
                f"dim {name!r} of the result is in no operand",
                text=text,
                span=span,
                hint=f"the operands have: {', '.join(sorted(known))}",
            )
    return made


def whole_lengths(sizes: Any, shape: Any) -> tuple[dict[str, int] | None, tuple[tuple[int, ...], ...] | None]:
    """Lengths by name, and shapes, as users write them -> the same in ints.

    A flat shape is that of one operand. Raises ShapeError for what is no length.
    """
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            raise ShapeError(f"sizes {shown(sizes)}", hint='lengths by name, as in sizes={"b": 8}')
        sizes = {name: _length(f"dim {name!r} in sizes", n) for name, n in sizes.items()}
    if shape is not None:
        shapes = tuple(shape) if whole_number(shape) is None else (shape,)
        shapes = (shapes,) if all(whole_number(n) is not None for n in shapes) else shapes
        shape = tuple(tuple(_length("a shape", n) for n in lengths_of(one)) for one in shapes)
    return sizes, shape


def _length(what: str, value: Any) -> int:
    found = whole_number(value)
    if found is None or found < 0:
        raise ShapeError(f"{what} has {shown(value)}", hint="a length is a whole number >= 0")
    return found


def shapes_of(
    given: Contraction, sizes: Mapping[str, int] | None, shapes: Sequence[tuple[int, ...]] | None
) -> tuple[tuple[int, ...], ...]:
    """The global shape of every operand, from the lengths of dims by name, or from all shapes.

    Raises ShapeError, marking the dim, for lengths that disagree, for one that is missing or one too many.
    """
    if (sizes is None) == (shapes is None):
        what = "no shapes" if sizes is None else "sizes and shapes"
        first = next((name for layout in given.operands for name in layout.names), "b")
        hint = f'sizes={{"{first}": 8, ...}}, or shape=[(8, ...), ...] with one shape per operand'
        raise ShapeError(what, text=given.text, hint=hint)
    if shapes is None:
        return _from_sizes(given, sizes or {})
    if len(shapes) != len(given.operands):
        what = f"{len(shapes)} shapes for {len(given.operands)} operands"
        raise ShapeError(what, text=given.text, hint="one shape per operand")
    lengths: dict[str, int] = {}
    for i, (layout, found) in enumerate(zip(given.operands, shapes, strict=True)):
        if len(found) != len(layout.names):
            raise ShapeError(
                f"shape {found} for {len(layout.names)} dims",
                text=given.text,
                span=text_spans(given.text).layouts[i],
                hint="one length per dim",
            )
        for name, length in zip(layout.names, found, strict=True):
            if lengths.setdefault(name, length) != length:
                raise ShapeError(
                    f"dim {name!r} is {lengths[name]} long in one operand and {length} in another",
                    text=given.text,
                    span=_dim_span(given, i, name),
                    hint="a name stands for one length",
                )
    return tuple(shapes)


def _from_sizes(given: Contraction, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    for i, layout in enumerate(given.operands):
        for name in layout.names:
            if name not in sizes:
                have = ", ".join(f"{key}={value}" for key, value in sizes.items())
                raise ShapeError(
                    f"sizes has no length for dim {name!r}",
                    text=given.text,
                    span=_dim_span(given, i, name),
                    hint=f"sizes has: {have}",
                )
    known = {name for layout in given.operands for name in layout.names}
    if extra := [name for name in sizes if name not in known]:
        hint = f"dims are: {', '.join(sorted(known))}"
        raise ShapeError(f"sizes has dim {extra[0]!r}", text=given.text, hint=hint)
    return tuple(tuple(sizes[name] for name in layout.names) for layout in given.operands)


def _dim_span(given: Contraction, operand: int, name: str) -> tuple[int, int]:
    """Where a dim of an operand stands in the text."""
    spans = text_spans(given.text)
    start, end = spans.layouts[operand]
    return next(at for found, at in spans.dims if found == name and start <= at[0] < end)
