"""The notation (docs/notation.md): text <-> dims, shards and tags, and the canonical spelling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from xshard.arguments import did_you_mean
from xshard.errors import NotationError, Span, XshardError
from xshard.notation.maps import Maps, NamedMap, Owners, RowMap, find_map, named_maps
from xshard.notation.overlap import Overlap, Width, bracketed
from xshard.notation.overlap_parser import Scanner, parse_overlap, parse_width

ORDERS = ("block", "balanced", "zigzag", "cyclic")
TAGS = ("sum", "mean", "max", "min", "copy")
SIZES = "sizes"
INTERVALS = "intervals"  # orders that list their parts in numbers
BY = "by"  # the order of a map: `Owners`
SEGMENTS = "segments"  # written block(axes, numbers)
ROUTED = "to"  # rows lie where values say: in a rule for the input of experts alone
ELLIPSIS = "..."
ARROW = "->"


@dataclass(frozen=True)
class Shard:
    """One sharding of a dim over mesh axes taken as one; the first axis is the slowest. numbers: for
    `cyclic`, the rows dealt out together; for `zigzag`, the lengths of documents, each sharded alone; for
    `segments` (written `block`), the same in contiguous parts; for `sizes`, the rows of every part; for
    `intervals`, the (start, stop, start, stop, ...) of every part; for `by`, its map.
    """

    axes: tuple[str, ...]
    order: str = "block"
    numbers: tuple[Width | NamedMap, ...] = ()

    def __str__(self) -> str:
        if self.order != "block":
            order = "block" if self.order == SEGMENTS else self.order
            return f"{order}({','.join((*self.axes, *map(bracketed, self.numbers)))})"
        return self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})"


@dataclass(frozen=True)
class Dim:
    """One array dim: its name, its shards (outermost first), its overlap."""

    name: str
    shards: tuple[Shard, ...] = ()
    overlap: Overlap | None = None

    def __str__(self) -> str:
        text = "".join([self.name, *(f"/{shard}" for shard in self.shards)])
        return text if self.overlap is None else f"{text}:{self.overlap}"

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that shards this dim, outermost first."""
        return tuple(axis for shard in self.shards for axis in shard.axes)


Tags = tuple[tuple[str, tuple[str, ...]], ...]
Parsed = tuple[tuple[Dim, ...], Tags]


class TextSpans(NamedTuple):
    """Positions of layouts, names and full dims in a text, in reading order."""

    layouts: list[Span]
    dims: list[tuple[str, Span]]
    axes: list[tuple[str, Span]]
    full_dims: list[tuple[Dim, Span]]


def check_text(what: str, text: object, hint: str | None = None) -> None:
    """Raise NotationError unless `text` is a str. what: the subject of the error."""
    if not isinstance(text, str):
        raise NotationError(f"{what} is text, not {type(text).__name__}", hint=hint)


def parse_layout(text: str, maps: Maps) -> Parsed:
    """Text of one layout -> its dims and tags. Raises NotationError."""
    parser = _Parser(text, maps)
    parsed = parser.layout()
    parser.expect("end")
    return parsed


_READS = {
    "expression": "an expression reads: layout -> layout",
    "contraction": "a contraction reads: layout, layout -> layout",
    "signature": "the layouts of a function read: layout, layout -> layout",
}


def parse_sides(text: str, kind: str) -> tuple[tuple[Parsed, ...], tuple[Parsed, ...], TextSpans]:
    """Text of a kind in `_READS` -> its (left, right) sides, and the positions in it. Raises NotationError.
    In a contraction a dim may be composed, `(h d)/tp`, and the second of a name in an operand is named
    `i'1`.
    """
    parser = _Parser(text, {}, by_name=kind == "contraction")
    left = (parser.layout(),) if kind == "expression" else parser.operands()
    parser.expect(ARROW, hint=_READS[kind])
    parser.repeats = False
    if kind == "contraction" and parser.kind == "end":
        return left, (((), ()),), parser.spans
    right = parser.operands() if kind == "signature" else (parser.layout(),)
    parser.expect("end")
    return left, right, parser.spans


def text_spans(text: str) -> TextSpans:
    """The positions that later errors mark, in a text that parses."""
    return _spanned(text, None).spans


@lru_cache(maxsize=4096)
def with_digests(text: str, maps: tuple[tuple[str, RowMap], ...]) -> str:
    """A text with the digest of every map behind its name. Raises NotationError."""
    spans = _spanned(text, dict(maps)).map_spans
    named = {span: find_map(text[slice(*span)], dict(maps), RowMap) for span in spans}
    for span in reversed(spans):
        text = f"{text[: span[0]]}{named[span]}{text[span[1] :]}"
    return text


