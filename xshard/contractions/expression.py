"""`layout, layout -> layout`: operands, and a result in which the dims that it lacks are summed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR, parse_layouts
from xshard.notation import parser
from xshard.notation.parser import ELLIPSIS, Dim, Shard, parts_of


@dataclass(frozen=True)
class Contraction:
    """The layouts of operands and result with one dim per name, and the text that errors mark."""

    operands: tuple[Layout, ...]
    result: Layout
    text: str
    arrays: tuple[
        Layout, ...
    ]  # as the text writes them, the result last: composed dims, names that repeat

    def __hash__(self) -> int:  # cheap: calls are keys of caches
        return hash(self.text)

    @classmethod
    def of(cls, arrays: Sequence[Layout], text: str) -> Contraction:
        """The contraction of arrays as they are written, the result last. Raises NotationError."""
        with parser.mark_errors(text):
            *operands, result = map(_by_name, arrays)
        return cls(tuple(operands), result, text, tuple(arrays))

    def resolved(
        self, ndims: Iterable[int], layouts: Sequence[Layout] | None = None
    ) -> Contraction:
        """The contraction with dims `_0`, ... for `...`, of arrays, or `layouts`, of so many dims."""
        pairs = enumerate(zip(layouts or self.arrays, ndims, strict=False))
        count = {n - len(x.dims) + 1: i for i, (x, n) in pairs if ELLIPSIS in x.names}
        if not count:
            return self
        if len(count) > 1 or min(count) < 0:
            what = f"'...' stands for {' and for '.join(map(str, count))} dims"
            span = parser.text_spans(self.text).layouts[[*count.values()][-1]]
            raise ShapeError(
                what, text=self.text, span=span, hint="it stands for the same dims everywhere"
            )
        more = max(count) - 1
        arrays = [x.resolved(len(x.dims) + more * (ELLIPSIS in x.names)) for x in self.arrays]
        return Contraction.of(arrays, self.text)


def is_contraction(expression: Any, *, named: bool) -> bool:
    """Whether an expression has several operands, or one that is not moved. named: lengths are by operand."""
    return isinstance(expression, str) and _is_contraction(expression, named)


@lru_cache(maxsize=4096)
def _is_contraction(text: str, named: bool) -> bool:
    depths = itertools.accumulate((char in "([") - (char in ")]") for char in text)
    if any(char == "," and not depth for char, depth in zip(text, depths, strict=True)):
        return True  # or meant as one, so that errors speak of operands
    if not named:  # a result that lacks dims of its one operand is a mistake in a move
        return False
    try:
        operands, ((kept, _),), _ = parser.parse_sides(text, "contraction")
    except NotationError:
        return False
    dims = operands[0][0]
    names = {dim.name for dim in kept}
    is_move = all(parts_of(dim) == [dim.name] for dim in (*dims, *kept))
    return names < {dim.name for dim in dims} or not is_move


def contraction(text: str) -> Contraction:
    """Parse a contraction; `()` or an empty right side is a scalar. NotationError marks the place."""
    parser.check_text("a contraction", text, 'it comes first: "layout, layout -> layout"')
    return _parsed(text)


@layout_cache(maxsize=4096)
def _parsed(text: str) -> Contraction:
    operands, results = parse_layouts(text, "contraction")
    call = Contraction.of((*operands, *results), text)
    spans = parser.text_spans(text)
    for dim, span in spans.full_dims:
        if dim.overlap is not None:
            raise NotationError(
                "an overlap in a contraction", text=text, span=span, hint="trim halos first"
            )
    for layout, span in zip(call.arrays, spans.layouts, strict=False):
        if layout.tagged(*NONLINEAR):
            hint = "max and min are not linear in each operand: reduce them first"
            raise NotationError(f"'{layout}' in a contraction", text=text, span=span, hint=hint)
    known = {name for layout in call.operands for name in layout.names}
    for name in call.result.names:
        if name not in known:
            what = f"dim {name!r} of the result is in no operand"
            hint = ", ".join(sorted(known))
            span = [span for dim, span in spans.dims if dim == name][-1]
            raise NotationError(what, text=text, span=span, hint=f"the operands have: {hint}")
    return call


def _by_name(layout: Layout) -> Layout:
    """A layout with one dim for every name; names of several dims, one of them sharded, come last."""
    shards: dict[str, tuple[Shard, ...]] = {}
    names = Counter(name for dim in layout.dims for name in parts_of(dim))
    for dim in layout.dims:
        first, *rest = parts_of(dim)
        if dim.shards and shards.get(first):
            hint = "redistribute the array first, so that one of them is whole"
            raise NotationError(f"two dims {first!r} are sharded", text=str(dim), hint=hint)
        shards[first] = shards.get(first) or dim.shards
        shards |= {name: () for name in rest if name not in shards}
    order = sorted(shards, key=lambda name: names[name] > 1)
    return Layout(tuple(Dim(name, shards[name]) for name in order), layout.tags)
