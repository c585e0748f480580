"""Tokens of the notation, read one ahead, and the grammar of overlaps: the text after the colon of a dim."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any, TypeVar

from xshard.arguments import MAX_DIGITS
from xshard.errors import NotationError, Span
from xshard.notation.maps import DIGEST, Maps, Needs, RowMap, find_map
from xshard.notation.overlap import (
    BOUNDARIES,
    OUTPUT_RULES,
    ZERO,
    Boundary,
    Fold,
    Halo,
    Overlap,
    Reads,
    Width,
    Window,
)
from xshard.signatures import did_you_mean

_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<dots>\.\.\.)|(?P<number>-?(?:inf\b|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+))"
    rf"|(?P<int>-?\d+)|(?P<map>[A-Za-z_]\w*{DIGEST}\b)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[/():,=|\[\]]))",
    re.ASCII,
)
# Hints for characters of other notations.
_HINTS_BY_CHARACTERS = {
    "→⟶⇒➔>-–—−": "did you mean '->'? an expression reads: layout -> layout",
    "*×·+": "axes taken as one are listed, as in s/(dp,cp)",
}
MAX_CHARS = 100_000
_KINDS_IN_WORDS = {"end": "the end", "name": "a name", "int": "a whole number"}
_T = TypeVar("_T")


class Scanner:
    """Reads a text token by token, always one token ahead.

    Attributes:
        token_kind: The kind of the next token: "name", "int", "number", "map", "end", or a mark itself.
        token_text: The characters of the next token.
        token_span: Where the next token stands: (start, stop).
        next_start: Where the text after the next token begins.
        previous_end: Where the last token that was taken ends.
        maps: The maps that names mean; None where names of maps stay names.
        map_spans: Where names of maps stand in the text.
    """

    def __init__(self, text: str, maps: Maps | None = None) -> None:
        if len(text) > MAX_CHARS:
            raise NotationError(f"a text of {len(text)} characters", hint=f"at most {MAX_CHARS}")
        self.maps = maps
        self.map_spans: list[Span] = []
        self.text = text
        self.next_start = 0
        self.token_span = (0, 0)
        self.advance()

    def advance(self) -> None:
        """Move on to the next token: read it into `token_kind`, `token_text` and `token_span`.

        In "n/tp" after "n" comes kind "/", text "/", span (1, 2), then kind "name", text "tp", span
        (2, 4). After the last token the kind is "end", with a span just behind the text, where
        errors put their caret. A character that begins no token raises NotationError.
        """
        self.previous_end = self.token_span[1]
        match = _TOKEN.match(self.text, self.next_start)
        if match is not None:
            group_name = str(match.lastgroup)  # the group of the pattern that fits, such as "name"
            self.token_text = match[group_name]
            # Marks are kinds of their own: "/" and "(", and not "mark".
            self.token_kind = (
                self.token_text if group_name in ("mark", "arrow", "dots") else group_name
            )
            self.token_span = match.span(group_name)
            self.next_start = match.end()
            return
        unread_text = self.text[self.next_start :]
        if unread_text.strip():
            # Tokens may have plain spaces before them. Another kind looks like one, and is marked.
            unread_text = unread_text.lstrip(string.whitespace)
            start = len(self.text) - len(unread_text)
            reason = f"unexpected character {unread_text[0]!r}"
            raise self.error(reason, (start, start + 1), _hint_for_character(unread_text[0]))
        self.token_kind = "end"
        self.token_text = ""
        self.token_span = (len(self.text), len(self.text) + 1)

    def error(
        self, reason: str, span: Span | None = None, hint: str | None = None
    ) -> NotationError:
        """Return an error that marks a part of the text, by default the next token."""
        if span is None:
            span = self.token_span
        return NotationError(reason, text=self.text, span=span, hint=hint)

    def take(self, token_kind: str) -> bool:
        """Take the next token if it is of this kind, and return whether it is."""
        if self.token_kind != token_kind:
            return False
        self.advance()
        return True

    def expect(self, token_kind: str, hint: str | None = None) -> str:
        """Take the next token, which has to be of this kind, and return its text."""
        if self.token_kind != token_kind:
            expected = _KINDS_IN_WORDS.get(token_kind, f"'{token_kind}'")
            actual = "the end" if self.token_kind == "end" else f"'{self.token_text}'"
            raise self.error(f"expected {expected}, found {actual}", hint=hint)
        text = self.token_text
        self.advance()
        return text

    def map(self, map_class: type[RowMap]) -> Any:
        """Read the name of a map, as `cells` in `n/by(x,cells)`, and return the map itself.

        The name may have a digest behind it, `cells@0123456789abcdef`. If `maps` is None, the text
        is parsed only for the places of its words: then the name is returned.
        """
        name_span = self.token_span
        name_text = self.token_text
        if self.token_kind not in ("name", "map"):
            self.expect("name", hint=f"the name of {map_class.__name__} in maps=")
        self.advance()
        self.map_spans.append(name_span)
        if self.maps is None:
            return name_text.partition("@")[0]
        try:
            return find_map(name_text, self.maps, map_class)
        except NotationError as error:
            # `find_map` does not know the whole text, which the error shows with a caret.
            raise self.error(error.reason, name_span, error.hint) from None

    def integer(self, hint: str | None = None) -> int:
        """Take a whole number."""
        span = self.token_span
        digits = self.expect("int", hint)
        if len(digits) > MAX_DIGITS:
            raise self.error("a number that fits no 64 bits", span, f"at most {MAX_DIGITS} digits")
        return int(digits)

    def listed(
        self, parse_item: Callable[[], _T], brackets: str = "()", *, may_be_empty: bool = False
    ) -> list[_T]:
        """Take `( item , item ... )` with at least one item unless `may_be_empty`, and return the items."""
        self.expect(brackets[0])
        if may_be_empty and self.take(brackets[1]):
            return []
        items = [parse_item()]
        while self.take(","):
            items.append(parse_item())
        self.expect(brackets[1])
        return items


def _hint_for_character(character: str) -> str | None:
    """Return what a character of another notation may mean here."""
    if character.isspace():
        return "it looks like a space: write a plain one"
    for characters, hint in _HINTS_BY_CHARACTERS.items():
        if character in characters:
            return hint
    return None


# ---- overlaps

_SMALLEST = {"k": 1, "s": 1, "d": 1, "p": 0}
_OPTIONS = "options are: k, s, d, p, out; each once"
_BOUNDARIES_ELSEWHERE = {
    "circular": "periodic",
    "wrap": "periodic",
    "replicate": "edge",
    "mirror": "reflect",
}
_LIMITS = "k, s, d >= 1 and p >= 0"
_OVERLAPS = "overlaps are: halo, window, reads, fold"


def parse_overlap(scanner: Scanner) -> Overlap:
    """Parse which rows a block holds beyond its own: the text after the colon of a dim.

    That is `halo(1,1)`, `window(k=3)` (what a convolution reads), `reads(needs)` (rows that a map
    lists), or `fold(...)` around one of these (its adjoint: overlapping rows are added up). The
    scanner stands at the first word, and is moved behind the closing bracket.
    """
    name_span = scanner.token_span
    overlap_name = scanner.expect("name", hint=_OVERLAPS)
    if overlap_name == "halo":
        return _halo(scanner)
    if overlap_name == "window":
        return _window(scanner)
    if overlap_name == "reads":
        scanner.expect("(")
        rows = scanner.map(Needs)
        scanner.expect(")")
        return Reads(rows)
    if overlap_name == "fold":
        scanner.expect("(")
        if scanner.token_text == "fold":  # refused before recursion: a text may nest thousands
            raise scanner.error("a fold of a fold", name_span, "fold(fold(x)) is x: write x")
        folded = parse_overlap(scanner)
        assert not isinstance(folded, Fold)
        scanner.expect(")")
        return Fold(folded)
    raise scanner.error(f"unknown overlap {overlap_name!r}", name_span, _OVERLAPS)


def _halo(scanner: Scanner) -> Halo:
    """Parse what follows `halo`: `(1,2)`, or with boundaries `(1,2,periodic)`.

    The widths are rows before and after a block: one number for all parts of the dim, or a list
    with one for each part. Without boundaries there is nothing beyond the ends of the array.
    """
    scanner.expect("(")
    rows_before = parse_width(scanner)
    scanner.expect(",", hint="as in halo(1,1)")
    rows_after_span = scanner.token_span
    rows_after = parse_width(scanner)
    if (
        isinstance(rows_before, tuple)
        and isinstance(rows_after, tuple)
        and len(rows_before) != len(rows_after)
    ):
        reason = f"{len(rows_before)} widths before and {len(rows_after)} after"
        raise scanner.error(reason, rows_after_span, "as many widths on both sides")
    boundary_before, boundary_after = _boundaries(scanner) if scanner.take(",") else (ZERO, ZERO)
    scanner.expect(")")
    return Halo(rows_before, rows_after, boundary_before, boundary_after)


def _window(scanner: Scanner) -> Window:
    """Parse what follows `window`: `(k=3,s=2,p=1,reflect)`, options first, then boundaries.

    `k` is the width of a kernel and must be given; `s` is its stride, `d` its dilation, `p` its
    padding, and `out` says how outputs are sharded. One boundary counts for both ends of the array.
    """
    start_span = scanner.token_span
    options: dict[str, Any] = {}
    scanner.expect("(")
    while True:
        name_span = scanner.token_span
        name = scanner.expect("name", hint="as in window(k=3,s=2,p=1)")
        if not scanner.take("="):  # a word without `=` is a boundary, and ends the options
            boundary_before = _boundary(scanner, name, name_span)
            boundary_after = _next_boundary(scanner) if scanner.take(",") else boundary_before
            options["before"] = boundary_before
            options["after"] = boundary_after
            break
        if name not in (*_SMALLEST, "out") or name in options:
            raise scanner.error(f"unknown or repeated window option {name!r}", name_span, _OPTIONS)
        options[name] = _window_option(scanner, name)
        if not scanner.take(","):
            break
    scanner.expect(")")
    if "k" not in options:
        raise scanner.error("a window needs its width k", start_span, "as in window(k=3)")
    return Window(**options)


def _window_option(scanner: Scanner, name: str) -> Width | str:
    """Parse the value after `name=` in a window: `p=1` or `p=[1,2]`, `out=balanced`, `s=2`.

    Returns a word for `out`, one number or two for the padding `p`, and a number for all others.
    """
    value_span = scanner.token_span
    if name == "out":
        rule = scanner.expect("name")
        if rule not in OUTPUT_RULES:
            hint = f"rules are: {', '.join(OUTPUT_RULES)}"
            raise scanner.error(f"unknown output rule {rule!r}", value_span, hint)
        return rule
    if name == "p":
        return _padding(scanner)
    value = scanner.integer()
    if value < _SMALLEST[name]:
        raise scanner.error(f"window {name}={value} is too small", value_span, _LIMITS)
    return value


def _padding(scanner: Scanner) -> Width:
    """Parse the padding of a window: one number >= 0, or two in brackets."""
    span = scanner.token_span
    padding = parse_width(scanner)
    if isinstance(padding, tuple) and len(padding) != 2:
        reason = f"window padding p has {len(padding)} numbers"
        raise scanner.error(reason, span, "as in p=1 or p=[1,2]")
    smallest = min(padding) if isinstance(padding, tuple) else padding
    if smallest < _SMALLEST["p"]:
        raise scanner.error(f"window p={padding} is negative", span, _LIMITS)
    return padding


def parse_width(scanner: Scanner) -> Width:
    """Parse a number, or several in brackets, as in `[1,0,2]`."""
    if scanner.token_kind == "[":
        return tuple(scanner.listed(scanner.integer, "[]"))
    return scanner.integer()


# ---- boundaries


def parse_boundaries(text: str) -> tuple[Boundary, Boundary]:
    """Parse one boundary for both ends of the array, or two: `"edge,zero"` -> (before, after).

    Raises:
        NotationError: The text is malformed.
    """
    scanner = Scanner(text)
    boundary_before, boundary_after = _boundaries(scanner)
    scanner.expect("end")
    return boundary_before, boundary_after


def _boundaries(scanner: Scanner) -> tuple[Boundary, Boundary]:
    """Parse one boundary for both ends of the array, or two with a comma between them."""
    boundary_before = _next_boundary(scanner)
    boundary_after = _next_boundary(scanner) if scanner.take(",") else boundary_before
    return boundary_before, boundary_after


def _next_boundary(scanner: Scanner) -> Boundary:
    """Parse a boundary from its name on."""
    span = scanner.token_span
    return _boundary(scanner, scanner.expect("name"), span)


def _boundary(scanner: Scanner, name: str, name_span: Span) -> Boundary:
    """Parse what lies beyond an end of the array: `periodic`, `constant(1.5)`, `pole(w,-1)`, ...

    The name has been read already: it is `name`, and `name_span` is its place in the text, for errors.
    What is left is the argument in brackets, which only `constant` and `pole` have.
    """
    if name not in BOUNDARIES:
        suggestion = did_you_mean(name, BOUNDARIES, _BOUNDARIES_ELSEWHERE)
        hint = f"{suggestion}boundaries are: {', '.join(BOUNDARIES)}"
        raise scanner.error(f"unknown boundary {name!r}", name_span, hint)
    if not scanner.take("("):
        return Boundary(name)
    if name == "constant":
        boundary = _constant(scanner)
    elif name == "pole":
        boundary = _pole(scanner)
    else:
        hint = "only constant(1.5) and pole(w,-1) do"
        raise scanner.error(f"{name} takes no argument", hint=hint)
    scanner.expect(")")
    return boundary


def _constant(scanner: Scanner) -> Boundary:
    """Parse the number of a `constant`."""
    if scanner.token_kind not in ("int", "number"):
        reason = f"expected a number, found '{scanner.token_text}'"
        raise scanner.error(reason, hint="as in constant(1.5)")
    value = float(scanner.token_text)
    scanner.advance()
    return Boundary("constant", value=value)


def _pole(scanner: Scanner) -> Boundary:
    """Parse the arguments of a `pole`: a dim, a sign, or both."""
    dim = ""
    if scanner.token_kind == "name":
        dim = scanner.expect("name")
        if not scanner.take(","):
            return Boundary("pole", dim=dim)
    span = scanner.token_span
    sign = scanner.integer(hint="as in pole(w) or pole(w,-1)")
    if sign not in (1, -1):
        hint = "rows from beyond a pole are kept (1) or negated (-1)"
        raise scanner.error(f"sign {sign} of a pole", span, hint)
    return Boundary("pole", dim=dim, sign=sign)
