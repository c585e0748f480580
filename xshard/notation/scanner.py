"""Tokens of the notation, read one ahead, and errors that mark the wrong token."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from xshard.arguments import MOST_DIGITS
from xshard.errors import NotationError, Span

_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<dots>\.\.\.)|(?P<number>-?(?:inf\b|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+))"
    r"|(?P<int>-?\d+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[/():,=|\[\]]))",
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

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARS:
            raise NotationError(f"a text of {len(text)} characters", hint=f"at most {MOST_CHARS}")
        self.text = text
        self.at, self.span = 0, (0, 0)
        self.advance()

    def advance(self) -> None:
        self.end = self.span[1]
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            rest = self.text[self.at :]
            start = self.at + len(rest) - len(rest.lstrip())
            if rest.strip():
                char = self.text[start]
                hint = next((hint for marks, hint in _MEANT.items() if char in marks), None)
                raise self.error(f"unexpected character {char!r}", (start, start + 1), hint)
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
            wanted = _EXPECTED.get(kind, f"'{kind}'")
            actual = "the end" if self.kind == "end" else f"'{self.value}'"
            raise self.error(f"expected {wanted}, found {actual}", hint=hint)
        value = self.value
        self.advance()
        return value

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
