"""Whole models: the sums of gradients that follow from layouts of activations and parameters. By the table of
`contractions.types`, the gradient of a parameter is summed over the axes along which activations vary (they
shard, copy or sum where these arrive) and that do not shard the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xshard.arguments import shown
from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes, factored, parse_expression
from xshard.layout.lengths import global_shape
from xshard.notation.parser import ARROW, ELLIPSIS, ROUTED, Dim, Shard


class ActivationRule(NamedTuple):
    """A rule for one array: its layouts before and after a move; other axes are left alone. routed: axes
    along which rows go where values say; they come back before the output.
    """

    src: Layout
    dst: Layout
    text: str
    routed: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        return self.src != self.dst

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.src.axes, *self.dst.axes)))


def rule_of(text: Any, mesh: Mesh, routes: bool = False) -> ActivationRule:
    """Parse `"layout -> layout"`, or one layout for both: nothing moves. Raises NotationError. routes: allow
    `"t/ep c -> t/to(ep) c"`, which has the same layout on both sides beside `routed`.
    """
    if not isinstance(text, str):
        hint = "'o/tp i' shards the first of two dims over tp, as Shard(0) along tp does"
        raise NotationError(f"a layout is text, not {shown(text)}", hint=hint)
    rule = _rule_of(text, mesh)
    if rule.routed and not routes:
        hint = "a rule for the input of experts may say so, as in 't/ep c -> t/to(ep) c'"
        raise NotationError("'to' is for rows that go where values say", text=text, hint=hint)
    return rule


@layout_cache(maxsize=4096)
def _rule_of(text: str, mesh: Mesh) -> ActivationRule:
    src, dst = parse_expression(text) if ARROW in text else (Layout.parse(text),) * 2
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    dims = *enumerate(src.dims), *enumerate(dst.dims)
    there = [(i, s.axes) for i, dim in dims for s in dim.shards if s.order == ROUTED]
    shards = (
        tuple(Shard(s.axes) if s.order == ROUTED else s for s in dim.shards) for dim in dst.dims
    )
    plain = tuple(replace(dim, shards=own) for dim, own in zip(dst.dims, shards, strict=True))
    placed = replace(dst, dims=plain)
    if there and (src != placed or len(there) > 1 or there[0][0]):
        hint = "as in 't/ep c -> t/to(ep) c': rows of the first dim, sharded over the same axes on the left"
        raise NotationError("'to' moves rows that are sharded", text=text, hint=hint)
    return ActivationRule(src, placed, text, there[0][1] if there else ())


def varying(outside: Iterable[str], rules: Sequence[ActivationRule]) -> frozenset[str]:
    """Axes along which activations differ inside a module: as `outside` it, but for axes that rules name."""
    named = {axis for rule in rules for axis in rule.axes}
    return frozenset(outside) - named | {axis for rule in rules for axis in rule.dst.axes}


def placed(layout: Layout, named: Collection[str], outside: Layout) -> Layout:
    """A layout by a rule that names some axes -> the whole one: others are as `outside`, by dims' names."""
    rest = factored(outside, {axis: () if axis in named else (axis,) for axis in outside.axes})
    around = {dim.name: dim.shards for dim in rest.dims}
    dims = (replace(dim, shards=(*around.get(dim.name, ()), *dim.shards)) for dim in layout.dims)
    return Layout(tuple(dims), (*rest.tags, *layout.tags))


def inside(rule: ActivationRule, outside: Layout) -> Layout:
    """All dims that have names inside a module, and the tags of activations there."""
    now = placed(rule.dst, rule.axes, outside)
    unsharded = Layout(tuple(Dim(dim.name) for dim in outside.dims))
    dims = {dim.name: dim for dim in (*placed(unsharded, rule.axes, outside).dims, *now.dims)}
    return Layout(tuple(dim for name, dim in dims.items() if name != ELLIPSIS), now.tags)


class KnownDim(NamedTuple):
    """A dim inside a module: its axes, its global length and this block's, and the rule that says so."""

    name: str
    axes: frozenset[str]
    length: int
    rows: int
    source: str = ""


