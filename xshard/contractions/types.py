"""The type of a local contraction: the layout of the result if every device contracts its own blocks.

Every mesh axis plays one part of this table, and the parts do not meet:

    part of the axis        operands that have the dim    other operands    result
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
    text = parsed.text
    wanted = parsed.result
    for layout in (*parsed.operands, wanted):
        check_axes(layout, mesh, text)
    result = local_type(parsed.operands, wanted.names, text)
    if wanted.axes and result != wanted:
        what = f"the local contraction gives '{result}'"
        span = text_spans(text).layouts[-1]
        hint = f"write that, or move it afterwards: {result} -> {wanted}"
        raise PlanError(what, text=text, span=span, hint=hint)
    return result


def local_type(operands: Sequence[Layout], names: Sequence[str], text: str) -> Layout:
    """The layouts of the operands and the dims of the result -> its layout. Raises PlanError."""
    cuts = _cuts(operands, text)
    tags: list[tuple[str, tuple[str, ...]]] = []
    for axis in dict.fromkeys(axis for layout in operands for axis in layout.axes):
        cut = [dim.name for dim in cuts.values() if axis in dim.axes]
        parts = [_part(layout, axis) for layout in operands]
        kinds: list[str | None] = [part for part in parts if part in ("sum", "mean")]
        if len(cut) > 1:
            what = f"cuts {cut[0]!r} and {cut[1]!r}"
            wrong = [i for i, layout in enumerate(operands) if cut[1] in layout.names]
        elif cut:
            kinds = [] if cut[0] in names else ["sum"]
            what = f"cuts {cut[0]!r}, which this operand lacks"
            lacks = [i for i, layout in enumerate(operands) if cut[0] not in layout.names]
            wrong = [i for i in lacks if parts[i] != "copy"]
        elif kinds:
            what = "holds addends of another operand"
            first = parts.index(kinds[0])
            wrong = [i for i, part in enumerate(parts) if i != first and part != "copy"]
        else:
            kinds = ["copy"]
            what = "holds copies of another operand, of this one replicas"
            wrong = [i for i, part in enumerate(parts) if part is None]
        if wrong:
            raise _illegal(f"mesh axis {axis!r} {what}", operands, wrong[0], axis, text)
        tags += [(kind, (axis,)) for kind in kinds[:1] if kind]
    return Layout(tuple(cuts[name] for name in names), tuple(tags))


def _cuts(operands: Sequence[Layout], text: str) -> dict[str, Dim]:
    """Every dim as all operands that have it shard it."""
    dims: dict[str, Dim] = {}
    for i, layout in enumerate(operands):
        for dim in layout.dims:
            other = dims.setdefault(dim.name, dim)
            if other != dim:
                raise _illegal(
                    f"'{other}' in one operand is '{dim}' in another", operands, i, other, text
                )
    return dims


def _part(layout: Layout, axis: str) -> str | None:
    """The tag of an axis, "cut", or None for replicas."""
    return next(
        (kind for kind, axes in layout.tags if axis in axes), "cut" if axis in layout.axes else None
    )


def _illegal(
    what: str, operands: Sequence[Layout], i: int, wanted: Dim | str, text: str
) -> PlanError:
    """The error about operand `i`. wanted: the legal dim, or the axis along which copies are legal."""
    layout = operands[i]
    axes = wanted.axes if isinstance(wanted, Dim) else (wanted,)
    dims = [
        replace(d, shards=tuple(s for s in d.shards if not set(s.axes) & set(axes)))
        for d in layout.dims
    ]
    tags = [(kind, tuple(a for a in tagged if a not in axes)) for kind, tagged in layout.tags]
    if isinstance(wanted, Dim):
        dims[layout.names.index(wanted.name)] = wanted
    else:
        tags.append(("copy", axes))
    hint = f"move it first: {layout} -> {Layout(tuple(dims), tuple(tags))}"
    return PlanError(what, text=text, span=text_spans(text).layouts[i], hint=hint)
