"""nvSubquadratic's functions beyond the original: uneven blocks, any dims, any group, all derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import xshard as xs
from tests.torch_bridge.helpers import block_of, error_of, numbers, on_ranks, still_connected
from torch_bridge.compat import ksuit, nvsubquadratic, poptorch
from torch_bridge.mesh import desync
from xshard.compat import DIRECTIONS

N = 4
MESH = xs.Mesh(cp=N)


def _dot(a: Tensor, b: Tensor) -> int:
    """Over all ranks."""
    total = (a * b).sum()
    dist.all_reduce(total)
    return int(total.item())


def _uneven() -> None:
    """Lengths that nothing divides, both ways: the blocks of the layouts, and exact adjoints."""
    for (length, channels), zigzag in itertools.product(((19, 6), (8, 5), (3, 2)), (True, False)):
        x = numbers(2, channels, length, 3)
        split = f"b c {'l/zigzag(cp)' if zigzag else 'l/cp'} w"
        ends = [block_of(x, layout, MESH) for layout in (split, "b c/cp l w")]
        for direction, (before, after) in zip(DIRECTIONS, (ends, ends[::-1]), strict=True):
            block = before.clone().requires_grad_()
            y = nvsubquadratic.AllToAllSingleFunction.apply(block, None, direction, zigzag, shape=x.shape)
            assert torch.equal(y, after)
            cotangent = torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape) % 7 - 3
            (gradient,) = torch.autograd.grad(y, block, cotangent)
            assert _dot(y.detach(), cotangent) == _dot(before, gradient)
    # A whole that nothing divides is cut, and put together again.
    whole = torch.from_numpy(numbers(2, 19))
    mine = nvsubquadratic.zigzag_split_across_group_ranks(whole, None, seq_dim=-1)
    assert mine.shape[1] < 19
    assert torch.equal(nvsubquadratic.zigzag_gather_from_group_ranks(mine, None, -1, shape=(2, 19)), whole)


def _dims() -> None:
    """Sequence first, as in [L, B, C]."""
    x = numbers(16, 2, 8)
    block, columns = block_of(x, "l/zigzag(cp) b c", MESH), block_of(x, "l b c/cp", MESH)
    for channel_dim, sequence_dim in ((2, 0), (-1, -3)):
        dims = {"channel_dim": channel_dim, "sequence_dim": sequence_dim}
        y = nvsubquadratic.all_to_all_single_fn(None, "split_to_full", block, **dims)
        assert torch.equal(y, columns)
        assert torch.equal(nvsubquadratic.all_to_all_single_fn(None, "full_to_split", y, **dims), block)


def _derivatives() -> None:
    rank = dist.get_rank()
    x = block_of(numbers(1, 4, 8), "b c l/zigzag(cp)", MESH)
    direction = torch.full_like(x, rank + 1.0)

    def moved(x: Tensor) -> Tensor:
        return nvsubquadratic.AllToAllSingleFunction.apply(x, None, "split_to_full", True)

    y, tangent = torch.func.jvp(moved, (x,), (direction,))
    assert torch.equal(y, moved(x)) and torch.equal(tangent, moved(direction))
    # Of sum(y**3): the gradient 3 x**2 has a gradient of its own, along the direction 6 x direction.
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(moved(leaf).pow(3).sum(), leaf, create_graph=True)
    assert gradient.requires_grad and torch.equal(gradient, 3 * x**2)
    (second,) = torch.autograd.grad((gradient * direction).sum(), leaf)
    assert torch.equal(second, 6 * x * direction)


class Mixer(nn.Module):
    """A Hyena mixer `(b, *space, c)`: gates around a convolution of channels over the whole space, by FFT.

    group: the processes that cut the first dim of space, in zigzag order; False for none.
    """

    def __init__(self, space: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.kernel = nn.Parameter(torch.randn(channels, *space))
        self.shift = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor, group: Any = False) -> Tensor:
        parts = self.enter(x).movedim(-1, 1).chunk(3, 1)  # the strides of channels-last
        kernel, shift = self.kernel, self.shift
        if group is not False:
            parts = [
                nvsubquadratic.AllToAllSingleFunction.apply(p, group, "split_to_full", True) for p in parts
            ]
            kernel, shift = (p.chunk(dist.get_world_size())[dist.get_rank()] for p in (kernel, shift))
        q, k, v = parts
        space = tuple(range(2, x.ndim))
        double = [2 * n for n in q.shape[2:]]
        waves = torch.fft.rfftn(k * v, s=double, dim=space)
        waves = waves * torch.fft.rfftn(kernel, s=double, dim=tuple(d - 1 for d in space))
        y = torch.fft.irfftn(waves, s=double, dim=space)[(..., *map(slice, q.shape[2:]))]
        y = q * (y + shift.view(-1, *[1] * len(space)) * (k * v))
        if group is not False:
            y = nvsubquadratic.AllToAllSingleFunction.apply(y, group, "full_to_split", True)
        return self.leave(y.movedim(1, -1))


def _mixers() -> None:
    for space in ((8,), (8, 3), (8, 3, 2)):
        torch.manual_seed(0)
        mixer = Mixer(space, 4).double()
        x = torch.randn(2, *space, 4, dtype=torch.float64, requires_grad=True)
        y = mixer(x)
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)
        wanted = torch.autograd.grad(y, [x, *mixer.parameters()], weights)
        mine = nvsubquadratic.zigzag_split_across_group_ranks(x.detach(), None, 1).requires_grad_()
        mixed = mixer(mine, None)
        split = nvsubquadratic.zigzag_split_across_group_ranks(weights, None, 1)
        found = torch.autograd.grad(mixed, [mine, *mixer.parameters()], split)
        for part in found[1:]:
            dist.all_reduce(part)
        whole = nvsubquadratic.zigzag_gather_from_group_ranks
        together = [whole(mixed, None, 1), whole(found[0], None, 1), *found[1:]]
        for a, b in zip(together, [y, *wanted], strict=True):
            torch.testing.assert_close(a, b)


def test_mixers_over_one_two_and_three_dims() -> None:
    on_ranks(2, _mixers)


def _groups() -> None:
    """In two groups of two, whose second one does not begin at rank 0; in the order of the group."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    x = numbers(1, 2, 8)
    block = torch.from_numpy(x)[:, [rank // 2]]
    y = nvsubquadratic.all_to_all_single_fn(mine, "full_to_split", block)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]
    assert np.array_equal(y, x[..., rows])
    kind, text = error_of(lambda: nvsubquadratic.all_to_all_single_fn(other, "full_to_split", block))
    assert kind == "MeshError" and f"rank {rank} is not in the group" in text
    alone = [dist.new_group([r]) for r in range(N)][rank]
    for function in (
        nvsubquadratic.zigzag_split_across_group_ranks,
        nvsubquadratic.zigzag_gather_from_group_ranks,
    ):
        assert torch.equal(function(block, alone, 2), block)
    assert still_connected()


X = torch.ones(2, 4, 8)
REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "direction": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "full_to_full", X),  # type: ignore[arg-type]
        "XshardError",
        ("unknown direction 'full_to_full'", "'split_to_full' or 'full_to_split'"),
    ),
    "dims": (
        lambda: nvsubquadratic.AllToAllSingleFunction.apply(X[0], None, "nonsense", True),  # type: ignore[arg-type]
        "ShapeError",
        ("2 dims, not 3, 4 or 5", "[B, C, L]", "all_to_all"),
    ),
    "length of zigzag": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "full_to_split", torch.ones(2, 4, 12)),
        "ShapeError",
        ("the sequence length 12 is not divisible by 8", "^^", "pass shape="),
    ),
    "length of half a chunk": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "split_to_full", torch.ones(2, 4, 3)),
        "ShapeError",
        ("the sequence length 12 is not divisible by 8", "'d0 d1 d2/zigzag(cp) -> d0 d1/cp d2'"),
    ),
    "contiguous length": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "full_to_split", torch.ones(2, 4, 6), False),
        "ShapeError",
        ("the sequence length 6 is not divisible by 4",),
    ),
    "channels": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "split_to_full", torch.ones(2, 6, 8)),
        "ShapeError",
        ("the number of channels 6 is not divisible by 4",),
    ),
    "another global shape": (
        lambda: nvsubquadratic.all_to_all_single_fn(None, "full_to_split", X, shape=(2, 9, 8)),
        "ShapeError",
        ("has shape (2, 4, 8), not (2, ", "of a (2, 9, 8) array"),
    ),
    "no group": (
        lambda: nvsubquadratic.all_to_all_single_fn("cp", "full_to_split", X),  # type: ignore[arg-type]
        "MeshError",
        ("'cp' is not a process group", "or None"),
    ),
}


