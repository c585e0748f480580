"""The notation (docs/notation.md): text <-> dims, shards and tags, and the canonical spelling."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.errors import NotationError, Span, XshardError
from xshard.notation.maps import Maps, NamedMap, Owners, RowMap, find_map, named_maps
from xshard.notation.overlap import Overlap, Width, bracketed
from xshard.notation.overlap_parser import Scanner, parse_overlap, parse_width
from xshard.signatures import did_you_mean

ORDERS = ("block", "balanced", "zigzag", "cyclic")
TAGS = ("sum", "mean", "max", "min", "copy")
SIZES = "sizes"  # an order that lists the number of rows of each part
INTERVALS = "intervals"  # an order that lists the intervals of each part
BY = "by"  # the order of a map: `Owners`
SEGMENTS = "segments"  # written block(axes, numbers)
SPREAD = "spread"  # units shared by several devices, if there are fewer units than devices
ROUTED = "to"  # rows lie where values say: in a rule for the input of experts alone
ELLIPSIS = "..."
ARROW = "->"


@dataclass(frozen=True)
class Shard:
    """One sharding of a dim over mesh axes: `cp`, `(dp,cp)`, `zigzag(cp)` or `sizes(cp,3,5)`.

    Attributes:
        axes: The mesh axes, which are taken as one; the first is the slowest.
        order: How rows are dealt out to the parts, as `block` or `zigzag`.
        numbers: The numbers of the order. For `cyclic`, the rows that are dealt out together. For
            `zigzag`, the lengths of documents, each of which is sharded alone; for `segments`
            (written `block`), the same in contiguous parts. For `sizes`, the rows of every part.
            For `intervals`, the (start, stop, start, stop, ...) of every part. For `by`, its map.
    """

    axes: tuple[str, ...]
    order: str = "block"
    numbers: tuple[Width | NamedMap, ...] = ()

    def __str__(self) -> str:
        if self.order == "block":
            names = ",".join(self.axes)
            return names if len(self.axes) == 1 else f"({names})"
        order = "block" if self.order == SEGMENTS else self.order
        arguments = [*self.axes, *map(bracketed, self.numbers)]
        return f"{order}({','.join(arguments)})"


@dataclass(frozen=True)
class Dim:
    """One dim of an array: `s/dp/zigzag(cp)` or `h/sp:halo(1,1)`.

    Attributes:
        name: The name of the dim; of a composed one, `(n 128)`, its parts joined: `n_128`.
        shards: Its shards, outermost first.
        overlap: The rows that each block holds beyond its own; None for none.
        parts: The names that a composed dim is made of, perhaps with a number as the last. Its
            shards count units: the rows that share an index of the first name.
        unit: The rows of a unit; None while the lengths of the names are not known. In a
            `Sharding`, which knows lengths, all shards count rows, and it is 1.
    """

    name: str
    shards: tuple[Shard, ...] = ()
    overlap: Overlap | None = None
    parts: tuple[str, ...] = field(default=(), compare=False)  # the name has them
    unit: int | None = 1

    def __str__(self) -> str:
        text = "/".join([self.text, *map(str, self.shards)])
        return text if self.overlap is None else f"{text}:{self.overlap}"

    @property
    def text(self) -> str:
        """The name as texts have it: `(n 128)` for n_128, unless its shards count rows."""
        if self.unit == 1:
            return self.name
        return f"({' '.join(self.parts)})"

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that shards this dim, outermost first."""
        return tuple(chain.from_iterable(shard.axes for shard in self.shards))

    @cached_property
    def spread_axes(self) -> tuple[str, ...]:
        """The axes along which several devices may share a unit of this dim."""
        spread = (shard.axes for shard in self.shards if shard.order == SPREAD)
        return tuple(chain.from_iterable(spread))


Tags = tuple[tuple[str, tuple[str, ...]], ...]
Parsed = tuple[tuple[Dim, ...], Tags]


class TextSpans(NamedTuple):
    """Where things stand in a text, in reading order; errors mark them.

    Attributes:
        layouts: Whole layouts.
        dims: Names of dims.
        axes: Names of mesh axes.
        full_dims: Dims with their shards and overlaps.
    """

    layouts: list[Span]
    dims: list[tuple[str, Span]]
    axes: list[tuple[str, Span]]
    full_dims: list[tuple[Dim, Span]]


