"""Tokens of the notation, read one ahead, and the grammar of overlaps: the text after the colon of a dim."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from xshard.arguments import MOST_DIGITS, did_you_mean
from xshard.errors import NotationError, Span
from xshard.notation.maps import DIGEST, Maps, Needs, RowMap, find_map
from xshard.notation.overlap import (
    BOUNDARIES,
    OUTPUT_RULES,
    Boundary,
    Fold,
    Halo,
    Overlap,
    Reads,
    Window,
)

_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<dots>\.\.\.)|(?P<number>-?(?:inf\b|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+))"
    rf"|(?P<int>-?\d+)|(?P<map>[A-Za-z_]\w*{DIGEST}\b)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[/():,=|\[\]]))",
    re.ASCII,
)
_MEANT = {  # characters of other notations -> a hint
    "→⟶⇒➔>-–—−": "did you mean '->'? an expression reads: layout -> layout",
    "*×·+": "axes taken as one are listed, as in s/(dp,cp)",
}
MOST_CHARS = 100_000
_EXPECTED = {"end": "the end", "name": "a name", "int": "a whole number"}
_T = TypeVar("_T")


class Scanner:
    """A text as tokens: `kind`, `value` and `span` (start, stop) of the next one; `end` of the last one."""

    def __init__(self, text: str, maps: Maps | None = None) -> None:
        self.maps = maps  # by name; None: names stay names
        self.map_spans: list[Span] = []
        if len(text) > MOST_CHARS:
            raise NotationError(f"a text of {len(text)} characters", hint=f"at most {MOST_CHARS}")
        self.text = text
        self.at = 0
        self.span = (0, 0)
        self.advance()

    def advance(self) -> None:
        self.end = self.span[1]
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            if rest := self.text[self.at :].lstrip():
                start = len(self.text) - len(rest)
                hint = next((hint for marks, hint in _MEANT.items() if rest[0] in marks), None)
                raise self.error(f"unexpected character {rest[0]!r}", (start, start + 1), hint)
            self.kind, self.value, self.span = "end", "", (len(self.text), len(self.text) + 1)
            return
        group = str(match.lastgroup)
        self.value = match[group]
        self.kind = self.value if group in ("mark", "arrow", "dots") else group
        self.span = match.span(group)
        self.at = match.end()

    def error(
        self, reason: str, span: Span | None = None, hint: str | None = None
    ) -> NotationError:
        return NotationError(reason, text=self.text, span=span or self.span, hint=hint)

    def take(self, kind: str) -> bool:
        if self.kind != kind:
            return False
        self.advance()
        return True

    def expect(self, kind: str, hint: str | None = None) -> str:
        if self.kind != kind:
            wanted = _EXPECTED.get(kind, f"'{kind}'")
            actual = "the end" if self.kind == "end" else f"'{self.value}'"
            raise self.error(f"expected {wanted}, found {actual}", hint=hint)
        value = self.value
        self.advance()
        return value

    def map(self, kind: type[RowMap]) -> Any:
        """The name of a map, perhaps with its digest -> the map."""
        span = self.span
        text = self.value
        if self.kind not in ("name", "map"):
            self.expect("name", hint=f"the name of {kind.__name__} in maps=")
        self.advance()
        self.map_spans.append(span)
        if self.maps is None:
            return text.partition("@")[0]
        try:
            return find_map(text, self.maps, kind)
        except NotationError as error:
            raise self.error(error.reason, span, error.hint) from None

    def integer(self, hint: str | None = None) -> int:
        span = self.span
        digits = self.expect("int", hint)
        if len(digits) > MOST_DIGITS:
            raise self.error("a number that fits no 64 bits", span, f"at most {MOST_DIGITS} digits")
        return int(digits)

    def listed(self, item: Callable[[], _T], ends: str = "()") -> list[_T]:
        """`( item , item ... )` with at least one item -> the items."""
        self.expect(ends[0])
        items = [item()]
        while self.take(","):
            items.append(item())
        self.expect(ends[1])
        return items


_SMALLEST = {"k": 1, "s": 1, "d": 1, "p": 0}
_OPTIONS = "options are: k, s, d, p, out; each once"
_BOUNDARIES_ELSEWHERE = {
    "circular": "periodic",
    "wrap": "periodic",
    "replicate": "edge",
    "mirror": "reflect",
}
_LIMITS = "k, s, d >= 1 and p >= 0"


def parse_overlap(scanner: Scanner) -> Overlap:
    """`halo(...)`, `window(...)`, `reads(...)` or `fold(...)`."""
    span = scanner.span
    kind = scanner.expect("name", hint="overlaps are: halo, window, reads, fold")
    if kind == "halo":
        return _halo(scanner)
    if kind == "window":
        return _window(scanner)
    if kind == "reads":
        scanner.expect("(")
        rows = scanner.map(Needs)
        scanner.expect(")")
        return Reads(rows)
    if kind == "fold":
        scanner.expect("(")
        if scanner.value == "fold":  # refused before it is read: a text may nest thousands
            raise scanner.error("a fold of a fold", span, "fold(fold(x)) is x: write x")
        inner = parse_overlap(scanner)
        assert not isinstance(inner, Fold)
        scanner.expect(")")
        return Fold(inner)
    raise scanner.error(
        f"unknown overlap {kind!r}", span, "overlaps are: halo, window, reads, fold"
    )


def _halo(scanner: Scanner) -> Halo:
    scanner.expect("(")
    lo = parse_width(scanner)
    scanner.expect(",", hint="as in halo(1,1)")
    span = scanner.span
    hi = parse_width(scanner)
    if isinstance(lo, tuple) and isinstance(hi, tuple) and len(lo) != len(hi):
        what = f"{len(lo)} widths before and {len(hi)} after"
        raise scanner.error(what, span, "as many widths on both sides")
    boundaries = _boundaries(scanner) if scanner.take(",") else ()
    scanner.expect(")")
    return Halo(lo, hi, *boundaries)


def _window(scanner: Scanner) -> Window:
    start = scanner.span
    options = dict[str, Any]()
    scanner.expect("(")
    while True:
        span = scanner.span
        name = scanner.expect("name", hint="as in window(k=3,s=2,p=1)")
        if not scanner.take("="):
            before = _boundary(scanner, name, span)
            after = _next_boundary(scanner) if scanner.take(",") else before
            options |= {"before": before, "after": after}
            break
        if name not in (*_SMALLEST, "out") or name in options:
            raise scanner.error(f"unknown or repeated window option {name!r}", span, _OPTIONS)
        span = scanner.span
        if name == "out":
            options[name] = out = scanner.expect("name")
            if out not in OUTPUT_RULES:
                known = f"rules are: {', '.join(OUTPUT_RULES)}"
                raise scanner.error(f"unknown output rule {out!r}", span, known)
        elif name == "p":
            options[name] = padding = parse_width(scanner)
            if isinstance(padding, tuple) and len(padding) != 2:
                what = f"window padding p has {len(padding)} numbers"
                raise scanner.error(what, span, "as in p=1 or p=[1,2]")
            if min(padding if isinstance(padding, tuple) else (padding,)) < 0:
                raise scanner.error(f"window p={padding} is negative", span, _LIMITS)
        else:
            options[name] = n = scanner.integer()
            if n < _SMALLEST[name]:
                raise scanner.error(f"window {name}={n} is too small", span, _LIMITS)
        if not scanner.take(","):
            break
    scanner.expect(")")
    if "k" not in options:
        raise scanner.error("a window needs its width k", start, "as in window(k=3)")
    return Window(**options)


def parse_boundaries(text: str) -> tuple[Boundary, Boundary]:
    """Text of one boundary for both ends of the array, or of two -> (before, after). Raises NotationError."""
    scanner = Scanner(text)
    both = _boundaries(scanner)
    scanner.expect("end")
    return both


def parse_width(scanner: Scanner) -> int | tuple[int, ...]:
    """A number, or several in brackets, as in `[1,0,2]`."""
    return (
        tuple(scanner.listed(scanner.integer, "[]")) if scanner.kind == "[" else scanner.integer()
    )


def _boundaries(scanner: Scanner) -> tuple[Boundary, Boundary]:
    before = _next_boundary(scanner)
    return before, _next_boundary(scanner) if scanner.take(",") else before


def _next_boundary(scanner: Scanner) -> Boundary:
    span = scanner.span
    return _boundary(scanner, scanner.expect("name"), span)


def _boundary(scanner: Scanner, kind: str, span: Span) -> Boundary:
    if kind not in BOUNDARIES:
        meant = did_you_mean(kind, BOUNDARIES, _BOUNDARIES_ELSEWHERE)
        hint = f"{meant}boundaries are: {', '.join(BOUNDARIES)}"
        raise scanner.error(f"unknown boundary {kind!r}", span, hint)
    if not scanner.take("("):
        return Boundary(kind)
    if kind == "constant":
        if scanner.kind not in ("int", "number"):
            raise scanner.error(
                f"expected a number, found '{scanner.value}'", hint="as in constant(1.5)"
            )
        boundary = Boundary(kind, value=float(scanner.value))
        scanner.advance()
    elif kind == "pole":
        boundary = _pole(scanner)
    else:
        raise scanner.error(
            f"{kind} takes no argument", hint="only constant(1.5) and pole(w,-1) do"
        )
    scanner.expect(")")
    return boundary


def _pole(scanner: Scanner) -> Boundary:
    dim = scanner.expect("name") if scanner.kind == "name" else ""
    if dim and not scanner.take(","):
        return Boundary("pole", dim=dim)
    span = scanner.span
    sign = scanner.integer(hint="as in pole(w) or pole(w,-1)")
    if sign not in (1, -1):
        hint = "rows from beyond a pole are kept (1) or negated (-1)"
        raise scanner.error(f"sign {sign} of a pole", span, hint)
    return Boundary("pole", dim=dim, sign=sign)
