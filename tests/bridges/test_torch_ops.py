"""The named ops: both gradient conventions against one process, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.bridges.torch_helpers import error_of, numbers, on_ranks, still_connected

N = 4
MESH = xs.Mesh(tp=N)
WHOLE = torch.from_numpy(numbers(8, 4))


def _gradient(op: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = x.clone().requires_grad_()
    loss(op(leaf)).backward()
    assert leaf.grad is not None
    return leaf.grad


def _conventions() -> None:
    """ "sum": the loss is the sum of all ranks' losses. "replicated": it is one loss, seen on every rank."""
    rank = dist.get_rank()
    weight = torch.arange(1.0, 33, dtype=torch.float64).reshape(8, 4)

    def own(y: Tensor) -> Tensor:  # what only this rank adds to the loss
        return (rank + 1) * (weight[: len(y)] * y).sum()

    def shared(y: Tensor) -> Tensor:
        return (weight[: len(y)] * y).sum()

    everybody = N * (N + 1) // 2  # the sum of all (rank + 1)
    addend, part = (rank + 1) * WHOLE, WHOLE.chunk(N)[rank]
    losses = torch.cat([(r + 1) * weight[:2] for r in range(N)])  # of `own`, where each rank sees its part
    only_mine = torch.zeros_like(WHOLE)
    only_mine.chunk(N)[rank].copy_((rank + 1) * weight[:2])

    def all_gather(v: Tensor) -> Tensor:
        return xt.all_gather(v, 0, "tp", MESH, grad="sum")

    def all_gather_replicated(v: Tensor) -> Tensor:
        return xt.all_gather(v, -2, "tp", MESH, grad="replicated")

    def all_reduce(v: Tensor) -> Tensor:
        return xt.all_reduce(v, "tp", MESH, grad="sum")

    def all_reduce_replicated(v: Tensor) -> Tensor:
        return xt.all_reduce(v, "tp", MESH, grad="replicated")

    def mean(v: Tensor) -> Tensor:
        return xt.all_reduce(v, "tp", MESH, op="mean", grad="sum")

    def largest(v: Tensor) -> Tensor:
        return xt.all_reduce(v, "tp", MESH, op="max", grad="replicated")

    def reduce_scatter(v: Tensor) -> Tensor:
        return xt.reduce_scatter(v, 0, "tp", MESH)

    def slice_(v: Tensor) -> Tensor:
        return xt.slice(v, 0, "tp", MESH, grad="sum")

    def slice_replicated(v: Tensor) -> Tensor:
        return xt.slice(v, 0, "tp", MESH, grad="replicated")

    def copy_to(v: Tensor) -> Tensor:
        return xt.copy_to(v, "tp", MESH)

    def reduce_from(v: Tensor) -> Tensor:
        return xt.reduce_from(v, "tp", MESH)

    for op, x, loss, y, gradient in (
        (all_gather, part, own, WHOLE, everybody * weight.chunk(N)[rank]),
        (all_gather_replicated, part, shared, WHOLE, weight.chunk(N)[rank]),
        (all_reduce, addend, own, everybody * WHOLE, everybody * weight),
        (all_reduce_replicated, addend, shared, everybody * WHOLE, weight),
        (mean, addend, own, everybody / N * WHOLE, everybody / N * weight),
        (largest, addend, shared, N * WHOLE, weight * (rank == N - 1)),
        (reduce_scatter, addend, own, everybody * part, losses),
        (slice_, WHOLE, own, part, only_mine),
        (slice_replicated, WHOLE, own, part, losses),
        (copy_to, WHOLE, own, WHOLE, everybody * weight),
        (reduce_from, addend, shared, everybody * WHOLE, weight),
    ):
        assert torch.equal(op(x), y), op.__name__
        assert torch.equal(_gradient(op, x, loss), gradient), op.__name__


def test_gradient_conventions() -> None:
    on_ranks(N, _conventions)


def _all_to_all() -> None:
    rank = dist.get_rank()
    mesh = xs.Mesh(dp=2, cp=2)
    x = torch.from_numpy(numbers(8, 4))
    coords = mesh.coords(rank)
    # Over one axis; over both, in both orders; and from zigzag to plain.
    y = xt.all_to_all(x.chunk(2)[coords[1]], -1, 0, "cp", mesh)
    assert torch.equal(y, x.chunk(2, 1)[coords[1]])
    for axes in (("dp", "cp"), ("cp", "dp")):
        index = mesh.index(rank, axes)
        y = xt.all_to_all(x.chunk(4)[index], 1, 0, axes, mesh)
        assert torch.equal(y, x.chunk(4, 1)[index])
    chunks = x.chunk(8)
    index = mesh.index(rank, ("dp", "cp"))
    zigzag = torch.cat([chunks[index], chunks[7 - index]])
    y = xt.all_to_all(zigzag, 1, 0, ("dp", "cp"), mesh, concat_order="zigzag")
    assert torch.equal(y, x.chunk(4, 1)[index])
    assert torch.equal(xt.all_to_all(y, 0, 1, ("dp", "cp"), mesh, split_order="zigzag"), zigzag)
    # Blocks of different sizes, where the global shape is told.
    x = x[:7, :3]
    blocks, columns = x.split([4, 3]), x.split([2, 1], 1)
    y = xt.all_to_all(blocks[coords[1]], 1, 0, "cp", mesh, shape=(7, 3))
    assert torch.equal(y, columns[coords[1]])


