"""Rules: patterns over the names of arrays or modules -> the layout, or the expression, of each.

Decides which names a pattern fits, and which rule a name gets. Knows no tree, no model and no array.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from xshard.arguments import shown
from xshard.errors import NotationError, Span, XshardError, with_path
from xshard.layout import Layout
from xshard.layout.layout import parse_expression
from xshard.notation.parser import ARROW

ALL = "**"
NAMED = 8  # most names that an error lists
MOST_SPELLINGS = 1000  # of one pattern, its braces and bars written out
MOST_CHARS = 1_000_000  # of all of them together
DEEPEST = 8  # braces inside braces

Pattern = str | re.Pattern[str]
T = TypeVar("T")


class Rules(Mapping[Pattern, Any]):
    """Patterns over names -> a layout or an expression; of the patterns that fit a name, the first decides.

    Names have parts between dots, as in `model.layers.0.mlp.up_proj.weight`. In a pattern `*` stands for one
    part or a piece of one, `**` for any number of whole parts, none too, `{a,b}` for either, and `|` stands
    between whole patterns; a compiled regular expression fits whole names. Leaves of trees are called as in
    `model.state_dict()`: keys, attributes and indices, with dots between them.
    Where rules are asked for, a plain dict does; where expressions are, a dict is a tree of them.
    Raises NotationError for a pattern or a layout that is malformed.

    >>> rules = Rules({"**.{q,k,v}_proj.weight|lm_head.weight": "o/tp i", "**.weight": "o i", "**": "..."})
    >>> rules.find("layers.0.q_proj.weight"), rules.find("norm.bias")
    ('o/tp i', '...')
    """

    def __init__(self, rules: Mapping[Pattern, Any]) -> None:
        if not isinstance(rules, Mapping):
            raise NotationError(f"{shown(rules)} are no rules", hint='{"**.weight": "o/tp i", "**": "..."}')
        self._rules = dict(rules)
        self._fits = {pattern: _fitting(pattern) for pattern in self._rules}
        for pattern, value in self._rules.items():
            if isinstance(value, str):
                try:
                    parse_expression(value) if ARROW in value else Layout.parse(value)
                except XshardError as error:
                    raise with_path(error, f"rule '{text_of(pattern)}'") from None

    def __getitem__(self, pattern: Pattern) -> Any:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"Rules({self._rules!r})"

    def pattern_for(self, name: str) -> Pattern | None:
        """The first pattern that fits a name, or None."""
        return next((pattern for pattern, fits in self._fits.items() if fits.fullmatch(name)), None)

    def find(self, name: str) -> Any | None:
        """What the rules say of a name, or None if no pattern fits it."""
        pattern = self.pattern_for(name)
        return None if pattern is None else self._rules[pattern]

    def match(self, names: Collection[str], *, partial: bool = False, what: str = "name") -> dict[str, Any]:
        """What the rules say of each name, in the order of `names`.

        partial: names without a rule are left out. what: the word that errors have for a name.
        Raises XshardError if a name has no rule, and for each rule that decides nothing: it fits no name, or
        rules before it decide all that it fits. `**`, which fits everything, may be left with nothing.

        >>> Rules({"*.weight": "o/tp i", "**": "..."}).match(["up.weight", "norm"])
        {'up.weight': 'o/tp i', 'norm': '...'}
        """
        names = list(names)
        decided = {name: self.pattern_for(name) for name in names}
        missing = [name for name, pattern in decided.items() if pattern is None and not partial]
        idle = [p for p in self._rules if p not in decided.values() and p != ALL] if names else []
        if missing or idle:
            raise self._error(names, missing, idle, decided, what)
        return {name: self._rules[pattern] for name, pattern in decided.items() if pattern is not None}

    def _error(
        self,
        names: list[str],
        missing: list[str],
        idle: list[Pattern],
        decided: Mapping[str, Pattern | None],
        what: str,
    ) -> XshardError:
        reasons, hints = [], []
        if missing:
            reasons.append(f"no rule for {len(missing)} of {len(names)} {what}s: {_listed(missing)}")
            rules = ", ".join(f"'{text_of(pattern)}'" for pattern in self._rules) or "nothing"
            hints.append(f"the rules are for: {rules}; '**' is for all others, '...' for whole arrays")
        for pattern in idle:
            fitted = [name for name in names if self._fits[pattern].fullmatch(name)]
            if fitted:
                earlier = decided[fitted[0]]
                assert earlier is not None
                reasons.append(
                    f"rule '{text_of(pattern)}' comes too late: '{text_of(earlier)}' decides {fitted[0]}"
                )
                hints.append("the first pattern that fits decides: write the narrow one before the wide one")
            else:
                reasons.append(f"rule '{text_of(pattern)}' fits no {what}")
                hints.append(f"the {what}s are: {_listed(names)}")
        return XshardError("; ".join(reasons), hint="\n  ".join(dict.fromkeys(hints)))


def leaf_name(path: Iterable[Any]) -> str:
    """The name of a leaf of a tree: the keys on the way to it, of JAX or torch, with dots between them."""
    named = ("key", "idx", "name")
    return ".".join(str(next((getattr(k, a) for a in named if hasattr(k, a)), k)) for k in path)


def named_once(leaves: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Leaves by name. Raises XshardError for two of one name."""
    found: dict[str, T] = {}
    for name, x in leaves:
        if name in found:
            raise XshardError(f"two leaves are called {name!r}", hint="a key without dots")
        found[name] = x
    return found


