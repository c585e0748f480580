"""Whole models: the sums of gradients that follow from layouts of activations and parameters.

By the table of `contractions.types`, the gradient of a parameter is summed over the axes along which
activations vary (they shard, copy or sum where these arrive) and that do not shard the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes, factored, parse_expression
from xshard.layout.lengths import global_shape
from xshard.notation.parser import ARROW, ELLIPSIS, ROUTED, Dim, Shard
from xshard.signatures import short_repr


class ActivationRule(NamedTuple):
    """A rule for one array: its layouts before and after a move; other axes are left alone.

    routed_axes: axes along which rows go where values say; they come back before the output.
    """

    src: Layout
    dst: Layout
    text: str
    routed_axes: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        return self.src != self.dst

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rule names."""
        return tuple(dict.fromkeys((*self.src.axes, *self.dst.axes)))


def rule_of(text: Any, mesh: Mesh, routes: bool = False) -> ActivationRule:
    """Parse a rule: `"layout -> layout"`, or one layout for both sides, so that nothing moves.

    routes: allow `"t/ep c -> t/to(ep) c"`, by which rows go to the devices that their values name.
    Raises NotationError.
    """
    if not isinstance(text, str):
        raise NotationError(
            f"a layout is text, not {short_repr(text)}",
            hint="'o/tp i' shards the first of two dims over tp, as Shard(0) along tp does",
        )
    rule = _rule_of(text, mesh)
    if rule.routed_axes and not routes:
        raise NotationError(
            "'to' is for rows that go where values say",
            text=text,
            hint="a rule for the input of experts may say so, as in 't/ep c -> t/to(ep) c'",
        )
    return rule


@layout_cache(maxsize=4096)
def _rule_of(text: str, mesh: Mesh) -> ActivationRule:
    """Parse the text of a rule for an activation: "layout -> layout", or one layout for both sides.

    `b s -> b s/tp` shards s over tp. `t/ep c -> t/to(ep) c` is a route: rows of t go to other devices of
    ep, to experts that their values name. In the result its layout is the same on both sides, `t/ep c`,
    and ep is in `routed_axes`, which is () for all other rules.
    """
    if ARROW in text:
        src, dst = parse_expression(text)
    else:
        src = dst = Layout.parse(text)
    # Errors mark the axis in the rule's own text.
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    # `to` is allowed only on the right, in the first dim, and once.
    routed = _routed_shards(dst.dims[:1])
    routed_elsewhere = _routed_shards((*src.dims, *dst.dims[1:]))
    # The right side without its route, which has to be the left side: `t/to(ep) c` -> `t/ep c`.
    plain = replace(dst, dims=tuple(map(_without_routes, dst.dims)))
    if routed_elsewhere or len(routed) > 1 or (routed and src != plain):
        raise NotationError(
            "'to' moves rows that are sharded",
            text=text,
            hint="as in 't/ep c -> t/to(ep) c': rows of the first dim, "
            "sharded over the same axes on the left",
        )
    return ActivationRule(src, plain, text, routed[0].axes if routed else ())


def _routed_shards(dims: Iterable[Dim]) -> list[Shard]:
    """Return the shards of some dims whose rows go where values say."""
    routed: list[Shard] = []
    for dim in dims:
        routed += [shard for shard in dim.shards if shard.order == ROUTED]
    return routed


def _without_routes(dim: Dim) -> Dim:
    """Return a dim with plain shards in place of routes: `t/to(ep)` -> `t/ep`."""
    shards = [Shard(shard.axes) if shard.order == ROUTED else shard for shard in dim.shards]
    return replace(dim, shards=tuple(shards))


def varying_axes(outside: Iterable[str], rules: Sequence[ActivationRule]) -> frozenset[str]:
    """Return the axes along which activations differ inside a module.

    Those of `outside` it, but for the axes that rules name: along these, as the rules say.
    """
    named_axes: set[str] = set()
    inner_axes: set[str] = set()
    for rule in rules:
        named_axes.update(rule.axes)
        inner_axes.update(rule.dst.axes)
    return frozenset(outside).difference(named_axes).union(inner_axes)


