"""`layout, layout -> layout`: operands, and the result in which dims that it lacks are summed.

Decides which expressions are contractions. Knows no mesh and no shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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


def contraction(text: str) -> Contraction:
    """Text -> the contraction that it says. Raises NotationError, marking the place.

    The result has its dims in any order; `()` or nothing for a scalar.

    >>> both = contraction("b s/tp d, d f/tp -> s/tp b f")
    >>> [str(layout) for layout in (*both.operands, both.result)]
    ['b s/tp d', 'd f/tp', 's/tp b f']
    """
    check_text("a contraction", text)
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