def place_of(name: str) -> str:
    """How errors begin that are about a leaf; a tree that is one leaf has no place in it."""
    return f"leaf '{name}'" if name else ""


def text_of(pattern: Pattern) -> str:
    """A pattern as its user wrote it."""
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(name or "''" for name in names[:NAMED]) + more


@lru_cache(maxsize=4096)
def _fitting(pattern: Pattern) -> re.Pattern[str]:
    """The regular expression of the names that a pattern fits."""
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise NotationError(
            f"{shown(pattern)} is no pattern", hint="text such as '**.weight', or re.compile(...)"
        )
    found = "|".join(_regex(spelling, pattern) for spelling in spellings(pattern))
    return re.compile(found, re.DOTALL)


def spellings(pattern: str) -> list[str]:
    """A pattern with its braces and bars written out. Raises NotationError.

    >>> spellings("{q,k}_proj|out")
    ['q_proj', 'k_proj', 'out']
    """
    found, end = _spellings(pattern, 0, depth=0)
    if end != len(pattern):
        raise _malformed("'}' closes nothing", pattern, (end, end + 1))
    return found


def _spellings(pattern: str, start: int, depth: int) -> tuple[list[str], int]:
    """Read alternatives from `start` to the brace that closes them -> each written out, and the end."""
    done: list[str] = []
    now, at = [""], start
    _check_number(1, pattern)
    while at < len(pattern) and pattern[at] != "}":
        char = pattern[at]
        if char == "{":
            opened = at
            if depth == DEEPEST:
                raise _malformed(f"braces inside more than {DEEPEST} others", pattern, (opened, opened + 1))
            inside, at = _spellings(pattern, opened + 1, depth + 1)
            if at == len(pattern):
                raise _malformed("'{' is not closed", pattern, (opened, opened + 1))
            _check_number(len(now) * len(inside), pattern)
            now = [a + b for a in now for b in inside]
        elif char == "|" or (char == "," and depth):
            done, now = done + now, [""]
        else:
            now = [text + char for text in now]
        at += 1
        _check_number(len(done) + len(now), pattern)
    return done + now, at


def _check_number(spellings: int, pattern: str) -> None:
    if spellings > MOST_SPELLINGS:
        raise _malformed(f"a pattern of more than {MOST_SPELLINGS} spellings", pattern, (0, len(pattern)))
    if spellings * len(pattern) > MOST_CHARS:
        raise _malformed(f"a pattern of more than {MOST_CHARS} characters", pattern, (0, len(pattern)))


def _regex(spelling: str, pattern: str) -> str:
    """A regular expression for parts with stars. What is between stars is found once, without going back."""
    groups: list[list[str]] = [[]]  # of parts, with a `**` between two
    for part in spelling.split("."):
        if part == ALL:
            groups.append([])
        else:
            groups[-1].append(_part_regex(part, pattern))
    first, *others = (r"\.".join(group) for group in groups)
    if not others:
        return first
    *middle, last = others
    found = r"\.".join(filter(None, (first, *(rf"(?>(?:[^.]+\.)*?{m}(?![^.]))" for m in middle if m))))
    if last:
        return found + r"\." * bool(found) + r"(?:[^.]+\.)*" + last
    return found + r"(?:\.[^.]+)*" if found else ".*"


def _part_regex(part: str, pattern: str) -> str:
    if ALL in part:
        at = pattern.index(ALL)
        raise _malformed("'**' stands for whole parts", pattern, (at, at + 2))
    first, *rest = map(re.escape, part.split("*"))
    middle = "".join(f"(?>[^.]*?{piece})" for piece in rest[:-1])
    return "[^.]+" if part == "*" else first + middle + (f"[^.]*{rest[-1]}" if rest else "")


def _malformed(reason: str, pattern: str, span: Span) -> NotationError:
    return NotationError(
        reason,
        text=pattern,
        span=span,
        hint="a pattern has names, '.', '*' in a part, '**' for parts, '{a,b}' and '|'",
    )
