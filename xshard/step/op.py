"""Operations of a training step: dims by name, and what one mesh axis may do in each class of operations.

A rule says it for one axis. It is written as a contraction over an axis `x`: `b c/x, f c/x -> b f | sum(x)`.
The classes (`KINDS`) derive rules from the dims of an operation by the table of `contractions.types`;
rules of its own replace them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from xshard.arguments import did_you_mean
from xshard.errors import NotationError, PlanError, ShapeError, Span, located
from xshard.layout import Layout

REPLICAS, SUM, COPY = -1, -2, -3  # ways of an axis in an array, beside a position: the dim that it shards
ARROW = "->"


@dataclass(frozen=True)
class Kind:
    """A class of operations.

    sums: an axis may shard a dim that the result lacks, and leaves partial sums. passes: tags that all
    operands may have, and the result then has. flops: floating point operations per element of the space of
    all dims; rate: share of the rate of matrix products. passes_read: how often operands and result are read
    or written. backward: work of the backward pass for each forward one. saved: copies of each operand of
    activations that are kept for the backward pass.
    """

    sums: bool = False
    passes: tuple[int, ...] = ()
    flops: float = 0.0
    rate: float = 1.0
    accesses: float = 1.0
    backward: float = 1.0
    saved: float = 0.0


KINDS: Mapping[str, Kind] = {
    # products and sums over dims; convolutions, with their windows whole
    "contraction": Kind(sums=True, flops=2.0, backward=2.0, saved=1.0),
    # functions of elements; norms, softmax, cumulative and sorting ones with their dims whole; random numbers
    "pointwise": Kind(accesses=1.5, backward=2.0, saved=1.0),
    # sums of arrays, views, permutations, broadcasts; slices, concatenations, padding with their dims whole
    "linear": Kind(sums=True, passes=(SUM,)),
    # rows of a table by number; a shard of the rows gives zeros for the others
    "lookup": Kind(sums=True),
    # scores of queries and keys; the dim of the keys is whole; `flops` count a causal mask
    "attention": Kind(flops=2.0, rate=0.75, backward=2.5, saved=1.0),
    # a sum of losses over all dims; logits are kept in float32 too
    "loss": Kind(sums=True, accesses=4.0, saved=3.0),
    # one activation for several operations: moved once for all of them
    "share": Kind(passes=(COPY,), accesses=0.0, saved=1.0),
    # numbers made in place: constants, positions, masks; and the first rows of a repeated block
    "source": Kind(accesses=0.0),
    "carry": Kind(accesses=0.0),
    # no rule is known: every device computes all of it
    "opaque": Kind(accesses=1.5, backward=2.0, saved=1.0),
}


class Rule(NamedTuple):
    """The use of one axis in each operand and the result: the number of the dim that it shards, or a tag."""

    operands: tuple[int, ...]
    result: int


class Dims(tuple[str, ...]):
    """Names of dims, outermost first, and which of them make up each dim of the array that holds them."""

    groups: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, whole: str, start: int = 0) -> Dims:
        """`"(g r d) c"` -> dims g, r, d, c in groups of 3 and 1. whole: the text that errors mark."""
        names, groups, depth = list[str](), list[int](), 0
        for token in re.finditer(r"\w+|\S", text):
            span = start + token.start(), start + token.end()
            if token[0] in "()":
                if (depth := depth + (1 if token[0] == "(" else -1)) not in (0, 1):
                    raise _malformed("this parenthesis lacks its partner", whole, span)
                groups += [0] * depth
            elif not token[0].isidentifier():
                raise _malformed(f"{token[0]!r} is not a name of a dim", whole, span)
            elif token[0] in names:
                raise _malformed(f"dim {token[0]!r} is there twice", whole, span)
            else:
                names.append(token[0])
                groups = [*groups[:-1], groups[-1] + 1] if depth else [*groups, 1]
        if depth:
            raise _malformed("a parenthesis is not closed", whole, (start, start + len(text)))
        dims = cls(names)
        dims.groups = tuple(groups)
        return dims

    @property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """The dims of every group."""
        stops = [sum(self.groups[: i + 1]) for i in range(len(self.groups))]
        return tuple(tuple(self[end - n : end]) for n, end in zip(self.groups, stops, strict=True))

    def __reduce__(self) -> tuple[object, ...]:
        return Dims.parse, (str(self), str(self))

    def __str__(self) -> str:
        return " ".join(m[0] if len(m) == 1 else f"({' '.join(m)})" for m in self.members)


@dataclass(frozen=True)
class Op:
    """An operation of the forward pass.

    name: its name, which is the result's too; `*` stands for the number of a repeated block.
    text: the dims of operands and result, as in `"b s c, (g d) c -> b s (g d)"`; in parentheses are dims that
    are one dim of the array. A dim has one length wherever it is; results reach operands by position.
    operands: names of operations, inputs and parameters. kind: its class, one of `KINDS`.
    whole: dims that no axis may shard. rules: they replace the rules of its class for an axis, each as in
    `"b s/x c -> b n/x c"`. times: how often it runs. again: in a repeated block, the operation that
    gives the operand of a `carry` from the second time on.
    enters, leaves: the module with it as the first and as the last operation; there rules can move the first
    operand and the result; None stands for its own name if it has a parameter, "" for no module.
    flops, accesses, saved: they replace the numbers of its class (`Kind`).
    Raises NotationError, PlanError.

    >>> op = Op("up", "b s c, f c -> b s f", ("norm", "up.weight"))
    >>> [str(op.text_of(rule)) for rule in op.axis_rules][2:]
    ['b s c | copy(x), f/x c -> b s f/x', 'b s c/x, f c/x -> b s f | sum(x)', 'b s c, f c -> b s f']
    """

    name: str
    text: str
    operands: tuple[str, ...] = ()
    kind: str = "contraction"
    whole: tuple[str, ...] = ()
    rules: tuple[str, ...] | None = None
    times: int = 1
    again: str = ""
    enters: str | None = None
    leaves: str | None = None
    flops: float | None = None
    accesses: float | None = None
    saved: float | None = None

    def __post_init__(self) -> None:
        for name in ("operands", "whole"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        with located(f"operation {self.name}"):
            if self.kind not in KINDS:
                hint = f"{did_you_mean(self.kind, KINDS)}there are: {', '.join(KINDS)}"
                raise PlanError(f"no class {self.kind!r} of operations", hint=hint)
            n = len(self.arrays) - 1
            if n != len(self.operands):
                hint = "one name for each operand before the arrow"
                raise NotationError(
                    f"{n} operands and {len(self.operands)} names: {', '.join(self.operands)}",
                    text=self.text,
                    span=(0, len(self.text)),
                    hint=hint,
                )
            known = {name for dims in self.arrays for name in dims}
            for dim in self.whole:
                if dim not in known:
                    raise NotationError(f"no dim {dim!r}", text=self.text, hint=f"dims: {' '.join(known)}")
            _ = self.axis_rules

    @cached_property
    def arrays(self) -> tuple[Dims, ...]:
        """The dims of the operands, then of the result."""
        if self.text.count(ARROW) != 1:
            raise _malformed("one arrow stands before the result", self.text, (0, len(self.text)))
        arrays, start, split = [], 0, self.text.index(ARROW)
        for part in self.text[:split].split(",") if self.text[:split].strip() else []:
            arrays.append(Dims.parse(part, self.text, start))
            start += len(part) + 1
        return (*arrays, Dims.parse(self.text[split + 2 :], self.text, split + 2))

    @property
    def result(self) -> Dims:
        """The dims of the result."""
        return self.arrays[-1]

    @property
    def work(self) -> Kind:
        """Its class with the operation's own numbers."""
        own = {n: v for n in ("flops", "accesses", "saved") if (v := getattr(self, n)) is not None}
        return replace(KINDS[self.kind], **own)

    @cached_property
    def axis_rules(self) -> tuple[Rule, ...]:
        """The rules for one axis; by the last it does nothing."""
        *operands, result = self.arrays
        idle = Rule((REPLICAS,) * len(operands), REPLICAS)
        if self.kind == "opaque":
            return (idle,)
        if self.rules is not None:
            return (*map(self._parsed, self.rules), idle)
        rules, kind = [], KINDS[self.kind]
        for dim in dict.fromkeys((*result, *(d for dims in operands for d in dims))):
            if dim not in self.whole and (dim in result or kind.sums):
                parts = (dims.index(dim) if dim in dims else COPY for dims in operands)
                rules.append(Rule(tuple(parts), result.index(dim) if dim in result else SUM))
        rules += [Rule((tag,) * len(operands), tag) for tag in kind.passes]
        return (*rules, idle)

    def text_of(self, rule: Rule) -> str:
        """A rule as a contraction over the axis `x`."""
        *sides, result = map(_layout, self.arrays, (*rule.operands, rule.result))
        return f"{', '.join(sides)} {ARROW} {result}"

    def _parsed(self, text: str) -> Rule:
        """The inverse of `text_of`."""
        arguments, arrow, result = text.partition(ARROW)
        sides = [side for side in arguments.split(",") if side.strip()] + [result]
        if not arrow or len(sides) != len(self.arrays):
            hint = f"as in '{self.text_of(Rule((REPLICAS,) * len(self.operands), REPLICAS))}', with axis x"
            raise _malformed("a rule has the arrays of its operation", text, (0, len(text)), hint)
        *parts, end = map(_part, sides, self.arrays, [text] * len(sides))
        return Rule(tuple(parts), end)


