"""Rules: patterns over the names of arrays or modules -> the layout, or the expression, of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from xshard.arguments import did_you_mean, lengths_of, shown
from xshard.compat import plan_of_transformers
from xshard.errors import NotationError, ShapeError, Span, XshardError, api_boundary, located
from xshard.layout import Layout, Mesh
from xshard.layout.layout import parse_expression
from xshard.notation.maps import Maps
from xshard.notation.parser import ARROW, with_maps

ALL = "**"
NAMED = 8  # most names that an error lists
MOST_SPELLINGS = 1000  # alternatives of one pattern
MOST_CHARS = 1_000_000  # in all alternatives
DEEPEST = 8  # braces inside braces
_PARTS = r"[^.]++(?:\.[^.]++)"  # before a star: one part or more

Pattern = str | re.Pattern[str]
RulesLike = Mapping[str, Any] | Mapping[Pattern, Any]  # plain dicts, and Rules


@api_boundary
class Rules(Mapping[Pattern, Any]):
    """Patterns over names -> a layout or an expression; the first pattern that fits a name applies.

    Names have parts between dots, as in `model.layers.0.mlp.up_proj.weight`. In a pattern `*` stands for one
    part or a piece of one, `**` for any number of whole parts or none, `{a,b}` for either, and `|` separates
    whole patterns; a compiled regular expression fits whole names. Leaves of trees have names as in
    `model.state_dict()`: keys, attributes and indices, with dots between them.
    A function that takes rules also takes a plain dict; in place of expressions a dict is a tree of them.
    maps: the `Owners` and `Needs` that layouts name. Raises NotationError for a malformed pattern or layout.

    >>> rules = Rules(
    ...     {"**.{q,k,v}_proj.weight|lm_head.weight": "o/tp i", "**.weight": "o i", "**": "..."}
    ... )
    >>> rules.find("layers.0.q_proj.weight"), rules.find("norm.bias")
    ('o/tp i', '...')
    """

    def __init__(self, rules: RulesLike, maps: Maps | None = None) -> None:
        if not isinstance(rules, Mapping):
            raise NotationError(
                f"{shown(rules)} are not rules", hint='{"**.weight": "o/tp i", "**": "..."}'
            )
        self._rules = with_maps(dict(rules), maps)
        self._maps = maps
        self._fits = {pattern: _compiled(pattern) for pattern in self._rules}
        for pattern, value in self._rules.items():
            if isinstance(value, str):
                with located(f"rule '{text_of(pattern)}'"):
                    parse_expression(value) if ARROW in value else Layout.parse(value)

    @classmethod
    def from_transformers(cls, model: Any, axis: str) -> dict[str, Rules]:
        """Read the tensor parallel plan that a model of transformers declares -> rules for `parallelize`.

        Returns its `parameters`, `inputs` and `outputs`; `inputs[""]`, of the model itself, says nothing:
        replace it to shard the batch, too. axis: a mesh axis. Source of the plan: `model.tp_plan`, which has
        `base_model_tp_plan` of the config. Raises XshardError for a model without one, and an unknown style.

        >>> from types import SimpleNamespace as Fake
        >>> up = ("layers.0.up.weight", Fake(shape=(8, 4)))
        >>> model = Fake(
        ...     tp_plan={"layers.*.up": "colwise"},
        ...     named_parameters=lambda **_: [up],
        ...     named_modules=lambda: [("layers.0.up", None)],
        ... )
        >>> Rules.from_transformers(model, "tp")["parameters"]
        Rules({'layers.*.up.weight': 'd0/tp d1', '**': '...'})
        """
        return {kind: cls(each) for kind, each in plan_of_transformers(model, axis).items()}

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
        """The layout or expression for a name; None if no pattern fits it."""
        pattern = self.pattern_for(name)
        return None if pattern is None else self._rules[pattern]

    def match(
        self, names: Collection[str], *, partial: bool = False, what: str = "name"
    ) -> dict[str, Any]:
        """The layout or expression for each name, in the order of `names`.

        partial: leave out names without a rule. what: the word for a name in errors. Raises XshardError for
        names without a rule, and for unused rules, except `**`: they, or one of their alternatives in braces
        or bars, fit no name, or rules before them fit the same names.

        >>> Rules({"*.weight": "o/tp i", "**": "..."}).match(["up.weight", "norm"])
        {'up.weight': 'o/tp i', 'norm': '...'}
        """
        names = list(names)
        decided = {name: self.pattern_for(name) for name in names}
        missing = [name for name, pattern in decided.items() if pattern is None and not partial]
        used = set(decided.values()) if names else set(self._rules)
        idle = {
            p: _idle(p, names) for p in self._rules if p not in used or set("{|") & set(text_of(p))
        }
        reasons = []
        hints = []
        if missing:
            reasons.append(f"no rule for {len(missing)} of {len(names)} {what}s: {listed(missing)}")
            rules = ", ".join(f"'{text_of(pattern)}'" for pattern in self._rules) or "nothing"
            hints.append(
                f"the rules are for: {rules}; '**' is for all others, '...' for whole arrays"
            )
        for pattern, alternatives in idle.items():
            for each in alternatives:
                of = f"'{text_of(each)}' in " if each != pattern else ""
                reasons.append(f"{of}rule '{text_of(pattern)}' fits no {what}")
                hints += filter(None, (nearest(each, names), f"the {what}s are: {listed(names)}"))
            if not alternatives and pattern not in used and pattern != ALL:  # all of it fits
                fitted = next(name for name in names if self._fits[pattern].fullmatch(name))
                earlier = text_of(decided[fitted] or pattern)
                reasons.append(
                    f"rule '{text_of(pattern)}' comes too late: '{earlier}' decides {fitted}"
                )
                hints.append(
                    "the first pattern that fits decides: write the narrow one before the wide one"
                )
        if reasons:
            raise XshardError("; ".join(reasons), hint="\n  ".join(dict.fromkeys(hints)))
        return {
            name: self._rules[pattern] for name, pattern in decided.items() if pattern is not None
        }


@api_boundary
def owned(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
    axis: str,
    *,
    cost: Callable[[tuple[int, ...]], float] = math.prod,
) -> Rules:
    """Give each array whole to one device along an axis: layouts by name, as `o/sizes(fsdp,0,0,8,0) i`.

    The costliest first, each to the device with the least so far: no device has more than 4/3 of the best
    possible load (Graham, 1969). For optimizers that need whole matrices, such as Muon or Shampoo, on sharded
    weights: one `redistribute` of the tree moves all of them, and one brings the results back.

    shapes: by name, each of one dim or more. cost: shape -> its work, by default its elements. Dims are
    named o, i, d2, d3, ... Raises MeshError for an unknown axis, ShapeError for an array without dims.

    >>> rules = owned({"up": (8, 2), "down": (2, 4), "bias": (4,)}, Mesh(fsdp=2), "fsdp")
    >>> rules.find("up"), rules.find("down"), rules.find("bias")
    ('o/sizes(fsdp,8,0) i', 'o/sizes(fsdp,0,2) i', 'o/sizes(fsdp,0,4)')
    """
    lengths = {name: lengths_of(shape) for name, shape in shapes.items()}
    loads = [0.0] * mesh.size(axis)
    rules = dict[Pattern, Any]()
    for name in sorted(lengths, key=lambda name: -cost(lengths[name])):
        if not lengths[name]:
            raise ShapeError(f"{name} is one number", hint="leave it out: it needs no owner")
        device, (rows, *others) = loads.index(min(loads)), lengths[name]
        loads[device] += cost(lengths[name])
        sizes = (rows if i == device else 0 for i in range(len(loads)))
        inner = ("i", *(f"d{d}" for d in range(2, len(others) + 1)))[: len(others)]
        rules[name] = " ".join((f"o/sizes({axis},{','.join(map(str, sizes))})", *inner))
    return Rules({name: rules[name] for name in shapes})


def _idle(pattern: Pattern, names: Sequence[str]) -> list[Pattern]:
    """The alternatives of a pattern that fit none of these names; the pattern itself if none does."""
    each = spellings(pattern) if isinstance(pattern, str) else [pattern]
    exact = {*names}  # a spelling without stars fits one name

    def fits(one: Pattern) -> bool:
        is_name = isinstance(one, str) and "*" not in one
        return one in exact if is_name else any(map(_compiled(one).fullmatch, names))

    idle = [one for one in each if names and one != ALL and not fits(one)]
    return [pattern] if len(idle) == len(each) else [*idle]


def nearest(spelling: Pattern, names: Collection[str]) -> str:
    """The part of a name for which a pattern without alternatives has nearly the same, as a hint; or "".

    >>> nearest("**.upp_proj.weight", ["layers.0.up_proj.weight"])
    "'**.upp_proj.weight': did you mean 'up_proj'?"
    """
    parts = spelling.split(".") if isinstance(spelling, str) else []
    for i, part in enumerate(parts):
        wide = ".".join((*parts[:i], "*", *parts[i + 1 :]))
        star = len(stars_in(".".join(parts[:i])))
        parts_there = {
            stars[star] for name in names if part != ALL and (stars := match_stars(wide, name))
        }
        if meant := did_you_mean(part, parts_there):
            return f"'{spelling}': {meant.strip()}"
    return ""


def text_of(pattern: Pattern) -> str:
    """A pattern as its user wrote it."""
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def listed(names: list[str]) -> str:
    """Names as an error lists them: the first few, and how many more."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(name or "''" for name in names[:NAMED]) + more


