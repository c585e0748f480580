"""What the bridges take as an expression, and how their named operations are spelt as one.

Both bridges have the same operations with the same arguments, so their text is read and made
here, once, and the global shape inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xshard.errors import ShapeError, XshardError
from xshard.held import length_of_equal_blocks
from xshard.layout import Layout, parse_expression
from xshard.mesh import Mesh
from xshard.notation import ELLIPSIS, marked, spans
from xshard.overlap import Halo
from xshard.overlap_grammar import boundaries
from xshard.plan import Plan

Expression = str | tuple[Layout | str, Layout | str] | Plan
Axes = str | tuple[str, ...]
Rows = int | Sequence[int]  # one number for every part, or one per part
HaloWidth = int | tuple[Rows, Rows]  # rows at both ends, or before and after


def sides(expression: Expression) -> tuple[Layout, Layout, str]:
    """Both layouts of an expression, and the text that errors mark."""
    if isinstance(expression, str):
        return *parse_expression(expression), expression
    if isinstance(expression, Plan):
        src, dst = expression.src, expression.dst
    else:
        src, dst = (Layout.parse(side) if isinstance(side, str) else side for side in expression)
    return src, dst, f"{src} -> {dst}"


def whole_shape(layout: Layout, mesh: Mesh, local_shape: Sequence[int], text: str) -> tuple[int, ...]:
    """The global shape of which every block is as large as this one. Raises ShapeError where none is."""
    with marked(text):
        found = layout.resolved(len(local_shape)).dims
    lengths = []
    for dim, rows in zip(found, local_shape, strict=True):
        length = length_of_equal_blocks(dim, rows, mesh.size(*dim.axes))
        if length is None:
            raise ShapeError(
                f"{rows} rows do not say how long dim {dim.name!r} is",
                text=text,
                hint="pass shape= (the global shape)",
            )
        lengths.append(length)
    return tuple(lengths)


def check_block(
    what: str,
    local_shape: tuple[int, ...],
    expected: tuple[int, ...],
    names: Sequence[str],
    text: str,
    hint: str,
    *,
    inferred: bool,
) -> None:
    """Raise ShapeError, at the first dim that is wrong, where a block has not the shape of its layout.

    what: whose block it is. names: of its dims. inferred: whether its array's shape was told from it.
    """
    if local_shape == expected:
        return
    wrong = [n for n, have, want in zip(names, local_shape, expected, strict=False) if have != want]
    where = dict(reversed(spans(text).dims))  # the left side's, which come first
    raise ShapeError(
        f"{what} has shape {local_shape}, not {expected}",
        text=text,
        span=where.get(wrong[0], where.get(ELLIPSIS)) if wrong else None,
        hint=hint + ("; where blocks differ in size, pass shape= (the global shape)" if inferred else ""),
    )


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """The dims of a block as text, some of them cut. Raises ShapeError for a dim it does not have.

    >>> dims((4, 2), {-1: "tp"})
    'd0 d1/tp'
    """
    names = [f"d{d}" for d in range(len(shape))]
    for dim, cut in (shards or {}).items():
        if not -len(shape) <= dim < len(shape):
            raise ShapeError(f"no dim {dim} in a block of shape {tuple(shape)}")
        names[dim] += f"/{cut}"
    return " ".join(names) or "()"


def shard(axis: Axes, order: str = "block") -> str:
    """A cut over an axis, or over several as one."""
    if order != "block":
        return f"{order}({_names(axis)})"
    return axis if isinstance(axis, str) else f"({_names(axis)})"


def halo(axis: Axes, width: HaloWidth, boundary: str) -> str:
    """A cut over an axis whose blocks are widened: by as many rows at both ends, or before and after.

    >>> halo("sp", (1, (2, 0)), "periodic")
    'sp:halo(1,[2,0],periodic)'
    """
    lo, hi = (width, width) if isinstance(width, int) else width
    return f"{shard(axis)}:{Halo(_rows(lo), _rows(hi), *boundaries(boundary))}"


def whole(axis: Axes, grad: str) -> str:
    """The tag of whole values: copies, whose gradients add up, or replicas, which have none."""
    if grad not in ("sum", "replicated"):
        raise XshardError(
            f"grad={grad!r}", hint='"sum": gradients add up along the axis; "replicated": they are equal'
        )
    return tag("copy", axis) if grad == "sum" else ""


def tag(kind: str, axis: Axes) -> str:
    """A tag with the bar before it."""
    return f" | {kind}({_names(axis)})"


def _rows(width: Rows) -> int | tuple[int, ...]:
    return width if isinstance(width, int) else tuple(width)


def _names(axis: Axes) -> str:
    return axis if isinstance(axis, str) else ",".join(axis)
