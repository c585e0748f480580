"""The pieces of a transfer: which boxes the destination takes, and who holds each of them.

A piece is the part of a receiver's block that one block of the source covers. With 12 rows over 3
devices that go to 2 devices, receiver 0 takes rows 0-3 from device 0 and rows 4-5 from device 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.runs import Runs, common_segments
from xshard.steps.base import REDUCERS

Ints = NDArray[np.int64]


class BoxesOfDim(NamedTuple):
    """The rows of every piece along one dim: piece i has the rows `boxes[indices[i]]`."""

    indices: Ints  # [pieces]
    boxes: tuple[Any, ...]


class SentPieces(NamedTuple):
    """All boxes that devices of the destination take, as columns: [pieces] each, unless said.

    Devices of the source that hold the same block are a group of holders: any of them may send.
    """

    dst: Ints  # the receiver's position on the target's mesh
    size: Ints  # elements
    group: Ints  # the group of holders
    holders: tuple[Ints, ...]  # of each group, positions on the source's mesh
    group_of: Ints  # of every device of the source, the group that it is in
    boxes_by_dim: tuple[BoxesOfDim, ...]


class Overlaps(NamedTuple):
    """The rows of one dim that a block of the target takes from a block of the source.

    There is an overlap for each pair of blocks with common rows, in the order of the target's blocks.
    """

    starts: Ints  # of each block of the target its first overlap; the number of overlaps at the end
    src_block: Ints  # [overlaps]
    length: Ints  # rows, [overlaps]
    boxes: tuple[Any, ...]  # segments in both blocks, [overlaps]


class Holders(NamedTuple):
    """The devices of the source in groups that hold the same block."""

    keys: Ints  # of each group, sorted: the addend, then the block of each dim, as one number
    groups: tuple[Ints, ...]  # of each group, positions on the source's mesh
    group_of: Ints  # of every device, its group


@layout_cache(maxsize=4096)
def find_pieces(source: Sharding, target: Sharding, sends: bool) -> SentPieces:
    """Find which pieces of the array each device of the destination has to receive.

    A piece is a box (a range of rows in every dim) that lies in one block of the source and in one
    block of the target. 8 rows from 2 devices to 4: each of the 4 receives one piece of 2 rows. If
    the source holds addends of a sum, each receiver has one such piece for each addend.

    All columns of the result are [pieces], in the order of receivers, then addends, then boxes.
    `sends` is False if every device has its block already: then there are no pieces.
    """
    n_addends = source.mesh.size(*source.layout.tagged(*REDUCERS))
    # If the target is a sum over devices, the first one along its axes receives the values, and the
    # others keep zeros, so they receive nothing.
    is_receiver = target.mesh.indices(target.layout.tagged("sum")) == 0
    receivers = np.flatnonzero(sends & is_receiver)
    # Begin with one piece for each receiver and addend: the whole array. Then each dim cuts every
    # piece into as many as there are blocks of the source along it, and these replace the piece.
    pieces = _Pieces(
        dst=np.repeat(receivers, n_addends),
        n_elements=np.ones(len(receivers) * n_addends, np.int64),
        holder_key=np.tile(np.arange(n_addends), len(receivers)),
        boxes_by_dim=(),
    )
    dims = zip(source.layout.dims, target.layout.dims, strict=True)
    for dim_index, (src_dim, dst_dim) in enumerate(dims):
        overlaps = _overlaps(
            source.owned_by_position(dim_index), target.held_by_position(dim_index)
        )
        dst_block = target.mesh.indices(dst_dim.axes)[pieces.dst]
        pieces = pieces.cut(overlaps, dst_block, source.mesh.size(*src_dim.axes))
    holders = _group_holders(source)  # devices with the same block are one group
    return SentPieces(
        dst=pieces.dst,
        size=pieces.n_elements,
        group=np.searchsorted(holders.keys, pieces.holder_key),
        holders=holders.groups,
        group_of=holders.group_of,
        boxes_by_dim=pieces.boxes_by_dim,
    )


class _Pieces(NamedTuple):
    """Pieces that are cut along the first dims, as columns: [pieces] each.

    Which devices of the source hold a piece is told by its addend and by the source's block that it
    lies in, dim by dim. These are the digits of one number, `holder_key`: addend 1, and block 2 of
    4 of the only dim, make 1 * 4 + 2 = 6. `Holders.keys` are made in the same way.
    """

    dst: Ints  # the receiver's position on the target's mesh
    n_elements: Ints  # along the dims so far
    holder_key: Ints
    boxes_by_dim: tuple[BoxesOfDim, ...]

    def cut(self, overlaps: Overlaps, dst_block: Ints, n_src_blocks: int) -> _Pieces:
        """Cut every piece along one more dim, into a piece for each overlap of its block.

        Args:
            overlaps: The rows that blocks of the target and of the source have in common.
            dst_block: The target's block along the dim in which each piece lies.
            n_src_blocks: The number of the source's blocks along the dim.
        """
        # For each new piece: the old piece that it is cut from, and its entry in `overlaps`.
        old_piece, overlap_index = _cut_pieces(dst_block, overlaps.starts)
        earlier_dims = [
            BoxesOfDim(of_dim.indices[old_piece], of_dim.boxes) for of_dim in self.boxes_by_dim
        ]
        src_block = overlaps.src_block[overlap_index]
        return _Pieces(
            dst=self.dst[old_piece],
            n_elements=self.n_elements[old_piece] * overlaps.length[overlap_index],
            holder_key=self.holder_key[old_piece] * n_src_blocks + src_block,
            boxes_by_dim=(*earlier_dims, BoxesOfDim(overlap_index, overlaps.boxes)),
        )


def _group_holders(source: Sharding) -> Holders:
    """Put devices with the same addend of the same block into groups."""
    addend_axes = source.layout.tagged(*REDUCERS)
    key_of_device = source.mesh.indices(addend_axes)
    # The digits of one number, as in `_Pieces.holder_key`: the addend, then the block of each dim.
    for dim in source.layout.dims:
        n_blocks = source.mesh.size(*dim.axes)
        key_of_device = key_of_device * n_blocks + source.mesh.indices(dim.axes)
    keys, group_of = np.unique(key_of_device, return_inverse=True)
    groups = tuple(np.flatnonzero(group_of == i) for i in range(len(keys)))
    return Holders(keys, groups, group_of)


def _cut_pieces(block_of_piece: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Cut every piece by the overlaps of its block: for each new piece the old one, and its overlap.

    Block b has the overlaps starts[b], ..., starts[b + 1] - 1. Pieces in the blocks (1, 0) with starts
    (0, 2, 5) -> old pieces 0 0 0 1 1 and overlaps 2 3 4 0 1.
    """
    n_overlaps = np.diff(starts)[block_of_piece]
    piece_index = np.repeat(np.arange(len(block_of_piece)), n_overlaps)
    # The overlaps of a piece count on from the first of its block. The offset is how much that is more
    # than the position in the result.
    offset = starts[block_of_piece] - (n_overlaps.cumsum() - n_overlaps)
    return piece_index, np.arange(len(piece_index)) + offset[piece_index]


