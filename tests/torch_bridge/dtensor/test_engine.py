"""xshard as DTensor's engine: both make each call of `redistribute_local_tensor`, where DTensor moves blocks,
and must agree. The program goes on with xshard's block; its results are those of whole tensors."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import Placement

import torch_bridge as xt
from tests.torch_bridge.helpers import RECENT, in_ranks, on_threads

R = Replicate()
S0 = Shard(0)
S1 = Shard(1)
S2 = Shard(2)
theirs = _redistribute.redistribute_local_tensor
Cuts = list[Placement]
Make = Callable[..., Tensor]  # shape, placements -> an array of whole numbers, or its DTensor
Program = Callable[[Make, Cuts, Cuts], list[Tensor]]


class Engine(threading.local):
    """What a rank, which is a thread, has moved; torch's own engine while one of both is at work."""

    def __init__(self) -> None:
        self.is_busy, self.moves = False, Counter[str]()

    @torch.no_grad()
    def move(self, block: Tensor, src: Any, dst: Any, **options: Any) -> Tensor:
        if self.is_busy:
            return theirs(block, src, dst, **options)
        self.is_busy = True
        try:
            kept = block.clone()
            expected = theirs(block, src, dst)
            x = DTensor.from_local(
                block, src.mesh, src.placements, shape=src.shape, stride=src.stride
            )
            found = xt.dtensor.redistribute(x, dst.placements).to_local()
            what = f"{src.placements} -> {dst.placements} of {tuple(src.shape)}"
            assert torch.equal(block, kept), f"{what} wrote to its operand"
            assert found.dtype == expected.dtype, what
            # Reduced in another order, sums of fractions may be rounded in another way.
            rounded = 1e-14 * any(isinstance(p, Partial) for p in src.placements)
            options = {"rtol": rounded, "atol": rounded, "msg": lambda text: f"{what}: {text}"}
            torch.testing.assert_close(added(found, dst), added(expected, dst), **options)
        finally:
            self.is_busy = False
        for old, new in zip(src.placements, dst.placements, strict=True):
            self.moves[f"{type(old).__name__} -> {type(new).__name__}"] += old != new
        return found


def added(block: Tensor, spec: Any) -> Tensor:
    """The block, with addends added: how an array is cut into addends is free."""
    block = block.clone()
    for at, placement in enumerate(spec.placements):
        if placement == Partial():
            dist.all_reduce(block, group=spec.mesh.get_group(at))
    return block


ENGINE = Engine()


def install() -> None:
    """Give DTensor xshard's engine, wherever torch has imported its own by name, until the process ends."""
    name = "redistribute_local_tensor"
    places = [m for m in [*sys.modules.values()] if getattr(m, name, None) in (theirs, ENGINE.move)]
    assert len(places) >= 3, "torch calls its engine in another way"
    for place in places:
        setattr(place, name, ENGINE.move)


