"""Rules: patterns over the names of arrays or modules -> the layout, or the expression, of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from xshard.arguments import lengths_of
from xshard.compat import plan_of_transformers
from xshard.errors import (
    NotationError,
    PlanError,
    ShapeError,
    Span,
    XshardError,
    api_boundary,
    located,
)
from xshard.layout import Layout, Mesh
from xshard.layout.layout import parse_expression
from xshard.notation.maps import Maps
from xshard.notation.parser import ARROW, with_map_digests
from xshard.signatures import did_you_mean, short_repr

ALL = "**"
NAMED = 8  # most names that an error lists
# Limits on what a pattern may ask for, so that no text from outside takes all memory or time.
MAX_SPELLINGS = 1000  # alternatives of one pattern
MAX_CHARS = 1_000_000  # in all alternatives
DEEPEST = 8  # braces inside braces
# Regular expressions of parts of a name, which dots separate.
_PART = r"[^.]++"  # `++`: always the whole part
_MOST_PARTS = rf"{_PART}(?:\.{_PART})*"  # one or more, as many as fit
_FEWEST_PARTS = rf"{_PART}(?:\.{_PART})*?"  # one or more, as few as fit

Pattern = str | re.Pattern[str]
# Plain dicts, and `Rules`, which reads them.
RulesLike = Mapping[str, Any] | Mapping[Pattern, Any]


class Complaint(NamedTuple):
    """One thing that is wrong with rules for some names, and hints what to do."""

    reason: str
    hints: list[str]


@api_boundary
class Rules(Mapping[Pattern, Any]):
    """Patterns over names -> a layout or an expression; the first pattern that fits a name applies.

    Names have parts between dots, as in `model.layers.0.mlp.up_proj.weight`. In a pattern `*` stands for one
    part or a piece of one, `**` for any number of whole parts or none, `{a,b}` for either, and `|` separates
    whole patterns; a compiled regular expression fits whole names. Leaves of trees have names as in
    `model.state_dict()`: keys, attributes and indices, with dots between them.
    A function that takes rules also takes a plain dict; in place of expressions a dict is a tree of them.

    Args:
        rules: Patterns -> layouts or expressions.
        maps: The `Owners` and `Needs` that layouts name.

    Raises:
        NotationError: A pattern or a layout is malformed.

    Examples:
        >>> rules = Rules(
        ...     {"**.{q,k,v}_proj.weight|lm_head.weight": "o/tp i", "**.weight": "o i", "**": "..."}
        ... )
        >>> rules.find("layers.0.q_proj.weight"), rules.find("norm.bias")
        ('o/tp i', '...')
    """

    def __init__(self, rules: RulesLike, maps: Maps | None = None) -> None:
        if not isinstance(rules, Mapping):
            raise NotationError(
                f"{short_repr(rules)} are not rules", hint='{"**.weight": "o/tp i", "**": "..."}'
            )
        self._rules = with_map_digests(dict(rules), maps)
        self._maps = maps
        self._fits: dict[Pattern, re.Pattern[str]] = {
            pattern: _compiled(pattern) for pattern in self._rules
        }
        for pattern, value in self._rules.items():
            if isinstance(value, str):
                _check_value(pattern, value)

    @classmethod
    def from_transformers(
        cls, model: Any, axis: str | tuple[str, str], mesh: Mesh | None = None
    ) -> dict[str, Rules]:
        """Read the tensor parallel plan that a model of transformers declares, as rules for `parallelize`.

        Args:
            model: A model of transformers. Its plan is `model.tp_plan`, which has `base_model_tp_plan` of
                the config.
            axis: The mesh axis of tensor parallelism. Or two axes, ("kv", "rep"): the first has a process
                for each head of keys and values, and processes along the second share the head, each
                with a part of the queries that read it.
            mesh: The mesh, so that processes of a single axis share heads of keys that are fewer than
                they are, if equal groups can. By default, and elsewhere, a head stays whole with all its
                queries, and some processes have none.

        Returns:
            The `parameters`, `inputs` and `outputs` of `parallelize`, and if heads are shared `counts`.
            `inputs[""]`, of the model itself, says nothing: replace it to shard the batch, too.
            `model.ep_plan` is not read: if only that shards experts, a warning says so.

        Raises:
            XshardError: The model has no plan, or a style that is not known.

        Examples:
            >>> from types import SimpleNamespace as Fake
            >>> up = ("layers.0.up.weight", Fake(shape=(8, 4)))
            >>> model = Fake(
            ...     tp_plan={"layers.*.up": "colwise"},
            ...     named_parameters=lambda **_: [up],
            ...     named_modules=lambda **_: [("layers.0.up", Fake(weight=up[1]))],
            ... )
            >>> Rules.from_transformers(model, "tp")["parameters"]
            Rules({'layers.*.up.weight': 'd0/tp d1', '**': '...'})
        """
        plan = plan_of_transformers(model, axis, mesh)
        return {kind: cls(rules) for kind, rules in plan.items()}

    def __getitem__(self, pattern: Pattern) -> Any:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"Rules({self._rules!r})"

    def pattern_for(self, name: str) -> Pattern | None:
        """Return the first pattern that fits a name, or None."""
        for pattern, regex in self._fits.items():
            if regex.fullmatch(name):
                return pattern
        return None

    def find(self, name: str) -> Any | None:
        """Return the layout or expression for a name; None if no pattern fits it.

        >>> Rules({"*.weight": "o/tp i"}).find("up.weight")
        'o/tp i'
        """
        pattern = self.pattern_for(name)
        return None if pattern is None else self._rules[pattern]

    def match(
        self, names: Collection[str], *, partial: bool = False, what: str = "name"
    ) -> dict[str, Any]:
        """Find the rule for each name: its layout or expression, in the order of `names`.

        The first pattern that fits a name decides.

        Args:
            names: Names of arrays or modules.
            partial: Leave out names without a rule.
            what: The word for a name in errors.

        Returns:
            Names -> layouts or expressions.

        Raises:
            XshardError: A name has no rule, or a rule is not used: it, or one of its alternatives in braces
                or bars, fits no name, or rules before it fit the same names. `**` may be unused.

        Examples:
            >>> Rules({"*.weight": "o/tp i", "**": "..."}).match(["up.weight", "norm"])
            {'up.weight': 'o/tp i', 'norm': '...'}
        """
        decided = {name: self.pattern_for(name) for name in names}
        # All that is wrong at once, so that one look at the error is enough.
        complaints: list[Complaint] = []
        if not partial:
            complaints += self._about_missing(decided, what)
        if decided:  # of no names all rules are unused: that is no mistake in them
            complaints += self._about_unused(decided, what)
        if complaints:
            hints: list[str] = []
            for complaint in complaints:
                hints += complaint.hints
            reasons = [complaint.reason for complaint in complaints]
            raise XshardError("; ".join(reasons), hint="\n  ".join(dict.fromkeys(hints)))
        matched = {}
        for name, pattern in decided.items():
            if pattern is not None:
                matched[name] = self._rules[pattern]
        return matched

    def _about_missing(self, decided: Mapping[str, Pattern | None], noun: str) -> list[Complaint]:
        """Return the complaint about names without a rule. decided: the pattern that fits each name."""
        missing = [name for name, pattern in decided.items() if pattern is None]
        if not missing:
            return []
        patterns = [f"'{pattern_text(pattern)}'" for pattern in self._rules]
        listed_patterns = ", ".join(patterns) if patterns else "nothing"
        reason = f"no rule for {len(missing)} of {len(decided)} {noun}s: {listed_names(missing)}"
        hint = (
            f"the rules are for: {listed_patterns}; '**' is for all others, '...' for whole arrays"
        )
        return [Complaint(reason, [hint])]

    def _about_unused(self, decided: Mapping[str, Pattern | None], noun: str) -> list[Complaint]:
        """List what is wrong with rules that no name uses: they fit none, or come too late.

        For the names `up.w` and `down.w` there is a complaint about `{up,gate}.w` (`gate.w` fits
        nothing), and one about `down.w` after `*.w`, which has decided already. `**` may be unused.

        Args:
            decided: For each name the pattern that decides, None if no rule fits.
            noun: The word for a name in errors.
        """
        names = list(decided)
        deciding_patterns = set(decided.values())
        complaints = []
        for pattern in self._rules:
            has_alternatives = not set("{|").isdisjoint(pattern_text(pattern))
            # A pattern with alternatives may be used by some of them only.
            if pattern in deciding_patterns and not has_alternatives:
                continue
            unused_alternatives = _unused_alternatives(pattern, names)
            for alternative in unused_alternatives:
                complaints.append(_about_unused_alternative(alternative, pattern, names, noun))
            # All of it fits some name, and yet it is unused: rules before it decide about these names.
            if not unused_alternatives and pattern not in deciding_patterns and pattern != ALL:
                complaints.append(self._about_overruled(pattern, decided))
        return complaints

    def _about_overruled(
        self, pattern: Pattern, decided: Mapping[str, Pattern | None]
    ) -> Complaint:
        """Return the complaint about a rule that fits names, but rules before it fit them, too."""
        fitted = [name for name in decided if self._fits[pattern].fullmatch(name)]
        earlier = decided[fitted[0]]
        assert earlier is not None  # for `pattern` fits it
        reason = f"rule '{pattern_text(pattern)}' comes too late: "
        reason += f"'{pattern_text(earlier)}' decides {fitted[0]}"
        return Complaint(
            reason,
            ["the first pattern that fits decides: write the narrow one before the wide one"],
        )


def match_objects(
    rules: Rules, objects: Mapping[str, Hashable], noun: str, *, partial: bool = True
) -> dict[str, Any]:
    """Find the rule of each name, as `Rules.match` does: an object with several names has one rule.

    A rule for one of its names is for all; `**` decides only for objects without another rule.

    Args:
        rules: Patterns of names.
        objects: What has the names: modules, or places in them.
        noun: The word for a name in errors.
        partial: Leave out objects without a rule.

    Raises:
        XshardError: Names of an object have different rules, or as `Rules.match`.
    """
    values: dict[str, Any] = {}  # of the names with another rule than `**`
    deciding_name: dict[Hashable, str] = {}  # the first of these names, by object
    for name, obj in objects.items():
        if rules.pattern_for(name) in (None, ALL):
            continue
        values[name] = rules.find(name)
        first_name = deciding_name.setdefault(obj, name)
        if values[first_name] != values[name]:
            reason = f"{first_name} and {name} are one {noun}, "
            reason += f"with rules {values[first_name]!r} and {values[name]!r}"
            raise PlanError(reason, hint="leave one out, or write the same for both")
    undecided_names = [
        name for name, obj in objects.items() if name in values or obj not in deciding_name
    ]
    matched = rules.match(undecided_names, partial=partial, what=noun)
    for name, obj in objects.items():
        if obj in deciding_name:
            matched[name] = matched[deciding_name[obj]]
    return matched


def _check_value(pattern: Pattern, value: str) -> None:
    """Raise NotationError, with the rule it is in, unless a value is a layout or an expression."""
    with located(f"rule '{pattern_text(pattern)}'"):
        if ARROW in value:
            parse_expression(value)
        else:
            Layout.parse(value)


def _about_unused_alternative(
    alternative: Pattern, pattern: Pattern, names: list[str], noun: str
) -> Complaint:
    """Return the complaint about an alternative of a pattern, or all of it, that fits no name."""
    pattern_prefix = ""
    if alternative != pattern:
        pattern_prefix = f"'{pattern_text(alternative)}' in "
    hints = [f"the {noun}s are: {listed_names(names)}"]
    suggestion = nearest_hint(alternative, names)
    if suggestion:
        hints.insert(0, suggestion)
    return Complaint(f"{pattern_prefix}rule '{pattern_text(pattern)}' fits no {noun}", hints)


@api_boundary
def owned(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
    axis: str,
    *,
    cost: Callable[[tuple[int, ...]], float] = math.prod,
) -> Rules:
    """Assign whole arrays to devices along a mesh axis, so that each device has about equal work.

    The layout `o/sizes(fsdp,0,0,8,0) i` gives all 8 rows of an array to device 2 of 4. The costliest first,
    each to the device with the least so far: no device has more than 4/3 of the best possible load (Graham,
    1969). For optimizers that need whole matrices, such as Muon or Shampoo, on sharded weights: one
    `redistribute` of the tree moves all of them, and one brings the results back.

    Args:
        shapes: Shapes by name, each of one dim or more.
        mesh: The devices.
        axis: The mesh axis that shares the arrays out.
        cost: A shape -> its work, by default its elements.

    Returns:
        A layout for each name, with dims named o, i, d2, d3, ...

    Raises:
        MeshError: The mesh has no such axis.
        ShapeError: An array has no dims.

    Examples:
        >>> rules = owned({"up": (8, 2), "down": (2, 4), "bias": (4,)}, Mesh(fsdp=2), "fsdp")
        >>> rules.find("up"), rules.find("down"), rules.find("bias")
        ('o/sizes(fsdp,8,0) i', 'o/sizes(fsdp,0,2) i', 'o/sizes(fsdp,0,4)')
    """
    lengths = {name: lengths_of(shape) for name, shape in shapes.items()}
    costs = {name: cost(shape) for name, shape in lengths.items()}
    loads = [0.0] * mesh.size(axis)
    layouts: dict[Pattern, Any] = {}
    for name in sorted(lengths, key=costs.__getitem__, reverse=True):
        if not lengths[name]:
            raise ShapeError(f"{name} is one number", hint="leave it out: it needs no owner")
        owner = loads.index(min(loads))
        loads[owner] += costs[name]
        layouts[name] = _owned_by(owner, lengths[name], axis, len(loads))
    return Rules({name: layouts[name] for name in shapes})


def _owned_by(owner: int, shape: Sequence[int], axis: str, n_devices: int) -> str:
    """Return the layout of an array that one device along an axis has whole."""
    sizes = ["0"] * n_devices
    sizes[owner] = str(shape[0])
    dims = [f"o/sizes({axis},{','.join(sizes)})"]
    for dim_index in range(1, len(shape)):
        dims.append(f"d{dim_index}" if dim_index > 1 else "i")  # as weights are written: out, in
    return " ".join(dims)


def _unused_alternatives(pattern: Pattern, names: Sequence[str]) -> list[Pattern]:
    """List the alternatives of a pattern that fit none of some names.

    `{up,gate}.w` is written out as `up.w` and `gate.w`: for the one name `up.w` the result is [`gate.w`].
    If no alternative fits, the result is the pattern itself. A compiled regular expression is one
    alternative, and `**` never counts as unused.
    """
    alternatives: Sequence[Pattern] = [pattern]
    if isinstance(pattern, str):
        alternatives = spellings(pattern)
    all_names = set(names)
    idle = []
    for alternative in alternatives:
        if alternative == ALL:
            continue
        if isinstance(alternative, str) and "*" not in alternative:
            fits = alternative in all_names  # faster than an expression: it fits one name
        else:
            fits = any(map(_compiled(alternative).fullmatch, names))
        if not fits:
            idle.append(alternative)
    if len(idle) == len(alternatives):  # one complaint about all of it says enough
        return [pattern]
    return idle


def nearest_hint(spelling: Pattern, names: Collection[str]) -> str:
    """Suggest a correction for a pattern that fits no name, by a name that is nearly fitted; or "".

    Each part between dots is replaced by a star in turn. If names fit then, what they have in its place
    is compared with the part: `**.upp.w` becomes `**.*.w`, which fits `layers.0.up.w`, and this has `up`
    in place of `upp`. A regular expression has no such parts, and gets no suggestion.

    >>> nearest_hint("**.upp_proj.weight", ["layers.0.up_proj.weight"])
    "'**.upp_proj.weight': did you mean 'up_proj'?"
    """
    if not isinstance(spelling, str):
        return ""
    parts = spelling.split(".")
    for i, part in enumerate(parts):
        if part == ALL:
            continue
        n_stars_before = len(stars_in(".".join(parts[:i])))
        with_star = ".".join((*parts[:i], "*", *parts[i + 1 :]))
        candidates: set[str] = set()
        for name in names:
            # The text that each star stands for, from left to right.
            star_texts = match_stars(with_star, name)
            if star_texts:
                candidates.add(star_texts[n_stars_before])  # for the star in place of the part
        suggestion = did_you_mean(part, candidates)
        if suggestion:
            return f"'{spelling}': {suggestion.strip()}"
    return ""


def pattern_text(pattern: Pattern) -> str:
    """Return a pattern as its user wrote it."""
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def listed_names(names: list[str]) -> str:
    """Return names as an error lists them: the first few, and how many more."""
    shown_names = ", ".join(name if name else "''" for name in names[:NAMED])
    if len(names) > NAMED:
        return f"{shown_names} and {len(names) - NAMED} more"
    return shown_names


def stars_in(pattern: str) -> list[str]:
    """Return every `*` and `**` of a pattern, from left to right."""
    return re.findall(r"\*\*?", pattern)


def match_stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the text of each star of a pattern (one spelling) in a name; None if it does not fit."""
    match = _compiled(pattern).fullmatch(name)
    return None if match is None else match.groups(default="")