@layout_cache(maxsize=4096)
def _overlaps(source_blocks: tuple[Runs, ...], target_blocks: tuple[Runs, ...]) -> Overlaps:
    """Intersect, along one dim, the rows of every target block with the rows of every source block.

    Source blocks with rows 0-3 and 4-7, target blocks with rows 0-5 and 6-7: the first target block
    overlaps both source blocks, by 4 and by 2 rows, the second overlaps the last one by 2 rows. So
    `length` is (4, 2, 2), `src_block` (0, 1, 1), and `starts` (0, 2, 3) says where each target
    block's entries begin.

    source_blocks, target_blocks: the rows of each block along the dim.
    """
    starts = [0]
    src_blocks: list[int] = []
    lengths: list[int] = []
    boxes: list[Any] = []
    for target_rows in target_blocks:
        for src_block, source_rows in enumerate(source_blocks):
            # The rows that both have, as segments: (start in one block, start in the other, length).
            box = common_segments(source_rows, target_rows)
            if box:
                src_blocks.append(src_block)
                lengths.append(sum(segment.length for segment in box))
                boxes.append(box)
        starts.append(len(boxes))
    return Overlaps(
        starts=np.array(starts),
        src_block=np.array(src_blocks, np.int64),
        length=np.array(lengths, np.int64),
        boxes=tuple(boxes),
    )
