"""Meshes of every kind: over the world, in any order, and parts of it that start anywhere."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    check_error,
    numbers,
    on_ranks,
    still_connected,
)
from torch_bridge.mesh.failures import timeout_of
from torch_bridge.mesh.process_mesh import mesh_of_ranks
from xshard import reference
from xshard.layout.layout import parse_expression

EXPRESSIONS = [
    "n/a/b d -> n/b/a d",
    "n/(a,b) d -> n d/(b,a)",
    "n/b d/a -> n d",
    "n d | sum(a,b) -> n/b/a d",
    "n d/b | sum(a) -> n d/b",
    "n/b d -> n d/b",
]


def _agrees(mesh: DeviceMesh, axes: xs.Mesh, device: int) -> None:
    """Every expression on a mesh, this process being its device number `device`, forward and backward."""
    x = numbers(8, 8)
    for expression in EXPRESSIONS:
        src, dst = parse_expression(expression)
        block = torch.from_numpy(reference.scatter(x, src, axes)[device]).requires_grad_()
        y = xt.redistribute(block, expression, mesh)
        plan = xs.plan((src, dst), axes, (8, 8), "float64")
        assert np.array_equal(
            y.detach(), reference.run(plan, reference.scatter(x, src, axes))[device]
        )
        cotangents = reference.scatter(x % 5, dst.dual, axes)
        (gradient,) = torch.autograd.grad(y, block, torch.from_numpy(cotangents[device]))
        assert np.array_equal(gradient, reference.run(plan.backward, cotangents)[device])


def _device_meshes() -> None:
    rank = dist.get_rank()
    _agrees(init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b")), xs.Mesh(a=2, b=4), rank)
    # Ranks in no order, neither along an axis nor between axes.
    shuffled = [[5, 1, 7, 2], [0, 6, 3, 4]]
    mesh = DeviceMesh("cpu", shuffled, mesh_dim_names=("a", "b"))
    _agrees(mesh, xs.Mesh(a=2, b=4), np.ravel(shuffled).tolist().index(rank))
    # A part of a larger mesh, which for half of the processes does not begin at rank 0.
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("p", "a", "b"))
    _agrees(whole["a", "b"], xs.Mesh(a=2, b=2), rank % 4)
    flat = xt.redistribute(torch.full((1,), rank), "n/ab -> n", whole["a", "b"]._flatten("ab"))
    assert flat.tolist() == [rank // 4 * 4 + k for k in range(4)]
    outer = xt.redistribute(
        torch.full((1,), rank), "n/(a,p) -> n", whole["p", "a"]
    )  # ranks two apart
    assert outer.tolist() == [rank % 2 + k for k in (0, 4, 2, 6)]
    # A mesh that some processes have no part in, and that the others use alone.
    mesh = DeviceMesh("cpu", [[7, 3], [6, 2]], mesh_dim_names=("a", "b"))
    if rank in (2, 3, 6, 7):
        _agrees(mesh, xs.Mesh(a=2, b=2), [7, 3, 6, 2].index(rank))
    else:
        move = functools.partial(xt.redistribute, torch.ones(2), "n/a -> n", mesh)
        check_error(move, "MeshError", f"rank {rank} is not in")
    assert still_connected()


def test_device_meshes() -> None:
    on_ranks(8, _device_meshes)


on_four = SharedRanks(4)


@on_four
def test_groups_are_made_when_a_gradient_will_need_them() -> None:
    """The slice needs none; its gradient needs some, which are there before it is asked for."""
    mesh = xs.Mesh(a=2, b=2)
    x = torch.ones(4, 4)
    counts = [len(c10d._world.pg_names)]
    for requires_grad in (False, False, True, True):
        y = xt.redistribute(
            x.requires_grad_(requires_grad), "n d -> n/b d | copy(a)", mesh, profile="h100"
        )
        counts.append(len(c10d._world.pg_names))
    y.sum().backward()
    before, *forward, with_gradient, again = counts
    assert set(forward) == {before} and with_gradient == again == len(c10d._world.pg_names) > before


SLOW_CP = xs.Profile("slow cp", "made up", xs.Link(0, 1e12), axes=(("cp", xs.Link(0, 1e6)),))


@on_four
def test_blocks_may_differ_along_axes_without_a_name() -> None:
    """Blocks may differ along `dp`, along which replicas would each fetch a part over the slow link."""
    mesh = xs.Mesh(dp=2, cp=2)
    first = dist.get_rank() // 2 * 2
    y = xt.redistribute(torch.full((8,), dist.get_rank()), "s/cp -> s", mesh, profile=SLOW_CP)
    assert y.tolist() == [first] * 8 + [first + 1] * 8
    assert "dp" in str(xs.plan("s/cp -> s", mesh, (16,), "int64", profile=SLOW_CP).steps)


@on_four
def test_meshes_that_cannot_be_used_are_refused() -> None:
    x = torch.ones(4, 4)
    four = xs.Mesh(a=4)
    unnamed = init_device_mesh("cpu", (4,))
    move = functools.partial(xt.redistribute, x, "n/a d -> n d")
    axis = "unknown mesh axis 'b' in\n    'd0/b d1 -> d0 d1 | copy(b)'"
    for call, kind, words in (
        (
            lambda: move(xs.Mesh(a=8)),
            "MeshError",
            "Mesh(a=8) has 8 devices, the world has 4 processes",
        ),
        (lambda: move(unnamed), "MeshError", "needs names for its dims"),
        (lambda: move("a=4"), "MeshError", "'a=4' is not a mesh"),
        (move, "MeshError", "a tensor needs a mesh"),
        (lambda: xt.ops.all_gather(x, 0, "b", four, grad="sum"), "NotationError", axis),
    ):
        check_error(call, kind, words)
    assert still_connected()
    dist.destroy_process_group()
    check_error(lambda: move(four), "MeshError", "no process group is initialised", "torchrun")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A new world has new groups: nothing is remembered of the old one.
    assert move(xs.Mesh(a=1)).equal(x)


def _histories() -> None:
    """Groups whose members have made other groups before, in other orders; no two of them wait in a ring."""
    rank = dist.get_rank()
    layout = "n d | sum(a,b) -> n d"
    pairs = {0: [(0, 1), (0, 2)], 1: [(1, 3), (0, 1)], 2: [(0, 2), (2, 3)], 3: [(1, 3), (2, 3)]}[
        rank
    ]
    for members in pairs:
        mesh = mesh_of_ranks(xs.Mesh(a=2, b=1), members)
        total = xt.redistribute(torch.full((2, 2), float(rank)), layout, mesh)
        assert torch.equal(total, torch.full((2, 2), float(sum(members))))
    # Three of four, in two orders that share their group; and all, in an order of their own.
    if rank:
        for members in ((3, 1, 2), (1, 2, 3)):
            mesh = mesh_of_ranks(xs.Mesh(a=3, b=1), members)
            blocks = xt.redistribute(torch.full((1,), rank), "n/(a,b) -> n", mesh)
            assert blocks.tolist() == list(members)
    mesh = mesh_of_ranks(xs.Mesh(a=2, b=2), (3, 1, 0, 2))
    assert xt.redistribute(torch.full((1,), rank), "n/(a,b) -> n", mesh).tolist() == [3, 1, 0, 2]
    assert still_connected()
    timeouts = {timeout_of(group) for group in c10d._world.pg_names}
    assert timeouts == {timeout_of(dist.group.WORLD)}, "our groups wait as long as the world"
    made = sorted(tuple(dist.get_process_group_ranks(group)) for group in c10d._world.pg_names)
    assert made == sorted([(0, 1, 2, 3), *pairs, *([(1, 2, 3)] if rank else [])])


def test_members_with_different_histories_find_each_other() -> None:
    on_ranks(4, _histories)
