"""Two stages of a pipeline on meshes of different size: moves that only their own processes call."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from tests.torch_bridge.helpers import SharedRanks, error_of, still_connected

on_five = SharedRanks(5)
FIRST = (0, 1)  # the ranks of the first stage, and of the second
SECOND = (2, 3, 4)
BATCHES, ROWS, WIDTH, INNER = 4, 2, 3, 6


@functools.cache
def mesh_of(ranks: tuple[int, ...]) -> DeviceMesh:
    """All ranks make it, as torch wants; only its own move over it."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("tp",))


def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Micro-batches and the weights of both stages, in integers."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).double()  # noqa: E731
    return draw(BATCHES, ROWS, WIDTH), draw(WIDTH, INNER), draw(INNER, WIDTH)


def moved(hidden: torch.Tensor | None, **options: Any) -> Any:
    ends = {"src_mesh": mesh_of(FIRST), "dst_mesh": mesh_of(SECOND), "shape": (ROWS, INNER)}
    return xt.redistribute(
        hidden, "b f/tp -> b f/tp", **ends, dtype="float64", requires_grad=True, **options
    )


def order_1f1b(n_stages: int, stage: int) -> list[tuple[str, int]]:
    """Forward and backward passes of micro-batches: some forward, then one of each by turns."""
    ahead = min(n_stages - 1 - stage, BATCHES)
    order = [("forward", i) for i in range(ahead)]
    for i in range(BATCHES):
        if i + ahead < BATCHES:
            order.append(("forward", i + ahead))
        order.append(("backward", i))
    return order


@on_five
def test_one_forward_one_backward_is_as_on_one_device() -> None:
    """Activations are on their way while gradients come back: four moves, and none waits for all."""
    x, first, second = whole()
    mesh_of(FIRST), mesh_of(SECOND)
    rank = dist.get_rank()
    is_first = rank in FIRST
    ranks = FIRST if is_first else SECOND
    rows = INNER // len(ranks)
    own = slice(ranks.index(rank) * rows, (ranks.index(rank) + 1) * rows)
    weight = (first[:, own] if is_first else second[own]).clone().requires_grad_()
    results: dict[int, Any] = {}
    for kind, i in order_1f1b(2, 0 if is_first else 1):
        if kind == "backward":
            results.pop(i).sum().backward()
        elif is_first:
            results[i] = moved((x[i] @ weight).relu(), async_op=True)
        else:
            hidden = moved(None, async_op=True)
            partial = hidden @ weight
            y = xt.redistribute(partial, "b o | sum(tp) -> b o", mesh_of(SECOND))
            results[i] = y.square()
    first.requires_grad_()
    second.requires_grad_()
    ((x @ first).relu() @ second).square().sum().backward()
    expected = first.grad[:, own] if is_first else second.grad[own]
    assert torch.equal(weight.grad, expected)


@on_five
def test_a_process_of_neither_mesh_need_not_call() -> None:
    ends = {
        "src_mesh": mesh_of((0, 1)),
        "dst_mesh": mesh_of((3,)),
        "shape": (4,),
        "dtype": "float64",
    }
    rank = dist.get_rank()
    block = torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64)
    for options in ({}, {"debug": True}, {"check_replicated": True}):
        if rank in (0, 1, 3):
            y = xt.redistribute(block if rank < 2 else None, "n/tp -> n", **ends, **options)
            assert y is None if rank < 2 else y.tolist() == [0, 1, 2, 3]
    # One that calls takes no part; and a block of it is refused.
    if rank == 2:
        assert xt.redistribute(None, "n/tp -> n", **ends) is None
        kind, told = error_of(lambda: xt.redistribute(block, "n/tp -> n", **ends))
        assert kind == "ShapeError" and "rank 2 is not in the source" in told
    assert still_connected()