# ---- text to values


def check_text(subject: str, text: object, hint: str | None = None) -> None:
    """Raise NotationError unless `text` is a str. `subject` is what the error calls it: "a layout"."""
    if not isinstance(text, str):
        raise NotationError(f"{subject} is text, not {type(text).__name__}", hint=hint)


def parse_layout(text: str, maps: Maps) -> Parsed:
    """Parse the text of one layout: `n/tp d | sum(dp)` -> its dims and tags.

    Raises:
        NotationError: The text is malformed.
    """
    parser = _Parser(text, maps)
    parsed = parser.layout()
    parser.expect("end")
    return parsed


_FORM_HINTS = {
    "expression": "an expression reads: layout -> layout",
    "contraction": "a contraction reads: layout, layout -> layout",
    "signature": "the layouts of a function read: layout, layout -> layout",
}


def parse_sides(text: str, form: str) -> tuple[tuple[Parsed, ...], tuple[Parsed, ...], TextSpans]:
    """Parse a text with an arrow: the layouts before it, those behind it, and where they stand.

    Three forms: "n/x d -> n d/x" (an expression) has one layout on each side of the arrow, "i/x k, k
    j -> i/x j" (a contraction) several operands and one result, and a signature several on both
    sides. In a contraction an operand may have a name twice, "i i -> i": its second dim is then
    named `i'1`.

    Args:
        text: The text.
        form: "expression", "contraction" or "signature".

    Returns:
        The (dims, tags) of each layout before the arrow, the same behind it, and where they stand
        in the text, for errors.

    Raises:
        NotationError: The text is malformed.
    """
    is_contraction = form == "contraction"
    parser = _Parser(text, {}, is_contraction=is_contraction)
    sources = (parser.layout(),) if form == "expression" else parser.layouts()
    parser.expect(ARROW, hint=_FORM_HINTS[form])
    parser.may_repeat = False  # only operands may have a dim twice
    # One layout without dims and tags: a scalar, if nothing follows, as in "i, i ->".
    results: tuple[Parsed, ...] = (((), ()),)
    if form == "signature":
        results = parser.layouts()
    elif not (is_contraction and parser.token_kind == "end"):
        results = (parser.layout(),)
    parser.expect("end")
    return sources, results, parser.spans


def text_spans(text: str) -> TextSpans:
    """Find what later errors mark, in a text that parses."""
    return _parse_for_spans(text, None).spans


@layout_cache(maxsize=4096)
def with_digests(text: str, maps: tuple[tuple[str, RowMap], ...]) -> str:
    """Write the digest of every map behind its name: `by(gp,cells)` -> `by(gp,cells@0123...)`.

    Raises:
        NotationError: The text is malformed, or names no such map.
    """
    spans = _parse_for_spans(text, dict(maps)).map_spans
    for start, stop in reversed(spans):  # from the end, so that earlier places stay right
        named_map = find_map(text[start:stop], dict(maps), RowMap)
        text = f"{text[:start]}{named_map}{text[stop:]}"
    return text


def with_map_digests(layouts: Any, maps: Any) -> Any:
    """Write the digests of maps into layouts and expressions, in dicts and lists too."""
    if maps is None:
        return layouts
    if isinstance(layouts, str):
        return with_digests(layouts, named_maps(maps))
    # Plain containers alone: a subclass, such as a NamedTuple, may have another constructor.
    if type(layouts) is dict:
        return {key: with_map_digests(value, maps) for key, value in layouts.items()}
    if type(layouts) in (list, tuple):
        return type(layouts)(with_map_digests(value, maps) for value in layouts)
    return layouts


def _parse_for_spans(text: str, maps: Maps | None) -> _Parser:
    """Parse a text of any form, only to learn where its words stand."""
    parser = _Parser(text, maps, is_contraction=True)
    parser.layouts()
    if parser.take(ARROW) and parser.token_kind != "end":
        parser.layouts()
    return parser


