"""The named operations of both bridges (all_gather, halo_exchange, ...), as moves of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from xshard.arguments import whole_numbers
from xshard.errors import MeshError, ShapeError, api_boundary
from xshard.notation.overlap import Halo
from xshard.notation.overlap_parser import parse_boundaries
from xshard.signatures import as_whole_number, short_repr

Axes = str | tuple[str, ...]
PartWidths = int | Sequence[int]  # the same number for every part, or one per part
HaloWidth = int | tuple[PartWidths, PartWidths]  # rows at both ends, or before and after
Shape = Sequence[int] | None  # the global shape, if blocks differ in size
Side = Mapping[int, str] | str  # the shards of some dims, or a tag
ReduceOp = Literal["sum", "mean", "max", "min"]
Grad = Literal["sum", "replicated"]
A = TypeVar("A")  # a framework's arrays
M = TypeVar("M")  # its meshes


@dataclass(frozen=True)
class Operations(Generic[A, M]):
    """The operations, by a framework's `move` of a block between two sides.

    In all of them `x` is this device's block, and `axis` a mesh axis or several taken as one.
    `mesh` is that of `redistribute`; JAX knows it inside `shard_map`. `shape` is the global shape,
    if blocks differ in size.

    Attributes:
        move: Moves a block: (block, left side, right side, mesh, global shape) -> block.

    Examples:
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

    @api_boundary
    def all_gather(
        self, x: A, dim: int, axis: Axes, mesh: M | None = None, *, grad: Grad, shape: Shape = None
    ) -> A:
        """Concatenate the blocks of the devices of a mesh axis along one dim: `n/axis -> n`.

        Blocks of 2 rows on 4 devices -> 8 rows on each.

        Args:
            x: This device's block, [n/devices, ...].
            dim: The dim that becomes whole.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            grad: The meaning of the results' gradients. "sum": each is an addend, and the backward
                pass reduce-scatters. "replicated": they are equal, and it slices.
            shape: The global shape, if blocks differ in size.

        Returns:
            The whole array, [n, ...].
        """
        return self.move(x, {dim: sharded(axis)}, gradient_tag(axis, grad), mesh, shape)

    @api_boundary
    def reduce_scatter(
        self,
        x: A,
        dim: int,
        axis: Axes,
        mesh: M | None = None,
        *,
        op: ReduceOp = "sum",
        shape: Shape = None,
    ) -> A:
        """Reduce the blocks of a mesh axis, and keep this device's part: `n | sum(axis) -> n/axis`.

        Blocks of 8 rows on 4 devices -> rows 0-1 of their sum on device 0, rows 2-3 on device 1.
        The backward pass all-gathers.

        Args:
            x: This device's addend, [n, ...].
            dim: The dim that is sharded.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            op: sum, mean, max or min.
            shape: The global shape, if blocks differ in size.

        Returns:
            This device's part of the result, [n/devices, ...].
        """
        return self.move(x, tag(op, axis), {dim: sharded(axis)}, mesh, shape)

    @api_boundary
    def all_reduce(
        self, x: A, axis: Axes, mesh: M | None = None, *, op: ReduceOp = "sum", grad: Grad
    ) -> A:
        """Reduce the blocks of a mesh axis; each device has the whole result: `n | sum(axis) -> n`.

        Args:
            x: This device's addend, [n, ...].
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            op: sum, mean, max or min.
            grad: The meaning of the results' gradients. "sum": each is an addend, and the backward
                pass all-reduces. "replicated": they are equal, and it sends nothing.

        Returns:
            The result, [n, ...].
        """
        return self.move(x, tag(op, axis), gradient_tag(axis, grad), mesh, None)

    @api_boundary
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
        """Shard one dim instead of another, which becomes whole: `s/axis c -> s c/axis`.

        split_dim=1, concat_dim=0, blocks [2, 8] on 4 devices -> [8, 2]. Each device sends every
        other one its part; the backward pass does the same with the dims swapped.

        Args:
            x: This device's block, [s/devices, c].
            split_dim: The dim that is sharded.
            concat_dim: The dim that becomes whole.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            split_order: The order of the rows that are sharded: block, zigzag, cyclic or balanced.
            concat_order: The order of the rows that become whole.
            shape: The global shape, if blocks differ in size.

        Returns:
            This device's block, [s, c/devices].
        """
        src = {concat_dim: sharded(axis, concat_order)}
        dst = {split_dim: sharded(axis, split_order)}
        return self.move(x, src, dst, mesh, shape)

    @api_boundary
    def shard(self, x: A, dim: int, axis: Axes, mesh: M | None = None, *, grad: Grad) -> A:
        """Keep this device's part of a block that all devices of a mesh axis have: `n -> n/axis`.

        8 rows on each of 4 devices -> rows 0-1 on device 0, rows 2-3 on device 1.
        Nothing is sent.

        Args:
            x: The block, equal on all devices along the axis, [n, ...].
            dim: The dim that is sharded.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            grad: The meaning of the block's gradient. "sum": an addend on each device (its part,
                and zeros elsewhere). "replicated": the same on all devices; the backward pass
                all-gathers.

        Returns:
            This device's part, [n/devices, ...].
        """
        return self.move(x, gradient_tag(axis, grad), {dim: sharded(axis)}, mesh, None)

    @api_boundary
    def copy_to(self, x: A, axis: Axes, mesh: M | None = None) -> A:
        """Use an equal block separately on each device of a mesh axis: `n -> n | copy(axis)`.

        The block is returned as it is. Only gradients change: each device computes one for its own
        use, and the backward pass all-reduces them. Megatron's f operator.

        Args:
            x: The block, equal on all devices along the axis, [n, ...].
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.

        Returns:
            The block, [n, ...].
        """
        return self.move(x, "", gradient_tag(axis, "sum"), mesh, None)

    @api_boundary
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
        """Widen a block by rows of its neighbours on a mesh axis: `n/axis -> n/axis:halo(lo,hi)`.

        8 rows on 2 devices with a width of 1: rows -1 to 4 and rows 3 to 8, where rows -1 and 8
        hold what `boundary` says. A wide halo has rows of several blocks. The backward pass adds
        the gradients of copied rows at their owner.

        Args:
            x: This device's block, [n/devices, ...].
            width: Rows at both sides, or (before, after); a list has one number per block.
                Negative widths drop rows.
            dim: The dim that is widened.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            boundary: The values beyond the ends of the array, as in a layout: zero, constant(1.5),
                periodic, reflect, edge, none, pole, or two of them ("edge,zero").
            shape: The global shape, if blocks differ in size.

        Returns:
            The wider block, [lo + n/devices + hi, ...].
        """
        widened = {dim: halo(axis, width, boundary)}
        return self.move(x, {dim: sharded(axis)}, widened, mesh, shape)

    @api_boundary
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
        """Drop the rows that `halo_exchange` added: `n/axis:halo(lo,hi) -> n/axis`.

        With a width of (1, 2): [7, ...] -> [4, ...].

        Args:
            x: The wider block, [lo + n/devices + hi, ...].
            width: As in `halo_exchange`.
            dim: The dim that is trimmed.
            axis: The mesh axis, or several taken as one.
            mesh: As in `redistribute`.
            boundary: As in `halo_exchange`.
            shape: The global shape, if blocks differ in size.

        Returns:
            This device's block, [n/devices, ...].
        """
        widened = {dim: halo(axis, width, boundary)}
        return self.move(x, widened, {dim: sharded(axis)}, mesh, shape)


