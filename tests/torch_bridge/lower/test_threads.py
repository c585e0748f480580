"""Ranks as threads of one process: torch's threaded process group, which its own tests use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of, check_error, for_each, numbers, on_threads
from xshard import reference

MESH = xs.Mesh(a=2, b=2)
EXPRESSIONS = [
    "n/a/b d -> n d",
    "n/a d -> n d/a",
    "n/sizes(a,5,3) d -> n/b d",  # whose length is said
    "n/a/b d -> n/b/a d",  # a permutation: here no message from rank to rank
    "n d | sum(a) -> n/a d",
    "n d | max(b) -> n/b d",  # a reduce-scatter of a maximum, which the threaded group lacks
    "n d | mean(a,b) -> n d",
    "n/zigzag(a) d -> n/b d/a",
    "n/a:halo(1,1) d -> n d/b",
    "n d -> n d | copy(a)",  # whose gradient alone needs a group, made while other ranks wait
]


def _all_kinds() -> None:
    x = numbers(8, 4)
    rank = dist.get_rank()

    def compare(expression: str) -> None:
        plan = xs.plan(expression, MESH, shape=(8, 4), dtype="float64")
        block = block_of(x, expression, MESH).requires_grad_()
        y = xt.redistribute(block, expression, MESH)
        assert torch.equal(
            y, torch.from_numpy(reference.run(plan, reference.scatter(x, plan.src, MESH))[rank])
        )
        if plan.src.is_linear:
            cotangent = reference.scatter(x, plan.backward.src, MESH)
            (gradient,) = torch.autograd.grad(y, block, torch.from_numpy(cotangent[rank]))
            assert torch.equal(
                gradient, torch.from_numpy(reference.run(plan.backward, cotangent)[rank])
            )

    for_each(EXPRESSIONS, compare)
    many = xt.redistribute({"x": block_of(x, "n/a d", MESH)}, "n/a d -> n d", MESH)
    assert torch.equal(many["x"], torch.from_numpy(x))
    other = torch.distributed.device_mesh.DeviceMesh(
        "cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b")
    )
    block = block_of(x, "n/a d", MESH)
    options = {"src_mesh": MESH, "dst_mesh": other, "shape": (8, 4), "dtype": torch.float64}
    words = "ranks that are threads", "torch_bridge.run_ranks"
    check_error(lambda: xt.redistribute(block, "n/a d -> n/a d", **options), "MeshError", *words)


def test_all_kinds_of_steps() -> None:
    on_threads(4, _all_kinds)


def _fails() -> None:
    assert dist.get_rank() != 1, "rank 1 fails"


def test_helpers_can_fail() -> None:
    with pytest.raises(xt.testing.RankError, match="rank 1 fails"):
        on_threads(2, _fails)
