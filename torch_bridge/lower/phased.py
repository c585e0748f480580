"""Gathers and reductions over links of several speeds: one collective per speed, as `Phases` says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.executable import Move
from torch_bridge.lower.packed_collective import packed, reduce_scattered
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.site import Site
from torch_bridge.lower.subarray import subarray
from torch_bridge.mesh.process_mesh import Group
from xshard.layout.runs import Run, Runs
from xshard.steps.traffic import Phases


def all_gather(phases: Phases, site: Site, dim: int, parts: Sequence[Runs]) -> list[Move]:
    """The slowest link first, while blocks are small. parts: rows of `dim`, one per device of the group."""
    have, want = site.shapes
    *slow, last = _groups(phases, site)[::-1]
    moves = list[Move]()
    n = 1
    for group in (*slow, last):
        m = len(group.devices)
        sent = _rows(site, 1, n, have) if moves else site.whole(0)
        here = (
            _parts(phases, site, want, dim, parts, last)
            if group is last
            else _rows(site, m, n, have)
        )
        moves.append(
            packed(Collective("all_gather", group, sent.sizes, here.sizes_by_rank), sent, here)
        )
        n *= m
    return moves


def reduce_scatter(
    phases: Phases, site: Site, dim: int, parts: Sequence[Runs], op: str
) -> list[Move]:
    """The slowest link last, when pieces are small. parts: rows of `dim`, one per device of the group."""
    first, *slow = _groups(phases, site)
    have, want = site.shapes
    moves = list[Move]()
    n = len(parts)
    for group in (first, *slow):
        m = len(group.devices)
        n = n // len(group.devices)
        sent = _rows(site, m, n, want) if moves else _parts(phases, site, have, dim, parts, first)
        part = _rows(site, 1, n, want) if n > 1 else site.whole(1)
        moves.append(reduce_scattered(group, sent, part, op, site.tensor_device))
    return moves


def all_reduce(phases: Phases, site: Site, op: str) -> list[Move]:
    """A reduce-scatter over fast links, so that the slowest reduces a piece for each device; and back."""
    *near, far = _groups(phases, site)
    shape = site.shapes[0]
    n = math.prod(len(group.devices) for group in near)
    size = math.prod(shape)
    piece = (-(-size // n),)
    filling = -size % n
    all_pieces = n, *piece

    def flat(block: Tensor) -> Tensor:
        whole = block.reshape(-1)
        return (torch.nn.functional.pad(whole, (0, filling)) if filling else whole).view(all_pieces)

    def shaped(pieces: Tensor) -> Tensor:
        if filling or site.lengths is not None:
            return pieces.view(-1)[:size].view(shape).clone()
        x = pieces.view(shape)  # the result is no view, and no copy
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), shape, x.stride())

    down = list[Move]()
    up = list[Move]()
    for group in near:
        m = len(group.devices)
        n = n // len(group.devices)
        # Devices that meet over the slow link have one piece: by their places, whatever their ranks are.
        places = [sorted(group.devices).index(device) for device in group.devices]
        pieces = _rows(site, m, n, piece, places)
        part = _rows(site, 1, n, piece)
        down.append(reduce_scattered(group, pieces, part, op, site.tensor_device))
        up.insert(
            0, packed(Collective("all_gather", group, part.sizes, pieces.sizes), part, pieces)
        )
    whole = _rows(site, 1, 1, piece)
    across = packed(Collective("all_reduce", far, whole.sizes, whole.sizes, op), whole, whole)
    return [flat, *down, across, *up, shaped]


def _groups(phases: Phases, site: Site) -> list[Group]:
    """The processes that this one meets in the phase of each level, the fastest first."""
    return [site.among(phases.members(site.device, level)) for level in range(len(phases.levels))]


def _rows(
    site: Site, m: int, n: int, shape: tuple[int, ...], places: Sequence[int] = ()
) -> Packing:
    """`m` messages of `n` blocks of a shape each, in their order or at the places given."""
    whole = (m * n, *shape)
    rows = ({0: (Run(i * n, n),)} for i in places or range(m))
    return Packing(whole, tuple(subarray(whole, each, site.tensor_device) for each in rows))


def _parts(
    phases: Phases,
    site: Site,
    shape: tuple[int, ...],
    dim: int,
    parts: Sequence[Runs],
    group: Group,
) -> Packing:
    """A block as parts: for each process of a group, the parts of devices that it reaches by slower links."""
    mine = [parts[phases.mesh.index(d, phases.axes)] for d in phases.reached(site.device)]
    messages = tuple(site.subarray(shape, {dim: rows}) for rows in mine)
    n = len(group.devices)
    return Packing(shape, messages, (len(messages) // n,) * n)
