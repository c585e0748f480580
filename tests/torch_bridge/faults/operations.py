"""What is interrupted: every kind of step, in every way to run one, forward and backward.

Each operation has process groups of its own, so that a rank can be in all of them at once, each in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

import tests.torch_bridge.preloaded_torch  # noqa: F401  ranks on nodes are forked from an agent, without JAX
import torch_bridge as xt
from torch_bridge.mesh import process_groups
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
TWO = ("all_gather", "permute")  # a collective, and messages: in the other ways to run a step
PHASED = ("all_gather", "reduce_scatter", "all_reduce")  # over nodes of two ranks
# (expression, the other operand, whether in rounds)
CONTRACTIONS = [
    ("s/{a} d, s/{a} e -> e/{a} d", (8, 8), False),
    ("s/{a} d, s/{a} e -> e/{a} d", (8, 8), True),
    ("s/{a} d, e/{a} s -> e/{a} d", (8, 32), True),
]
LONG = timedelta(minutes=10)
PAIRS = Mesh(x=2, y=2)
TRAINER = "trainer"
SERVER = "server"
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


@dataclass(frozen=True)
class Begun(Operation):
    """One that compares and sends a part before it is interrupted, and waits there.

    run: calls a function without arguments where it waits.
    """

    def forward(self) -> Callable[[], Tensor]:
        is_there = threading.Event()
        goes_on = threading.Event()

        def wait() -> None:
            is_there.set()
            goes_on.wait()

        thread = ThreadPoolExecutor(1)
        coming = thread.submit(self.run, self.block, wait)
        is_there.wait()

        def ended() -> Tensor:
            goes_on.set()
            return coming.result()

        return ended


def operations(width: int, timeout_s: float, direction: str) -> Iterator[Operation]:
    """All operations that have a direction, forward or backward; four ranks call this together.

    width: of blocks. timeout_s: of messages from rank to rank, whose groups cannot change it later.
    """
    block = torch.arange(ROWS * width, dtype=torch.float32).view(ROWS, width) % 5 + dist.get_rank()
    for row, call in WAYS.items():
        for step in STEPS if call is _plain else TWO:
            mesh, expression = own_mesh(STEPS[step], timeout_s if step == "permute" else None)
            yield Operation(row, partial(call, mesh=mesh, expression=expression), block)
    # One that is begun: what several would do beside their caller, one thread does in order.
    for step, call in [*((step, _plain) for step in PHASED), ("all_gather", _begun)]:
        with own_groups():
            mesh, expression = own_mesh(STEPS[step])
            run = partial(call, mesh=mesh, expression=expression, profile="h100:2")
            yield Operation("links of two speeds", run, block)
    for text, shape, in_rounds in CONTRACTIONS:
        mesh, expression = own_mesh(text, timeout_s if in_rounds else None)
        run = partial(
            _contracted, mesh=mesh, expression=expression, shape=shape, in_rounds=in_rounds
        )
        yield Operation("`einsum` in rounds" if in_rounds else "`einsum`", run, block)
    mesh, layout = own_mesh("b s/{a} h k", timeout_s)
    yield Operation("ring attention", partial(_attended, mesh=mesh, layout=layout), block)
    mesh, expression = own_mesh(STEPS["all_gather"])  # whose gradient is a reduce_scatter
    run = partial(_plain, mesh=mesh, expression=expression)
    compiled = torch.compile(lambda x: run(x), backend="aot_eager", fullgraph=True)
    yield Operation("`torch.compile`", compiled, block)
    mesh, layout = own_mesh("b c h/{a} w")
    layer = xt.nn.domain_parallel(nn.Conv2d(1, 1, (3, 1), padding=(1, 0)), layout, mesh)
    yield Operation("layers", layer, block[None, None, :1])
    yield Operation("`parallelize`", _parallel(width), block)
    yield Operation("`redistribute` between meshes", _between, block)
    if direction == "forward":
        yield Begun("`transfer`", _transferred, block)


def cold_operations(width: int) -> Iterator[Operation]:
    """Those that run for the first time when they are interrupted, forward; their results are ones.

    They meet in the store, of which a process has one connection: they run one after the other.
    """
    block, (mesh, expression) = torch.ones(ROWS, width), own_mesh(STEPS["all_gather"])
    yield Operation(
        BARE, bare(dist.new_group(timeout=LONG)), block
    )  # until all else is interrupted
    yield Operation(
        "`debug=True`", partial(_plain, mesh=mesh, expression=expression, debug=True), block
    )
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


@contextmanager
def own_groups() -> Iterator[None]:
    """Inside, groups are made anew that other operations have already."""
    digest = process_groups.ranks_digest
    number = next(_NUMBERS)
    process_groups._group_of.cache_clear()
    with mock.patch.object(
        process_groups, "ranks_digest", lambda ranks: f"{digest(ranks)}/{number}"
    ):
        yield
    process_groups._group_of.cache_clear()


def bare(group: Any) -> Run:
    """The mean over a group, four times; of ones, it is ones."""

    def run(x: Tensor) -> Tensor:
        dist.all_reduce(y := x.clone(), group=group)
        return y.div_(4).repeat(4, 1)

    return run


def _plain(x: Tensor, mesh: Any, expression: str, **options: Any) -> Tensor:
    return xt.redistribute(x, expression, mesh, **options)


def _begun(x: Tensor, mesh: Any, expression: str, **options: Any) -> Tensor:
    y = xt.redistribute(x, expression, mesh, async_op=True, **options)
    try:
        return y + 0
    except xt.errors.CollectiveError:  # which any later use raises again
        return y * 2


def _many(x: Tensor, mesh: Any, expression: str, **options: Any) -> Tensor:
    return torch.stack(xt.redistribute([x, x + 1], expression, mesh, **options))


def _contracted(
    x: Tensor, mesh: Any, expression: str, shape: tuple[int, ...], in_rounds: bool
) -> Tensor:
    w = torch.arange(float(shape[0] * shape[1])).view(shape) % 3
    return xt.einsum(expression, x, w, mesh=mesh, overlap="always" if in_rounds else "never")


def _attended(x: Tensor, mesh: Any, layout: str) -> Tensor:
    heads = x[:, :1000].reshape(1, ROWS, -1, 8)
    return xt.nn.attention(heads, heads, heads, layout, mesh, how="ring")


def _parallel(width: int) -> Run:
    """A model that gathers a parameter, and sums the gradient of another at the end."""
    torch.manual_seed(0)
    mesh, axis = own_mesh("{a}")
    rules = {"weight": f"o/{axis} i -> o i", "bias": "o"}
    return xt.parallelize(nn.Linear(width, ROWS), rules, {"": f"b/{axis} i"}, mesh)


WAYS = {"`redistribute`": _plain, "`async_op=True`": _begun, "`redistribute` of a tree": _many}


def _two_meshes(*ranks: Sequence[int]) -> dict[str, DeviceMesh]:
    src, dst = (
        DeviceMesh("cpu", some, mesh_dim_names=(axis,), _init_backend=False)
        for some, axis in zip(ranks, "ab", strict=True)
    )
    return {"src_mesh": src, "dst_mesh": dst}


def _between(x: Tensor) -> Tensor:
    """Even ranks have the blocks, odd ones get them."""
    n = dist.get_world_size()
    odd = dist.get_rank() % 2
    whole = {"shape": (n // 2 * ROWS, x.shape[1]), "dtype": x.dtype, "requires_grad": True}
    meshes = _two_meshes(range(0, n, 2), range(1, n, 2))
    y = xt.redistribute(None if odd else x, "n/a d -> n/zigzag(b) d", **meshes, **whole)
    assert y is not None
    return y


def _transferred(x: Tensor, wait: Callable[[], None]) -> Tensor | None:
    """The first two ranks have the blocks, the others get them; waits after the first bucket of two."""
    tree = {"first": x[:1], "second": x} if dist.get_rank() < 2 else None
    options = {"bucket_bytes": 1, "progress": lambda done, total: wait()}
    found = xt.transfer(tree, {"*": "n/a d -> n/b d"}, **_two_meshes([0, 1], [2, 3]), **options)
    return None if found is None else found["second"]


def next_version(
    kind: str, store: Store, width: int, timeout_s: float
) -> tuple[Begun, Tensor | None]:
    """Of a stream from a trainer to a server, beside the world of all other operations: the next version,
    amid whose messages its ranks wait -> that, and what the last one was.

    timeout_s: of two waits one after the other, by which all ranks know.
    """
    make: Any = xt.live.Publisher if kind == TRAINER else xt.live.Subscriber
    times = {"timeout_s": LONG.total_seconds(), "silent_s": LONG.total_seconds()}
    meshes = {"src_mesh": Mesh(a=2), "dst_mesh": Mesh(b=2)}
    end = make(store=store, rules={"*": "n/a d -> n d/b"}, bucket_bytes=1, **meshes, **times)
    block = torch.arange(float(ROWS * width)).view(ROWS, width) + dist.get_rank()
    version = _published if kind == TRAINER else _received
    operation = Begun("`publish`, `receive`", partial(version, end), block)
    expected = operation.forward()()
    end.timeout_s = timeout_s / 2
    end.silent_s = timeout_s / 5
    return operation, expected


def _published(end: Any, x: Tensor, wait: Callable[[], None]) -> None:
    end.publish({"first": x[:1], "second": x}, progress=lambda done, total: wait())


def _received(end: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
    end.receive(LONG.total_seconds(), progress=lambda done, total: wait())
    found: Tensor = end.tree["second"]
    return found