def stars_in(pattern: str) -> list[str]:
    """Every `*` and `**` of a pattern, from left to right."""
    return re.findall(r"\*\*?", pattern)


def match_stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """The text of each star of a pattern (one spelling) in a name; None if the pattern does not fit it."""
    match = _compiled(pattern).fullmatch(name)
    return None if match is None else match.groups(default="")


def fill_stars(pattern: str, texts: Sequence[str]) -> str:
    """The name that a pattern fits with these texts in place of its stars: the inverse of `match_stars`."""
    left = iter(texts)
    filled = ((part, re.sub(r"\*\*?", lambda _: next(left), part)) for part in pattern.split("."))
    return ".".join(text for part, text in filled if text or part != ALL)


@lru_cache(maxsize=4096)
def _compiled(pattern: Pattern) -> re.Pattern[str]:
    """The regular expression of the names that a pattern fits, with a group for each star."""
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise NotationError(
            f"{shown(pattern)} is not a pattern", hint="'**.weight', or re.compile(...)"
        )
    return re.compile(
        "|".join(_regex(spelling, pattern) for spelling in spellings(pattern)), re.DOTALL
    )


@lru_cache(maxsize=4096)
def spellings(pattern: str) -> tuple[str, ...]:
    """A pattern with its braces and bars written out. Raises NotationError."""
    # For each open brace, and for the pattern: its place, the alternatives before a bar, and after it.
    levels: list[tuple[Span, list[str], list[str]]] = [((0, 0), [], [""])]
    _check_number(1, pattern)
    for token in re.finditer(r"[{}|,]|[^{}|,]+", pattern):
        (opened, done, now), inside = levels.pop(), [token[0]]
        if token[0] == "{":
            if len(levels) == DEEPEST:
                raise _malformed(f"braces inside more than {DEEPEST} others", pattern, token.span())
            levels += [(opened, done, now), (token.span(), [], [""])]
            continue
        if token[0] == "}":
            if not levels:
                raise _malformed("'}' closes nothing", pattern, token.span())
            inside, (opened, done, now) = done + now, levels.pop()
        if token[0] == "|" or (token[0] == "," and levels):
            done = done + now
            now = [""]
        else:
            _check_number(len(now) * len(inside), pattern)
            now = [start + end for start in now for end in inside]
        _check_number(len(done) + len(now), pattern)
        levels.append((opened, done, now))
    if len(levels) > 1:
        raise _malformed("'{' is not closed", pattern, levels[-1][0])
    return (*levels[0][1], *levels[0][2])


