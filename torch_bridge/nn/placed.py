"""Placements of blocks, recorded at the entrance and by every layer: equal on all processes, sent by none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding
from xshard.errors import NotationError, ShapeError, api_boundary
from xshard.layout.layout import check_axes
from xshard.layout.lengths import sharding_of_block
from xshard.notation.parser import Dim
from xshard.ops import tag

_RECORD = "_xshard_placement"

Axes = tuple[str, ...]
CopyKey = tuple[int, Axes]  # the id of a parameter, and the axes along which it is copied

# The copies of parameters made where a model was entered; see `Placement.parameter_copies`.
COPIES: ContextVar[Mapping[CopyKey, Tensor]] = ContextVar("COPIES")


@dataclass(frozen=True)
class Placement:
    """The sharding of a global array, and the processes that hold it."""

    sharding: Sharding
    processes: ProcessMesh
    gradient_share_axes: Axes = ()  # axes along which processes keep their shares of gradients

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: the processes end with their program."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.sharding.layout.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.sharding.shape

    @property
    def ndim(self) -> int:
        return len(self.sharding.shape)

    @property
    def axes(self) -> Axes:
        """The mesh axes that shard the array, in the order of the mesh."""
        return tuple(axis for axis in self.sharding.mesh.axes if axis in self.layout.axes)

    def axes_of(self, dims: Iterable[int]) -> Axes:
        """Return the mesh axes that shard some dims, in the order of the dims."""
        axes: Axes = ()
        for d in dims:
            axes += self.dims[d].axes
        return axes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this process's block."""
        return self.sharding.local_shape(self.processes.device)

    def is_sharded(self, dim: int) -> bool:
        return bool(self.dims[dim].axes)

    def with_dims(self, dims: Sequence[Dim], shape: Sequence[int]) -> Placement:
        """Return the placement of another array on the same processes."""
        layout = Layout(tuple(dims))
        return replace(self, sharding=Sharding(layout, self.sharding.mesh, tuple(shape)))

    def with_shape(self, shape: Sequence[int]) -> Placement:
        """Return the placement of an array with other lengths."""
        return self.with_dims(self.dims, shape)

    def with_length(self, dim: int, length: int) -> Placement:
        """Return the placement of the array with another length of one dim."""
        shape = list(self.shape)
        shape[dim] = length
        return self.with_shape(shape)

    def replicated_like(self, x: Tensor) -> Placement:
        """Return the placement of a tensor that all of these processes have whole."""
        dims = [Dim(f"d{i}") for i in range(x.ndim)]
        return self.with_dims(dims, x.shape)

    def like_block(self, y: Tensor) -> Placement:
        """Return the placement of an array sharded like this one, a block of which has other whole dims."""
        shape = list(y.shape)
        for d in range(self.ndim):
            if self.is_sharded(d):
                shape[d] = self.shape[d]
        return self.with_shape(shape)

    def redistribute(self, x: Tensor, layout: Layout) -> Tensor:
        """Redistribute a block with this placement."""
        return redistribute(x, (self.layout, layout), self.processes, shape=self.shape)

    def parameter_copies(self, parameters: Sequence[Tensor | None]) -> list[Any]:
        """Return parameters in a form whose gradients are summed over the devices of the array.

        Each device uses a replicated parameter with its own block, so its gradient is a part of the
        sum. The copy is an identity in the forward pass, and an all-reduce in the backward pass.
        Parameters that are None or need no gradient are returned as they are. Copies that were made
        when the model was entered are used again, so that one all-reduce sums all their gradients.
        """
        if not self.needs_copies:
            return list(parameters)
        axes = self.axes
        made_before = COPIES.get({})
        missing = []
        for x in parameters:
            if x is not None and x.requires_grad and (id(x), axes) not in made_before:
                missing.append(x)
        copies = {**made_before, **self.make_copies(missing)}
        return [copies.get((id(x), axes), x) for x in parameters]

    @property
    def needs_copies(self) -> bool:
        """Whether gradients of parameters must be summed over devices, or be cut into shares.

        Those of their uses are shares over `axes`; the user gets shares over `gradient_share_axes`.
        """
        return self.axes != self.gradient_share_axes and torch.is_grad_enabled()

    def make_copies(self, parameters: Sequence[Tensor]) -> dict[CopyKey, Tensor]:
        """Return copies by the ids of parameters: one collective sums the gradients of all."""
        if not parameters:
            return {}
        axes = self.axes
        # Forward nothing moves; backward a copy's gradients are summed.
        src = "..." + _copy_tag(self.gradient_share_axes)
        dst = "..." + _copy_tag(axes)
        copies = redistribute(list(parameters), f"{src} -> {dst}", self.processes)
        # Ids are unique, as parameters live as long as their module runs.
        keys = [(id(x), axes) for x in parameters]
        return dict(zip(keys, copies, strict=True))

    def shape_error(self, reason: str, hint: str | None = None) -> ShapeError:
        """Return an error that shows the layout."""
        return ShapeError(reason, text=str(self.layout), hint=hint)