def with_maps(layouts: Any, maps: Any) -> Any:
    """Layouts and expressions, in dicts and lists too: their texts with the digests of the maps."""
    if maps is None:
        return layouts
    if isinstance(layouts, str):
        return with_digests(layouts, named_maps(maps))
    if type(layouts) is dict:
        return {key: with_maps(value, maps) for key, value in layouts.items()}
    return (
        type(layouts)(with_maps(v, maps) for v in layouts)
        if type(layouts) in (list, tuple)
        else layouts
    )


def _spanned(text: str, maps: Maps | None) -> _Parser:
    """A text that was parsed for its positions alone."""
    parser = _Parser(text, maps, by_name=True)
    parser.operands()
    if parser.take(ARROW) and parser.kind != "end":
        parser.operands()
    return parser


@contextmanager
def mark_errors(text: str | None) -> Iterator[None]:
    """Attach the user's expression to errors raised inside, and mark the dim at fault."""
    try:
        yield
    except XshardError as error:
        if text is None or error.span is not None:
            raise
        span = next(
            (span for dim, span in text_spans(text).full_dims if str(dim) == error.text), None
        )
        raise type(error)(error.reason, text=text, span=span, hint=error.hint) from None


def parts_of(dim: Dim) -> list[str]:
    """The names of a dim of a contraction: both for `(h d)`, `i` for `i'1`, the second `i`."""
    return [name.partition("'")[0] for name in dim.name.strip("()").split()]


def write(dims: tuple[Dim, ...], tags: Tags) -> str:
    """Dims and tags -> canonical text; a scalar is `()`."""
    text = " ".join(map(str, dims)) or "()"
    return (
        text
        if not tags
        else f"{text} | " + " ".join(f"{kind}({','.join(axes)})" for kind, axes in tags)
    )


_ORDERS = (*ORDERS, SIZES, INTERVALS, BY)
_CLOSES = re.compile(r"\s*\)")

# Names that tags and orders have in other systems.
_TAGS_ELSEWHERE = {
    "psum": "sum",
    "partial": "sum",
    "pmean": "mean",
    "avg": "mean",
    "average": "mean",
}
_TAGS_ELSEWHERE |= {"pmax": "max", "pmin": "min"}
_ORDERS_ELSEWHERE = {"contiguous": "block", "striped": "cyclic", "round_robin": "cyclic"}
_ORDERS_ELSEWHERE |= {"headtail": "zigzag", "uneven": "sizes", "ragged": "sizes"}

# Hints: the numbers that each order takes after its axes.
_NUMBERS = {
    "block": "block takes no number, or the lengths of segments, as in block(tp,512,128,128)",
    "balanced": "balanced takes no number, as in s/balanced(cp)",
    "zigzag": "zigzag takes no number, or the lengths of documents, as in zigzag(cp,4,8,4)",
    "cyclic": "cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)",
    ROUTED: "to takes no number, as in t/to(ep)",
    SIZES: "sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)",
    INTERVALS: "intervals takes [start,stop,...] of every part, as in intervals(cp,[0,4,12,16],[4,12])",
}


