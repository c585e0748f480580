"""Gathers and reductions over links of two speeds: one collective per speed, with the values of one."""

from __future__ import annotations

import functools
import math
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import in_ranks
from torch_bridge.lower import beside
from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.executable import BucketedExecutable
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import Group, mesh_of_ranks
from torch_bridge.versions.autograd import lazy_copies
from xshard import reference

NODES = "h100:2"
GATHER = ["all_gather"] * 2
SCATTER = ["all_to_all"] * 2
REDUCE = ["all_to_all", "all_reduce", "all_gather"]
# (expression, mesh, shape, collectives); of an axis of four a node has a half.
CASES = [
    ("n/a/b d -> n d", xs.Mesh(a=2, b=2), (8, 6), GATHER),
    ("n/(b,a) d -> n d", xs.Mesh(a=2, b=2), (8, 6), GATHER),
    ("n/zigzag(a) d -> n d", xs.Mesh(a=4), (8, 6), GATHER),
    ("n d/a -> n d | copy(a)", xs.Mesh(a=4), (3, 8), GATHER),
    ("n d | sum(a,b) -> n/b/a d", xs.Mesh(a=2, b=2), (8, 6), SCATTER),
    ("n d | max(a) -> n d/a", xs.Mesh(a=4), (3, 8), SCATTER),
    ("n d | sum(a) -> n d", xs.Mesh(a=4), (3, 5), REDUCE),  # pieces that do not divide
    ("n d | min(a,b) -> n d", xs.Mesh(a=2, b=2), (4, 4), REDUCE),
    # Blocks so large that ranks send them to each other themselves.
    ("n/a/b d -> n d", xs.Mesh(a=2, b=2), (256, 256), GATHER),
    ("n d | sum(a,b) -> n/b/a d", xs.Mesh(a=2, b=2), (256, 256), SCATTER),
    ("n d | max(a,b) -> n d", xs.Mesh(a=2, b=2), (256, 256), REDUCE),
]
# Plans of several steps: permutations, exchanges, gathers over one axis after another.
SEVERAL_STEPS = [
    ("n/a d/b -> n/b d", xs.Mesh(a=2, b=2), (8, 8), []),
    ("n/zigzag(a) d/b -> n/b d", xs.Mesh(a=2, b=2), (8, 8), []),
    ("n/a d/b -> n/a:halo(1,1) d", xs.Mesh(a=2, b=2), (8, 8), []),
    ("n/sizes(a,3,5) d/b -> n/a d", xs.Mesh(a=2, b=2), (8, 8), []),
    ("n/sizes(a,3,5) d | sum(b) -> n/a d", xs.Mesh(a=2, b=2), (8, 8), []),
    ("n/a:halo(1,1) d -> n d", xs.Mesh(a=4), (8, 8), []),
]
ORDERS = [(0, 1, 2, 3), (2, 3, 1, 0)]  # ranks of a mesh's devices


def _blocks(plan: xs.Plan) -> list[np.ndarray]:
    whole = np.arange(np.prod(plan.shape)).reshape(plan.shape)
    if not plan.src.tags:
        return reference.scatter(whole, plan.src, plan.mesh)
    return [(whole * (7 * device + 3)) % 11 for device in range(plan.mesh.n_devices)]


@in_ranks(4)
def test_values_by_phases() -> None:
    rank = dist.get_rank()
    links = xs.load_profile(NODES)
    for expression, mesh, shape, kinds in CASES:
        plan = xs.plan(expression, mesh, shape, "int64", profile=links)
        want = reference.run(plan, _blocks(plan))
        for ranks in ORDERS:
            device = ranks.index(rank)
            executable = lower(plan, mesh_of_ranks(mesh, ranks), torch.device("cpu"))
            found = [
                move.collective for move in executable.moves if isinstance(move, PackedCollective)
            ]
            assert [each.kind for each in found] == kinds, expression
            assert len(plan.steps) == 1 and {len(each.group.ranks) for each in found} == {2}
            x = torch.from_numpy(np.ascontiguousarray(_blocks(plan)[device]))
            for y in (executable(x), executable.begin(x)()):
                assert np.array_equal(y, want[device]), (expression, ranks)
                assert y.is_contiguous() and not y._is_view()
        x = torch.from_numpy(np.ascontiguousarray(_blocks(plan)[rank]))
        for y in xt.redistribute([x, x], [plan, plan], mesh):
            assert np.array_equal(y, want[rank]), expression
    move = functools.partial(xt.redistribute, layouts=plan, mesh=mesh)
    assert np.array_equal(torch.compile(lambda x: move(x), backend="aot_eager")(x), want[rank])