def _refusals() -> list[tuple[str, str]]:
    found = [error_of(call) for call, _, _ in REFUSED.values()]
    assert still_connected()
    return found


def _flags_that_differ() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    x = torch.ones(1, 4, 8)

    def turned(direction: Any = "full_to_split", zigzag: bool = True, x: Tensor = x) -> Any:
        return nvsubquadratic.AllToAllSingleFunction.apply(x, None, direction, zigzag, debug=True)

    found = [
        error_of(lambda: turned("split_to_full" if rank == 1 else "full_to_split")),
        error_of(lambda: turned(zigzag=rank != 2)),
        error_of(lambda: turned("full_to_full" if rank == 3 else "full_to_split")),
        error_of(lambda: turned(x=torch.ones(1, 4, 6) if rank == 0 else x)),
        error_of(lambda: turned("full_to_full")),
    ]
    assert turned().shape == (1, 16, 2)
    # Every verb, as the environment variable XSHARD_DEBUG does.
    desync.ALWAYS = True
    found.append(error_of(lambda: poptorch.all_reduce_cross_replica_sum(x, N, rank == 1)))
    found.append(error_of(lambda: ksuit.all_gather_grad(x, batch_dim=rank % 2)))
    assert still_connected()
    return found


FLAGS = (
    ("DesyncError", "type"),
    ("DesyncError", "with_zigzag_splitting"),
    ("DesyncError", "unknown direction 'full_to_full'"),
    ("DesyncError", "the sequence length 6 is not divisible by 8"),
    ("XshardError", "unknown direction 'full_to_full'"),
    ("DesyncError", "expression"),
    ("DesyncError", "expression"),
)


def _on_four() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    for check in (_uneven, _dims, _derivatives, _groups):
        check()
    return _refusals(), _flags_that_differ()


def test_blocks_dims_groups_and_what_is_refused_on_every_rank() -> None:
    for refused, differing in on_ranks(N, _on_four):
        for (kind, text), (_, wanted, parts) in zip(refused, REFUSED.values(), strict=True):
            assert issubclass(getattr(xs.errors, wanted), ValueError)  # what users of the originals catch
            assert kind == wanted and all(part in text for part in parts), text
        for (kind, text), (wanted, part) in zip(differing, FLAGS, strict=True):
            assert kind == wanted and part in text, text
