"""Which of several holders sends each piece of a transfer.

All links are to be done at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.machine import are_on_two_nodes
from xshard.plans.transfer_pieces import Ints

if TYPE_CHECKING:
    from xshard.plans.transfer import Transfer  # which asks for its senders

Floats = NDArray[np.float64]


class Batch(NamedTuple):
    """Pieces of one transfer with equal sizes and the same holders."""

    n_bytes: int  # of one piece
    transfer: int  # its place in the list
    pieces: Ints  # their numbers


def balanced(transfers: Sequence[Transfer], itemsizes: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Choose which device sends each piece of transfers that run together, so that loads are even.

    Replicated blocks have several holders, and any of them can send a piece. A receiver that holds
    a piece itself uses its own. The other pieces are given out greedily, the largest first, each to
    the holder that would be done with it first.

    A piece is the part of a receiver's block that lies in one block of the source. If devices 0 and
    1 both hold block A, which 2 and 3 each need, 0 sends to one of them and 1 to the other.

    Args:
        transfers: The transfers, with devices that are numbered alike in all of them.
        itemsizes: Bytes of an element, one for each transfer. Default: 1.

    Returns:
        For every transfer the sender of each of its pieces, as a position on the source's mesh.
    """
    itemsizes = itemsizes or (1,) * len(transfers)
    max_device = max(
        (max(*transfer.src_devices, *transfer.dst_devices) for transfer in transfers),
        default=0,
    )
    busy_s = np.zeros(max_device + 1)  # [devices]: until when each device sends, in seconds
    senders_by_transfer = []  # for each transfer: the senders so far, [pieces]
    batches: list[Batch] = []  # of all transfers: pieces of one size with the same holders
    for transfer_index, (transfer, itemsize) in enumerate(zip(transfers, itemsizes, strict=True)):
        # The receiver itself where it holds the piece; -1 for pieces that have to be sent.
        senders = _own_positions(transfer, max_device)
        senders_by_transfer.append(senders)
        batches += _batches(transfer, transfer_index, np.flatnonzero(senders < 0), itemsize)
    # The largest pieces first. Python's sort is stable, so batches of equal bytes stay in one order,
    # the same on all ranks: each rank computes the senders for itself.
    batches.sort(key=lambda batch: (-batch.n_bytes, batch.transfer))
    for batch in batches:
        # This adds the seconds of the batch to `busy_s`, so that later batches go to other devices.
        senders = _choose_senders(batch, transfers[batch.transfer], busy_s)
        senders_by_transfer[batch.transfer][batch.pieces] = senders
    return [tuple(senders.tolist()) for senders in senders_by_transfer]


def _own_positions(transfer: Transfer, max_device: int) -> Ints:
    """Return for every piece its receiver's position on the source's mesh if it holds the piece, else -1."""
    sent_pieces = transfer._pieces
    position_of_device = np.full(max_device + 1, -1)
    position_of_device[[*transfer.src_devices]] = range(len(transfer.src_devices))
    receivers = np.array(transfer.dst_devices)[sent_pieces.dst]
    position = position_of_device[receivers]
    holds_piece = (position >= 0) & (sent_pieces.group_of[position] == sent_pieces.group)
    return np.where(holds_piece, position, -1)


def _batches(
    transfer: Transfer, transfer_index: int, piece_indices: Ints, itemsize: int
) -> list[Batch]:
    """Sort some pieces of a transfer into batches, larger pieces first."""
    piece_sizes = transfer._pieces.size
    holder_groups = transfer._pieces.group
    piece_indices = piece_indices[
        np.lexsort((holder_groups[piece_indices], -piece_sizes[piece_indices]))
    ]
    is_new_batch = np.diff(piece_sizes[piece_indices]) | np.diff(holder_groups[piece_indices])
    starts = np.flatnonzero(is_new_batch) + 1
    return [
        Batch(int(piece_sizes[batch[0]]) * itemsize, transfer_index, batch)
        for batch in np.split(piece_indices, starts)
        if len(batch)
    ]


