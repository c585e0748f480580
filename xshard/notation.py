"""The notation: text <-> the values it stands for.

Decides the grammar (docs/notation.md) and the canonical spelling. Knows no mesh and no
shape: `b s/zigzag(cp) c` is only read here; what it means is in `ownership` and `layout`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from xshard.errors import NotationError, Span

ORDERS = ("block", "balanced", "zigzag", "cyclic")
TAGS = ("sum", "mean", "max", "min", "copy")
BOUNDARIES = ("zero", "constant", "periodic", "reflect", "edge", "none", "pole")
ELLIPSIS = "..."
ARROW = "->"


@dataclass(frozen=True)
class Shard:
    """One cut of a dim over mesh axes taken as one, the first axis major."""

    axes: tuple[str, ...]
    order: str = "block"

    def __str__(self) -> str:
        if self.order != "block":
            return f"{self.order}({','.join(self.axes)})"
        return self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})"


@dataclass(frozen=True)
class Halo:
    """Each block widened by `lo` rows before it and `hi` rows after it."""

    lo: int
    hi: int
    boundary: str = "zero"

    def __str__(self) -> str:
        return f"halo({self.lo},{self.hi}{_boundary_text(self.boundary)})"


@dataclass(frozen=True)
class Window:
    """The rows that the device's share of a k-wide, s-strided, d-dilated, p-padded window op reads."""

    k: int
    s: int = 1
    d: int = 1
    p: int = 0
    boundary: str = "zero"

    def __str__(self) -> str:
        options = "".join(
            f",{name}={value}"
            for name, value, default in (("s", self.s, 1), ("d", self.d, 1), ("p", self.p, 0))
            if value != default
        )
        return f"window(k={self.k}{options}{_boundary_text(self.boundary)})"


@dataclass(frozen=True)
class Fold:
    """The dual of an overlap: overlapping rows are contributions, added at their owner."""

    of: Halo | Window

    def __str__(self) -> str:
        return f"fold({self.of})"


Overlap = Halo | Window | Fold


