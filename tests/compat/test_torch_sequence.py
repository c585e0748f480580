"""nvSubquadratic's functions: uneven blocks, any dims, any group; what it, ksuit and poptorch refuse."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of,
    error_of,
    numbers,
    still_connected,
)
from torch_bridge.compat import ksuit, nvsubquadratic, poptorch
from torch_bridge.mesh import desync
from xshard.compat import DIRECTIONS

N = 4
MESH = xs.Mesh(cp=N)


on_ranks_of_group = SharedRanks(N)


@on_ranks_of_group
def test_blocks_may_be_uneven() -> None:
    """Lengths that nothing divides, both ways: the blocks of the layouts, and gradients that move back."""
    for (length, channels), zigzag in itertools.product(((19, 6), (8, 5), (3, 2)), (True, False)):
        x = numbers(2, channels, length, 3)
        layouts = f"b c {'l/zigzag(cp)' if zigzag else 'l/cp'} w", "b c/cp l w"
        ends = [[block_of(array, layout, MESH) for array in (x, x % 7 - 3)] for layout in layouts]
        for direction, (before, after) in zip(DIRECTIONS, (ends, ends[::-1]), strict=True):
            block = before[0].clone().requires_grad_()
            y = nvsubquadratic.AllToAllSingleFunction.apply(
                block, None, direction, zigzag, shape=x.shape
            )
            assert torch.equal(y, after[0])
            assert torch.equal(torch.autograd.grad(y, block, after[1])[0], before[1])
    # A whole that nothing divides is cut, and put together again.
    whole = torch.from_numpy(numbers(2, 19))
    mine = nvsubquadratic.zigzag_split_across_group_ranks(whole, None, seq_dim=-1)
    assert mine.shape[1] < 19
    assert torch.equal(
        nvsubquadratic.zigzag_gather_from_group_ranks(mine, None, -1, shape=(2, 19)), whole
    )


@on_ranks_of_group
def test_any_dims_are_exchanged() -> None:
    """Sequence first, as in [L, B, C]."""
    x = numbers(16, 2, 8)
    block = block_of(x, "l/zigzag(cp) b c", MESH)
    columns = block_of(x, "l b c/cp", MESH)
    for channel_dim, sequence_dim in ((2, 0), (-1, -3)):
        dims = {"channel_dim": channel_dim, "sequence_dim": sequence_dim}
        y = nvsubquadratic.all_to_all_single_fn(None, "split_to_full", block, **dims)
        assert torch.equal(y, columns)
        assert torch.equal(
            nvsubquadratic.all_to_all_single_fn(None, "full_to_split", y, **dims), block
        )


@on_ranks_of_group
def test_any_group_exchanges() -> None:
    """In two groups of two, whose second one does not begin at rank 0; in the order of the group."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = pairs[rank % 2]
    other = pairs[1 - rank % 2]
    x = numbers(1, 2, 8)
    block = torch.from_numpy(x)[:, [rank // 2]]
    y = nvsubquadratic.all_to_all_single_fn(mine, "full_to_split", block)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]
    assert np.array_equal(y, x[..., rows])
    kind, text = error_of(
        lambda: nvsubquadratic.all_to_all_single_fn(other, "full_to_split", block)
    )
    assert kind == "MeshError" and f"rank {rank} is not in the group" in text
    alone = [dist.new_group([r]) for r in range(N)][rank]
    for verb in ("split_across", "gather_from"):
        assert torch.equal(
            getattr(nvsubquadratic, f"zigzag_{verb}_group_ranks")(block, alone, 2), block
        )
    assert still_connected()


@on_ranks_of_group
def test_what_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    x = torch.ones(2, 4, 8)
    single: Any = nvsubquadratic.all_to_all_single_fn
    length = "the sequence length 12 is not divisible by 8"

    def compared(direction: str = "full_to_split", zigzag: bool = True, x: Tensor = x[:1]) -> Any:
        apply: Any = nvsubquadratic.AllToAllSingleFunction.apply
        return apply(x, None, direction, zigzag, debug=True)

    def every(call: Callable[[], Any]) -> Any:
        """As the environment variable XSHARD_DEBUG does, of every verb."""
        desync.ALWAYS = True
        return call()

    refused: Any = (
        (lambda: single(None, "full_to_full", x), "XshardError",
            "type is 'full_to_full', not Direction", "['split_to_full', 'full_to_split']"),
        (lambda: nvsubquadratic.AllToAllSingleFunction.apply(x[0], None, "full_to_split", True), "ShapeError",
            "2 dims, not 3, 4 or 5", "[B, C, L]", "all_to_all"),
        (lambda: single(None, "full_to_split", torch.ones(2, 4, 12)), "ShapeError",
            length, "^^", "pass shape="),
        (lambda: single(None, "split_to_full", torch.ones(2, 4, 3)), "ShapeError",
            length, "'d0 d1 d2/zigzag(cp) -> d0 d1/cp d2'"),
        (lambda: single(None, "full_to_split", torch.ones(2, 4, 6), False), "ShapeError",
            "the sequence length 6 is not divisible by 4"),
        (lambda: single(None, "split_to_full", torch.ones(2, 6, 8)), "ShapeError",
            "the number of channels 6 is not divisible by 4"),
        (lambda: single(None, "full_to_split", x, shape=(2, 9, 8)), "ShapeError",
            "has shape (2, 4, 8), not (2, ", "of a (2, 9, 8) array"),
        (lambda: single("cp", "full_to_split", x), "XshardError", "group is 'cp', not Group", "None"),
        (lambda: poptorch.all_gather_cross_replica(x, 2), "MeshError",
            "replication_factor 2, the group has 4 processes"),
        (lambda: poptorch.all_to_all_single_cross_replica(torch.ones(6, 2), 4), "ShapeError",
            "6 rows cannot be split into 4 equal parts"),
        (lambda: poptorch.all_to_all_single_cross_replica(torch.tensor(1.0), 4), "ShapeError",
            "a scalar cannot be split into 4 equal parts"),
        (lambda: ksuit.all_gather_grad(x[0, 0], batch_dim=1), "ShapeError",
            "no dim 1 in a block of shape (8,)"),
        (lambda: compared("split_to_full" if rank == 1 else "full_to_split"), "DesyncError", "type"),
        (lambda: compared(zigzag=rank != 2), "DesyncError", "with_zigzag_splitting"),
        (lambda: compared("full_to_full" if rank == 3 else "full_to_split"), "DesyncError",
            "unknown direction 'full_to_full'"),
        (lambda: compared(x=torch.ones(1, 4, 6) if rank == 0 else x[:1]), "DesyncError",
            "the sequence length 6 is not divisible by 8"),
        (lambda: compared("full_to_full"), "XshardError", "unknown direction 'full_to_full'"),
        (lambda: every(lambda: poptorch.all_reduce_cross_replica_sum(x, N, rank == 1)), "DesyncError",
            "expression"),
        (lambda: every(lambda: ksuit.all_gather_grad(x, batch_dim=rank % 2)), "DesyncError", "expression"),
    )  # fmt: skip
    for call, kind, *parts in refused:
        with pytest.raises(
            ValueError, match=re.escape(parts[0])
        ) as caught:  # as users of the originals do
            call()
        assert type(caught.value).__name__ == kind and all(
            part in str(caught.value) for part in parts
        )
    assert still_connected() and compared().shape == (1, 16, 2)
