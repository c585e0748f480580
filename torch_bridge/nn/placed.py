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
from xshard.errors import NotationError, ShapeError
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import Dim
from xshard.ops import tag

_RECORD = "_xshard_placement"

# The copies of parameters made where a model was entered, by id and by the axes of the copies.
Copies = Mapping[tuple[int, tuple[str, ...]], Tensor]
COPIES: ContextVar[Copies] = ContextVar("COPIES")


@dataclass(frozen=True)
class Placement:
    """The sharding of a global array, and the processes that hold it."""

    sharding: Sharding
    processes: ProcessMesh
    shares: tuple[str, ...] = ()  # axes along which processes keep their shares of gradients

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # unpickled as None: the processes end with their program
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sharding.shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the array, in the order of the mesh."""
        return tuple(axis for axis in self.sharding.mesh.axes if axis in self.layout.axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.sharding.local_shape(self.processes.device)

    def cuts(self, dim: int) -> bool:
        return bool(self.layout.dims[dim].axes)

    def remade(self, dims: Sequence[Dim], shape: Sequence[int]) -> Placement:
        return replace(
            self, sharding=Sharding(Layout(tuple(dims)), self.sharding.mesh, tuple(shape))
        )

    def with_length(self, dim: int, length: int) -> Placement:
        return self.remade(self.layout.dims, (*self.shape[:dim], length, *self.shape[dim + 1 :]))

    def whole(self, x: Tensor) -> Placement:
        """The placement of a tensor that is replicated on the same processes."""
        return self.remade([Dim(f"d{i}") for i in range(x.ndim)], x.shape)

    def moved(self, x: Tensor, to: Layout) -> Tensor:
        return redistribute(x, (self.layout, to), self.processes, shape=self.shape)

    def copied(self, *parameters: Tensor | None) -> list[Tensor | None]:
        """Parameters as copies along the axes that shard the array, or the ones made at the entrance."""
        axes = self.axes
        ready = COPIES.get({})
        if axes == self.shares or not torch.is_grad_enabled():
            return list(parameters)
        missing = [
            p
            for p in parameters
            if p is not None and p.requires_grad and (id(p), axes) not in ready
        ]
        if missing:
            copies = zip(missing, self.copies_of(missing, axes), strict=True)
            ready = {**ready, **{(id(p), axes): x for p, x in copies}}
        return [ready.get((id(p), axes), p) for p in parameters]

    def copies_of(self, parameters: Sequence[Tensor], axes: tuple[str, ...]) -> Sequence[Tensor]:
        """Replicated parameters as copies along the axes: one collective sums the gradients of all."""
        src, dst = ("..." + (tag("copy", names) if names else "") for names in (self.shares, axes))
        return redistribute(list(parameters), f"{src} -> {dst}", self.processes)


Outputs = tuple[Tensor, Placement]
Lengths = Sequence[int | None] | None  # of dims; None for the lengths of equal blocks


def check_whole(placement: Placement, dims: Iterable[int], what: str) -> None:
    """Raise NotationError if one of the dims is sharded."""
    for d in dims:
        if placement.cuts(d):
            dim = placement.layout.dims[d]
            text = str(placement.layout)
            hint = f"redistribute first, as in '{dim} -> {dim.name}'"
            raise NotationError(f"{what} needs dim {dim.name!r} whole", text=text, hint=hint)


def record(x: Tensor, placement: Placement) -> Tensor:
    """Record the placement of a tensor -> the same tensor."""
    setattr(x, _RECORD, placement)
    return x


def recorded(x: object) -> Placement | None:
    """The placement of a block, or None if nothing is recorded."""
    return getattr(x, _RECORD, None) if isinstance(x, Tensor) else None


def sharding_of(x: Tensor) -> Sharding:
    """Return the layout, mesh and global shape of a block that a domain-parallel model returned.

    Raises ShapeError for any other tensor.
    """
    return placement_of(x).sharding


def placement_of(x: Tensor) -> Placement:
    """The placement of a block. Raises ShapeError if nothing is recorded."""
    if (placement := recorded(x)) is None:
        hint = "the outputs of domain-parallel layers and models have a sharding"
        raise ShapeError(f"nothing is known of a tensor of shape {tuple(x.shape)}", hint=hint)
    return placement


def placed_as(x: Tensor, layout: Layout | str, mesh: MeshLike, shape: Lengths = None) -> Placement:
    """The placement of a block: recorded, else under `layout`; lengths of None are equal blocks' lengths."""
    lengths = None if shape is None else tuple(shape)
    return recorded(x) or _placed_as(
        Layout.parse(layout), process_mesh(mesh), tuple(x.shape), lengths
    )


@lru_cache(maxsize=4096)
def _placed_as(
    layout: Layout,
    processes: ProcessMesh,
    local: tuple[int, ...],
    shape: tuple[int | None, ...] | None,
) -> Placement:
    text = str(layout)
    check_axes(layout, processes.mesh)
    if layout.tags or any(dim.overlap for dim in layout.dims):
        what = "layers work on blocks of values that do not overlap"
        raise NotationError(what, text=text, hint="as in b c h/sp w")
    if shape is not None and len(shape) != len(local):
        raise ShapeError(f"shape {shape} of a block with {len(local)} dims", text=text)
    known = (
        {} if shape is None else dict(zip(layout.resolved(len(local)).names, shape, strict=True))
    )
    whole = global_shape(layout, processes.mesh, local, text, known)
    placement = Placement(Sharding(layout, mesh_of(processes.mesh), whole), processes)
    if placement.local_shape != local:
        what = f"the block has shape {local}, not {placement.local_shape}"
        hint = f"this process's part of a {whole} array; pass shape= where blocks differ in size"
        raise ShapeError(what, text=text, hint=hint)
    return placement
