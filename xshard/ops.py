"""The named operations of both bridges (all_gather, halo_exchange, ...), as moves of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from xshard.arguments import shown, whole_number, whole_numbers
from xshard.errors import MeshError, ShapeError, XshardError
from xshard.notation.overlap import Halo
from xshard.notation.overlap_parser import parse_boundaries

Axes = str | tuple[str, ...]
PartWidths = int | Sequence[int]  # the same number for every part, or one per part
HaloWidth = int | tuple[PartWidths, PartWidths]  # rows at both ends, or before and after
Shape = Sequence[int] | None  # the global shape, if blocks differ in size
Side = Mapping[int, str] | str  # the shards of some dims, or a tag
Grad = Literal["sum", "replicated"]
A = TypeVar("A")  # a framework's arrays
M = TypeVar("M")  # its meshes


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """The dims of a block as text, some of them sharded. Raises ShapeError for an unknown dim."""
    names = [f"d{d}" for d in range(len(shape))]
    for key, cut in (shards or {}).items():
        dim = whole_number(key)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ShapeError(f"no dim {shown(key)} in a block of shape {tuple(shape)}")
        names[dim] += f"/{cut}"
    return " ".join(names) or "()"


@dataclass(frozen=True)
class Operations(Generic[A, M]):
    """The operations, by a framework's `move` of a block between two sides.

    mesh: as in `redistribute`; JAX knows it inside `shard_map`. shape: the global shape, if blocks differ.

    >>> def text(x: tuple[int, ...], src: Side, dst: Side, mesh: None, shape: Shape) -> str:
    ...     return move(x, src, dst)
    >>> operations = Operations(text)
    >>> operations.all_gather((1, 2), 0, "dp", grad="sum")
    'd0/dp d1 -> d0 d1 | copy(dp)'
    >>> operations.all_to_all((1, 2), 1, 0, "cp", concat_order="zigzag")
    'd0/zigzag(cp) d1 -> d0 d1/cp'
    >>> operations.halo_exchange((4,), (1, 2), 0, "sp", boundary="edge")
    'd0/sp -> d0/sp:halo(1,2,edge)'
    """

    move: Callable[[A, Side, Side, M | None, Shape], A]

    def all_gather(
        self, x: A, dim: int, axis: Axes, mesh: M | None = None, *, grad: Grad, shape: Shape = None
    ) -> A:
        """Concatenate the blocks along `axis`, along `dim`: `n/axis -> n`.

        grad: the meaning of the results' gradients. "sum": each is an addend, and the backward pass
        reduce-scatters. "replicated": they are equal, and it slices.
        """
        return self.move(x, {dim: sharded(axis)}, gradient_tag(axis, grad), mesh, shape)

    def reduce_scatter(
        self,
        x: A,
        dim: int,
        axis: Axes,
        mesh: M | None = None,
        *,
        op: str = "sum",
        shape: Shape = None,
    ) -> A:
        """Reduce the blocks along `axis`, and shard the result along `dim`: `n | sum(axis) -> n/axis`.

        op: sum, mean, max or min. The backward pass all-gathers.
        """
        return self.move(x, tag(op, axis), {dim: sharded(axis)}, mesh, shape)

    def all_reduce(
        self, x: A, axis: Axes, mesh: M | None = None, *, op: str = "sum", grad: Grad
    ) -> A:
        """Reduce the blocks along `axis`; every device has the result: `n | sum(axis) -> n`.

        op: sum, mean, max or min. grad: "sum": the results' gradients are addends, and the backward pass
        all-reduces. "replicated": they are equal, and it sends nothing.
        """
        return self.move(x, tag(op, axis), gradient_tag(axis, grad), mesh, None)

    def all_to_all(
        self,
        x: A,
        split_dim: int,
        concat_dim: int,
        axis: Axes,
        mesh: M | None = None,
        *,
        split_order: str = "block",
        concat_order: str = "block",
        shape: Shape = None,
    ) -> A:
        """Shard `split_dim` instead of `concat_dim`, which becomes whole: `s/axis c -> s c/axis`.

        split_order, concat_order: the orders of their rows: block, zigzag, cyclic or balanced.
        """
        src = {concat_dim: sharded(axis, concat_order)}
        dst = {split_dim: sharded(axis, split_order)}
        return self.move(x, src, dst, mesh, shape)

    def shard(self, x: A, dim: int, axis: Axes, mesh: M | None = None, *, grad: Grad) -> A:
        """This device's part, along `dim`, of a block replicated along `axis`: `n -> n/axis`.

        grad: the gradient of the block. "sum": an addend on each device (its part, and zeros elsewhere).
        "replicated": the same on all devices; the backward pass all-gathers.
        """
        return self.move(x, gradient_tag(axis, grad), {dim: sharded(axis)}, mesh, None)

    def copy_to(self, x: A, axis: Axes, mesh: M | None = None) -> A:
        """The same block, as a separate copy on every device along `axis`: `n -> n | copy(axis)`.

        Sends nothing; the backward pass all-reduces.
        """
        return self.move(x, "", gradient_tag(axis, "sum"), mesh, None)

    def halo_exchange(
        self,
        x: A,
        width: HaloWidth,
        dim: int,
        axis: Axes,
        mesh: M | None = None,
        *,
        boundary: str = "zero",
        shape: Shape = None,
    ) -> A:
        """Widen a block by rows of its neighbours along `axis`: `n/axis -> n/axis:halo(lo,hi)`.

        width: rows at both sides, or (before, after); a list has one number per block. Rows may come from
        several blocks; negative widths drop rows. boundary: the values beyond the ends of the array, as in
        a layout: zero, constant(1.5), periodic, reflect, edge, none, pole, or two of them ("edge,zero").
        The backward pass adds the gradients of copied rows at their owner.
        """
        return self.move(x, {dim: sharded(axis)}, {dim: halo(axis, width, boundary)}, mesh, shape)

    def trim_halo(
        self,
        x: A,
        width: HaloWidth,
        dim: int,
        axis: Axes,
        mesh: M | None = None,
        *,
        boundary: str = "zero",
        shape: Shape = None,
    ) -> A:
        """Drop the rows that `halo_exchange` added: `n/axis:halo(lo,hi) -> n/axis`."""
        return self.move(x, {dim: halo(axis, width, boundary)}, {dim: sharded(axis)}, mesh, shape)


def move(shape: Sequence[int], src: Side, dst: Side) -> str:
    """The expression of a move of a block."""
    sides = (
        dims(shape) + side if isinstance(side, str) else dims(shape, side) for side in (src, dst)
    )
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
        raise ShapeError(
            f"a halo of width {shown(width)}", hint="rows at both ends, or (before, after)"
        )
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
            f"the operation {shown(kind)} is not text", hint='"sum", "mean", "max" or "min"'
        )
    return f" | {kind}({_axis_names(axis)})"


def _halo_width(width: PartWidths) -> int | tuple[int, ...]:
    rows = whole_number(width)
    if rows is not None:
        return rows
    widths = whole_numbers(width)
    if not widths:
        raise ShapeError(
            f"{shown(width)} is not a number of rows", hint="one number, or one per part"
        )
    return widths


def _axis_names(axis: Axes) -> str:
    if isinstance(axis, str):
        return axis
    if not isinstance(axis, list | tuple) or not all(isinstance(name, str) for name in axis):
        raise MeshError(
            f"{shown(axis)} is not a mesh axis", hint='its name, as in "cp", or several names'
        )
    return ",".join(axis)