def with_outer_axes(layout: Layout, named_axes: Collection[str], outside: Layout) -> Layout:
    """Add to a rule's layout the shards and tags of mesh axes that the rule does not name.

    A rule is about some mesh axes only; all others stay as they are around the module. With the layout
    `b s/tp` of a rule that names tp, and `b/dp s` outside, the array is `b/dp s/tp` in full. Dims are
    matched by name.

    named_axes: those that the rule names. outside: the full layout around the module.
    """
    # `outside` without the named axes. `factored` is for meshes whose axes are divided: it replaces each
    # axis by its parts. Here a named axis has no parts, and so goes; others are their own part.
    kept_axes = {axis: () if axis in named_axes else (axis,) for axis in outside.axes}
    outer_layout = factored(outside, kept_axes)
    shards_outside = {dim.name: dim.shards for dim in outer_layout.dims}
    dims = []
    for dim in layout.dims:
        # The rule sees blocks of what is outside, so its shards are the inner ones.
        dims.append(replace(dim, shards=(*shards_outside.get(dim.name, ()), *dim.shards)))
    return Layout(tuple(dims), (*outer_layout.tags, *layout.tags))


def layout_inside(rule: ActivationRule, outside: Layout) -> Layout:
    """Return all dims that have names inside a module, and the tags of activations there."""
    inside_layout = with_outer_axes(rule.dst, rule.axes, outside)
    unsharded = outside.unsharded
    # Dims that the rule does not name keep the shards of other axes.
    outside_layout = with_outer_axes(unsharded, rule.axes, outside)
    # About the dims that it names, which come last, the rule decides.
    dims_by_name = {dim.name: dim for dim in (*outside_layout.dims, *inside_layout.dims)}
    dims_by_name.pop(ELLIPSIS, None)  # stands for dims without a name
    return Layout(tuple(dims_by_name.values()), inside_layout.tags)


class KnownDim(NamedTuple):
    """A dim inside a module: its axes, its global length and this block's, and the rule that says so."""

    name: str
    axes: frozenset[str]
    length: int
    local_length: int
    source: str = ""


def arriving_shape(
    rule: ActivationRule,
    mesh: Mesh,
    device: int,
    local_shape: tuple[int, ...],
    known_dims: Iterable[KnownDim],
) -> tuple[int, ...]:
    """Infer the global shape of an activation from one device's block, as far as its rule's axes go.

    A block (2, 8) that arrives as `b/dp c`, with 4 devices along dp, is of an array (8, 8). Axes that the
    rule does not name are ignored: along them the block counts as the whole. If tp shards c further
    around the module, c has the length 8 here all the same.

    Args:
        rule: The rule; its left side is the layout on arrival.
        mesh: The mesh.
        device: The position of this device.
        local_shape: The shape of its block.
        known_dims: Dims whose lengths are known, by name, for blocks that may be uneven. Blocks of all other
            dims are taken to be equally long.

    Raises:
        ShapeError: No array has such a block on this device.
    """
    layout = rule.src.resolved(len(local_shape))
    named_axes = set(rule.axes)
    lengths: dict[str, int] = {}  # by name of the dim, as far as the rule's axes go
    for dim in known_dims:
        if dim.axes.isdisjoint(named_axes):  # to the rule, the block is the whole
            lengths[dim.name] = dim.local_length
        elif dim.axes <= named_axes:
            lengths[dim.name] = dim.length
        # Else only some of its axes are named, and neither length is the one that the rule means.
    # A check in reverse: this device's block of an array of that shape has to be as long.
    shape = global_shape(layout, mesh, local_shape, rule.text, lengths)
    expected = Sharding(layout, mesh, shape).local_shape(device)
    if expected != local_shape:
        raise ShapeError(
            f"the block has shape {local_shape}, not {expected}",
            text=rule.text,
            hint=_misfit_hint(layout, shape, local_shape, expected, known_dims),
        )
    return shape


def _misfit_hint(
    layout: Layout,
    shape: Sequence[int],
    local_shape: Sequence[int],
    expected: Sequence[int],
    known_dims: Iterable[KnownDim],
) -> str:
    """Explain which dim of a block has another length than expected, and where that came from.

    "3 rows of 'b/dp', not 2 of 8 as by 'b/dp c' of the input: ..." for a block (3, 8) where (2, 8) is
    expected of the array (8, 8). Only the first such dim is told.

    layout: of the array on arrival. shape: of the whole array. known_dims: those that other rules have fixed.
    """
    # The first wrong dim. There is one: the caller has compared the shapes.
    dim_index = next(
        dim_index for dim_index, rows in enumerate(local_shape) if rows != expected[dim_index]
    )
    dim = layout.dims[dim_index]
    hint = (
        f"{local_shape[dim_index]} rows of '{dim}', not {expected[dim_index]} of {shape[dim_index]}"
    )
    for known_dim in known_dims:
        if known_dim.name == dim.name and known_dim.source:
            hint += f" as by {known_dim.source}: it arrives under another layout, or {dim.name!r} "
            hint += "names another dim there, and this one needs a name of its own"
            break
    return hint