def arriving_shape(
    rule: ActivationRule,
    mesh: Mesh,
    device: int,
    local_shape: tuple[int, ...],
    known: Iterable[KnownDim],
) -> tuple[int, ...]:
    """A block that arrives -> the global shape along the axes of its rule; blocks of dims that are not in
    `known` are equally long. Raises ShapeError if this block cannot be one.
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
        hint = f"{rows} rows of '{dim}', not {want} of {length}"
        if source := next((each.source for each in known if each.name == dim.name), ""):
            hint += f" as by {source}: it arrives under another layout, or {dim.name!r} names another dim"
            hint += " there, and this one needs a name of its own"
        raise ShapeError(
            f"the block has shape {local_shape}, not {expected}", text=rule.text, hint=hint
        )
    return shape


def known_inside(
    rule: ActivationRule,
    shape: Sequence[int],
    rows: Sequence[int],
    outside: Iterable[KnownDim],
    where: str,
) -> tuple[KnownDim, ...]:
    """The dims with a name inside a module, where `...` has none that rules could share. shape: global shape
    on arrival; rows: shape of the block after the rule; where: the tensor that the rule is for.
    """
    dims = {dim.name: dim for dim in outside}
    lengths = dict(zip(rule.src.resolved(len(shape)).names, shape, strict=True))
    for dim, n in zip(rule.dst.resolved(len(shape)).dims, rows, strict=True):
        if dim.name in rule.dst.names:
            before = dims.get(dim.name, KnownDim(dim.name, frozenset(), lengths[dim.name], n))
            axes = frozenset(dim.axes) | before.axes - set(rule.axes)
            source = f"'{rule.text}' of the {where}"
            dims[dim.name] = KnownDim(dim.name, axes, before.length, n, source)
    return tuple(dims.values())


def dims_of_parameter(sharding: Sharding, device: int) -> tuple[KnownDim, ...]:
    """The sharded dims of a parameter, which its module's output may have, too."""
    rows = zip(sharding.layout.dims, sharding.shape, sharding.local_shape(device), strict=True)
    return tuple(
        KnownDim(dim.name, frozenset(dim.axes), n, own) for dim, n, own in rows if dim.axes
    )


class ParameterUse(NamedTuple):
    """A parameter in one module: its layouts in storage and in use, the axes along which inputs vary, and
    those along which each process uses all of it, by its rule.
    """

    stored: Layout
    used: Layout
    varying: frozenset[str]
    whole: frozenset[str] = frozenset()

    @property
    def copied(self) -> frozenset[str]:
        """Axes over which the gradient of this use is summed."""
        return self.varying - set(self.used.axes)

    @property
    def unsummed(self) -> frozenset[str]:
        """Axes that shard the parameter where activations are equal: the gradients of these would differ."""
        return frozenset(self.used.axes) - self.varying

    def move(self, later: frozenset[str]) -> tuple[Layout, Layout] | None:
        """The layouts in storage and in use, or None if nothing moves. later: axes of sums afterwards."""
        now = tuple(sorted(self.copied - later))
        used = replace(self.used, tags=(*self.used.tags, ("copy", now)) if now else self.used.tags)
        return None if used == self.stored else (self.stored, used)


def use_of(text: str, ndim: int, mesh: Mesh, varying: frozenset[str]) -> ParameterUse:
    """Parse `"stored -> used"`, or one layout for both, for a parameter. Raises NotationError, ShapeError.
    `copy` and `mean` on the right are about `varying`: activations do not vary along an axis of `mean`.
    """
    rule = rule_of(text, mesh)
    for layout, tags in ((rule.src, set()), (rule.dst, {"sum", "copy", "mean"})):
        if {kind for kind, _ in layout.tags} - tags or any(dim.overlap for dim in layout.dims):
            what = f"a parameter is stored and used as values, not as '{layout}'"
            hint = "shards, as in 'o/dp i -> o i', and a sum on the right; the axes over which its "
            raise NotationError(what, text=text, hint=f"{hint}gradient is summed are derived")
    whole = frozenset(rule.dst.tagged("copy"))
    if equal := whole - varying:
        what = f"activations do not differ along '{min(equal)}', where the rule says that copies do"
        hint = "leave copy out: it says that a parameter is meant to be whole"
        raise NotationError(what, text=text, hint=hint)
    if ELLIPSIS not in rule.src.names and len(rule.src.dims) != ndim:
        hint = "'...' is any number of dims"
        raise ShapeError(
            f"{len(rule.src.dims)} dims, the parameter has {ndim}", text=text, hint=hint
        )
    used = replace(rule.dst, tags=tuple(tag for tag in rule.dst.tags if tag[0] == "sum"))
    varying -= {*rule.dst.tagged("mean")}
    return ParameterUse(rule.src.resolved(ndim), used.resolved(ndim), varying, whole)


def repeated(
    shape: Sequence[int], beside: Iterable[tuple[ParameterUse, Sequence[int]]]
) -> set[str]:
    """Axes that shard a parameter with more dims, some of them of `shape`: a weight beside a bias."""
    larger = [(use, iter(lengths)) for use, lengths in beside if len(lengths) > len(shape)]
    around = [use for use, left in larger if all(n in left for n in shape)]  # in this order
    return {axis for use in around for dim in use.used.dims for axis in dim.axes}


def summed_later(uses: Sequence[ParameterUse]) -> frozenset[str]:
    """The axes over which the gradient is summed once, after all uses: they do not shard the parameter."""
    return frozenset.intersection(*(use.copied for use in uses)) - set(uses[0].stored.axes)


def written(layout: Layout | str) -> str:
    """A layout with `...` for dims that have no name of their own."""
    return re.sub(r"\b_0( _\d+)*", "...", str(layout))
