"""The torch side of the chains, in a process that has imported torch and done nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

import torch_bridge as xt
from tests.fuzz.judge import Arrived, Trip
from tests.fuzz.runtimes import laid
from torch_bridge.testing.arrays import array_of, tensor_of
from torch_bridge.testing.launch import run_ranks
from xshard.steps.base import Block

Moved = tuple[list[Block], Block | None]  # a rank's blocks after every move, and the gradient of its first


def run(n: int, trips: Sequence[Trip], timeout_s: float) -> list[Arrived]:
    """All chains on `n` ranks."""
    by_rank = run_ranks(n, _run_all, trips, timeout_s=timeout_s)
    return [_together(each) for each in zip(*by_rank, strict=True)]


def _run_all(trips: Sequence[Trip]) -> list[Moved]:
    torch.use_deterministic_algorithms(True)  # memory that nobody writes to holds no number
    return [_run(trip) for trip in trips]


def _run(trip: Trip) -> Moved:
    """Expressions, which redistribute plans itself; dtypes without autograd go back by the backward plans."""
    chain, rank = trip.chain, dist.get_rank()
    first = _laid(trip.blocks[rank], chain.strides)
    inexact = trip.cotangents is not None and (first.is_floating_point() or first.is_complex())
    here = first.clone(memory_format=torch.preserve_format).requires_grad_(inexact)
    leaf, found = here, []
    for i in range(chain.moves):
        ends = chain.layouts[i], chain.layouts[i + 1]
        here = xt.redistribute(here, ends, chain.mesh, shape=chain.shape_at(i), profile=chain.profile)
        found.append(array_of(here.detach().contiguous()).copy())
    if trip.cotangents is None:
        return found, None
    cotangent = _laid(trip.cotangents[rank], chain.strides)
    if inexact:
        (gradient,) = torch.autograd.grad(here, leaf, cotangent)
    else:
        gradient = cotangent
        for plan in reversed(trip.plans):
            gradient = xt.redistribute(gradient, plan.backward, chain.mesh)
    return found, array_of(gradient.detach().contiguous())


def _laid(block: np.ndarray, strides: str) -> torch.Tensor:
    if strides == "one value" and block.size and (block == block.flat[0]).all():
        return tensor_of(block.ravel()[:1].copy()).reshape(()).expand(block.shape)
    return tensor_of(laid(block, strides))


def _together(ranks: Sequence[Moved]) -> Arrived:
    moved, gradients = zip(*ranks, strict=True)
    gradient = None if gradients[0] is None else list(gradients)
    return Arrived([list(blocks) for blocks in zip(*moved, strict=True)], gradient)