@contextmanager
def mark_errors(text: str | None) -> Iterator[None]:
    """Attach the user's expression to errors raised inside, and mark the dim at fault."""
    try:
        yield
    except XshardError as error:
        if text is None or error.span is not None:
            raise  # nothing to add: the error marks a text already
        dim_span = None
        for dim, span in text_spans(text).full_dims:
            if str(dim) == error.text:
                dim_span = span
                break
        raise type(error)(error.reason, text=text, span=dim_span, hint=error.hint) from None


# ---- values to text


def is_plain(dim: Dim) -> bool:
    """Return whether a dim is whole, or cut into contiguous parts that need not end between units."""
    return not dim.shards or (dim.unit == 1 and all(shard.order == "block" for shard in dim.shards))


def names_of_dim(dim: Dim) -> list[str]:
    """Return the names that a dim of a contraction stands for: `(h d)` -> h, d; `i'1` -> i.

    The number of `(n 128)` is a dim of the name n_128: the 128 of `(m 128)` is another.
    """
    names: list[str] = []
    for part_text in dim.parts or (dim.name,):
        name = part_text.partition("'")[0]
        names.append(f"{names[0]}_{name}" if name.isdigit() else name)
    return names


def write(dims: tuple[Dim, ...], tags: Tags) -> str:
    """Write dims and tags in the canonical spelling; a scalar is `()`."""
    text = " ".join(map(str, dims)) if dims else "()"
    if not tags:
        return text
    tag_texts = [f"{tag}({','.join(axes)})" for tag, axes in tags]
    return f"{text} | {' '.join(tag_texts)}"


# ---- the grammar

_WRITTEN_ORDERS = (*ORDERS, SIZES, INTERVALS, BY, SPREAD)
_CLOSES = re.compile(r"\s*\)")

# Names that tags and orders have in other systems.
_TAGS_ELSEWHERE = {
    "psum": "sum",
    "partial": "sum",
    "pmean": "mean",
    "avg": "mean",
    "average": "mean",
    "pmax": "max",
    "pmin": "min",
}
_ORDERS_ELSEWHERE = {
    "contiguous": "block",
    "striped": "cyclic",
    "round_robin": "cyclic",
    "headtail": "zigzag",
    "uneven": "sizes",
    "ragged": "sizes",
}

# The least and the most numbers of an order after its axes; other orders take any number.
_NUMBER_COUNTS = {
    "balanced": (0, 0),
    SPREAD: (0, 0),
    "cyclic": (0, 1),
    ROUTED: (0, 0),
    SIZES: (1, math.inf),
    INTERVALS: (1, math.inf),
}
_NUMBER_HINTS = {
    "block": "block takes no number, or the lengths of segments, as in block(tp,512,128,128)",
    "balanced": "balanced takes no number, as in s/balanced(cp)",
    SPREAD: "spread takes no number, as in (h 128)/spread(tp)",
    "zigzag": "zigzag takes no number, or the lengths of documents, as in zigzag(cp,4,8,4)",
    "cyclic": "cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)",
    ROUTED: "to takes no number, as in t/to(ep)",
    SIZES: "sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)",
    INTERVALS: "intervals takes [start,stop,...] of every part, as in intervals(cp,[0,4,12,16],[4,12])",
}


