"""Redistributions begun and ended in two places: values, gradients, and what lies between both ways."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of,
    check_error,
    derivatives,
    for_each,
    numbers,
)
from torch_bridge.lower.collectives import Collective

NEAR = xs.Needs.of_rows([[3, 7], [], [0], [5]])
MESH = xs.Mesh(a=4)
TURN = "n/a d -> n d/a"
EXPRESSIONS = [
    "n/a d -> n d | copy(a)",
    "n d | sum(a) -> n/a d",
    "n d | sum(a) -> n d",
    TURN,
    "n/zigzag(a) d -> n d/a",
    "n/a d -> n/a:halo(1,1) d",
    "n d | mean(a) -> n d",
    "n d -> n/a d",
    "n d | max(a) -> n d",
    "n/a d -> d/a n",
    f"n/a d -> n/a:reads({NEAR}) d",
]


def check_pending(expression: str) -> None:
    x = block_of(numbers(8, 8) % 7, expression, MESH)

    def plain(v: Tensor) -> Tensor:
        return xt.redistribute(v, expression, MESH)

    def begun(v: Tensor) -> Tensor:
        y = xt.redistribute(v, expression, MESH, async_op=True)
        between = v * 0
        return y.wait() + between.sum()

    expected = plain(x)
    found = xt.redistribute(x, expression, MESH, async_op=True)
    assert (found.shape, found.dtype, found.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    )
    assert type(found.wait()) is Tensor and found.wait() is found.wait()
    assert all(map(torch.equal, derivatives(begun, x), derivatives(plain, x)))


on_four = SharedRanks(4)


@on_four
def test_results_are_those_of_one_call() -> None:
    for_each(EXPRESSIONS, check_pending)


@on_four
def test_it_is_used_like_a_tensor() -> None:
    x = torch.arange(8.0).view(2, 4) + dist.get_rank()

    def begun() -> xt.PendingTensor:
        return xt.redistribute(x, TURN, MESH, async_op=True)

    y = xt.redistribute(x, TURN, MESH)
    ones = torch.ones_like(y)
    used = [
        (begun() + 1, y + 1),
        (1 - begun(), 1 - y),
        (ones @ begun().mT, ones @ y.mT),
        (torch.cat([begun(), ones]), torch.cat([y, ones])),
        (torch.nn.functional.linear(ones, begun()), torch.nn.functional.linear(ones, y)),
        (begun()[1:], y[1:]),
        (begun() == begun(), y == y),
        (-begun(), -y),
    ]
    assert all(torch.equal(a, b) and type(a) is Tensor for a, b in used)
    total = ones.clone()
    total += begun()
    assert torch.equal(total, ones + y)
    assert [row.tolist() for row in begun()] == y.tolist() and len(begun()) == len(y)
    pending = begun()
    assert "under way" in repr(pending)
    assert float(pending.sum()) == float(y.sum()) and "arrived" in repr(pending)


@on_four
def test_work_overlaps_its_collectives() -> None:
    """What happens, in order: collectives begun and ended, and what is computed between."""
    events: list[str] = []
    begin = Collective.begin

    def recorded(self: Collective, messages: Tensor, shape) -> object:
        events.append("begin")
        end = begin(self, messages, shape)
        return lambda: (events.append("end"), end())[1]

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            events.append("work")
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            events.append("work")
            return gradient * 2

    x = torch.ones(2, 4, requires_grad=True)
    with mock.patch.object(Collective, "begin", recorded):
        y = xt.redistribute(x, TURN, MESH, async_op=True)
        z = Work.apply(x)
        loss = y.sum() + z.sum()
        events.append("backward")
        loss.backward()
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
    assert events == ["begin", "work", "end", "backward", "begin", "work", "end"]


@on_four
def test_it_is_differentiable_as_it_was_begun() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    pending = xt.redistribute(x, TURN, MESH, async_op=True)
    with torch.no_grad():
        y = pending.wait()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    y = xt.redistribute(x, TURN, MESH, async_op=True)
    y.wait()
    for _ in range(2):  # a graph that is kept sends its gradient every time
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, torch.ones(2, 4))
    pieces = torch.full((3,), dist.get_rank(), dtype=torch.int16)
    gathered = xt.redistribute(pieces, "n/a -> n", MESH, async_op=True)
    assert gathered.tolist() == [rank for rank in range(4) for _ in range(3)]


@on_four
def test_a_dtensor_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    check_error(
        lambda: xt.redistribute(x, TURN, async_op=True), "PlanError", "async_op is for tensors"
    )
