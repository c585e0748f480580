"""The type of a local contraction: the layout of the result if every device contracts its own blocks.

Every mesh axis has one role of this table, and operands do not mix two of them:

    role of the axis        operands that have the dim    other operands    result
    cuts a dim it keeps     the same cut                  copy              the same cut
    cuts a dim it sums      the same cut                  copy              sum
    sum in one operand      that one: sum                 copy              sum
    copies                  copy                          copy              copy
    replicas                unnamed                       unnamed           unnamed

An operand that lacks the dim is a copy, as devices use it for different results: a replica would get the
gradient of one device. A cotangent under the dual of the result gives the dual of the operand left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from xshard.contractions.expression import contraction
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh
from xshard.layout.layout import check_axes
from xshard.layout.mesh import check_mesh
from xshard.notation.parser import Dim, text_spans
from xshard.steps.base import with_tag, without_tags


def einsum_type(expression: str, mesh: Mesh) -> Layout:
    """Return the layout of the result, if every device contracts its own blocks: nothing moves.

    Args:
        expression: `"layout, layout -> dims"` says which dims are not summed, in any order;
            `"layout, layout -> layout"` also what the result's layout has to be.
        mesh: The mesh whose axes the layouts name.

    Returns:
        The layout of the result, with the tags that follow.

    Raises:
        NotationError: The text is wrong, marked with a caret.
        PlanError: A mesh axis does not fit the table of this module; the error proposes a move.

    Examples:
        >>> str(einsum_type("b s d | copy(tp), d f/tp -> b s f", Mesh(tp=4)))
        'b s f/tp'
        >>> str(einsum_type("b s f/tp, f/tp d -> b s d", Mesh(tp=4)))
        'b s d | sum(tp)'
    """
    check_mesh(mesh)
    parsed = contraction(expression)
    text = parsed.text
    written_result = parsed.result
    for layout in (*parsed.operands, written_result):
        check_axes(layout, mesh, text)
        if layout.spread_axes:
            reason = f"lengths say which devices share units of '{layout}'"
            raise PlanError(reason, text=text, hint="xshard.plan(expression, mesh, sizes=...)")
    result = local_type(parsed.operands, written_result.names, text)
    if written_result.axes and result != written_result:
        reason = f"the local contraction gives '{result}'"
        span = text_spans(text).layouts[-1]
        hint = f"write that, or move it afterwards: {result} -> {written_result}"
        raise PlanError(reason, text=text, span=span, hint=hint)
    return result


def local_type(operands: Sequence[Layout], names: Sequence[str], text: str) -> Layout:
    """Return the layout of a contraction's result if each device contracts its own blocks.

    Operands `b s/tp` and `s/tp f` with names (b, f): `b f | sum(tp)`, since each
    device has an addend.

    names: the dims of the result; others are summed. text: the expression that errors mark. Raises
    PlanError if blocks do not fit together, as `b s` and `s/tp f` do not.
    """
    dims = _common_dims(operands, text)
    tags: list[tuple[str, tuple[str, ...]]] = []
    # In the order in which the text names them, so that errors are about the first.
    for axis in dict.fromkeys(chain.from_iterable(layout.axes for layout in operands)):
        role = _axis_role(axis, operands, list(dims.values()), names)
        if role.misfits:
            reason = f"mesh axis {axis!r} {role.reason}"
            raise _illegal(reason, operands, role.misfits[0], axis, text)
        if role.tag:
            tags.append((role.tag, (axis,)))
    return Layout(tuple(dims[name] for name in names), tuple(tags))


class AxisRole(NamedTuple):
    """What a mesh axis does in the result, and the operands in which it does not fit that.

    Attributes:
        tag: The tag that the axis has in the result; None if it shards one of its dims.
        misfits: The indices of the operands in which the axis would have to do something else.
        reason: Why these do not fit.
    """

    tag: str | None
    misfits: list[int]
    reason: str


def _axis_role(
    axis: str, operands: Sequence[Layout], dims: Sequence[Dim], result_names: Sequence[str]
) -> AxisRole:
    """Find what a mesh axis does in the result of a local contraction, and operands that forbid it.

    `b s/tp, s/tp f` without s in the result: a partial sum ("sum"). `b s, s f/tp` without copies of
    the first operand along tp: shards f, but operand 0 misfits, for it has to be `b s | copy(tp)`.

    Args:
        axis: The mesh axis, which does something in an operand at least.
        operands: The layouts of the operands.
        dims: The dims of all operands, each once, with their shards.
        result_names: The names of the result's dims.
    """
    tags = [_tag_in(layout, axis) for layout in operands]
    not_copies = [i for i, tag in enumerate(tags) if tag != "copy"]
    cut_names = [dim.name for dim in dims if axis in dim.axes]
    if len(cut_names) > 1:
        return _refuse_two_cuts(cut_names, operands)
    if len(cut_names) == 1:
        cut_name = cut_names[0]
        return AxisRole(
            # Of a dim that the result lacks, each device sums its own rows.
            tag=None if cut_name in result_names else "sum",
            # Operands without that dim have to be copies: each device uses them for other results.
            misfits=[i for i in not_copies if cut_name not in operands[i].names],
            reason=f"cuts {cut_name!r}, which this operand lacks",
        )
    for sum_index, tag in enumerate(tags):
        if tag in ("sum", "mean"):
            return AxisRole(
                tag=tag,
                # The product of two sums is no sum of products: all other operands have to be copies.
                misfits=[i for i in not_copies if i != sum_index],
                reason="holds addends of another operand",
            )
    # No operand is cut or a sum, so that at least one holds copies, each of which gets a gradient
    # of its own. Another operand with replicas, which must have equal gradients, would get unequal
    # ones.
    reason = "holds copies of another operand, of this one replicas"
    return AxisRole(tag="copy", misfits=not_copies, reason=reason)


def _refuse_two_cuts(cut_names: Sequence[str], operands: Sequence[Layout]) -> AxisRole:
    """Refuse an axis that cuts two dims: with `b/tp d, d f/tp` devices get the blocks of a diagonal."""
    first_name, second_name = cut_names[:2]
    misfits = [i for i, layout in enumerate(operands) if second_name in layout.names]
    reason = f"cuts {first_name!r} and {second_name!r}"
    return AxisRole(tag=None, misfits=misfits, reason=reason)


def _common_dims(operands: Sequence[Layout], text: str) -> dict[str, Dim]:
    """Return every dim by name. Raises PlanError unless all operands that have it shard it equally."""
    dims: dict[str, Dim] = {}
    for i, layout in enumerate(operands):
        for dim in layout.dims:
            first_dim = dims.setdefault(dim.name, dim)
            if first_dim != dim:
                reason = f"'{first_dim}' in one operand is '{dim}' in another"
                raise _illegal(reason, operands, i, first_dim, text)
    return dims


def _tag_in(layout: Layout, axis: str) -> str | None:
    """Return the tag that an axis has in a layout; None if it shards a dim or holds replicas."""
    for tag, axes in layout.tags:
        if axis in axes:
            return tag
    return None


def _illegal(
    reason: str, operands: Sequence[Layout], index: int, required: Dim | str, text: str
) -> PlanError:
    """Return the error about one operand, with a redistribution that makes it legal as its hint.

    Operand `b s` where tp shards f of the other one: "move it first: b s -> b s | copy(tp)".

    index: of the operand that does not fit. required: the dim as it has to be sharded, or the mesh
    axis along which the operand has to hold copies.
    """
    layout = operands[index]
    # In the proposed layout these axes first lose their dim or tag, and then get the required one.
    moved_axes = required.axes if isinstance(required, Dim) else (required,)
    dims = []
    for dim in layout.dims:
        shards = tuple(shard for shard in dim.shards if set(shard.axes).isdisjoint(moved_axes))
        dims.append(replace(dim, shards=shards))
    copies: tuple[str, ...] = ()
    if isinstance(required, Dim):
        dims[layout.names.index(required.name)] = required
    else:
        copies = moved_axes
    required_layout = replace(without_tags(layout, moved_axes), dims=tuple(dims))
    required_layout = with_tag(required_layout, "copy", copies)
    hint = f"move it first: {layout} -> {required_layout}"
    return PlanError(reason, text=text, span=text_spans(text).layouts[index], hint=hint)
