"""Derivatives through torch: of every order, in both modes, and never by writing to what is not ours."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of, error_of, for_each, numbers, on_ranks, still_connected
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(a=4)
EVEN = [
    "n/a d -> n d",
    "n/a d -> n d | copy(a)",
    "n d -> n/a d",
    "n d | sum(a) -> n/a d",
    "n d | sum(a) -> n d",
    "n d -> n d | copy(a)",
    "n/a d -> n d/a",
    "n/zigzag(a) d -> n/a d",
    "n/a d -> n d | sum(a)",
    "n d | mean(a) -> n d",
]


def _double_backward(expression: str) -> None:
    """Of loss = sum(w * y**3): the first three derivatives, each as the plans say."""
    src, dst = parse_expression(expression)
    there = xs.plan((src, dst), MESH, (8, 8), "float64")
    back = there.backward

    def ahead(v: Tensor) -> Tensor:
        return xt.redistribute(v, there, MESH)

    def aback(v: Tensor) -> Tensor:
        return xt.redistribute(v, back, MESH)

    x = block_of(numbers(8, 8) % 5 - 2, str(src), MESH).requires_grad_()
    y = ahead(x)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert torch.equal(first, aback(3 * y**2))
    (second,) = torch.autograd.grad((first * first).sum(), x, create_graph=True)
    # d/dx sum(first^2) = back(6y * ahead'(2 first)), where ahead' is the adjoint of back.
    assert torch.equal(second, aback(6 * y * xt.redistribute(2 * first, back.backward, MESH)))
    (third,) = torch.autograd.grad(second.sum(), x)
    assert third.shape == x.shape and third.abs().sum() > 0


def test_derivatives_of_higher_order() -> None:
    on_ranks(4, for_each, EVEN, _double_backward)


def _functional(expression: str) -> None:
    src, _ = parse_expression(expression)
    x = block_of(numbers(8, 8) % 7 - 3, str(src), MESH)
    tangent = block_of(numbers(8, 8) % 3, str(src), MESH)

    def move(v: Tensor) -> Tensor:
        return xt.redistribute(v, expression, MESH)

    y, dy = torch.func.jvp(move, (x,), (tangent,))
    assert torch.equal(y, move(x)) and torch.equal(dy, move(tangent))

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((move(leaf) ** 2).sum(), leaf)
    assert torch.equal(torch.func.grad(lambda v: (move(v) ** 2).sum())(x), expected)

    for dim in (0, 1, 2):
        batch = torch.stack([x, 2 * x, x - 1], dim)
        each = torch.stack([move(v) for v in batch.unbind(dim)])
        assert torch.equal(torch.func.vmap(move, in_dims=dim)(batch), each)
    nested = torch.stack([torch.stack([x, tangent]), torch.stack([tangent, x])])
    pairs = torch.stack([torch.stack([move(v) for v in pair]) for pair in nested])
    assert torch.equal(torch.func.vmap(torch.func.vmap(move))(nested), pairs)
    gradients = torch.func.vmap(torch.func.grad(lambda v: (move(v) ** 2).sum()))(torch.stack([x, x]))
    assert torch.equal(gradients, torch.stack([expected, expected]))


def test_torch_func() -> None:
    on_ranks(4, for_each, EVEN, _functional)


def _untouched(expression: str) -> None:
    src, dst = parse_expression(expression)
    x = block_of(numbers(8, 8), str(src), MESH).requires_grad_()
    y = xt.redistribute(x, expression, MESH)
    kept_x, kept_y = x.detach().clone(), y.detach().clone()
    cotangent = block_of(numbers(8, 8), str(dst.dual), MESH)
    kept = cotangent.clone()
    (gradient,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
    assert torch.equal(x, kept_x) and torch.equal(cotangent, kept)
    gradient.fill_(-1)
    assert torch.equal(cotangent, kept), "writing to the gradient wrote to the cotangent"
    with torch.no_grad():
        x.fill_(-1)
        assert torch.equal(y, kept_y), "writing to the input wrote to the output"
    y *= 2  # allowed although it requires a gradient: the result is a tensor of its own
    assert (x == -1).all(), "writing to the output wrote to the input"
    (doubled,) = torch.autograd.grad(y, x, cotangent)
    back = xs.plan(expression, MESH, (8, 8), "float64").backward
    assert torch.equal(doubled, 2 * xt.redistribute(kept, back, MESH))
    with torch.no_grad():
        z = xt.redistribute(x, expression, MESH)
        z += 5
        assert (x == -1).all()


def test_nothing_is_written_to_or_shared() -> None:
    on_ranks(4, for_each, [*EVEN, "n d -> n d", "n d | copy(a) -> n d"], _untouched)


def _strided(expression: str) -> None:
    src, _ = parse_expression(expression)
    block = block_of(numbers(8, 8), str(src), MESH)
    leaf = torch.stack([block, -block], dim=-1)[..., 0].requires_grad_()
    assert not leaf.is_contiguous()
    y = xt.redistribute(leaf, expression, MESH)
    assert torch.equal(y, xt.redistribute(block, expression, MESH))
    y.sum().backward()  # whose cotangent is one element, seen everywhere
    back = xs.plan(expression, MESH, (8, 8), "float64").backward
    assert torch.equal(leaf.grad, xt.redistribute(torch.ones_like(y), back, MESH))


def test_strided_blocks_and_gradients() -> None:
    on_ranks(4, for_each, EVEN, _strided)


def _winners() -> None:
    rank = dist.get_rank()
    x = torch.tensor([[1.0, 5.0, rank], [7.0, float(rank == 2), 3.0]], dtype=torch.float64).requires_grad_()
    y = xt.redistribute(x, "n d | max(a) -> n d", MESH)
    assert y.tolist() == [[1, 5, 3], [7, 1, 3]]
    (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    won = torch.tensor([[1 / 4, 1 / 4, rank == 3], [1 / 4, rank == 2, 1 / 4]], dtype=torch.float64)
    assert torch.equal(gradient, 2 * y * won)
    # All shares of an element add up to one, so the square's second derivative is left: 2.
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, 2 * won)

    def largest(v: Tensor) -> Tensor:
        return xt.ops.all_reduce(v, "a", MESH, op="max", grad="sum")

    # Forwards: the winners' tangents, in the same shares.
    tangent = torch.full_like(won, rank + 1.0)
    _, pushed = torch.func.jvp(largest, (x.detach(),), (tangent,))
    assert pushed.tolist() == [[2.5, 2.5, 4.0], [2.5, 3.0, 2.5]]
    kind, text = error_of(lambda: xt.redistribute(x, "n d | max(a) -> n d | max(a)", MESH))
    assert kind == "LinearityError" and "its gradient is not defined" in text
    xt.redistribute(x.detach(), "n d | max(a) -> n d | max(a)", MESH)


def test_the_gradient_of_a_maximum() -> None:
    on_ranks(4, _winners)


class Block(nn.Module):
    """Whole numbers: the gradient of each row's weights needs the rows of all ranks."""

    def __init__(self, checkpoint: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) % 4)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(self.rows, x)

    def rows(self, x: Tensor) -> Tensor:
        return xt.redistribute(x @ self.weight, "n/a d -> n d | copy(a)", MESH) ** 2


