"""The named operations of both bridges (all_gather, halo, ...) as text of expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xshard.arguments import shown, whole_number, whole_numbers
from xshard.errors import MeshError, ShapeError, XshardError
from xshard.notation.overlap import Halo
from xshard.notation.overlap_parser import parse_boundaries

Axes = str | tuple[str, ...]
PartWidths = int | Sequence[int]  # the same number for every part, or one per part
HaloWidth = int | tuple[PartWidths, PartWidths]  # rows at both ends, or before and after
Shape = Sequence[int] | None  # the global shape, if blocks differ in size
Side = Mapping[int, str] | str  # the shards of some dims, or a tag


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """The dims of a block as text, some of them sharded. Raises ShapeError for an unknown dim."""
    names = [f"d{d}" for d in range(len(shape))]
    for key, cut in (shards or {}).items():
        dim = whole_number(key)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ShapeError(f"no dim {shown(key)} in a block of shape {tuple(shape)}")
        names[dim] += f"/{cut}"
    return " ".join(names) or "()"


def move(shape: Sequence[int], src: Side, dst: Side) -> str:
    """The expression of a move of a block."""
    sides = (dims(shape) + side if isinstance(side, str) else dims(shape, side) for side in (src, dst))
    return " -> ".join(sides)


def sharded(axis: Axes, order: str = "block") -> str:
    """A shard over one axis, or over several axes taken as one, as text."""
    if order != "block":
        return f"{order}({_axis_names(axis)})"
    return axis if isinstance(axis, str) else f"({_axis_names(axis)})"


def halo(axis: Axes, width: HaloWidth, boundary: str) -> str:
    """A shard with blocks widened by `width` rows at both ends, or by (before, after), as text."""
    widths = whole_numbers(width) if whole_number(width) is None else (width, width)
    if widths is None or len(widths) != 2:
        raise ShapeError(f"a halo of width {shown(width)}", hint="rows at both ends, or (before, after)")
    lo, hi = widths
    return f"{sharded(axis)}:{Halo(_halo_width(lo), _halo_width(hi), *parse_boundaries(boundary))}"


def gradient_tag(axis: Axes, grad: str) -> str:
    """The tag of values on every device: `copy` if gradients are summed, else "". Raises XshardError."""
    if grad not in ("sum", "replicated"):
        hint = '"sum": gradients are summed along the axis; "replicated": they are equal'
        raise XshardError(f"unknown grad={grad!r}", hint=hint)
    return tag("copy", axis) if grad == "sum" else ""


def tag(kind: str, axis: Axes) -> str:
    """A tag as text, with the bar before it. Raises XshardError unless `kind` is text."""
    if not isinstance(kind, str):
        raise XshardError(
            f"the operation {shown(kind)} is not text", hint='it is "sum", "mean", "max" or "min"'
        )
    return f" | {kind}({_axis_names(axis)})"


def _halo_width(width: PartWidths) -> int | tuple[int, ...]:
    rows = whole_number(width)
    if rows is not None:
        return rows
    widths = whole_numbers(width)
    if not widths:
        raise ShapeError(f"{shown(width)} is not a number of rows", hint="one number, or one per part")
    return widths


def _axis_names(axis: Axes) -> str:
    if isinstance(axis, str):
        return axis
    if not isinstance(axis, list | tuple) or not all(isinstance(name, str) for name in axis):
        raise MeshError(f"{shown(axis)} is not a mesh axis", hint='its name, as in "cp", or several names')
    return ",".join(axis)