def fill_stars(pattern: str, texts: Sequence[str]) -> str:
    """Return the name that a pattern fits with these texts in place of its stars.

    The inverse of `match_stars`: "a.*.w" with ("0",) -> "a.0.w". A `**` for no parts leaves no dot.
    """
    unused_texts = iter(texts)
    filled_parts = []
    for part in pattern.split("."):
        filled = re.sub(r"\*\*?", lambda _: next(unused_texts), part)
        if filled or part != ALL:
            filled_parts.append(filled)
    return ".".join(filled_parts)


@lru_cache(maxsize=4096)
def _compiled(pattern: Pattern) -> re.Pattern[str]:
    """Return the regular expression of the names that a pattern fits, with a group for each star."""
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise NotationError(
            f"{short_repr(pattern)} is not a pattern", hint="'**.weight', or re.compile(...)"
        )
    regexes = [_regex(spelling, pattern) for spelling in spellings(pattern)]
    return re.compile("|".join(regexes), re.DOTALL)


@dataclass
class _Alternatives:
    """The spellings of an open brace, or of the whole pattern, as far as it is read."""

    span: Span  # of the brace
    finished: list[str] = field(default_factory=list)  # before the last comma or bar
    current: list[str] = field(default_factory=lambda: [""])  # of the alternative being read

    @property
    def all(self) -> list[str]:
        """The spellings of all alternatives."""
        return [*self.finished, *self.current]

    def begin_next(self) -> None:
        """Begin the next alternative."""
        self.finished += self.current
        self.current = [""]

    def append(self, endings: Sequence[str], pattern: str) -> None:
        """Continue each spelling of this alternative with each of the endings."""
        _check_number(len(self.current) * len(endings), pattern)
        longer = []
        for start in self.current:
            longer += [start + ending for ending in endings]
        self.current = longer