def _wait_for_all_beside() -> None:
    """Return when all that was begun before has ended: one thread calls it in order."""
    beside._thread(os.getpid()).submit(int).result()


@in_ranks(4)
def test_begun_plans_go_on_by_themselves() -> None:
    """Nothing is left to send when a begun plan is ended, and the caller sends on its groups meanwhile.

    The gradient's plan, too: one that begins with an exchange keeps rows of its block.
    """
    nothing_is_sent = mock.patch.object(Collective, "_issue", side_effect=AssertionError)
    first_keeps_rows = set()
    for expression, mesh, shape, _ in CASES + SEVERAL_STEPS:
        plan = xs.plan(expression, mesh, shape, "float64", profile=xs.load_profile(NODES))
        forward = lower(plan, mesh_of_ranks(mesh, range(4)), torch.device("cpu"))
        shape_before = plan.source.local_shape(dist.get_rank())
        ways = [(forward, shape_before)]
        if plan.src.is_linear:
            ways.append((forward.backward, forward.shape))
        for executable, block_shape in ways:
            if not executable.collectives:
                continue
            if len(executable.collectives) > 1:
                first_keeps_rows.add(executable.collectives[0].keeps_rows)
            x = torch.arange(math.prod(block_shape), dtype=torch.float64).view(block_shape)
            want = executable(x)
            end_one = executable.begin(*lazy_copies([x]))
            end_both = BucketedExecutable((executable, executable)).begin(x, x)
            meanwhile = executable(x)
            x.zero_()
            _wait_for_all_beside()
            with nothing_is_sent:
                for y in (end_one(), *end_both(), meanwhile):
                    assert torch.equal(y, want), (expression, executable.plan)
    assert first_keeps_rows == {False, True}


@in_ranks(4)
def test_an_error_beside_the_caller_is_told_at_the_end() -> None:
    mesh = xs.Mesh(a=2, b=2)
    plan = xs.plan("n/a/b d -> n d", mesh, (8, 6), "int64", profile=xs.load_profile(NODES))
    executable = lower(plan, mesh_of_ranks(mesh, range(4)), torch.device("cpu"))
    x = torch.from_numpy(np.ascontiguousarray(_blocks(plan)[dist.get_rank()]))
    want = executable(x)
    begun: list[Collective] = []
    begin = Collective.begin

    def fail_second(self: Collective, *args: Any) -> Any:
        begun.append(self)
        if len(begun) == 2:
            raise RuntimeError("Connection closed by peer")
        return begin(self, *args)

    with mock.patch.object(Collective, "begin", fail_second):
        end = executable.begin(x)
        _wait_for_all_beside()
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        end()
    assert "in step 1 of 1" in caught.value.__notes__[0]
    dropped = executable.begin(x)  # and nobody asks for its end
    del dropped
    assert torch.equal(executable.begin(x)(), want)


def test_large_blocks_are_received_before_they_are_sent() -> None:
    """gloo asks for nothing before it has sent what it was given first: one way, then the other."""
    called: list[tuple[str, int, int]] = []

    def noted(name: str) -> object:
        def call(tensors: list[torch.Tensor], rank: int, tag: int) -> SimpleNamespace:
            called.append((name, rank, len(tensors[0])))
            return SimpleNamespace(wait=lambda: None)

        return call

    def among(*devices: int) -> Group:
        backend = SimpleNamespace(rank=lambda: 1, send=noted("send"), recv=noted("recv"))
        group = Group(backend, devices)
        vars(group).update(ranks=list(devices), backends="cpu:gloo")
        return group

    n = 1 << 14
    x = torch.arange(n, dtype=torch.float32)
    y = Collective("all_gather", among(0, 1), [n], [n] * 2).run(x, (2, n))
    assert called == [("recv", 0, n), ("send", 0, n)]
    assert torch.equal(y[1], x)
    called.clear()
    swap = Collective(
        "all_to_all", among(0, 1), [n - 8, 8], [n + 8, 8]
    )  # as large for the other rank
    assert torch.equal(swap.run(x, (n + 16,))[-8:], x[-8:])
    assert called == [("recv", 0, n + 8), ("send", 0, n - 8)]