class _Parser(Scanner):
    """Recursive descent over the grammar, which records the positions of names."""

    def __init__(self, text: str, maps: Maps | None, *, by_name: bool = False) -> None:
        self.composes = self.repeats = by_name  # a dim may be `(h d)`; two dims may have one name
        self.names = Counter[str]()  # the dims of this layout
        self.spans = TextSpans([], [], [], [])
        super().__init__(text, maps)

    def operands(self) -> tuple[Parsed, ...]:
        layouts = [self.layout()]
        while self.take(","):
            layouts.append(self.layout())
        return tuple(layouts)

    def layout(self) -> Parsed:
        start = self.span[0]
        self.names = Counter()
        dims: list[Dim] = []
        while self.kind in ("name", ELLIPSIS) or self.is_composed:
            dims.append(self.dim())
        if is_scalar := not dims and self.take("("):
            self.expect(")", hint="a scalar is written ()")
        tags: list[tuple[str, tuple[str, ...]]] = []
        if self.take("|"):
            tags.append(self.tag())
            while self.kind == "name":
                tags.append(self.tag())
        elif not dims and not is_scalar and self.kind in ("end", ARROW, ","):
            raise self.error("an empty layout", hint="a scalar is written ()")
        self.spans.layouts.append((start, self.end))
        return tuple(dims), tuple(tags)

    @property
    def is_composed(self) -> bool:
        return self.composes and self.kind == "(" and not _CLOSES.match(self.text, self.at)

    def name(self) -> str:
        """A name; a later dim of the same, if there may be one, has an apostrophe and a number."""
        name = self.value
        span = self.span
        self.advance()
        if name in self.names and (name == ELLIPSIS or not self.repeats):
            raise self.error(
                f"dim {name!r} is named twice", span, "an einsum takes diagonals: i i -> i"
            )
        times = self.names[name]
        self.names[name] += 1
        name = f"{name}'{times}" if times else name
        self.spans.dims.append((name, span))
        return name

    def dim(self) -> Dim:
        span = self.span
        if self.take("("):
            parts = list[str]()
            while self.kind == "name":
                parts.append(self.name())
            self.expect(
                ")", hint="a composed dim has names alone and is sharded as a whole: (h d)/tp"
            )
            name = f"({' '.join(parts)})"
            self.spans.dims.append((name, (span[0], self.end)))
        else:
            name = self.name()
        shards: list[Shard] = []
        if name == ELLIPSIS and self.kind in ("/", ":"):
            raise self.error(
                "'...' stands for unsharded dims", hint="name the dim to shard or widen it"
            )
        while self.take("/"):
            shards.append(self.shard())
        dim = Dim(name, tuple(shards), parse_overlap(self) if self.take(":") else None)
        self.spans.full_dims.append((dim, (span[0], self.end)))
        return dim

    def shard(self) -> Shard:
        if self.kind == "(":
            return Shard(tuple(self.listed(self.axis)))
        span = self.span
        name = self.expect("name", hint="a mesh axis follows '/', as in s/cp or s/zigzag(cp)")
        is_order = name in (*_ORDERS, ROUTED) or not self.composes or self.span[0] == self.end
        if self.kind != "(" or not is_order:  # after a space a composed dim follows
            self.spans.axes.append((name, span))
            return Shard((name,))
        if name not in (*_ORDERS, ROUTED):
            hint = (
                f"{did_you_mean(name, _ORDERS, _ORDERS_ELSEWHERE)}orders are: {', '.join(_ORDERS)}"
            )
            raise self.error(f"unknown order {name!r}", span, hint)
        return self.owned() if name == BY else self.ordered(name, span)

    def ordered(self, order: str, span: Span) -> Shard:
        """`( axis , ... , number , ... )`: axes, then the numbers of the order."""
        self.expect("(")
        axes = [self.axis()]
        numbers = list[Width]()
        while self.take(","):
            if self.kind == "name" and not numbers:
                axes.append(self.axis())
                continue
            number_span = self.span
            numbers.append(parse_width(self))
            if isinstance(numbers[-1], tuple) != (order == INTERVALS):
                raise self.error(
                    f"'{bracketed(numbers[-1])}' in {order}", number_span, _NUMBERS[order]
                )
            if min(numbers[-1] if isinstance(numbers[-1], tuple) else (numbers[-1],)) < 0:
                raise self.error(
                    f"a number below 0: {bracketed(numbers[-1])}", number_span, _NUMBERS[order]
                )
        self.expect(")")
        most = {"balanced": 0, "cyclic": 1, ROUTED: 0}.get(order, len(numbers))
        least = int(order in (SIZES, INTERVALS))
        if not least <= len(numbers) <= most or (order == "cyclic" and 0 in numbers):
            count = f"{len(numbers) or 'no'} number{'' if len(numbers) == 1 else 's'}"
            raise self.error(f"{count} in {order}", span, _NUMBERS[order])
        return Shard(
            tuple(axes), SEGMENTS if order == "block" and numbers else order, tuple(numbers)
        )

    def owned(self) -> Shard:
        """`( axis , ... , map )`."""
        self.expect("(")
        axes = list[str]()
        hint = "by takes its axes and a map, as in by(gp,cells)"
        while not axes or self.text[self.at :].lstrip().startswith(
            ","
        ):  # what follows the next token
            axes.append(self.axis())
            self.expect(",", hint)
        owners = self.map(Owners)
        self.expect(")", hint)
        return Shard(tuple(axes), BY, (owners,))

    def axis(self) -> str:
        span = self.span
        name = self.expect("name")
        self.spans.axes.append((name, span))
        return name

    def tag(self) -> tuple[str, tuple[str, ...]]:
        span = self.span
        kind = self.expect("name", hint=f"tags are: {', '.join(TAGS)}")
        if kind not in TAGS:
            hint = f"{did_you_mean(kind, TAGS, _TAGS_ELSEWHERE)}tags are: {', '.join(TAGS)}"
            raise self.error(f"unknown tag {kind!r}", span, hint)
        return kind, tuple(self.listed(self.axis))