def test_all_to_all() -> None:
    on_ranks(4, _all_to_all)


def _float8_gradient() -> Tensor:
    x = torch.ones(2).to(torch.float8_e4m3fn)
    assert xt.redistribute(x, "n/tp -> n | copy(tp)", MESH).float().sum() == 8
    return xt.redistribute(x.requires_grad_(), "n/tp -> n | copy(tp)", MESH)


def _other_plan(expression: str, mesh: xs.Mesh, dtype: str) -> Tensor:
    return xt.redistribute(torch.ones(2, 4), xs.plan(expression, mesh, (8, 4), dtype), MESH)


X = torch.ones(2, 4)
REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "unknown axis": (
        lambda: xt.redistribute(X, "b s/cq -> b s", MESH),
        "NotationError",
        ("unknown mesh axis 'cq' in 'b s/cq -> b s'", "           ^^\n", "the mesh has: tp=4"),
    ),
    "rank": (
        lambda: xt.redistribute(X, "n/tp -> n", MESH),
        "ShapeError",
        ("has 1 dims, the array has 2", "'n/tp -> n'", "one name per dim"),
    ),
    "local shape": (
        lambda: xt.redistribute(X, "n/tp d -> n d", MESH, shape=(8, 5)),
        "ShapeError",
        ("has shape (2, 4), not (2, 5) in 'n/tp d -> n d'", "under 'n/tp d'", "a (8, 5) array"),
    ),
    "no such even block": (
        lambda: xt.redistribute(torch.ones(3), "n/zigzag(tp) -> n", MESH),
        "ShapeError",
        ("has shape (3,), not (", "'n/zigzag(tp) -> n'", "pass shape= (the global shape)"),
    ),
    "dtype": (
        lambda: xt.redistribute(X.bool(), "n d | sum(tp) -> n d", MESH),
        "DtypeError",
        ("dtype bool has no sum", "cast to an integer"),
    ),
    "dtype that only moves": (
        lambda: xt.all_reduce(X.to(torch.uint16), "tp", MESH, grad="sum"),
        "DtypeError",
        ("torch has no 'all_reduce sum(tp)' of uint16", "cast before the reduction"),
    ),
    "gradient that cannot be added": (
        _float8_gradient,
        "DtypeError",
        ("float8_e4m3fn cannot be reduced",),
    ),
    "plan for another mesh": (
        lambda: _other_plan("n/tp d -> n d", xs.Mesh(tp=2), "float32"),
        "MeshError",
        ("the plan is for Mesh(tp=2), this is Mesh(tp=4)",),
    ),
    "plan for another dtype": (
        lambda: _other_plan("n/tp d -> n d", MESH, "float64"),
        "DtypeError",
        ("the plan is for float64, the block has float32",),
    ),
    "grad": (
        lambda: xt.all_gather(X, 0, "tp", MESH, grad="mean"),  # type: ignore[arg-type]
        "XshardError",
        ("grad='mean'", '"replicated": they are equal'),
    ),
    "dim": (
        lambda: xt.all_gather(X, 2, "tp", MESH, grad="sum"),
        "ShapeError",
        ("no dim 2 in a block of shape (2, 4)",),
    ),
}


def _refusals() -> list[tuple[str, str]]:
    found = [error_of(REFUSED[name][0]) for name in REFUSED]
    assert still_connected()
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str]]]:
    return [dict(zip(REFUSED, found, strict=True)) for found in on_ranks(N, _refusals)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_before_anything_is_sent(
    name: str, refusals: list[dict[str, tuple[str, str]]]
) -> None:
    _, kind, parts = REFUSED[name]
    for found in refusals:
        assert found[name][0] == kind
        for part in parts:
            assert part in found[name][1]


def test_examples_of_the_docstrings() -> None:
    """In a process of their own, since they fork."""
    script = (
        "import doctest, importlib\n"
        "for name in ('dtensor', 'launch', 'nn.domain', 'nn.halo', 'nn.layers', 'ops', 'positions',\n"
        "             'redistribution'):\n"
        "    found = doctest.testmod(importlib.import_module('torch_bridge.' + name))\n"
        "    assert found.attempted and not found.failed, found\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