@lru_cache(maxsize=4096)
def spellings(pattern: str) -> tuple[str, ...]:
    """Write the braces and bars of a pattern out: "{a,b}.w|c" -> ("a.w", "b.w", "c").

    Braces may be nested: "{a,{b,c}d}" -> ("a", "bd", "cd"). A comma outside braces is plain text. Raises
    NotationError for unmatched braces, braces nested too deep, or too many spellings.
    """
    _check_number(1, pattern)
    # What is written out so far: of the pattern as a whole, then of each brace that is open.
    levels = [_Alternatives((0, 0))]
    for token in re.finditer(r"[{}|,]|[^{}|,]+", pattern):
        token_text = token[0]
        if token_text == "{":
            if len(levels) > DEEPEST:
                raise _malformed(f"braces inside more than {DEEPEST} others", pattern, token.span())
            levels.append(_Alternatives(token.span()))
            continue
        if token_text == "}":
            closed = levels.pop()
            if not levels:
                raise _malformed("'}' closes nothing", pattern, token.span())
            levels[-1].append(closed.all, pattern)
        elif token_text == "|" or (token_text == "," and len(levels) > 1):
            levels[-1].begin_next()
        else:
            levels[-1].append([token_text], pattern)
        _check_number(len(levels[-1].all), pattern)
    if len(levels) > 1:
        raise _malformed("'{' is not closed", pattern, levels[-1].span)
    return tuple(levels[0].all)