# ---- parts of expressions as text


def move(shape: Sequence[int], src: Side, dst: Side) -> str:
    """Write the expression of a move of a block: a block of 2 dims, {0: "dp"}, "" -> `d0/dp d1 -> d0 d1`."""
    return f"{_side(shape, src)} -> {_side(shape, dst)}"


def _side(shape: Sequence[int], shards_or_tag: Side) -> str:
    """Write one side of a move: the dims with the shards of some, or with a tag."""
    if isinstance(shards_or_tag, str):
        return dims(shape) + shards_or_tag
    return dims(shape, shards_or_tag)


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """Write a layout with dims d0, d1, ...: shape (4, 6), shards {1: "tp"} -> `d0 d1/tp`.

    shards: what is written behind some dims, by their number, also counted from the
    end; None for nothing.

    Raises:
        ShapeError: The block has no such dim.
    """
    names = [f"d{dim_index}" for dim_index in range(len(shape))]
    if shards is None:
        shards = {}
    for key, shard in shards.items():
        dim = as_whole_number(key)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ShapeError(f"no dim {short_repr(key)} in a block of shape {tuple(shape)}")
        names[dim] += f"/{shard}"
    return " ".join(names) if names else "()"


def sharded(axis: Axes, order: str = "block") -> str:
    """Write a shard over one axis, or over several axes taken as one: `zigzag(cp)`, `(dp,cp)`."""
    if order != "block":
        return f"{order}({_axis_names(axis)})"
    return axis if isinstance(axis, str) else f"({_axis_names(axis)})"


def halo(axis: Axes, width: HaloWidth, boundary: str) -> str:
    """Write a shard with a halo in the notation of layouts: `sp:halo(1,2,edge)`.

    axis "sp", width (1, 2), boundary "edge": blocks over mesh axis sp, with 1 row more before and 2
    after, which beyond the ends of the array repeat its edge. A width of 1 is (1, 1); ([1, 0], [0,
    1]) has a number for each block.

    Raises:
        ShapeError: The width is neither a number of rows nor a pair.
        NotationError: There is no such boundary.
    """
    # One number is for both ends; a pair may have a list per end.
    widths = (width, width) if as_whole_number(width) is not None else whole_numbers(width)
    if widths is None or len(widths) != 2:
        hint = "rows at both ends, or (before, after)"
        raise ShapeError(f"a halo of width {short_repr(width)}", hint=hint)
    rows_before = _halo_width(widths[0])
    rows_after = _halo_width(widths[1])
    boundary_before, boundary_after = parse_boundaries(boundary)
    return f"{sharded(axis)}:{Halo(rows_before, rows_after, boundary_before, boundary_after)}"


def gradient_tag(axis: Axes, grad: str) -> str:
    """Write the tag of values on every device: `copy` if gradients are summed, else nothing."""
    return tag("copy", axis) if grad == "sum" else ""


def tag(tag_name: str, axis: Axes) -> str:
    """Write a tag with the bar before it: "sum", "dp" -> ` | sum(dp)`."""
    return f" | {tag_name}({_axis_names(axis)})"


def _halo_width(width: PartWidths) -> int | tuple[int, ...]:
    """Return a width as plain numbers, or raise ShapeError."""
    rows = as_whole_number(width)
    if rows is not None:
        return rows
    widths = whole_numbers(width)
    if not widths:
        hint = "one number, or one per part"
        raise ShapeError(f"{short_repr(width)} is not a number of rows", hint=hint)
    return widths


def _axis_names(axis: Axes) -> str:
    """Return the names of axes with commas between them, or raise MeshError."""
    if isinstance(axis, str):
        return axis
    if not isinstance(axis, list | tuple) or not all(isinstance(name, str) for name in axis):
        hint = 'its name, as in "cp", or several names'
        raise MeshError(f"{short_repr(axis)} is not a mesh axis", hint=hint)
    return ",".join(axis)