def known_inside(
    rule: ActivationRule,
    shape: Sequence[int],
    local_shape: Sequence[int],
    outside: Iterable[KnownDim],
    tensor_text: str,
) -> tuple[KnownDim, ...]:
    """Collect what is known about dims by name once a rule has moved a module's input.

    Rules inside the module may use the same names. Of each dim, the mesh axes that shard it are known, its
    global length, and the length of this device's block. After `b s -> b s/tp` on 2 devices, with shape
    (8, 16), s is sharded over tp, with length 16 and a block of 8. Dims of `...` have no names.

    Args:
        rule: The rule.
        shape: The global shape on arrival.
        local_shape: The shape of this device's block after the rule.
        outside: What is known outside the module; the rule's dims replace those of the same name.
        tensor_text: The tensor that the rule is for, in words, for errors.
    """
    known_by_name = {dim.name: dim for dim in outside}
    lengths = dict(zip(rule.src.resolved(len(shape)).names, shape, strict=True))
    for dim, local_length in zip(rule.dst.resolved(len(shape)).dims, local_shape, strict=True):
        if dim.name not in rule.dst.names:
            continue  # a dim of `...`
        axes = frozenset(dim.axes)
        length = lengths[dim.name]
        if dim.name in known_by_name:
            # Axes that the rule does not name may shard the dim too, and to the rule a block along
            # them is the whole. So these axes and the global length are those known outside.
            axes |= known_by_name[dim.name].axes.difference(rule.axes)
            length = known_by_name[dim.name].length
        source = f"'{rule.text}' of the {tensor_text}"
        known_by_name[dim.name] = KnownDim(dim.name, axes, length, local_length, source)
    return tuple(known_by_name.values())


def dims_of_parameter(sharding: Sharding, device: int) -> tuple[KnownDim, ...]:
    """Return the sharded dims of a parameter, which its module's output may have, too."""
    local_shape = sharding.local_shape(device)
    dims = []
    for dim, length, rows in zip(sharding.layout.dims, sharding.shape, local_shape, strict=True):
        if dim.axes:  # an unsharded one says nothing that a block does not
            # As rules name them: a `spread` stands for sub-axes.
            axes = frozenset(map(sharding.mesh.origin, dim.axes))
            dims.append(KnownDim(dim.name, axes, length, rows))
    return tuple(dims)


class ParameterUse(NamedTuple):
    """A parameter in one module.

    stored, used: its layouts in storage and in use. varying_axes: the axes along which the module's inputs
    differ. whole_axes: those along which each process uses all of it, by its rule.
    """

    stored: Layout
    used: Layout
    varying_axes: frozenset[str]
    whole_axes: frozenset[str] = frozenset()

    @property
    def summed_axes(self) -> frozenset[str]:
        """Axes over which the gradient of this use is summed."""
        # Devices that share a unit use it in different ways: it is copied along what cuts nothing.
        return self.varying_axes - _cutting_axes(self.used)

    @property
    def unsummed_axes(self) -> frozenset[str]:
        """Axes that shard the parameter where activations are equal: the gradients of these would differ."""
        return frozenset(self.used.axes) - self.varying_axes

    def move(self, summed_later: frozenset[str]) -> tuple[Layout, Layout] | None:
        """Return the layouts in storage and in use, or None if nothing moves.

        summed_later: axes summed after all uses.
        A parameter is used as copies along the other axes: their adjoint is the sum of gradients.
        """
        summed_now = tuple(sorted(self.summed_axes - summed_later))
        used = self.used
        if summed_now:
            used = replace(used, tags=(*used.tags, ("copy", summed_now)))
        return None if used == self.stored else (self.stored, used)


