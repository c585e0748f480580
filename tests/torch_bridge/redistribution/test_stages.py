"""Two stages of a pipeline on meshes of different size: moves that only their own processes call."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from tests.torch_bridge.helpers import SharedRanks, error_of, still_connected
from torch_bridge.mesh.failures import timeout_of
from torch_bridge.mesh.process_groups import group_of_programs

on_five = SharedRanks(5)
FIRST = (0, 1)  # the ranks of the first stage, and of the second
SECOND = (2, 3, 4)
TIMEOUT_S, LATE_S = 4, 30  # the second is for a slow machine
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


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Groups that are made inside wait for `TIMEOUT_S`; ranks begin together, however slow they are."""
    world = dist.group.WORLD
    wait = timeout_of(world)
    dist.barrier()
    c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), world)
    yield
    c10d._set_pg_timeout(wait, world)
    dist.barrier()


def halves(src: tuple[int, ...], dst: tuple[int, ...]) -> torch.Tensor | None:
    """Move 12 numbers from half to half: each rank sends to one."""
    rank = dist.get_rank()
    ends = {"src_mesh": mesh_of(src), "dst_mesh": mesh_of(dst), "shape": (12,)}
    block = torch.arange(6.0) + 6 * src.index(rank) if rank in src else None
    return xt.redistribute(block, "n/tp -> n/tp", **ends, dtype="float32")


def told_of_a_missing_rank(src: tuple[int, ...], dst: tuple[int, ...]) -> str:
    """What this rank is told of a move, which must not take longer than the timeout and a little."""
    start = time.monotonic()
    kind, told = error_of(lambda: halves(src, dst))
    assert kind == "CollectiveError", told
    assert time.monotonic() - start < TIMEOUT_S + LATE_S
    return told


@on_five
def test_a_missing_rank_is_named_within_the_timeout() -> None:
    """Rank 3 comes to one move, and not to the next; rank 4 never comes."""
    rank = dist.get_rank()
    for ranks in (FIRST, (2, 3), (2, 4)):
        mesh_of(ranks)
    missing = f"has ended, has failed, did not come within {TIMEOUT_S} s"
    with short_timeouts():
        if rank < 4:
            y = halves(FIRST, (2, 3))
            assert y is None or y.tolist() == list(range(6 * rank - 12, 6 * rank - 6))
        if rank == 1:  # it sends to rank 3 alone: ranks 0 and 2 need not know
            told = told_of_a_missing_rank(FIRST, (2, 3))
            assert "the messages between the meshes of 'n/tp -> n/tp' failed on rank 1" in told
            assert f"rank 3 {missing}" in told
    with short_timeouts():
        if rank < 3:
            assert f"rank 4 {missing}" in told_of_a_missing_rank(FIRST, (2, 4))
        if (
            rank > 2
        ):  # the group of two programs, of which the second has two ranks: the last does not come
            place = rank - 3
            store = c10d._get_default_store().clone()
            meet = functools.partial(group_of_programs, store, "both", place, 3)
            kind, told = error_of(lambda: meet(timedelta(seconds=2)))
            assert kind == "CollectiveError" and "rank 2 has ended, has failed" in told, told
            assert "did not come within 2 s" in told