def _layout(dims: Sequence[str], part: int) -> str:
    text = " ".join(f"{dim}/x" if i == part else dim for i, dim in enumerate(dims))
    return text + {SUM: " | sum(x)", COPY: " | copy(x)"}.get(part, "")


def _part(side: str, dims: Dims, text: str) -> int:
    layout = Layout.parse(side) if side.strip() else Layout(())
    if layout.names != tuple(dims) or set(layout.axes) - {"x"}:
        raise _malformed(f"'{side.strip()}' is not '{' '.join(dims)}' over the axis x", text, (0, len(text)))
    tags = {"sum": SUM, "copy": COPY}
    parts = [i for i, dim in enumerate(layout.dims) if dim.shards] + [tags[kind] for kind, _ in layout.tags]
    return parts[0] if parts else REPLICAS


def _malformed(
    reason: str, text: str, span: Span, hint: str = "as in 'b s c, (g d) c -> b s (g d)'"
) -> NotationError:
    return NotationError(reason, text=text, span=span, hint=hint)


def elements(dims: Sequence[str], lengths: Mapping[str, int]) -> int:
    """Elements of an array with these dims. Raises ShapeError for a dim without a length."""
    for dim in dims:
        if dim not in lengths:
            raise ShapeError(f"dim {dim!r} lacks a length", hint=f"lengths are: {', '.join(lengths)}")
    return math.prod(lengths[dim] for dim in dims)