def use_of(text: str, ndim: int, mesh: Mesh, varying_axes: frozenset[str]) -> ParameterUse:
    """Parse a parameter's rule: `"stored -> used"`, or one layout for both.

    `o/tp/dp i -> o/tp i` is stored in shards over tp and dp, and gathered over dp to be used (FSDP). Its
    gradient is summed over `varying_axes`, along which devices have different activations. Tags on the
    right say more about an axis: with `| mean(dp)` activations are the same along dp, and nothing is
    summed there; `| copy(dp)` only says that they do differ along dp, which is checked.

    Args:
        text: The rule.
        ndim: The number of dims of the parameter.
        mesh: The mesh.
        varying_axes: Axes along which activations around the module differ.

    Raises:
        NotationError: The rule is malformed, or its copies are along an axis that does not vary.
        ShapeError: The parameter has another number of dims.
    """
    rule = rule_of(text, mesh)
    # Partial sums, and rows with halos, are no values that could be stored.
    _check_values(rule.src, (), text)
    _check_values(rule.dst, ("sum", "copy", "mean"), text)
    # `copy` moves nothing here: with it a user states that the parameter is whole on each process, and
    # used with different activations.
    whole_axes = frozenset(rule.dst.tagged("copy"))
    equal_axes = whole_axes - varying_axes  # along these, activations are equal
    if equal_axes:
        raise NotationError(
            f"activations do not differ along '{min(equal_axes)}', where the rule says that copies do",
            text=text,
            hint="leave copy out: it says that a parameter is meant to be whole",
        )
    if ELLIPSIS not in rule.src.names and len(rule.src.dims) != ndim:
        raise ShapeError(
            f"{len(rule.src.dims)} dims, the parameter has {ndim}",
            text=text,
            hint="'...' is any number of dims; a rule for its name comes before the others",
        )
    # In the layout in use only sums are left, in which devices hold addends of the parameter: `copy`
    # and `mean` speak of gradients, and have become `whole_axes` and `varying_axes`.
    sums = tuple(tag for tag in rule.dst.tags if tag[0] == "sum")
    used = replace(rule.dst, tags=sums)
    return ParameterUse(
        stored=rule.src.resolved(ndim),
        used=used.resolved(ndim),
        varying_axes=varying_axes.difference(rule.dst.tagged("mean")),
        whole_axes=whole_axes,
    )


def _check_values(layout: Layout, allowed_tags: Collection[str], text: str) -> None:
    """Raise NotationError for a layout of a parameter with an overlap, or with another tag."""
    has_other_tag = any(tag not in allowed_tags for tag, _ in layout.tags)
    if has_other_tag or layout.has_overlap:
        reason = f"a parameter is stored and used as values, not as '{layout}'"
        hint = "shards, as in 'o/dp i -> o i', and a sum on the right; the axes over which its "
        hint += "gradient is summed are derived"
        raise NotationError(reason, text=text, hint=hint)


def axes_of_larger_parameters(
    shape: Sequence[int], beside: Iterable[tuple[ParameterUse, Sequence[int]]]
) -> set[str]:
    """Return the axes that shard a larger parameter of the same module, with all dims of `shape`.

    A weight `[o, i]` over tp beside a bias `[o]` -> {"tp"}: the bias may be added on each device once more.
    beside: the other parameters, with their shapes.
    """
    axes: set[str] = set()
    for use, other_shape in beside:
        if len(other_shape) > len(shape) and _is_subsequence(shape, other_shape):
            for dim in use.used.dims:
                axes.update(dim.axes)
    return axes


def _is_subsequence(lengths: Sequence[int], other_lengths: Sequence[int]) -> bool:
    """Return whether all lengths are among others, in this order: (4, 2) in (4, 3, 2)."""
    unmatched = iter(other_lengths)
    # `in` takes all up to the length that it finds.
    return all(length in unmatched for length in lengths)


def axes_summed_after_all_uses(uses: Sequence[ParameterUse]) -> frozenset[str]:
    """Return the axes over which the gradient is summed once, after all uses of a parameter.

    Those over which all uses sum it, and that do not shard it where it is stored.
    """
    of_all_uses = uses[0].summed_axes
    # Over an axis that some use does not sum, a sum of all uses would count that one too often.
    for use in uses[1:]:
        of_all_uses &= use.summed_axes
    return of_all_uses - _cutting_axes(uses[0].stored)


def uncut_axes(sharding: Sharding, axes: Collection[str]) -> tuple[str, ...]:
    """Return those of some axes that do not cut an array: of one that spreads units, the sub-axis."""
    mesh = sharding.mesh
    uncut = [axis for axis in mesh.axes if axis not in sharding.layout.sharding_axes]
    return tuple(axis for axis in uncut if mesh.origin(axis) in axes)


def _cutting_axes(layout: Layout) -> set[str]:
    """Return the axes along which no two devices share a unit."""
    return set(layout.axes).difference(layout.spread_axes)


def layout_text(layout: Layout | str) -> str:
    """Return the text of a layout, with `...` for dims that have no name of their own."""
    return re.sub(r"\b_0( _\d+)*", "...", str(layout))