@dataclass(frozen=True)
class Dim:
    """One array dim: its name, its cuts (outermost first), its overlap."""

    name: str
    shards: tuple[Shard, ...] = ()
    overlap: Overlap | None = None

    def __str__(self) -> str:
        text = "".join([self.name, *(f"/{shard}" for shard in self.shards)])
        return text if self.overlap is None else f"{text}:{self.overlap}"

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that cuts this dim, outermost first."""
        return tuple(axis for shard in self.shards for axis in shard.axes)


Tags = tuple[tuple[str, tuple[str, ...]], ...]
Parsed = tuple[tuple[Dim, ...], Tags]


@dataclass(frozen=True)
class Spans:
    """Where the names of a text stand: (name, span) in reading order."""

    dims: tuple[tuple[str, Span], ...]
    axes: tuple[tuple[str, Span], ...]


def parse_layout(text: str) -> Parsed:
    """Text of one layout -> its dims and tags. Raises NotationError."""
    if not isinstance(text, str):
        raise NotationError(f"a layout is text, not {type(text).__name__}")
    parser = _Parser(text)
    parsed = parser.layout()
    parser.expect("end")
    return parsed


def parse_expression(text: str) -> tuple[Parsed, Parsed]:
    """Text of `layout -> layout` -> both sides. Raises NotationError."""
    if not isinstance(text, str):
        raise NotationError(f"an expression is text, not {type(text).__name__}")
    parser = _Parser(text)
    src = parser.layout()
    parser.expect(ARROW, hint="an expression reads: layout -> layout")
    dst = parser.layout()
    parser.expect("end")
    return src, dst


def spans(text: str) -> Spans:
    """Where dim and axis names stand in a text that parses, for errors found later."""
    parser = _Parser(text)
    parser.layout()
    if parser.kind == ARROW:
        parser.expect(ARROW)
        parser.layout()
    return Spans(tuple(parser.dim_spans), tuple(parser.axis_spans))


def write(dims: tuple[Dim, ...], tags: Tags) -> str:
    """Dims and tags -> canonical text; a scalar is `()`."""
    text = " ".join(map(str, dims)) or "()"
    return text if not tags else f"{text} | " + " ".join(f"{kind}({','.join(axes)})" for kind, axes in tags)


def _boundary_text(boundary: str) -> str:
    return "" if boundary == "zero" else f",{boundary}"


_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<dots>\.\.\.)|(?P<int>-?\d+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[/():,=|]))",
    re.ASCII,
)
_T = TypeVar("_T")


class _Parser:
    """Recursive descent over the grammar; remembers where names stood."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.dim_spans: list[tuple[str, Span]] = []
        self.axis_spans: list[tuple[str, Span]] = []
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            rest = self.text[self.at :]
            start = self.at + len(rest) - len(rest.lstrip())
            if rest.strip():
                raise self.error(f"unexpected character {self.text[start]!r}", (start, start + 1))
            self.kind, self.value, self.span = "end", "", (len(self.text), len(self.text) + 1)
            return
        group = str(match.lastgroup)
        self.value = match[group]
        self.kind = self.value if group in ("mark", "arrow", "dots") else group
        self.span = match.span(group)
        self.at = match.end()

    def error(self, reason: str, span: Span | None = None, hint: str | None = None) -> NotationError:
        return NotationError(reason, text=self.text, span=span or self.span, hint=hint)

    def take(self, kind: str) -> bool:
        if self.kind != kind:
            return False
        self.advance()
        return True

    def expect(self, kind: str, hint: str | None = None) -> str:
        if self.kind != kind:
            wanted = {"end": "the end", "name": "a name", "int": "a whole number"}.get(kind, f"'{kind}'")
            found = "the end" if self.kind == "end" else f"'{self.value}'"
            raise self.error(f"expected {wanted}, found {found}", hint=hint)
        value = self.value
        self.advance()
        return value

    def layout(self) -> Parsed:
        dims: list[Dim] = []
        while self.kind in ("name", ELLIPSIS):
            dims.append(self.dim())
        if not dims and self.take("("):
            self.expect(")", hint="a scalar is written ()")
        tags: list[tuple[str, tuple[str, ...]]] = []
        if self.take("|"):
            tags.append(self.tag())
            while self.kind == "name":
                tags.append(self.tag())
        elif not dims and self.kind in ("end", ARROW) and not self._is_scalar():
            raise self.error("an empty layout", hint="a scalar is written ()")
        return tuple(dims), tuple(tags)

    def _is_scalar(self) -> bool:
        return self.text[: self.span[0]].rstrip().endswith(")")

    def dim(self) -> Dim:
        name, span = self.value, self.span
        self.advance()
        if any(name == known for known, _ in self._dims_of_this_layout()):
            raise self.error(f"dim {name!r} twice", span)
        self.dim_spans.append((name, span))
        shards: list[Shard] = []
        while self.kind == "/":
            if name == ELLIPSIS:
                raise self.error(
                    "'...' stands for whole dims and cannot be cut", hint="name the dim to cut it"
                )
            self.advance()
            shards.append(self.shard())
        overlap = None
        if self.kind == ":":
            if name == ELLIPSIS:
                raise self.error("'...' stands for whole dims and cannot overlap")
            self.advance()
            overlap = self.overlap()
        return Dim(name, tuple(shards), overlap)

    def _dims_of_this_layout(self) -> list[tuple[str, Span]]:
        arrow = self.text.find(ARROW)
        here = self.span[0]
        return [d for d in self.dim_spans if (d[1][0] > arrow) == (here > arrow) or arrow < 0]

    def shard(self) -> Shard:
        if self.kind == "(":
            return Shard(self.axes())
        span = self.span
        name = self.expect("name", hint="after '/' comes a mesh axis, as in s/cp or s/zigzag(cp)")
        if self.kind != "(":
            self.axis_spans.append((name, span))
            return Shard((name,))
        if name not in ORDERS:
            raise self.error(f"unknown order {name!r}", span, f"orders are: {', '.join(ORDERS)}")
        return Shard(self.axes(), name)

    def axes(self) -> tuple[str, ...]:
        return tuple(self.listed(self.axis))

    def axis(self) -> str:
        span = self.span
        name = self.expect("name")
        self.axis_spans.append((name, span))
        return name

    def listed(self, item: Callable[[], _T]) -> list[_T]:
        """`( item , item ... )`, at least one."""
        self.expect("(")
        items = [item()]
        while self.take(","):
            items.append(item())
        self.expect(")")
        return items

    def tag(self) -> tuple[str, tuple[str, ...]]:
        span = self.span
        kind = self.expect("name", hint=f"tags are: {', '.join(TAGS)}")
        if kind not in TAGS:
            raise self.error(f"unknown tag {kind!r}", span, f"tags are: {', '.join(TAGS)}")
        return kind, self.axes()

    def overlap(self) -> Overlap:
        span = self.span
        kind = self.expect("name", hint="overlaps are: halo, window, fold")
        if kind == "halo":
            return self.halo()
        if kind == "window":
            return self.window()
        if kind == "fold":
            self.expect("(")
            inner = self.overlap()
            if isinstance(inner, Fold):
                raise self.error("a fold of a fold", span, "fold(fold(x)) is x")
            self.expect(")")
            return Fold(inner)
        raise self.error(f"unknown overlap {kind!r}", span, "overlaps are: halo, window, fold")

    def halo(self) -> Halo:
        self.expect("(")
        lo = int(self.expect("int"))
        self.expect(",", hint="as in halo(1,1)")
        hi = int(self.expect("int"))
        boundary = self.boundary() if self.take(",") else "zero"
        self.expect(")")
        return Halo(lo, hi, boundary)

    def window(self) -> Window:
        start = self.span
        values: dict[str, int] = {}
        boundary = "zero"
        self.expect("(")
        while True:
            span, name = self.span, self.expect("name", hint="as in window(k=3,s=2,p=1)")
            if self.take("="):
                if name not in ("k", "s", "d", "p") or name in values:
                    raise self.error(f"window option {name!r}", span, "k, s, d, p, each once")
                span, values[name] = self.span, int(self.expect("int"))
                if values[name] < (0 if name == "p" else 1):
                    raise self.error(f"window {name}={values[name]}", span, "k, s, d >= 1 and p >= 0")
            else:
                boundary = self.checked_boundary(name, span)
                break
            if not self.take(","):
                break
        self.expect(")")
        if "k" not in values:
            raise self.error("a window needs its width k", start, "as in window(k=3)")
        return Window(**values, boundary=boundary)

    def boundary(self) -> str:
        span = self.span
        return self.checked_boundary(self.expect("name"), span)

    def checked_boundary(self, name: str, span: Span) -> str:
        if name not in BOUNDARIES:
            raise self.error(f"unknown boundary {name!r}", span, f"boundaries are: {', '.join(BOUNDARIES)}")
        return name