def matmul(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    x = make((8, 4), a)
    y = make((4, 12), b)
    z = x @ y
    (z * z).sum().backward()
    return [z, x.grad, y.grad]


def pointwise(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    x = make((8, 5), a)
    y = make((8, 5), b)
    z = torch.cat([x * y + x, torch.where(x > y, x, y)], dim=1)
    (z * z).sum().backward()
    return [z, x.grad, y.grad, torch.stack([x, y], dim=1)]


def reductions(make: Make, a: Cuts, _: Cuts) -> list[Tensor]:
    x = make((8, 12), a)
    found = [x.sum(0), x.sum(1, keepdim=True), x.mean(), x.amax(0), x.min()]
    centred = x - x.mean(0)
    (centred * centred).sum().backward()
    return [*found, x.cumsum(1), x.all(), x.argmax(1), centred, x.grad]


def flattening(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    x = make((4, 8, 4), a)
    w = make((4, 6), b)
    y = x.flatten(0, 1) @ w
    y.sum().backward()
    return [y, x.grad, w.grad]


def views(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    x = make((4, 8, 4), a)
    z = x.permute(2, 0, 1).reshape(16, 8).unsqueeze(1)
    (z * z).sum().backward()
    return [z, x.transpose(0, 1)[2:5], x.grad, *x.split(2, dim=1), *flattening(make, a, b)]


def attention(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    x = make((4, 6, 8), a)
    qkv = [make((8, 8), b) for _ in range(3)]
    out = make((8, 8), [S0] + [R] * (len(b) - 1))
    q, k, v = ((x @ w).view(4, 6, 4, 2).transpose(1, 2) for w in qkv)
    mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
    y = functional.layer_norm(mixed.transpose(1, 2).flatten(2) @ out, (8,))
    loss = functional.cross_entropy(y.flatten(0, 1), make((24,), [R] * len(a), torch.int64) % 8)
    loss.backward()
    return [y, loss, x.grad, *(w.grad for w in qkv), out.grad]


def optimiser_steps(make: Make, a: Cuts, b: Cuts) -> list[Tensor]:
    weights = [
        torch.nn.Parameter(make(shape, cut).detach()) for shape, cut in (((6, 8), a), ((8, 5), b))
    ]
    optimisers = [
        torch.optim.SGD(weights, lr=0.5, momentum=0.5),
        torch.optim.AdamW(weights, foreach=True),
    ]
    for optimiser in optimisers * 2:
        optimiser.zero_grad()
        y = make((4, 6), [S0] + [R] * (len(a) - 1)) @ weights[0] @ weights[1]
        (y * y).sum().backward()
        torch.nn.utils.clip_grad_norm_(weights, 4.0)
        optimiser.step()
    return weights


Ends = list[tuple[Cuts, Cuts]]
LINE: list[tuple[Program, Ends]] = [
    (matmul, [*itertools.product([[R], [S0], [S1]], repeat=2)]),
    (pointwise, [([S0], [S1]), ([R], [S1])]),
    (reductions, [([S0], []), ([S1], [])]),
    (attention, [([S0], [S1])]),
    (optimiser_steps, [([S1], [S0])]),
]
# A few: on two axes torch enumerates its own strategies for long.
GRID: list[tuple[Program, Ends]] = [
    (matmul, [([S0, S1], [R, S0])]),
    (pointwise, [([S0, S1], [S1, S0])]),
]
if RECENT:  # DTensor flattens cut dims
    LINE += [(views, [([S0], [S1]), ([S1], [R]), ([S2], [S0])]), (attention, [([S1], [R])])]
    GRID += [(flattening, [([S1, S0], [R, R])])]


def check_programs(
    shape: tuple[int, ...], table: list[tuple[Program, Ends]], kinds: set[str]
) -> None:
    mesh = init_device_mesh("cpu", shape)
    install()

    def making(mesh: DeviceMesh | None) -> Make:
        numbers = itertools.count(3)

        def make(shape: Sequence[int], cuts: Cuts, dtype: torch.dtype = torch.float64) -> Tensor:
            whole = (torch.arange(math.prod(shape)) * next(numbers) % 7).view(*shape).to(dtype)
            whole = whole - 3 if dtype.is_floating_point else whole
            x = distribute_tensor(whole, mesh, cuts, src_data_rank=None) if mesh else whole
            return x.requires_grad_(dtype.is_floating_point)

        return make

    for program, ends in table:
        for a, b in ends:
            try:
                both = program(making(None), a, b), program(making(mesh), a, b)
                for plain, placed in zip(*both, strict=True):
                    torch.testing.assert_close(placed.full_tensor(), plain, rtol=1e-12, atol=1e-12)
            except BaseException as error:
                error.add_note(f"{program.__name__}: {a}, {b}")
                raise
    least = 4 if RECENT else 1
    assert {kind for kind, times in ENGINE.moves.items() if times >= least} >= kinds, ENGINE.moves


@in_ranks(2, on_threads)
def test_programs_on_one_axis() -> None:
    kinds = {"Shard -> Replicate", "Shard -> Shard", "Replicate -> Shard"}
    kinds |= {"Partial -> Replicate", "Partial -> Shard"}
    if RECENT:
        kinds |= {"_StridedShard -> Replicate"}  # flattens cut dims
    check_programs((2,), LINE, kinds)


@in_ranks(4, on_threads)
def test_programs_on_two_axes() -> None:
    check_programs((2, 2), GRID, {"Shard -> Replicate", "Partial -> Replicate"})