def _reentrant(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return checkpoint(function, *inputs, use_reentrant=True)


def _swapped() -> list[tuple[str, str]]:
    x = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)

    def gradients(model: Block, call: Callable[[Block, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), model.weight
        call(model, leaves[0]).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    def swapped(model: Block, x: Tensor) -> Tensor:
        return functional_call(model, {"weight": xt.ops.copy_to(model.weight, "a", MESH)}, (x,))

    def captured(model: Block, x: Tensor) -> Tensor:
        weight = xt.ops.copy_to(model.weight, "a", MESH)
        return _reentrant(lambda v: xt.redistribute(v @ weight, "n/a d -> n d | copy(a)", MESH) ** 2, x)

    expected = gradients(Block(lambda f, x: f(x)), swapped)
    for block, call in (
        (Block(functools.partial(checkpoint, use_reentrant=False)), swapped),
        (Block(lambda f, x: f(x)), lambda model, x: _reentrant(lambda v: swapped(model, v), x)),
        (Block(_reentrant), captured),
    ):
        assert all(map(torch.equal, gradients(block, call), expected))
    with torch.no_grad():
        swapped(Block(lambda f, x: f(x)), x)
    # Torch alone loses the factor 2 in the same way: the second pass has the module's own parameters.
    own = nn.Linear(3, 3, bias=False)
    loss = functional_call(own, {"weight": 2 * own.weight}, (x,)).sum()
    (whole,) = torch.autograd.grad(loss, own.weight)
    module = nn.Sequential(own)
    module.forward = lambda x: _reentrant(own, x)
    functional_call(module, {"0.weight": 2 * own.weight}, (x,)).sum().backward()
    assert torch.equal(2 * own.weight.grad, whole)
    block = Block(_reentrant)
    dtensor = DTensor.from_local(x, init_device_mesh("cpu", (4,), mesh_dim_names=("a",)), [Shard(0)])
    found = []
    for move in (
        lambda v: xt.redistribute(v, "n/a d -> n d", MESH),
        lambda v: xt.redistribute([v], "n/a d -> n d", MESH)[0],
        lambda v: xt.redistribute(v, "n/a d -> n d", src_mesh=MESH, dst_mesh=MESH, shape=(8, 3)),
        lambda v: xt.dtensor.redistribute(dtensor, [Replicate()]).to_local(),
    ):
        block.rows = move
        found.append(error_of(lambda: swapped(block, x)))
    assert still_connected()
    return found


def test_parameters_that_a_reentrant_checkpoint_would_forget() -> None:
    first, *others = on_ranks(4, _swapped)
    assert len(first) == 4 and all(found == first for found in others)
    for kind, text in first:
        assert kind == "XshardError" and "reentrant checkpoint inside torch.func.functional_call" in text
        assert text.endswith("use_reentrant=False")
