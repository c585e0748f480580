"""Redistributions inside torch.compile and torch.export: one graph, the values and gradients of eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_bridge as xt
import xshard as xs
from tests.cases import ALL
from tests.torch_bridge.helpers import (
    SharedRanks,
    assert_refused,
    block_of,
    in_ranks,
    numbers,
    on_ranks,
)
from torch_bridge.mesh.process_mesh import Group, MeshLike
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(a=2)
EVERY_STEP = [  # with a leading dim that is whole
    "s n/a d -> s n d | copy(a)",
    "s n d -> s n/a d",
    "s n d | sum(a) -> s n/a d",
    "s n/a d -> s n d/a",
    "s n/zigzag(a) d -> s n d/zigzag(a)",
    "s n/zigzag(a) d -> s n/a d",
    "s n/a d -> s n/a:halo(1,2,periodic) d",
    "s n/a d -> s n d | sum(a)",
    "s n d -> s n d | sum(a)",
    "s n d | mean(a) -> s n d | copy(a)",
    "s n d | max(a) -> s n d",
    "s n/a d -> d/a n s",
    f"s n/a d -> s n/a:reads({ALL}) d",
]
TWO_AXES = [
    "s n d | sum(a,b) -> s n d",
    "s n/a/b d -> s n/b/a d",
    "s n/a d/b -> s n/a:halo(1,1,constant(5)) d/b:halo(1,1,edge)",
]


def _agrees(compiled, plain, x: Tensor) -> None:
    """The same values, and the same gradient of a weighted sum."""
    y = compiled(x)
    expected = plain(x)
    assert torch.equal(y, expected)
    weights = torch.arange(float(y.numel()), dtype=y.dtype).view(y.shape) % 7
    found, wanted = (torch.autograd.grad(out, x, weights)[0] for out in (y, expected))
    assert torch.equal(found, wanted)


def _compiled(expression: str, mesh: MeshLike, blocks: Iterable[Tensor]) -> int:
    """How often a function is compiled, as one graph, for blocks of which each has the eager result."""

    def user(x: Tensor) -> Tensor:
        return xt.redistribute(x * 2, expression, mesh) * 3

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(user, backend=backend, fullgraph=True)
    for x in blocks:
        _agrees(compiled, user, x.requires_grad_())
    return backend.frame_count


def _graphs(placed: list[str], named: list[str], *names: str) -> None:
    """All expressions in one function, compiled as one graph.

    placed: on a device mesh, of one shape; named: on a mesh of names, of any length of the first dim.
    """
    on = xs.Mesh(dict.fromkeys(names, 2))
    expressions = [*placed, *named]
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    meshes: list[MeshLike] = [*(mesh for _ in placed), *(on for _ in named)]

    def user(xs: list[Tensor]) -> list[Tensor]:
        moves = zip(xs, expressions, meshes, strict=True)
        return [xt.redistribute(x * 2, e, m) * 3 for x, e, m in moves]

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(user, backend=backend, fullgraph=True)
    for i, n in enumerate((4, 3, 7)):
        shapes = [(3 if m is mesh else n, 8, 8) for m in meshes]
        cut = zip(shapes, expressions, strict=True)
        blocks = [block_of(numbers(*shape) % (i + 5), e, on).requires_grad_() for shape, e in cut]
        for x in blocks[len(placed) :]:
            torch._dynamo.mark_dynamic(x, 0)
        for expression, *same in zip(
            expressions, *_pulled(compiled, blocks), *_pulled(user, blocks), strict=True
        ):
            y, gradient, expected_y, expected_gradient = same
            assert torch.equal(y, expected_y) and torch.equal(gradient, expected_gradient), (
                expression
            )
    assert backend.frame_count == 1


def _pulled(function, blocks: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The values, and the gradients of their weighted sum."""
    values = function(blocks)
    weights = [torch.arange(float(y.numel()), dtype=y.dtype).view(y.shape) % 7 for y in values]
    return values, torch.autograd.grad(values, blocks, weights)


def test_every_step_is_one_graph_in_which_the_length_of_a_whole_dim_may_change() -> None:
    """Also on a device mesh: a collective along one axis, along two, and an exchange."""
    on_ranks(2, _graphs, [EVERY_STEP[0], EVERY_STEP[6]], EVERY_STEP, "a")
    on_ranks(4, _graphs, TWO_AXES[:1], TWO_AXES[1:], "a", "b")


on_two = SharedRanks(2)


