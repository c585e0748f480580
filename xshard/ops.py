"""The named operations of the bridges (all_gather, halo, ...) as text of expressions.

Decides how their arguments become dims, cuts and tags, once for both bridges. Knows no mesh, no plan and
no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xshard.errors import ShapeError, XshardError
from xshard.notation.overlap import Halo
from xshard.notation.overlap_parser import parse_boundaries

Axes = str | tuple[str, ...]
PartWidths = int | Sequence[int]  # the same number for every part, or one per part
HaloWidth = int | tuple[PartWidths, PartWidths]  # rows at both ends, or before and after


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """The dims of a block as text, some of them cut. Raises ShapeError for an unknown dim.

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
    """A cut over one axis, or over several axes taken as one, as text."""
    if order != "block":
        return f"{order}({_axis_names(axis)})"
    return axis if isinstance(axis, str) else f"({_axis_names(axis)})"


def halo(axis: Axes, width: HaloWidth, boundary: str) -> str:
    """A cut over an axis with blocks widened by `width` rows at both ends, or by (before, after), as text.

    >>> halo("sp", (1, (2, 0)), "periodic")
    'sp:halo(1,[2,0],periodic)'
    """
    lo, hi = (width, width) if isinstance(width, int) else width
    return f"{shard(axis)}:{Halo(_halo_width(lo), _halo_width(hi), *parse_boundaries(boundary))}"


def gradient_tag(axis: Axes, grad: str) -> str:
    """The tag of values that every device has: `copy` if their gradients are summed, none for replicas.

    Raises XshardError for an unknown `grad`.
    """
    if grad not in ("sum", "replicated"):
        raise XshardError(
            f"unknown grad={grad!r}",
            hint='"sum": gradients are summed along the axis; "replicated": they are equal',
        )
    return tag("copy", axis) if grad == "sum" else ""


def tag(kind: str, axis: Axes) -> str:
    """A tag as text, with the bar before it."""
    return f" | {kind}({_axis_names(axis)})"


def _halo_width(width: PartWidths) -> int | tuple[int, ...]:
    return width if isinstance(width, int) else tuple(width)


def _axis_names(axis: Axes) -> str:
    return axis if isinstance(axis, str) else ",".join(axis)