def _choose_senders(batch: Batch, transfer: Transfer, busy_s: Floats) -> Ints:
    """Choose which device sends each piece of a batch: the one that would be done with it first.

    All pieces of a batch have the same size and the same holders, devices that have a replica of
    them. If devices 0 and 1 are holders, busy until 0 and 5 s, and two pieces take 3 s each, device
    0 sends both.

    Args:
        batch: The pieces.
        transfer: Their transfer.
        busy_s: Until when each device sends, [devices]. The seconds of sending are added in place.

    Returns:
        The senders' positions on the source's mesh, [pieces].
    """
    profile = transfer.profile
    sent_pieces = transfer._pieces
    # Any piece of the batch tells the group of holders: positions on the source's mesh, [holders].
    holders = sent_pieces.holders[sent_pieces.group[batch.pieces[0]]]
    devices = np.array(transfer.src_devices)[holders]
    receivers = np.array(transfer.dst_devices)[sent_pieces.dst[batch.pieces]]
    # Inside a node, then between nodes: `is_between_nodes` as an index takes one of these two.
    links = (profile.default, profile.across or profile.default)
    link_s = np.array([link.latency_s + batch.n_bytes / link.bytes_per_s for link in links])
    is_between_nodes = are_on_two_nodes(profile, devices, receivers[:, None])
    piece_s = link_s[is_between_nodes.astype(int)]  # [pieces, holders]
    # With equal times the loop below has a closed form, and there may be millions of pieces.
    if (piece_s == piece_s[0, 0]).all():
        equal_s = max(float(piece_s[0, 0]), 1e-12)  # links of a profile may cost nothing
        senders: Ints = holders[_fill_evenly(busy_s, devices, equal_s, len(batch.pieces))]
        return senders
    senders = np.empty_like(batch.pieces)
    for i, holder_s in enumerate(piece_s):
        done_s = busy_s[devices] + holder_s
        earliest = done_s.argmin()
        senders[i] = holders[earliest]
        busy_s[devices[earliest]] = done_s[earliest]
    return senders


def _fill_evenly(busy_s: Floats, devices: Ints, piece_s: float, n_pieces: int) -> Ints:
    """Give equal pieces, one after another, to the device that would be done with it first.

    Holders (devices that have the pieces) that are busy until 0 and 5 s, and two pieces of 3 s ->
    [0, 0]: holder 0 is done at 3 and at 6 s, holder 1 would be at 8 s.

    The result is that of a loop over the pieces, but in one sort: each holder offers the times at
    which it would be done with its first, second, ... piece, and the earliest offers are taken.

    Args:
        busy_s: Until when each device sends, [devices]. Changed in place: for holders that take
            pieces, it is set to when they are done with the last one.
        devices: The device of each holder, [holders].
        piece_s: Seconds of one piece, more than 0.
        n_pieces: The number of pieces.

    Returns:
        The holder that takes each piece, as an index into `devices`, [pieces].
    """
    free_s = busy_s[devices]  # [holders]: from when on they are free
    # How many offers are enough? If only the k holders that are free first shared the work, and all
    # ended at once, that would be at end_s[k - 1]. No holder ends more than one piece after the
    # earliest of these times, so offers after that are not made.
    end_s = (n_pieces * piece_s + np.sort(free_s).cumsum()) / np.arange(1, len(free_s) + 1)
    latest_s = end_s.min() + piece_s
    # A holder that is free only after that has a negative quotient: -1, and so no offers.
    last_offer = np.clip((latest_s - free_s) / piece_s, -1, n_pieces).astype(np.int64)
    n_offers = last_offer + 1
    # All offers in a row, holder by holder: for 2 and 3 offers, `holder` is 0 0 1 1 1, `n_before`
    # is 0 0 2 2 2 and `ordinal` is 1 2 1 2 3.
    holder = np.repeat(np.arange(len(free_s)), n_offers)
    n_before = np.repeat(n_offers.cumsum() - n_offers, n_offers)
    ordinal = np.arange(1, len(holder) + 1) - n_before
    done_s = free_s[holder] + ordinal * piece_s
    earliest = np.lexsort((holder, done_s))[:n_pieces]  # ties go to the first holder
    takers = holder[earliest]
    np.maximum.at(busy_s, devices[takers], done_s[earliest])
    return takers