def _copy_tag(axes: Axes) -> str:
    return tag("copy", axes) if axes else ""


Outputs = tuple[Tensor, Placement]
Lengths = Sequence[int | None] | None  # of dims; None for the lengths of equal blocks


def needs_whole(placement: Placement, dim: int, operation: str) -> NotationError:
    """Return the error of an operation that needs a sharded dim whole."""
    sharded = placement.dims[dim]
    reason = f"{operation} needs dim {sharded.name!r} whole"
    hint = f"redistribute first, as in '{sharded} -> {sharded.name}'"
    return NotationError(reason, text=str(placement.layout), hint=hint)


def check_whole(placement: Placement, dims: Iterable[int], operation: str) -> None:
    """Raise NotationError if one of the dims is sharded."""
    for d in dims:
        if placement.is_sharded(d):
            raise needs_whole(placement, d, operation)


def record(x: Tensor, placement: Placement) -> Tensor:
    """Record the placement of a tensor -> the same tensor."""
    setattr(x, _RECORD, placement)  # on the tensor itself: a new result of torch has none
    return x


def recorded_placement(x: object) -> Placement | None:
    """Return the placement of a block, or None if nothing is recorded."""
    if isinstance(x, Tensor):
        return getattr(x, _RECORD, None)
    return None


def recorded_placements(values: Iterable[object]) -> list[Placement]:
    """Return the placements of all blocks among values."""
    placements = map(recorded_placement, values)
    return [placement for placement in placements if placement is not None]


@api_boundary
def sharding_of(x: Tensor) -> Sharding:
    """Say how an output of a domain-parallel model is sharded: layout, mesh and global shape.

        y = parallel_model(block)
        sharding_of(y)            # [b, c, h/sp, w] on a mesh of 2, of a global shape such as (1, 2, 8, 8)

    Args:
        x: An output of a model of `domain_parallel`, or of a part of it.

    Returns:
        The sharding of the whole array, of which `x` is this process's block.

    Raises:
        ShapeError: For any other tensor.
    """
    return placement_of(x).sharding


def placement_of(x: Tensor) -> Placement:
    """Return the placement of a block. Raises ShapeError if nothing is recorded."""
    placement = recorded_placement(x)
    if placement is None:
        hint = "the outputs of domain-parallel layers and models have a sharding"
        raise ShapeError(f"nothing is known of a tensor of shape {tuple(x.shape)}", hint=hint)
    return placement


def placed_as(x: Tensor, layout: Layout | str, mesh: MeshLike, shape: Lengths = None) -> Placement:
    """Return the placement of a block: the recorded one, else under `layout`.

    Args:
        x: This process's block.
        layout: The layout of the array.
        mesh: The mesh.
        shape: Global lengths; None for the block's length times the number of parts.
    """
    # A record prevails: layers change layouts and lengths, which the caller of the model does not know.
    placement = recorded_placement(x)
    if placement is not None:
        return placement
    lengths = None if shape is None else tuple(shape)
    return _placed_as(Layout.parse(layout), process_mesh(mesh), tuple(x.shape), lengths)


@lru_cache(maxsize=4096)
def _placed_as(
    layout: Layout,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    shape: tuple[int | None, ...] | None,
) -> Placement:
    """Check that a block fits a layout, and return the placement: layout, mesh and global shape.

    Raises NotationError for partial sums and overlapping blocks, ShapeError for a block that is not
    this process's part.

    Args:
        layout: The layout of the array.
        processes: The processes of the mesh.
        local_shape: The shape of this process's block.
        shape: The global shape, None for lengths that are inferred: (4, 3) under "h/sp w" on sp=2
            -> (8, 3).
    """
    text = str(layout)
    check_axes(layout, processes.mesh)
    # Layers are not linear, so that they need values and not addends of a sum. Rows that two blocks
    # share would count twice in a mean.
    if layout.tags or any(dim.overlap for dim in layout.dims):
        message = "layers work on blocks of values, without sums, copies or overlap"
        raise NotationError(
            message, text=text, hint="as in b c h/sp w: they sum gradients of copies"
        )
    sharding = sharding_of_block(layout, mesh_of(processes.mesh), local_shape, shape, text)
    placement = Placement(sharding, processes)
    # If blocks differ in size and no shape was given, some processes have inferred a wrong shape.
    if placement.local_shape != local_shape:
        message = f"the block has shape {local_shape}, not {placement.local_shape}"
        hint = f"this process's part of a {sharding.shape} array; pass shape= where blocks differ in size"
        raise placement.shape_error(message, hint)
    return placement