def _check_number(n_spellings: int, pattern: str) -> None:
    """Raise NotationError if a pattern has too many spellings, or too long ones."""
    whole_span = (0, len(pattern))
    if n_spellings > MAX_SPELLINGS:
        raise _malformed(f"a pattern of more than {MAX_SPELLINGS} spellings", pattern, whole_span)
    if n_spellings * len(pattern) > MAX_CHARS:
        raise _malformed(f"a pattern of more than {MAX_CHARS} characters", pattern, whole_span)


def _regex(spelling: str, pattern: str) -> str:
    """Translate one spelling of a pattern to a regular expression, with a group for each star.

    `*` is some text without dots, `**` any number of parts between dots, or none: `**.up.*` fits
    `layers.0.up.weight`, with the groups `layers.0` and `weight`.

    Names may come from files that others wrote, so that matching has to be fast for all names: atomic
    groups, `(?>...)`, never try another place for a section once it has fitted. Nothing is missed, since
    the first place where a section between two `**` fits is as good as any later one.

    pattern: the whole text with its braces, for errors.
    """
    # Lists of parts: `a.**.b.c` has the sections [a] and [b, c], with a `**` between them.
    sections: list[list[str]] = [[]]
    for part in spelling.split("."):
        if part == ALL:
            sections.append([])
        else:
            sections[-1].append(_part_regex(part, pattern))
    regex, *later = [r"\.".join(section) for section in sections]
    # The dot before the next part: none if the pattern begins with `**`, which may be no part at all.
    dot = r"\." if regex else ""
    for i, section in enumerate(later, 1):
        regex += _double_star_regex(section, dot, is_last=i == len(later))
        if section:
            dot = r"\."
    return regex