@on_two
def test_a_collective_takes_the_block_in_its_shape() -> None:
    """As on NCCL, whose reduce-scatters gloo has, too. A compiler fuses no product with what is flattened."""
    taken: list[tuple[int, ...]] = []

    def note(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            if str(node.target).startswith("_c10d_functional.") and "wait" not in node.name:
                taken.append(tuple(node.args[0].meta["val"].shape))
        return graph

    gathered = "b s/a d -> b s d | copy(a)"
    scattered = "b s d | sum(a) -> b s/a d"
    for expression, shape, expected in (
        (
            gathered,
            (3, 4, 6),
            [(3, 4, 6), (6, 4, 6)],
        ),  # the halves of a gradient, one after the other
        (scattered, (3, 8, 6), [(6, 4, 6), (3, 4, 6)]),
        ("b/a s d -> b s d | copy(a)", (3, 4, 6), [(3, 4, 6), (6, 4, 6)]),
        (scattered, (1, 8, 6), [(48,), (1, 4, 6)]),  # one row cannot be divided
    ):

        def user(x: Tensor, expression: str = expression) -> Tensor:
            return xt.redistribute(x * 2, expression, MESH, profile="h100") * 3

        torch._dynamo.reset()
        compiled = torch.compile(user, backend=aot_autograd(fw_compiler=note), fullgraph=True)
        x = torch.arange(float(math.prod(shape))).view(shape) % 5
        with mock.patch.object(Group, "serves", return_value=False):
            _agrees(compiled, user, x.requires_grad_())
        assert taken == expected, expression
        taken.clear()


@on_two
def test_another_length_is_compiled_again() -> None:
    """A dim that is cut is planned for as the number that it is: another length is compiled again."""
    torch._dynamo.reset()
    blocks = [torch.arange(rows * 8.0).view(rows, 8) for rows in (4, 6, 5)]
    assert _compiled("n/a d -> n d/a", MESH, blocks) == 3
    backend = CompileCounterWithBackend("aot_eager")

    def whole(v: Tensor) -> Tensor:
        return xt.redistribute(v, "n/a d -> n d", MESH, shape=(2 * v.shape[0], v.shape[1]))

    compiled = torch.compile(whole, backend=backend, fullgraph=True, dynamic=True)
    for rows, columns in ((4, 6), (4, 3), (4, 9), (5, 9)):
        _agrees(
            compiled,
            whole,
            torch.arange(rows * float(columns)).view(rows, columns).requires_grad_(),
        )
    assert backend.frame_count == 2, "the length of a whole dim may change"


@on_two
def test_options_are_recorded() -> None:
    torch._dynamo.reset()
    x = block_of(numbers(5, 8) % 9, "n d/a", MESH, torch.float32).requires_grad_()
    uneven = block_of(numbers(5, 8) % 9, "n/a d", MESH, torch.float32).requires_grad_()

    def narrowed(v: Tensor) -> Tensor:
        y = xt.redistribute(
            v, "n d/a -> n d", MESH, comm_dtype=(torch.bfloat16, None), async_op=True
        )
        return y.wait() + 1

    def split(v: Tensor) -> Tensor:
        return xt.redistribute(v, "n/a d -> n d/a", MESH, shape=(5, 8))

    for function, block in ((narrowed, x), (split, uneven)):
        _agrees(torch.compile(function, backend="aot_eager", fullgraph=True), function, block)


@on_two
def test_options_of_two_meshes_pass_through_compiled_code() -> None:
    """A move between meshes runs between two graphs; None as its option leaves a move on one mesh."""
    torch._dynamo.reset()
    x = block_of(numbers(4, 4), "n/a d", MESH, torch.float32)
    to_columns = {"dst_mesh": xs.Mesh(b=2), "shape": (4, 4), "dtype": torch.float32}

    def between(v: Tensor) -> Tensor:
        return xt.redistribute(v * 2, "n/a d -> n d/b", src_mesh=MESH, **to_columns) + 1

    def on_one(v: Tensor) -> Tensor:
        return xt.redistribute(v * 2, "n/a d -> n d", MESH, src_mesh=None, relabel=False) + 1

    for function, is_one_graph in ((between, False), (on_one, True)):
        compiled = torch.compile(function, backend="eager", fullgraph=is_one_graph)
        assert torch.equal(compiled(x), function(x))


@in_ranks(2)
def test_inductor() -> None:
    """Values of the whole way down: a reduction, an exchange with empty messages, a move."""

    def step(x: Tensor) -> Tensor:
        added = xt.redistribute(torch.sin(x), "s n d | sum(a) -> s n/a d", MESH)
        wide = xt.redistribute(added, "s n/a d -> s n/a:halo(1,1) d", MESH)
        return xt.redistribute(wide[:, 1:-1] * 2, "s n/a d -> s n d/a", MESH)

    x = block_of(numbers(2, 8, 4) % 5, "s n d | sum(a)", MESH).requires_grad_()
    compiled = torch.compile(step, fullgraph=True)
    # Compiled here, not in processes that import torch first. Which vectors the processor has does not
    # matter: torch would compile six programs to find out, and load each in one that imports torch.
    options = {"compile_threads": 1, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(options):
        y = compiled(x)
        expected = step(x)
        gradient, expected_gradient = (
            torch.autograd.grad(out.sum(), x)[0] for out in (y, expected)
        )
    assert torch.allclose(y, expected)
    assert torch.allclose(gradient, expected_gradient)


class Calling(torch.nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


@on_two
def test_a_move_is_exported() -> None:
    torch._dynamo.reset()
    x = block_of(numbers(3, 8, 8), "s n/zigzag(a) d", MESH)
    turn = Calling(lambda x: xt.redistribute(x, "s n/zigzag(a) d -> s n d/a", MESH))
    program = torch.export.export(turn, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("all_to_all_single" in name for name in names) == 1
    assert "step" not in str(program.graph), "the groups have their own names"
    for n in (3, 5):
        block = block_of(numbers(n, 8, 8), "s n/zigzag(a) d", MESH)
        assert torch.equal(program.module()(block), turn(block))


@on_two
def test_what_needs_the_host_is_not_exported() -> None:
    torch._dynamo.reset()
    x = block_of(numbers(3, 8, 8), "s n/a d", MESH)
    named = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))

    def compares(v: Tensor) -> Tensor:
        return xt.redistribute(v, "s n/a d -> s n d/a", MESH, check_replicated=True)

    placed = DTensor.from_local(x, named, [Shard(1)], run_check=False)
    for call, given, reason in (
        (compares, x, "compares on the host"),
        (lambda v: xt.redistribute(v, "s n/a d -> s n d/a"), placed, "plain tensors on one mesh"),
    ):
        with pytest.raises(xs.errors.PlanError, match=reason):
            torch.export.export(Calling(call), (given,))


@on_two
def test_what_is_not_recorded_runs_between_graphs() -> None:
    """What is not recorded runs as it is, where more than one graph is allowed."""
    torch._dynamo.reset()
    x = block_of(numbers(8, 8), "n/a d", MESH, torch.float32).requires_grad_()
    pair = tuple(parse_expression("n/a d -> n d/a"))

    def by_layouts(v: Tensor) -> Tensor:
        return xt.redistribute(v * 2, pair, MESH) + 1

    def many(v: Tensor) -> Tensor:
        return sum(xt.redistribute([v * 2, v * 3], "n/a d -> n d/a", MESH)) + 1

    for function in (by_layouts, many):
        _agrees(torch.compile(function, backend="aot_eager"), function, x)


@on_two
def test_what_is_refused() -> None:
    """In all of these torch itself says nothing, or something else."""
    torch._dynamo.reset()
    x = torch.ones(4, 8)

    def compiled(function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            torch._dynamo.reset()
            return torch.compile(function, backend="aot_eager", fullgraph=True)(x)

        return call

    def turn(v: Tensor) -> Tensor:
        return xt.redistribute(v, "n/a d -> n d/a", MESH)

    transformed = "...torch.func inside torch.compile"
    axis = "n/q d -> n d"
    pair = ("n/a d", "n d")
    assert_refused(
        (
            compiled(lambda v: xt.redistribute(v, axis, MESH)),
            f"...unknown mesh axis 'q' in\n    '{axis}'",
        ),
        (compiled(lambda v: xt.redistribute(v, pair, MESH)), "...with an expression that is text"),
        (compiled(lambda v: torch.func.jvp(turn, (v,), (v,))), transformed),
        (compiled(torch.func.grad(lambda v: turn(v).sum())), transformed),
        (compiled(torch.func.vmap(turn, in_dims=0)), transformed),
        (
            compiled(lambda v: xt.redistribute([v], "n/a d -> n d/a", MESH)),
            "...calls on plain tensors",
        ),
        is_alike=False,
    )
    assert torch.equal(torch.compile(turn, backend="aot_eager")(x), turn(x)), (
        "nothing is left behind"
    )
