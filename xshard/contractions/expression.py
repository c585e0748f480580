"""`layout, layout -> layout`: operands, and a result in which the dims that it lacks are summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR, parse_layouts
from xshard.notation import parser
from xshard.notation.parser import ELLIPSIS, Dim, Shard, names_of_dim


@dataclass(frozen=True)
class Contraction:
    """The layouts of operands and result with one dim per name, and the text that errors mark.

    arrays: the layouts as the text writes them, the result last: with composed dims, as `(b d)/tp`, and names
    that repeat, as `i i`.
    """

    operands: tuple[Layout, ...]
    result: Layout
    text: str
    arrays: tuple[Layout, ...]

    def __hash__(self) -> int:  # cheap: calls are keys of caches
        return hash(self.text)

    @classmethod
    def of(cls, arrays: Sequence[Layout], text: str) -> Contraction:
        """Return the contraction of arrays as the text writes them, the result last.

        Raises NotationError if an array has no layout with one dim per name.
        """
        with parser.mark_errors(text):
            *operands, result = map(_with_dim_per_name, arrays)
        return cls(tuple(operands), result, text, tuple(arrays))

    def resolved(
        self, ndims: Iterable[int], layouts: Sequence[Layout] | None = None
    ) -> Contraction:
        """Replace `...` by named dims, as many as the operands' arrays have.

        `... c, c d -> ... d` of arrays with 3 and 2 dims becomes `_0 _1 c, c d -> _0 _1 d`.

        ndims: the number of dims of each operand's array. layouts: the layouts of these arrays, if
        they are not as the text writes them but have, for example, composed dims split; None: as
        written. Raises ShapeError if `...` would stand for 2 dims in one operand and 1 in another.
        """
        if layouts is None:
            layouts = self.arrays
        n_hidden = self._dims_of_ellipsis(ndims, layouts)
        if n_hidden is None:
            return self
        arrays = []
        for layout in self.arrays:
            ndim = len(layout.dims)
            if ELLIPSIS in layout.names:
                ndim += n_hidden - 1  # `...` itself is one of its dims
            arrays.append(layout.resolved(ndim))
        return Contraction.of(arrays, self.text)

    def _dims_of_ellipsis(self, ndims: Iterable[int], layouts: Sequence[Layout]) -> int | None:
        """Count the dims that `...` stands for: 2 for `... c` of an array with 3; None without `...`.

        Raises ShapeError, marked at an operand, if operands do not agree on one number.
        """
        # Each number that some operand implies, with the last operand that does.
        operand_of_count: dict[int, int] = {}
        # `layouts` may have the result behind the operands, which no array of `ndims` is given for.
        for i, (layout, ndim) in enumerate(zip(layouts, ndims, strict=False)):
            if ELLIPSIS in layout.names:
                n_named = len(layout.dims) - 1
                operand_of_count[ndim - n_named] = i
        if not operand_of_count:
            return None
        counts = list(operand_of_count)
        # Below 0: an array has fewer dims than the text names beside `...`.
        if len(counts) > 1 or counts[0] < 0:
            reason = f"'...' stands for {' and for '.join(map(str, counts))} dims"
            last_operand = operand_of_count[counts[-1]]
            span = parser.text_spans(self.text).layouts[last_operand]
            hint = "it stands for the same dims everywhere"
            raise ShapeError(reason, text=self.text, span=span, hint=hint)
        return counts[0]


def is_contraction(expression: Any, *, named: bool) -> bool:
    """Return whether an expression is a contraction, not a move.

    It has several operands; or it has one, and `named`: lengths are given by name or by operand, and the
    expression sums, composes or repeats a dim.
    """
    return isinstance(expression, str) and _is_contraction(expression, named)


@lru_cache(maxsize=4096)
def _is_contraction(text: str, named: bool) -> bool:
    if _has_outer_comma(text):
        return True  # right or wrong, it is meant as a contraction: errors should speak of operands
    # Without lengths, `b d -> b` is a mistake in a move, not a sum over d.
    return named and _is_more_than_move(text)


def _is_more_than_move(text: str) -> bool:
    """Return whether a text with one operand sums a dim, composes dims or repeats a name.

    `b d -> b` sums d, `(b d) -> d b` has a composed dim, `i i -> i` repeats a name.
    """
    try:  # malformed text is no contraction: the caller parses it as a move, which raises
        operands, results, _ = parser.parse_sides(text, "contraction")
        [(result_dims, _)] = results
    except NotationError:
        return False
    operand_dims, _ = operands[0]
    if any(names_of_dim(dim) != [dim.name] for dim in (*operand_dims, *result_dims)):
        return True  # of these, `dim.name` is no name of one dim
    return {dim.name for dim in result_dims} < {dim.name for dim in operand_dims}


def _has_outer_comma(text: str) -> bool:
    """Return whether a comma separates operands: one outside all brackets."""
    depth = 0
    for char in text:
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "," and depth == 0:
            return True
    return False


def contraction(text: str) -> Contraction:
    """Parse a contraction; `()` or an empty right side is a scalar. NotationError marks the place."""
    parser.check_text("a contraction", text, 'it comes first: "layout, layout -> layout"')
    return _parse_contraction(text)


@layout_cache(maxsize=4096)
def _parse_contraction(text: str) -> Contraction:
    """Parse a contraction, and raise NotationError for what a product of local blocks cannot give.

    That is a dim with a halo, a max or min of an operand or result, and a dim of the result that no
    operand has.
    """
    operands, results = parse_layouts(text, "contraction")
    call = Contraction.of((*operands, *results), text)
    spans = parser.text_spans(text)
    for dim, span in spans.full_dims:
        if dim.overlap is not None:
            reason = "an overlap in a contraction"
            raise NotationError(reason, text=text, span=span, hint="trim halos first")
    for layout, span in zip(call.arrays, spans.layouts, strict=False):
        if layout.tagged(*NONLINEAR):
            hint = "max and min are not linear in each operand: reduce them first"
            raise NotationError(f"'{layout}' in a contraction", text=text, span=span, hint=hint)
    known_names = {*chain.from_iterable(layout.names for layout in call.operands)}
    for name in call.result.names:
        if name not in known_names:
            reason = f"dim {name!r} of the result is in no operand"
            hint = f"the operands have: {', '.join(sorted(known_names))}"
            # The last place, on the right: the name stands nowhere else.
            name_spans = [span for dim_name, span in spans.dims if dim_name == name]
            raise NotationError(reason, text=text, span=name_spans[-1], hint=hint)
    return call


def _with_dim_per_name(layout: Layout) -> Layout:
    """Return the layout with one dim for every name: `(b d)/tp` -> `b/tp d`, `i/tp i` -> `i/tp`.

    A name that two dims have stands for their diagonal. It comes last, as numpy's and torch's
    `diagonal` put it: `i i b` -> `b i`. Raises NotationError if two dims of one name are sharded.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    n_dims = Counter[str]()
    for dim in layout.dims:
        names = names_of_dim(dim)
        n_dims.update(names)
        outer_name, *inner_names = names  # a composed dim is sharded by its first name
        if dim.shards and shards.get(outer_name):
            hint = "redistribute the array first, so that one of them is whole"
            raise NotationError(f"two dims {outer_name!r} are sharded", text=str(dim), hint=hint)
        if dim.shards or outer_name not in shards:
            shards[outer_name] = dim.shards
        for name in inner_names:
            shards.setdefault(name, ())  # it keeps the shards of another dim of this name
    unique = [name for name in shards if n_dims[name] == 1]
    repeated = [name for name in shards if n_dims[name] > 1]
    return Layout(tuple(Dim(name, shards[name]) for name in (*unique, *repeated)), layout.tags)
