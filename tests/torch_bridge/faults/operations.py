"""What is interrupted: every kind of step, in every way to run one, forward and backward.

Each operation has process groups of its own, so that one rank can be in all of them at once, each in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from xshard import Mesh

ROWS = 8  # of a block
BARE = "bare"  # a call of the backend alone, which takes as long as it must
# A step, and the plan that consists of it. Its backward pass is the dual step.
STEPS = {
    "all_gather": "n/a d -> n d | copy(a)",
    "reduce_scatter": "n d | sum(a) -> n/a d",
    "all_reduce": "n d | sum(a) -> n d | copy(a)",
    "all_to_all": "n/a d -> n d/a",
    "exchange": "n/a d -> n/zigzag(a) d",
    "permute": "n/a d -> n/intervals(a,[24,32],[0,8],[8,16],[16,24]) d",
    "halo": f"n/a d -> n/a:halo({ROWS},{ROWS}) d",
}
COMPILED = ("all_gather", "all_reduce", "all_to_all")  # a compiler has no others

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operation:
    """row: of the table."""

    row: str
    expression: str
    run: Run
    block: Tensor

    def forward(self) -> Callable[[], Tensor]:
        """What is to be interrupted: the whole call."""
        return lambda: self.run(self.block)

    def backward(self) -> Callable[[], Tensor | None]:
        """The same, when the forward pass has been."""
        x = self.block.clone().requires_grad_()
        y = self.run(x)

        def pulled() -> Tensor | None:
            y.sum().backward()
            return x.grad

        return pulled


def operations(width: int, compiles: bool) -> Iterator[Operation]:
    """All operations; four ranks call this together. width: of blocks. compiles: also compiled ones."""
    block = torch.arange(ROWS * width, dtype=torch.float32).view(ROWS, width) % 5 + dist.get_rank()
    for row, call in WAYS.items():
        for expression in STEPS.values():
            yield Operation(row, expression, _on_own_mesh(call, expression), block)
    for step in COMPILED if compiles else ():
        run = torch.compile(_on_own_mesh(_plain, STEPS[step]), backend="aot_eager", fullgraph=True)
        yield Operation("`torch.compile`", STEPS[step], run, block)
    for overlap in (False, True):
        kernel = nn.Conv2d(1, 1, (3, 1), padding=(1, 0))
        layer = xt.nn.Conv2d.from_module(kernel, own_mesh(), "b c h/a w", overlap=overlap)
        yield Operation("layers", "b c h/a", layer, block[None, None, :1])
    yield Operation("`redistribute_between`", "n/a d -> n/zigzag(b) d", _between, block)


def cold_operations(width: int) -> Iterator[Operation]:
    """Those that run for the first time when they are interrupted, forward; their results are ones."""
    block, group = torch.ones(ROWS, width), own_mesh().get_group()
    yield Operation(BARE, "", lambda x: _bare(x, group), block)
    mesh, pairs = own_mesh(), Mesh(x=2, y=2)
    debug = lambda x: xt.redistribute(x, STEPS["all_gather"], mesh, debug=True)  # noqa: E731
    yield Operation("`debug=True`", STEPS["all_gather"], debug, block)
    first = lambda x: xt.redistribute(x, "n/x d -> n d", pairs).repeat(2, 1)  # noqa: E731
    yield Operation("the first call on a mesh", "n/x d -> n d", first, block)


def own_mesh() -> DeviceMesh:
    """All ranks along one axis, in a group that nobody else uses."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))


def _on_own_mesh(call: Callable[[Tensor, str, DeviceMesh], Tensor], expression: str) -> Run:
    mesh = own_mesh()
    return lambda x: call(x, expression, mesh)


def _bare(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(y := x.clone(), group=group)
    return y.div_(4).repeat(4, 1)


def _plain(x: Tensor, expression: str, mesh: DeviceMesh) -> Tensor:
    return xt.redistribute(x, expression, mesh)


def _begun(x: Tensor, expression: str, mesh: DeviceMesh) -> Tensor:
    return xt.redistribute(x, expression, mesh, async_op=True) + 0


def _many(x: Tensor, expression: str, mesh: DeviceMesh) -> Tensor:
    return torch.stack(xt.redistribute_many([x, x + 1], expression, mesh))


WAYS = {"`redistribute`": _plain, "`async_op=True`": _begun, "`redistribute_many`": _many}


def _between(x: Tensor) -> Tensor:
    """Even ranks have the blocks, odd ones get them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    src, dst = (
        DeviceMesh("cpu", range(k, n, 2), mesh_dim_names=(axis,), _init_backend=False)
        for k, axis in ((0, "a"), (1, "b"))
    )
    y = xt.redistribute_between(
        None if rank % 2 else x,
        "n/a d -> n/zigzag(b) d",
        src,
        dst,
        shape=(n // 2 * ROWS, x.shape[1]),
        dtype=x.dtype,
        requires_grad=True,
    )
    assert y is not None
    return y
