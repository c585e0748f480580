"""Redistributions begun and ended in two places: values, gradients, and what lies between both ways."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

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
from torch_bridge.lower import executable
from torch_bridge.lower.collectives import Collective
from torch_bridge.versions.autograd import lazy_copies
from torch_bridge.versions.pytree import tree_leaves, tree_structure

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


@contextmanager
def recorded_events(events: list[str] | None = None) -> Iterator[list[str]]:
    """What happens, in order: collectives begun and ended, beside what else is noted in the list."""
    if events is None:
        events = []
    begin = Collective.begin

    def recorded(self: Collective, messages: Tensor, shape) -> object:
        events.append("begin")
        end = begin(self, messages, shape)
        return lambda: (events.append("end"), end())[1]

    with mock.patch.object(Collective, "begin", recorded):
        yield events


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
    assert torch.equal(pickle.loads(pickle.dumps(begun())), y)
    pending = begun()
    assert "under way" in repr(pending)
    assert float(pending.sum()) == float(y.sum()) and "arrived" in repr(pending)


@on_four
def test_work_overlaps_its_collectives() -> None:
    events: list[str] = []

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
    with recorded_events(events):
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
    for value in (x, {"w": torch.ones(1, 4), "x": x}):
        check_error(
            lambda value=value: xt.redistribute(value, TURN, mesh, async_op=True),
            "PlanError",
            "async_op is for tensors",
        )


@on_four
def test_what_is_written_meanwhile_to_the_blocks_of_a_tree_does_not_arrive() -> None:
    for expression in EXPRESSIONS:
        x = block_of(numbers(8, 8) % 7, expression, MESH)
        expected = xt.redistribute(x.clone(), expression, MESH)
        for n_leaves in (1, 2):
            blocks = [x.clone() for _ in range(n_leaves)]
            begun = xt.redistribute(blocks, expression, MESH, async_op=True)
            for block in blocks:
                block.zero_()
            for y in begun:
                assert torch.equal(y.wait(), expected), (expression, n_leaves)


# Of one collective, of several, of none, a max, and dtypes that cannot share one.
TREE_TEXTS = {
    "a": "n/a d -> n d | copy(a)",
    "b": ["n/a d -> n d | copy(a)", "n d | sum(a) -> n/a d"],
    "c": "n d | max(a) -> n d",
    "d": "n/zigzag(a) d -> n d/a",
    "e": "n/a d -> n d",
}


@on_four
def test_the_memory_of_blocks_is_free_while_their_messages_travel() -> None:
    # Rows change places in memory, so that messages are a copy.
    copies: list[StorageWeakRef] = []

    def recorded(tensors: Sequence[Tensor]) -> list[Tensor]:
        made = lazy_copies(tensors)
        copies.extend(StorageWeakRef(x.untyped_storage()) for x in made)
        return made

    x = torch.arange(16.0).view(2, 8)
    given = StorageWeakRef(x.untyped_storage())
    alone = xt.redistribute(x, TURN, MESH, async_op=True)
    del x
    assert given.expired()
    with mock.patch.object(executable, "lazy_copies", recorded):
        trees = {"x": torch.arange(16.0).view(2, 8), "y": torch.arange(4.0).view(1, 4)}
        together = xt.redistribute(trees, TURN, MESH, async_op=True)
    assert len(copies) == 2 and all(each.expired() for each in copies)
    expected = xt.redistribute(trees, TURN, MESH)
    assert torch.equal(alone.wait(), expected["x"])
    assert torch.equal(together["x"].wait(), expected["x"])
    assert torch.equal(together["y"].wait(), expected["y"])


@on_four
def test_backends_get_no_lazy_copies() -> None:
    """Their threads would make the copy while this one lets go of the original, which torch cannot take."""
    is_lazy: list[bool] = []
    start = Collective._start

    def recorded(self: Collective, out: Tensor, messages: Tensor, async_op: bool) -> object:
        is_lazy.append(torch._C._is_cow_tensor(messages))
        return start(self, out, messages, async_op)

    with mock.patch.object(Collective, "_start", recorded):
        # Some blocks, as that of a reduction, are messages as they lie in memory.
        for expression, n_leaves in itertools.product(EXPRESSIONS, (1, 2)):
            x = block_of(numbers(8, 8) % 7, expression, MESH)
            blocks = [x.clone() for _ in range(n_leaves)]
            begun = xt.redistribute(blocks, expression, MESH, async_op=True, profile="h100")
            for y in begun:
                y.wait()
    assert is_lazy and not any(is_lazy)


def _tree(x: Tensor) -> dict[str, object]:
    rank = dist.get_rank()
    whole = x.tile(4, 1) * (rank + 1)
    steps = torch.full((1, 2), rank)
    return {"a": x, "b": [2 * x, whole], "c": whole, "d": x.tile(2, 1), "e": steps}


def _sum(tree: dict[str, object]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(tree_leaves(tree), start=2):
        total = total + (i * y * (1 + torch.arange(y.shape[-1]))).sum()
    return total


@on_four
def test_trees_travel_while_you_compute() -> None:
    x = torch.from_numpy(numbers(8, 8) % 7)[2 * dist.get_rank() :][:2].requires_grad_()
    for bucket_bytes in (None, 64):
        plain = xt.redistribute(_tree(x), TREE_TEXTS, MESH, bucket_bytes=bucket_bytes)
        begun = xt.redistribute(
            _tree(x), TREE_TEXTS, MESH, bucket_bytes=bucket_bytes, async_op=True
        )
        assert tree_structure(begun) == tree_structure(plain)
        for y, expected in zip(tree_leaves(begun), tree_leaves(plain), strict=True):
            assert type(y) is xt.PendingTensor
            assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        (expected,) = torch.autograd.grad(_sum(plain), x)
        total = _sum(begun)
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(total, x, retain_graph=True)[0], expected)
        assert all(
            torch.equal(y.wait(), expected)
            for y, expected in zip(tree_leaves(begun), tree_leaves(plain), strict=True)
        )


def _moved_tree(x: Tensor, **options: bool) -> Tensor:
    moved = xt.redistribute([x, 3 * x], TURN, MESH, **options)
    return sum(y * (i + x.sum()) for i, y in enumerate(moved))


@on_four
def test_trees_under_way_have_all_derivatives() -> None:
    x = block_of(numbers(8, 8) % 7, TURN, MESH)
    found = derivatives(lambda v: _moved_tree(v, async_op=True), x)
    assert all(map(torch.equal, found, derivatives(_moved_tree, x)))
    debugged = _moved_tree(x, async_op=True, debug=True)
    assert torch.equal(debugged, _moved_tree(x))
    checked = _moved_tree(x, async_op=True, check_replicated=True)
    assert torch.equal(checked, _moved_tree(x))


@on_four
def test_collectives_of_trees_overlap_work() -> None:
    with recorded_events() as events:
        x = torch.ones(2, 4, requires_grad=True)
        y, z = xt.redistribute([x, 2 * x], TURN, MESH, async_op=True)
        events.append("work")
        loss = y.sum() + z.sum()
        events.append("backward")
        loss.backward()
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
    assert events == ["begin", "work", "end", "backward", "begin", "end"]


# Large enough that two ranks exchange messages, whose memory nothing of torch holds.
LARGE = 1 << 16


@SharedRanks(2)
def test_an_error_in_between_leaves_nothing_on_the_way() -> None:
    pair = xs.Mesh(a=2)
    x = torch.full((LARGE,), float(dist.get_rank()))
    tree = [x, torch.ones(3)]

    def fails(value: object) -> None:
        pending = xt.redistribute(value, "n/a -> n", pair, async_op=True)
        del pending
        raise ValueError

    for i in range(4):
        with suppress(ValueError):
            fails(x + i if i % 2 else tree)
        whole = xt.redistribute(x + 10 * i, "n/a -> n", pair)
        assert whole[0] == 10 * i and whole[-1] == 10 * i + 1
        pending = xt.redistribute(x - i, "n/a -> n", pair, async_op=True)
        assert pending[-1] == 1 - i
