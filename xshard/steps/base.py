"""Step: frozen data with an effect on a sharding in normal form, a traffic and a numpy rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.layout.partition import block_length
from xshard.layout.runs import Runs, as_index
from xshard.notation.parser import Shard, Tags
from xshard.steps.traffic import LinkSpans, PairTraffic, Traffic

Block = NDArray[Any]
Blocks = Sequence[Block]
DimCut = tuple[str, tuple[Shard, ...]]  # a dim and some of its shards, outermost first

FREE = ("retag", "transpose")  # kinds of local steps that return a view
REDUCERS: dict[str, Callable[[Block, Block], Block]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


class Step(ABC):
    """One collective or local move. Subclasses are frozen dataclasses of plain values."""

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Step]]] = {}

    def __init_subclass__(cls) -> None:
        Step.registry[cls.kind] = cls

    @abstractmethod
    def after(self, before: Sharding) -> Sharding:
        """The sharding that the step leads to. Raises PlanError if the step does not apply."""

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        """The traffic in elements, by default of a local copy; without spans all links are equal."""
        return Traffic() if self.kind in FREE else Traffic(copied=self.after(before).max_local_size)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        """Who sends whom how much: `traffic` of every pair of devices. A local step sends nothing."""
        return ()

    @abstractmethod
    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        """The numpy rule, which defines the step: one block per device -> one block per device."""

    @abstractmethod
    def __str__(self) -> str: ...


def axes_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """The axes of some shards, outermost first."""
    return tuple(axis for shard in shards for axis in shard.axes)


def shards_text(shards: Sequence[Shard]) -> str:
    """Cuts as they follow the name of a dim."""
    return "/".join(map(str, shards))


def without_inner(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    """The layout without `shards`, which must be the innermost shards of `dim`. Raises PlanError."""
    d = layout.dim(dim) if dim in layout.names else None
    if d is None or not shards or d.shards[-len(shards) :] != shards:
        raise PlanError(
            f"'{shards_text(shards)}' is not the innermost cut of dim {dim!r} in '{layout}'"
        )
    return _with_shards(layout, dim, d.shards[: -len(shards)])


def with_inner(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    """The layout with `shards` added as the innermost shards of `dim`. Raises PlanError."""
    if dim not in layout.names:
        raise PlanError(f"no dim {dim!r} in '{layout}'")
    return _with_shards(layout, dim, layout.dim(dim).shards + shards)


def with_tag(layout: Layout, kind: str, axes: Sequence[str]) -> Layout:
    return replace(layout, tags=(*layout.tags, (kind, tuple(axes)))) if axes else layout


def without_tags(layout: Layout, axes: Sequence[str]) -> Layout:
    """The layout with all tags of these axes removed."""
    tags: Tags = tuple(
        (kind, tuple(a for a in tagged if a not in axes)) for kind, tagged in layout.tags
    )
    return replace(layout, tags=tags)


def freed(layout: Layout, axes: Sequence[str], copies: Sequence[str]) -> Layout:
    """The layout after a gather or reduction over `axes`: `copies` hold copies, the others replicas."""
    if not set(copies) <= set(axes):
        raise PlanError(f"copies {tuple(copies)} are not among the axes {tuple(axes)}")
    return with_tag(layout, "copy", copies)


def take_free(layout: Layout, axes: Sequence[str]) -> Layout:
    """The layout with `axes` free for a shard or a sum. Raises PlanError if they hold no replicas."""
    busy = set(layout.axes) - set(layout.tagged("copy"))
    for axis in axes:
        if axis in busy:
            raise PlanError(f"axis {axis!r} is not replicated in '{layout}'")
    return without_tags(layout, axes)


def check_even(sharding: Sharding, dim: str, shards: tuple[Shard, ...]) -> None:
    """Raise PlanError if parts of a dim under `shards` differ in size on any device."""
    index = sharding.dim_index(dim)
    d = sharding.layout.dims[index]
    outer = d.shards[: -len(shards)] if d.shards[-len(shards) :] == shards else d.shards
    for cut_by in (outer, outer + shards):
        whole = replace(d, shards=cut_by)
        if not block_length(whole, sharding.shape[index], sharding.mesh.sizes_of(whole.axes))[1]:
            raise PlanError(
                f"'{shards_text(shards)}' cuts dim {dim!r} of '{sharding.layout}' unevenly"
            )


def even_parts(sharding: Sharding, dim: str, shards: tuple[Shard, ...]) -> tuple[Runs, ...]:
    """Positions of each part of a dim under `shards`; all devices have the same. Raises as `check_even`."""
    check_even(sharding, dim, shards)
    return sharding.parts(sharding.dim_index(dim), shards, 0)


def own_part(sharding: Sharding, dim: str, shards: tuple[Shard, ...], device: int) -> Runs:
    """Positions of a device's own part of a dim under `shards`."""
    parts = sharding.parts(sharding.dim_index(dim), shards, device)
    return parts[sharding.mesh.index(device, axes_of(shards))]


def lands_in_place(sharding: Sharding, dim: str, shards: Sequence[Shard]) -> bool:
    """True if pieces concatenated in group order are the block: contiguous shards of the leading dim."""
    return dim == sharding.layout.names[0] and all(s.order == "block" for s in shards)


def take_rows(block: Block, dim: int, runs: Runs) -> Block:
    """The rows of a block at local positions `runs` of `dim`."""
    return block[(slice(None),) * dim + (as_index(runs),)]


def put_rows(out: Block, dim: int, runs: Runs, block: Block) -> None:
    """Write a block to the local positions `runs` of `dim` in `out`."""
    out[(slice(None),) * dim + (as_index(runs),)] = block


def reduce_blocks(op: str, blocks: Sequence[Block]) -> Block:
    """Blocks of one shape -> their reduction by `op`, in the order given."""
    total = blocks[0].copy()
    for block in blocks[1:]:
        total = REDUCERS[op](total, block)
    return total


def _with_shards(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    return replace(
        layout, dims=tuple(replace(d, shards=shards) if d.name == dim else d for d in layout.dims)
    )
