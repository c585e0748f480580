"""Redistributions begun and ended in two places: values, gradients, and what lies between both ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of, error_of, for_each, numbers, on_ranks
from torch_bridge.lower.collectives import Collective
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(a=4)
EXPRESSIONS = [
    "n/a d -> n d | copy(a)",
    "n d | sum(a) -> n/a d",
    "n d | sum(a) -> n d",
    "n/a d -> n d/a",
    "n/zigzag(a) d -> n d/a",
    "n/a d -> n/a:halo(1,1) d",
    "n d | mean(a) -> n d",
    "n d -> n/a d",
    "n d | max(a) -> n d",
    "n/a d -> d/a n",
]


def _same(expression: str) -> None:
    src, _ = parse_expression(expression)
    x = block_of(numbers(8, 8) % 7, str(src), MESH).requires_grad_()

    def begun(v: Tensor) -> xt.PendingTensor:
        return xt.redistribute(v, expression, MESH, async_op=True)

    expected = xt.redistribute(x, expression, MESH)
    found = begun(x)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert type(found.wait()) is Tensor and torch.equal(found.wait(), expected)
    assert found.wait() is found.wait()
    loss, wanted = (begun(x) ** 3).sum(), (expected**3).sum()
    (first,), (second,) = (torch.autograd.grad(v, x, create_graph=True) for v in (loss, wanted))
    assert torch.equal(first, second)
    assert torch.equal(*(torch.autograd.grad((g * g).sum(), x)[0] for g in (first, second)))


def test_values_and_derivatives_are_those_of_one_call() -> None:
    on_ranks(4, for_each, EXPRESSIONS, _same)


def _functional(expression: str) -> None:
    x = block_of(numbers(8, 8) % 7, str(parse_expression(expression)[0]), MESH)

    def plain(v: Tensor) -> Tensor:
        return xt.redistribute(v, expression, MESH)

    def begun(v: Tensor) -> Tensor:
        y = xt.redistribute(v, expression, MESH, async_op=True)
        between = v * 0
        return y.wait() + between.sum()

    assert torch.equal(torch.func.jvp(begun, (x,), (x,))[1], plain(x))
    gradients = (torch.func.grad(lambda v, f=f: (f(v) ** 2).sum())(x) for f in (begun, plain))
    assert torch.equal(*gradients)
    batch = torch.stack([x, 2 * x])
    assert torch.equal(torch.func.vmap(begun)(batch), torch.stack([plain(x), plain(2 * x)]))
    both = torch.func.vmap(torch.func.grad(lambda v: (begun(v) ** 2).sum()))(batch)
    assert torch.equal(both[0], torch.func.grad(lambda v: (plain(v) ** 2).sum())(x))


def test_torch_func_goes_through() -> None:
    on_ranks(4, for_each, EXPRESSIONS[:-1], _functional)


def _tensor_like() -> None:
    x = torch.arange(8.0).view(2, 4) + dist.get_rank()

    def begun() -> xt.PendingTensor:
        return xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)

    y = xt.redistribute(x, "n/a d -> n d/a", MESH)
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


def test_it_is_used_like_a_tensor() -> None:
    on_ranks(4, _tensor_like)


def _overlaps() -> list[str]:
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

    Collective.begin = recorded
    x = torch.ones(2, 4, requires_grad=True)
    y = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
    z = Work.apply(x)
    loss = y.sum() + z.sum()
    events.append("backward")
    loss.backward()
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
    return events


def test_what_is_computed_in_between_is_so_both_ways() -> None:
    for events in on_ranks(4, _overlaps):
        assert events == ["begin", "work", "end", "backward", "begin", "work", "end"]


def _begun_recording() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
    with torch.no_grad():
        y = pending.wait()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    y = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
    y.wait()
    for _ in range(2):  # a graph that is kept sends its gradient every time
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, torch.ones(2, 4))
    pieces = torch.full((3,), dist.get_rank(), dtype=torch.int16)
    gathered = xt.redistribute(pieces, "n/a -> n", MESH, async_op=True)
    assert gathered.tolist() == [rank for rank in range(4) for _ in range(3)]


def test_it_is_differentiable_as_it_was_begun() -> None:
    on_ranks(4, _begun_recording)


def _dtensor() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return error_of(lambda: xt.redistribute(x, "n/a d -> n d/a", async_op=True))


def test_a_dtensor_is_refused() -> None:
    for kind, text in on_ranks(4, _dtensor):
        assert kind == "PlanError" and "async_op is for tensors" in text
