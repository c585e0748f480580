"""The type of a local contraction: the layout of the result if every device contracts its own blocks.

Every mesh axis plays one part of this table, and the parts do not meet:

    part of the axis        operands that have the dim    other operands    result
    cuts a dim it keeps     the same cut                  copy              the same cut
    cuts a dim it sums      the same cut                  copy              sum
    sum in one operand      that one: sum                 copy              sum
    copies                  copy                          copy              copy
    replicas                unnamed                       unnamed           unnamed

Devices use an operand that lacks the dim for different results, so it is a copy: a replica would get the
gradient of one device. The table is closed under differentiation: a cotangent under the dual of the result,
contracted with the other operands, is under the dual of the operand that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xshard.contractions.expression import contraction
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh
from xshard.layout.layout import check_axes
from xshard.layout.mesh import check_mesh
from xshard.notation.parser import Dim, text_spans


def einsum_type(expression: str, mesh: Mesh) -> Layout:
    """`"layout, layout -> dims"` -> the layout of the result, if every device contracts its own blocks.

    A layout on the right has to be that layout; dims alone, in any order, say which ones are not summed.
    Raises NotationError, and PlanError for an axis that does not fit the table: the error proposes a move.

    >>> str(einsum_type("b s d | copy(tp), d f/tp -> b s f", Mesh(tp=4)))
    'b s f/tp'
    >>> str(einsum_type("b s f/tp, f/tp d -> b s d", Mesh(tp=4)))
    'b s d | sum(tp)'
    """
    check_mesh(mesh)
    parsed = contraction(expression)
    text, wanted = parsed.text, parsed.result
    for layout in (*parsed.operands, wanted):
        check_axes(layout, mesh, text)
    result = local_type(parsed.operands, wanted.names, text)
    if wanted.axes and result != wanted:
        what, span = f"the local contraction gives '{result}'", text_spans(text).layouts[-1]
        hint = f"write that, or move it afterwards: {result} -> {wanted}"
        raise PlanError(what, text=text, span=span, hint=hint)
    return result


def local_type(operands: Sequence[Layout], names: Sequence[str], text: str) -> Layout:
    """The layouts of the operands and the dims of the result -> its layout. Raises PlanError."""
    cuts = _cuts(operands, text)
    tags: list[tuple[str, tuple[str, ...]]] = []
    for axis in dict.fromkeys(axis for layout in operands for axis in layout.axes):
        cut = [dim for dim in cuts.values() if axis in dim.axes]
        if len(cut) > 1:
            i = next(i for i, layout in enumerate(operands) if cut[1].name in layout.names)
            what = f"mesh axis {axis!r} cuts {cut[0].name!r} and {cut[1].name!r}"
            raise _illegal(what, operands, i, axis, text)
        parts = [_part(layout, axis) for layout in operands]
        kinds = [part for part in parts if part in ("sum", "mean")]
        if cut:
            for i, layout in enumerate(operands):
                if cut[0].name not in layout.names and parts[i] != "copy":
                    what = f"mesh axis {axis!r} cuts {cut[0].name!r}, which this operand lacks"
                    raise _illegal(what, operands, i, axis, text)
            kind = None if cut[0].name in names else "sum"
        elif kinds:
            first = parts.index(kinds[0])
            for i, part in enumerate(parts):
                if i != first and part != "copy":
                    what = f"mesh axis {axis!r} holds addends of another operand"
                    raise _illegal(what, operands, i, axis, text)
            kind = kinds[0]
        else:
            if None in parts:
                what = f"mesh axis {axis!r} holds copies of another operand, of this one replicas"
                raise _illegal(what, operands, parts.index(None), axis, text)
            kind = "copy"
        if kind is not None:
            tags.append((kind, (axis,)))
    return Layout(tuple(cuts[name] for name in names), tuple(tags))


def _cuts(operands: Sequence[Layout], text: str) -> dict[str, Dim]:
    """Every dim as all operands that have it shard it."""
    dims: dict[str, Dim] = {}
    for i, layout in enumerate(operands):
        for dim in layout.dims:
            other = dims.setdefault(dim.name, dim)
            if other != dim:
                raise _illegal(f"'{other}' in one operand is '{dim}' in another", operands, i, other, text)
    return dims


def _part(layout: Layout, axis: str) -> str | None:
    """The tag of an axis, "cut", or None for replicas."""
    tag = next((kind for kind, axes in layout.tags if axis in axes), None)
    return "cut" if tag is None and axis in layout.axes else tag


def _illegal(what: str, operands: Sequence[Layout], i: int, wanted: Dim | str, text: str) -> PlanError:
    """The error about operand `i`. wanted: the legal dim, or the axis along which copies are legal."""
    layout = operands[i]
    axes = wanted.axes if isinstance(wanted, Dim) else (wanted,)
    dims = tuple(
        wanted
        if isinstance(wanted, Dim) and dim.name == wanted.name
        else replace(dim, shards=tuple(s for s in dim.shards if not set(s.axes) & set(axes)))
        for dim in layout.dims
    )
    tags = tuple((kind, tuple(a for a in tagged if a not in axes)) for kind, tagged in layout.tags)
    legal = Layout(dims, (*tags, ("copy", axes)) if isinstance(wanted, str) else tags)
    return PlanError(
        what, text=text, span=text_spans(text).layouts[i], hint=f"move it first: {layout} -> {legal}"
    )
