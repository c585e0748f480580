"""Derivatives that torch does not define alone: of maxima, and of parameters that a checkpoint forgets."""

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
from tests.torch_bridge.helpers import SharedRanks, check_error, still_connected

MESH = xs.Mesh(a=4)


on_four = SharedRanks(4)


@on_four
def test_winners_of_a_maximum_share_its_gradient() -> None:
    rank = dist.get_rank()
    x = torch.tensor(
        [[1.0, 5.0, rank], [7.0, float(rank == 2), 3.0]], dtype=torch.float64
    ).requires_grad_()
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
    move = functools.partial(xt.redistribute, layouts="n d | max(a) -> n d | max(a)", mesh=MESH)
    check_error(lambda: move(x), "LinearityError", "its gradient is not defined")
    move(x.detach())


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


@on_four
def test_a_reentrant_checkpoint_that_would_forget_parameters_is_refused() -> None:
    x = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)

    def gradients(model: Block, call: Callable[[Block, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), model.weight
        call(model, leaves[0]).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    def swapped(model: Block, x: Tensor) -> Tensor:
        return functional_call(model, {"weight": xt.ops.copy_to(model.weight, "a", MESH)}, (x,))

    def captured(model: Block, x: Tensor) -> Tensor:
        weight = xt.ops.copy_to(model.weight, "a", MESH)
        return _reentrant(
            lambda v: xt.redistribute(v @ weight, "n/a d -> n d | copy(a)", MESH) ** 2, x
        )

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
    dtensor = DTensor.from_local(
        x, init_device_mesh("cpu", (4,), mesh_dim_names=("a",)), [Shard(0)]
    )
    for move in (
        lambda v: xt.redistribute(v, "n/a d -> n d", MESH),
        lambda v: xt.redistribute([v], "n/a d -> n d", MESH)[0],
        lambda v: xt.redistribute(v, "n/a d -> n d", src_mesh=MESH, dst_mesh=MESH, shape=(8, 3)),
        lambda v: xt.dtensor.redistribute(dtensor, [Replicate()]).to_local(),
    ):
        block.rows = move
        place = "reentrant checkpoint inside torch.func.functional_call"
        check_error(lambda: swapped(block, x), "XshardError", place, "use_reentrant=False")
    assert still_connected()