def _check_number(spellings: int, pattern: str) -> None:
    limits = (
        (spellings, MOST_SPELLINGS, "spellings"),
        (spellings * len(pattern), MOST_CHARS, "characters"),
    )
    for n, most, what in limits:
        if n > most:
            raise _malformed(f"a pattern of more than {most} {what}", pattern, (0, len(pattern)))


def _regex(spelling: str, pattern: str) -> str:
    """A regular expression for parts with stars; atomic groups keep the time of a match linear."""
    sections: list[list[str]] = [[]]  # of parts, with a `**` between two sections
    for part in spelling.split("."):
        if part == ALL:
            sections.append([])
        else:
            sections[-1].append(_part_regex(part, pattern))
    regex, *others = (r"\.".join(section) for section in sections)
    dot = r"\." if regex else ""
    for i, section in enumerate(others, 1):
        if i < len(others):  # the first place where the section fits
            regex += rf"{dot}(?>(?:({_PARTS}*?)\.)??{section}(?![^.]))" if section else "()"
        elif section:
            regex += rf"{dot}(?:({_PARTS}*)\.)?{section}"
        else:
            regex += rf"(?:\.({_PARTS}*))?" if dot else "(.*)"
        dot = r"\." if section else dot
    return regex


def _part_regex(part: str, pattern: str) -> str:
    if ALL in part:
        start = pattern.find(part)  # braces may have put the stars beside each other
        span = (
            (start + part.index(ALL), start + part.index(ALL) + 2)
            if start >= 0
            else (0, len(pattern))
        )
        raise _malformed("'**' stands for whole parts", pattern, span)
    first, *rest = map(re.escape, part.split("*"))
    if not rest:
        return first
    middle = "".join(f"(?>([^.]*?){piece})" for piece in rest[:-1])
    return "([^.]+)" if part == "*" else f"{first}{middle}([^.]*){rest[-1]}"


def _malformed(reason: str, pattern: str, span: Span) -> NotationError:
    hint = "a pattern has names, '.', '*' in a part, '**' for parts, '{a,b}' and '|'"
    return NotationError(reason, text=pattern, span=span, hint=hint)
