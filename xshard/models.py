"""Whole models: what the layouts of activations and parameters, given by name, say about gradients.

Decides along which axes a parameter's gradient is summed, and what that makes of the layout in which the
parameter is used. Activations vary along the axes that cut, copy or sum in the layout under which they came
in. By the table of `contractions.types`, a parameter that such an axis does not cut is used as a copy along
it. Knows no framework and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes, parse_expression
from xshard.layout.lengths import global_shape
from xshard.notation.parser import ARROW, ELLIPSIS


class Rule(NamedTuple):
    """What a rule says of one array: how it arrives, and how it goes on; other axes are left alone."""

    src: Layout
    dst: Layout
    text: str

    @property
    def moves(self) -> bool:
        return self.src != self.dst

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that either side names."""
        return tuple(dict.fromkeys((*self.src.axes, *self.dst.axes)))


@lru_cache(maxsize=4096)
def rule_of(text: str, mesh: Mesh) -> Rule:
    """`"layout -> layout"`, or one layout: the array is there, and stays. Raises NotationError."""
    src, dst = parse_expression(text) if ARROW in text else (Layout.parse(text),) * 2
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    return Rule(src, dst, text)


def varying(outside: Iterable[str], rules: Iterable[Rule]) -> frozenset[str]:
    """The axes along which activations differ inside a module whose inputs have these rules.

    outside: those in the enclosing module. An axis that a rule names is as its right side says.

    >>> sorted(varying(["dp"], [rule_of("b s/tp c -> b s c | copy(tp)", Mesh(dp=2, tp=2))]))
    ['dp', 'tp']
    """
    rules = list(rules)
    named = {axis for rule in rules for axis in rule.axes}
    return frozenset(outside) - named | {axis for rule in rules for axis in rule.dst.axes}


class Known(NamedTuple):
    """What is known of a dim inside a module: the axes that cut it, its length, and that of this block."""

    name: str
    axes: frozenset[str]
    length: int
    rows: int


def arriving_shape(
    rule: Rule, mesh: Mesh, device: int, local_shape: tuple[int, ...], known: Iterable[Known]
) -> tuple[int, ...]:
    """The shape of an array, of which a block arrives: whole along the axes of its rule.

    known: dims of the enclosing module. Of other dims blocks are equally long.
    Raises ShapeError if the block is not this device's part of such an array.
    """
    layout = rule.src.resolved(len(local_shape))
    named = set(rule.axes)
    lengths = {dim.name: dim.length for dim in known if dim.axes <= named}
    lengths |= {dim.name: dim.rows for dim in known if not dim.axes & named}
    shape = global_shape(layout, mesh, local_shape, rule.text, lengths)
    expected = Sharding(layout, mesh, shape).local_shape(device)
    if expected != local_shape:
        dims = zip(layout.dims, expected, local_shape, shape, strict=True)
        dim, want, rows, length = next(each for each in dims if each[1] != each[2])
        raise ShapeError(
            f"the block has shape {local_shape}, not {expected}",
            text=rule.text,
            hint=f"{rows} rows of '{dim}', not {want} of {length}: it arrives under another layout, or "
            f"{dim.name!r} names another dim outside, and this one needs a name of its own",
        )
    return shape


def known_inside(
    rule: Rule, shape: Sequence[int], local_shape: Sequence[int], outside: Iterable[Known]
) -> tuple[Known, ...]:
    """What is known inside a module. shape: what arrived, whole; local_shape: of the block that goes in."""
    found = {dim.name: dim for dim in outside}
    lengths = dict(zip(rule.src.resolved(len(shape)).names, shape, strict=True))
    for dim, rows in zip(rule.dst.resolved(len(shape)).dims, local_shape, strict=True):
        before = found.get(dim.name)
        axes, length = frozenset(dim.axes), lengths[dim.name]
        if before is not None:
            axes, length = axes | before.axes - set(rule.axes), before.length
        found[dim.name] = Known(dim.name, axes, length, rows)
    return tuple(found.values())


class Use(NamedTuple):
    """A parameter in one module: how it is stored and used, and along which axes activations vary there."""

    stored: Layout
    used: Layout
    varying: frozenset[str]

    @property
    def copied(self) -> frozenset[str]:
        """The axes over which the gradients of the uses are summed."""
        return self.varying - set(self.used.axes)

    @property
    def apart(self) -> frozenset[str]:
        """Axes that cut the parameter where activations are equal: their gradient would not be equal."""
        return frozenset(self.used.axes) - self.varying

    def move(self, later: frozenset[str]) -> tuple[Layout, Layout] | None:
        """From where it is stored to how it is used, or None if nothing moves.

        later: axes over which gradients are summed afterwards, with those of other parameters.
        """
        now = tuple(sorted(self.copied - later))
        used = replace(self.used, tags=(*self.used.tags, ("copy", now)) if now else self.used.tags)
        return None if used == self.stored else (self.stored, used)


def use_of(text: str, ndim: int, mesh: Mesh, varying: frozenset[str]) -> Use:
    """`"stored -> used"`, or one layout for both, of a parameter with `ndim` dims.

    What is added to addends is used as addends too: `"o -> o | sum(tp)"`.
    Raises NotationError for what is no place to keep values in, ShapeError for another number of dims.

    >>> use_of("o/dp i -> o i", 2, Mesh(dp=2, tp=2), frozenset(["dp"])).copied
    frozenset({'dp'})
    """
    rule = rule_of(text, mesh)
    for layout, tags in ((rule.src, set()), (rule.dst, {"sum"})):
        if {kind for kind, _ in layout.tags} - tags or any(dim.overlap for dim in layout.dims):
            raise NotationError(
                f"a parameter is stored and used as values, not as '{layout}'",
                text=text,
                hint="cuts, as in 'o/dp i -> o i', and a sum on the right; over which axes its gradient is "
                "summed is derived",
            )
    if ELLIPSIS not in rule.src.names and len(rule.src.dims) != ndim:
        raise ShapeError(
            f"{len(rule.src.dims)} dims, the parameter has {ndim}",
            text=text,
            hint="'...' is any number of dims",
        )
    return Use(rule.src.resolved(ndim), rule.dst.resolved(ndim), varying)


def summed_later(uses: Sequence[Use]) -> frozenset[str]:
    """The axes over which the gradient is summed once, after all uses: all of them sum over these axes.

    An axis that cuts the stored parameter is none: its sum ends in blocks.
    """
    common = frozenset.intersection(*(use.copied for use in uses))
    return common - set(uses[0].stored.axes)
