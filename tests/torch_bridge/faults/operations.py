"""What is interrupted: every kind of step, in every way to run one, forward and backward.

Each operation has process groups of its own, so that a rank can be in all of them at once, each in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

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
    "all_gather": "n/{a} d -> n d | copy({a})",
    "reduce_scatter": "n d | sum({a}) -> n/{a} d",
    "all_reduce": "n d | sum({a}) -> n d | copy({a})",
    "all_to_all": "n/{a} d -> n d/{a}",
    "exchange": "n/{a} d -> n/zigzag({a}) d",
    "permute": "n/{a} d -> n/intervals({a},[24,32],[0,8],[8,16],[16,24]) d",
    "halo": "n/{a} d -> n/{a}:halo(8,8) d",
}
COMPILED = ("all_gather", "all_reduce", "all_to_all")  # a compiler has no others
LONG = timedelta(minutes=10)
PAIRS = Mesh(x=2, y=2)
_NUMBERS = count()

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operation:
    """row: of the table."""

    row: str
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


def operations(width: int, timeout_s: float, compiles: bool) -> Iterator[Operation]:
    """All operations; four ranks call this together.

    width: of blocks. timeout_s: of messages from rank to rank, whose groups cannot change it later.
    compiles: also compiled ones.
    """
    block = torch.arange(ROWS * width, dtype=torch.float32).view(ROWS, width) % 5 + dist.get_rank()
    for row, call in WAYS.items():
        for step, text in STEPS.items():
            mesh, expression = own_mesh(text, timeout_s if step == "permute" else None)
            yield Operation(row, partial(call, mesh=mesh, expression=expression), block)
    for step in COMPILED if compiles else ():
        mesh, expression = own_mesh(STEPS[step])
        yield Operation("`torch.compile`", _compiled(mesh, expression), block)
    for overlap in (False, True):
        mesh, layout = own_mesh("b c h/{a} w")
        kernel = nn.Conv2d(1, 1, (3, 1), padding=(1, 0))
        layer = xt.nn.Conv2d.from_module(kernel, mesh, layout, overlap=overlap)
        yield Operation("layers", layer, block[None, None, :1])
    yield Operation("`redistribute_between`", _between, block)


def cold_operations(width: int) -> Iterator[Operation]:
    """Those that run for the first time when they are interrupted, forward; their results are ones.

    They meet in the store, of which a process has one connection: they run one after the other.
    """
    block, (mesh, expression) = torch.ones(ROWS, width), own_mesh(STEPS["all_gather"])
    yield Operation(BARE, bare(dist.new_group(timeout=LONG)), block)
    yield Operation("`debug=True`", partial(_plain, mesh=mesh, expression=expression, debug=True), block)
    yield Operation(
        "the first call on a mesh", lambda x: _plain(x, PAIRS, "n/x d -> n d").repeat(2, 1), block
    )


def own_mesh(text: str, timeout_s: float | None = None) -> tuple[DeviceMesh, str]:
    """All ranks along one axis, in a group that nobody else uses, and the text for its axis.

    Meshes that differ in their groups alone are equal to torch.
    """
    group = dist.new_group(timeout=LONG if timeout_s is None else timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    axis = f"a{next(_NUMBERS)}"
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,)), text.format(a=axis)


def bare(group: Any) -> Run:
    """The mean over a group, four times; of ones, it is ones."""

    def run(x: Tensor) -> Tensor:
        dist.all_reduce(y := x.clone(), group=group)
        return y.div_(4).repeat(4, 1)

    return run


def _compiled(mesh: DeviceMesh, expression: str) -> Run:
    return torch.compile(lambda x: _plain(x, mesh, expression), backend="aot_eager", fullgraph=True)


def _plain(x: Tensor, mesh: Any, expression: str, **options: Any) -> Tensor:
    return xt.redistribute(x, expression, mesh, **options)


def _begun(x: Tensor, mesh: Any, expression: str) -> Tensor:
    y = xt.redistribute(x, expression, mesh, async_op=True)
    try:
        return y + 0
    except xt.CollectiveError:  # which any later use raises again
        return y * 2


def _many(x: Tensor, mesh: Any, expression: str) -> Tensor:
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