class _Parser(Scanner):
    """Parses by recursive descent: a method per rule, which records where names stand.

    Attributes:
        may_repeat: Whether two dims of a layout may have one name, as in `i i -> i`.
        spans: Where things stand in the text.
    """

    def __init__(self, text: str, maps: Maps | None, *, is_contraction: bool = False) -> None:
        self.may_repeat = is_contraction
        self.spans = TextSpans([], [], [], [])
        self._count_of_name = Counter[str]()  # how often a dim of this layout has each name
        super().__init__(text, maps)

    def layouts(self) -> tuple[Parsed, ...]:
        """Parse `layout , layout ...`."""
        layouts = [self.layout()]
        while self.take(","):
            layouts.append(self.layout())
        return tuple(layouts)

    def layout(self) -> Parsed:
        """Parse one layout, `b/dp s | sum(tp)`: dims, then tags after a bar; `()` is a scalar.

        Returns the dims, and the tags as (tag, axes): here ("sum", ("tp",)). Where the layout stands
        in the text is added to `self.spans`, which errors about it need.
        """
        start = self.token_span[0]
        self._count_of_name = Counter()  # names are told apart within one layout
        dims = []
        while self.token_kind in ("name", ELLIPSIS) or self.is_at_composed_dim:
            dims.append(self.dim())
        if not dims:
            if self.take("("):
                self.expect(")")  # a scalar: any other bracket begins a composed dim
            elif self.token_kind in ("end", ARROW, ","):
                # At any other token the caller's error says what was expected.
                raise self.error("an empty layout", hint="a scalar is written ()")
        tags = []
        if self.take("|"):
            tags.append(self.tag())
            while self.token_kind == "name":
                tags.append(self.tag())
        self.spans.layouts.append((start, self.previous_end))
        return tuple(dims), tuple(tags)

    @property
    def is_at_composed_dim(self) -> bool:
        """Whether the next token opens a composed dim, and not the scalar `()`."""
        return self.token_kind == "(" and not _CLOSES.match(self.text, self.next_start)

    def dim(self) -> Dim:
        """Parse `name / shard / shard ... : overlap`, as in `s/dp/zigzag(cp):halo(1,1)`.

        The name may be composed: `(h d)/tp` of two dims, or `(n 128)/tp` of units with 128 rows each,
        which are not cut.
        """
        start = self.token_span[0]
        part_names = self.composed_names() if self.token_kind == "(" else (self.name(),)
        name = "_".join(part_names)
        if name == ELLIPSIS and self.token_kind in ("/", ":"):
            hint = "name the dim to shard or widen it"
            raise self.error("'...' stands for unsharded dims", hint=hint)
        shards = []
        while self.take("/"):
            shards.append(self.shard())
        overlap = parse_overlap(self) if self.take(":") else None
        dim = Dim(name, tuple(shards), overlap)
        if len(part_names) > 1:
            # The rows of a unit: 128 in `(n 128)`, not known yet in `(h d)` or `(n h 128)`.
            is_name_and_number = len(part_names) == 2 and part_names[1].isdigit()
            unit = int(part_names[1]) if is_name_and_number else None
            dim = replace(dim, parts=part_names, unit=unit)
        self.spans.full_dims.append((dim, (start, self.previous_end)))
        return dim

    def name(self) -> str:
        """Parse the name of a dim; a later dim of the same name is told apart: `i i` -> i, i'1."""
        name = self.token_text
        name_span = self.token_span
        self.advance()
        count = self._count_of_name[name]
        if count and (name == ELLIPSIS or not self.may_repeat):
            hint = "an einsum takes diagonals: i i -> i"
            raise self.error(f"dim {name!r} is named twice", name_span, hint)
        self._count_of_name[name] += 1
        if count:
            name = f"{name}'{count}"
        self.spans.dims.append((name, name_span))
        return name

    def composed_names(self) -> tuple[str, ...]:
        """Parse the names of a composed dim: `(h d)` -> h, d; `(n 128)` -> n, 128.

        Its rows are those of all named dims together, row-major.
        """
        hint = "a composed dim is names, then perhaps a number, and is sharded as a whole: (h d)/tp"
        start = self.token_span[0]
        self.expect("(")
        if self.token_kind != "name":
            self.expect("name", hint)
        part_names = [self.name()]
        while self.token_kind == "name":
            part_names.append(self.name())
        if self.token_kind == "int":
            number_span = self.token_span
            unit_rows = self.integer()
            if unit_rows < 1:
                raise self.error(
                    "a unit of no rows", number_span, "a unit has 1 row or more: (n 128)/tp"
                )
            part_names.append(str(unit_rows))
        self.expect(")", hint)
        if len(part_names) > 1:
            self.spans.dims.append(("_".join(part_names), (start, self.previous_end)))
        return tuple(part_names)

    def shard(self) -> Shard:
        """Parse one sharding of a dim, after its `/`: `cp`, `(dp,cp)` or `zigzag(cp)`.

        That is one mesh axis, several, or the order in which devices take rows, with axes in
        brackets.
        """
        if self.token_kind == "(":
            return Shard(tuple(self.listed(self.axis)))
        name_span = self.token_span
        name = self.expect("name", hint="a mesh axis follows '/', as in s/cp or s/zigzag(cp)")
        # A bracket after a space begins a composed dim, as in `n/tp (h d)`: the word is an axis.
        if self.token_kind == "(" and self.token_span[0] == self.previous_end:
            if name in (*_WRITTEN_ORDERS, ROUTED):
                return self.by_map() if name == BY else self.ordered(name, name_span)
            suggestion = did_you_mean(name, _WRITTEN_ORDERS, _ORDERS_ELSEWHERE)
            hint = f"{suggestion}orders are: {', '.join(_WRITTEN_ORDERS)}"
            raise self.error(f"unknown order {name!r}", name_span, hint)
        self.spans.axes.append((name, name_span))
        return Shard((name,))

    def ordered(self, order: str, order_span: Span) -> Shard:
        """Parse the brackets after an order: `(cp)` of zigzag, `(x,3,1)` of `sizes(x,3,1)`.

        First mesh axes, then numbers, of which each order takes its own count: `sizes` one for each
        part, `cyclic` at most one, the rows of a group.

        Args:
            order: The word before the brackets, which has been read: "zigzag", "sizes", ...
            order_span: Its place in the text, for errors.
        """
        self.expect("(")
        axes = [self.axis()]
        numbers: list[Width] = []
        while self.take(","):
            if self.token_kind == "name" and not numbers:  # a name after a number is an error
                axes.append(self.axis())
            else:
                numbers.append(self.order_number(order))
        self.expect(")")
        any_count = (0, math.inf)
        min_count, max_count = _NUMBER_COUNTS.get(order, any_count)
        deals_none = order == "cyclic" and 0 in numbers  # groups of 0 rows have no end
        if deals_none or not min_count <= len(numbers) <= max_count:
            count = len(numbers) if numbers else "no"
            plural = "" if len(numbers) == 1 else "s"
            raise self.error(f"{count} number{plural} in {order}", order_span, _NUMBER_HINTS[order])
        if order == "block" and numbers:  # block(x,4,2) cuts segments of 4 and 2 rows by themselves
            order = SEGMENTS
        return Shard(tuple(axes), order, tuple(numbers))

    def order_number(self, order: str) -> Width:
        """Parse a number that an order takes, `4`; for `intervals` those of a part, `[0,4,12,16]`."""
        number_span = self.token_span
        number: Width
        if order == INTERVALS and self.token_kind == "[":
            number = tuple(self.listed(self.integer, "[]", may_be_empty=True))  # [] of no rows
        else:
            number = parse_width(self)
        if isinstance(number, tuple) != (order == INTERVALS):
            raise self.error(f"'{bracketed(number)}' in {order}", number_span, _NUMBER_HINTS[order])
        smallest = min(number, default=0) if isinstance(number, tuple) else number
        if smallest < 0:
            raise self.error(
                f"a number below 0: {bracketed(number)}", number_span, _NUMBER_HINTS[order]
            )
        return number

    def by_map(self) -> Shard:
        """Parse `( axis , ... , map )`."""
        hint = "by takes its axes and a map, as in by(gp,cells)"
        self.expect("(")
        axes: list[str] = []
        # A name with a comma behind it is an axis; the last one is the map.
        while not axes or self.text[self.next_start :].lstrip().startswith(","):
            axes.append(self.axis())
            self.expect(",", hint)
        owners = self.map(Owners)
        self.expect(")", hint)
        return Shard(tuple(axes), BY, (owners,))

    def axis(self) -> str:
        """Parse the name of a mesh axis."""
        span = self.token_span
        name = self.expect("name")
        self.spans.axes.append((name, span))
        return name

    def tag(self) -> tuple[str, tuple[str, ...]]:
        """Parse `tag( axis , ... )`."""
        tags_hint = f"tags are: {', '.join(TAGS)}"
        tag_span = self.token_span
        tag = self.expect("name", hint=tags_hint)
        if tag not in TAGS:
            suggestion = did_you_mean(tag, TAGS, _TAGS_ELSEWHERE)
            raise self.error(f"unknown tag {tag!r}", tag_span, f"{suggestion}{tags_hint}")
        return tag, tuple(self.listed(self.axis))
