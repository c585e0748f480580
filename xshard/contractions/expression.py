"""`layout, layout -> layout`: operands, and a result in which the dims that it lacks are summed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xshard.errors import NotationError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR, check_form
from xshard.notation.parser import ELLIPSIS, check_text, parse_operands, text_spans


@dataclass(frozen=True)
class Contraction:
    """The layouts of operands and result, and the text that errors mark."""

    operands: tuple[Layout, ...]
    result: Layout
    text: str


def is_contraction(expression: Any, *, named: bool) -> bool:
    """Whether an expression has several operands, or one with dims that the result lacks.

    named: the lengths are those of a contraction: by name, or a shape for each operand. Without them a result
    that lacks dims of its one operand is a mistake in a move.
    """
    return isinstance(expression, str) and _is_contraction(expression, named)


@lru_cache(maxsize=4096)
def _is_contraction(text: str, named: bool) -> bool:
    depths = itertools.accumulate((char in "([") - (char in ")]") for char in text)
    if any(char == "," and not depth for char, depth in zip(text, depths, strict=True)):
        return True  # or meant as one, so that errors speak of operands
    if not named:
        return False
    try:
        operands, (kept, _) = parse_operands(text)
    except NotationError:
        return False
    return {dim.name for dim in kept} < {dim.name for dim in operands[0][0]} - {ELLIPSIS}


def contraction(text: str) -> Contraction:
    """Parse a contraction; `()` or an empty right side is a scalar. NotationError marks the place."""
    check_text("a contraction", text, 'it comes first: "layout, layout -> layout"')
    return _parsed(text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Contraction:
    operands, result = parse_operands(text)
    spans = text_spans(text)
    for parsed, span in zip((*operands, result), spans.layouts, strict=False):  # an empty side has no span
        check_form(*parsed, text, slice(*span))
    layouts = [Layout(*parsed) for parsed in (*operands, result)]
    for dim, span in spans.full_dims:
        if dim.overlap is not None or dim.name == ELLIPSIS:
            what = "'...'" if dim.name == ELLIPSIS else "an overlap"
            hint = "name every dim, and trim halos first"
            raise NotationError(f"{what} in a contraction", text=text, span=span, hint=hint)
    for layout, span in zip(layouts, spans.layouts, strict=False):
        if layout.tagged(*NONLINEAR):
            hint = "max and min are not linear in each operand: reduce them first"
            raise NotationError(f"'{layout}' in a contraction", text=text, span=span, hint=hint)
    known = {name for layout in layouts[:-1] for name in layout.names}
    for name in layouts[-1].names:
        if name not in known:
            what, hint = f"dim {name!r} of the result is in no operand", ", ".join(sorted(known))
            span = [span for dim, span in spans.dims if dim == name][-1]
            raise NotationError(what, text=text, span=span, hint=f"the operands have: {hint}")
    return Contraction(tuple(layouts[:-1]), layouts[-1], text)