def _double_star_regex(section: str, dot: str, *, is_last: bool) -> str:
    """Return the regular expression of a `**` and of the section behind it, up to the next `**`.

    For `.**.b` of the pattern `a.**.b`, which fits `a.b`, `a.x.b` and `a.x.y.b`: its group, the text
    of the `**`, is nothing, "x" or "x.y".

    Args:
        section: The section's expression; "" if the pattern ends, or another `**` follows at once.
        dot: The expression of the dot before the `**`; "" at the beginning of the pattern.
        is_last: Whether no other `**` follows.
    """
    if not section and not is_last:
        return "()"  # of `**.**` the second takes all parts
    if not section:
        # The pattern ends. `a.**` fits `a` too: without parts there is no dot either.
        return rf"(?:\.({_MOST_PARTS}))?" if dot else "(.*)"
    if is_last:
        perhaps_parts = rf"(?:({_MOST_PARTS})\.)?"
        return dot + perhaps_parts + section
    # As few parts as possible (`??` tries none first): up to the first place where the section fits,
    # as whole parts. The atomic group `(?>...)` never looks for a later place.
    perhaps_parts = rf"(?:({_FEWEST_PARTS})\.)??"
    at_end_of_part = r"(?![^.])"
    return rf"{dot}(?>{perhaps_parts}{section}{at_end_of_part})"


def _part_regex(part: str, pattern: str) -> str:
    """Return the regular expression of one part, as `*_proj`. Raises NotationError for `**` within it."""
    if ALL in part:
        raise _malformed("'**' stands for whole parts", pattern, _span_of_all(part, pattern))
    if part == "*":
        return "([^.]+)"  # a whole part is not empty
    start_regex, *other_regexes = [re.escape(text) for text in part.split("*")]
    if not other_regexes:
        return start_regex
    *middle_regexes, end_regex = other_regexes
    middle = "".join(f"(?>([^.]*?){text})" for text in middle_regexes)
    return f"{start_regex}{middle}([^.]*){end_regex}"


def _span_of_all(part: str, pattern: str) -> Span:
    """Return the place of a `**` within a part; of the whole pattern if braces put the stars together."""
    start = pattern.find(part)
    if start < 0:
        return (0, len(pattern))
    stars_start = start + part.index(ALL)
    return (stars_start, stars_start + len(ALL))


def _malformed(reason: str, pattern: str, span: Span) -> NotationError:
    return NotationError(
        reason,
        text=pattern,
        span=span,
        hint="a pattern has names, '.', '*' in a part, '**' for parts, '{a,b}' and '|'",
    )
