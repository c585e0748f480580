"""Meshes of every kind: over the world, in any order, and parts of it that start anywhere."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, numbers, on_ranks, still_connected
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
        assert np.array_equal(y.detach(), reference.run(plan, reference.scatter(x, src, axes))[device])
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
    # A mesh that some processes have no part in, and that the others use alone.
    mesh = DeviceMesh("cpu", [[7, 3], [6, 2]], mesh_dim_names=("a", "b"))
    if rank in (2, 3, 6, 7):
        _agrees(mesh, xs.Mesh(a=2, b=2), [7, 3, 6, 2].index(rank))
    else:
        kind, text = error_of(lambda: xt.redistribute(torch.ones(2), "n/a -> n", mesh))
        assert kind == "MeshError" and f"rank {rank} is not in" in text
    assert still_connected()


def test_device_meshes() -> None:
    on_ranks(8, _device_meshes)


SLOW_CP = xs.Profile("slow cp", "made up", xs.Link(0, 1e12), axes=(("cp", xs.Link(0, 1e6)),))


def _unnamed_axes() -> None:
    rank = dist.get_rank()
    x = torch.full((8,), rank)
    y = xt.redistribute(x, "s/cp -> s", xs.Mesh(dp=2, cp=2), profile=SLOW_CP)
    first = rank // 2 * 2
    assert y.tolist() == [first] * 8 + [first + 1] * 8


def test_blocks_may_differ_along_an_axis_that_is_not_named() -> None:
    on_ranks(4, _unnamed_axes)


def test_which_a_plan_for_the_whole_mesh_would_not_allow() -> None:
    """Replicas along `dp` can each fetch a part over the slow link: the test above can fail."""
    plan = xs.plan("s/cp -> s", xs.Mesh(dp=2, cp=2), (16,), "int64", profile=SLOW_CP)
    assert any("dp" in str(step) for step in plan.steps), str(plan)


def _groups() -> list[int]:
    mesh = xs.Mesh(a=2, b=2)
    x = torch.ones(4, 4)
    counts = [len(c10d._world.pg_names)]
    for requires_grad in (False, False, True, True):
        y = xt.redistribute(x.requires_grad_(requires_grad), "n d -> n/b d | copy(a)", mesh, profile="h100")
        counts.append(len(c10d._world.pg_names))
    y.sum().backward()
    return [*counts, len(c10d._world.pg_names)]


def test_groups_are_made_once_and_before_the_backward_pass() -> None:
    """The slice needs none; its gradient needs some, which are there before it is asked for."""
    first, *others = on_ranks(4, _groups)
    assert all(counts == first for counts in others)
    before, *forward, with_gradient, again, after = first
    assert set(forward) == {before} and with_gradient == again == after > before


def _errors() -> list[tuple[str, str]]:
    x = torch.ones(4, 4)
    unnamed = init_device_mesh("cpu", (4,))
    found = [
        error_of(lambda: xt.redistribute(x, "n/a d -> n d", xs.Mesh(a=8))),
        error_of(lambda: xt.redistribute(x, "n/a d -> n d", unnamed)),
        error_of(lambda: xt.redistribute(x, "n/a d -> n d", "a=4")),
        error_of(lambda: xt.redistribute(x, "n/a d -> n d")),
        error_of(lambda: xt.ops.all_gather(x, 0, "b", xs.Mesh(a=4), grad="sum")),
    ]
    assert still_connected()
    dist.destroy_process_group()
    found.append(error_of(lambda: xt.redistribute(x, "n/a d -> n d", xs.Mesh(a=4))))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A new world has new groups: nothing is remembered of the old one.
    assert xt.redistribute(x, "n/a d -> n d", xs.Mesh(a=1)).equal(x)
    return found


def test_meshes_that_cannot_be_used() -> None:
    first, *others = on_ranks(4, _errors)
    assert all(found == first for found in others)
    expected = [
        ("MeshError", "Mesh(a=8) has 8 devices, the world has 4 processes"),
        ("MeshError", "needs names for its dims"),
        ("MeshError", "'a=4' is not a mesh"),
        ("MeshError", "a tensor needs a mesh"),
        ("NotationError", "unknown mesh axis 'b' in\n    'd0/b d1 -> d0 d1 | copy(b)'"),
        ("MeshError", "no process group is initialised"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert kind == expected_kind and part in text
    assert "torchrun" in first[-1][1]


def _histories() -> list[tuple[int, ...]]:
    """Groups whose members have made other groups before, in other orders; no two of them wait in a ring."""
    rank = dist.get_rank()
    layout = "n d | sum(a,b) -> n d"
    pairs = {0: [(0, 1), (0, 2)], 1: [(1, 3), (0, 1)], 2: [(0, 2), (2, 3)], 3: [(1, 3), (2, 3)]}[rank]
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
    blocks = xt.redistribute(
        torch.full((1,), rank), "n/(a,b) -> n", mesh_of_ranks(xs.Mesh(a=2, b=2), (3, 1, 0, 2))
    )
    assert blocks.tolist() == [3, 1, 0, 2]
    assert still_connected()
    timeouts = {timeout_of(group) for group in c10d._world.pg_names}
    assert timeouts == {timeout_of(dist.group.WORLD)}, "our groups wait as long as the world"
    return sorted(tuple(dist.get_process_group_ranks(group)) for group in c10d._world.pg_names)


def test_members_with_different_histories_find_each_other() -> None:
    made = on_ranks(4, _histories)
    world, three = (0, 1, 2, 3), (1, 2, 3)
    assert made[0] == sorted([world, (0, 1), (0, 2)])
    assert made[1] == sorted([world, (0, 1), (1, 3), three])
    assert made[3] == sorted([world, (1, 3), (2, 3), three])


def _flattened() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("p", "a", "b"))
    flat = mesh["a", "b"]._flatten("ab")
    y = xt.redistribute(torch.full((1,), rank), "n/ab -> n", flat)
    first = rank // 4 * 4
    assert y.tolist() == list(range(first, first + 4))
    outer = mesh["p", "a"]  # whose ranks are two apart
    y = xt.redistribute(torch.full((1,), rank), "n/(a,p) -> n", outer)
    assert y.tolist() == [rank % 2 + r for r in (0, 4, 2, 6)]
    _agrees(mesh["a", "b"], xs.Mesh(a=2, b=2), rank % 4)


def test_slices_and_flattened_meshes() -> None:
    on_ranks(8, _flattened)
