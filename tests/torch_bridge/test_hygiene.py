"""Nothing is written to that is not ours, and nothing piles up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.autodiff.test_transforms import (
    GRID,
    PAIR,
    array,
    chains_here,
    in_order,
    moves,
    shape_of,
)
from tests.torch_bridge.helpers import on_ranks


def strided(x: Tensor) -> Tensor:
    """The same values, every other one in memory, the dims the other way round."""
    turned = x.permute(*reversed(range(x.ndim))).contiguous()
    return torch.stack([turned, turned + 1], dim=-1)[..., 0].permute(*reversed(range(x.ndim)))


def _untouched() -> None:
    for step, chain in {**chains_here(), "no step": "n d > n d"}.items():
        shape = shape_of(step)
        mesh = PAIR if dist.get_world_size() == 2 else GRID
        block = array(shape, 1)
        for expression in moves(chain):
            x = block.clone().requires_grad_()
            whole = in_order(shape, expression, 0)
            y = xt.redistribute(x, expression, mesh, shape=whole)
            cotangent = torch.ones_like(y)
            kept = x.detach().clone()
            versions = (x._version, cotangent._version)
            (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
            assert (x._version, cotangent._version) == versions and torch.equal(x, kept), expression
            assert cotangent.eq(1).all()

            odd = strided(block).requires_grad_()
            assert odd.numel() < 2 or not odd.is_contiguous()
            z = xt.redistribute(odd, expression, mesh, shape=whole)
            assert torch.equal(z, y), f"a strided block, in {expression}"
            scale = (
                1 if "max" in expression or "min" in expression else 2
            )  # those are kept for gradients
            if scale == 2:
                z *= 2  # allowed, as the result is a tensor of its own
            assert torch.equal(odd, block)
            one = torch.ones((), dtype=z.dtype).expand(z.shape)  # a single element, seen everywhere
            (again,) = torch.autograd.grad(z, odd, one)
            assert torch.equal(again, scale * gradient), f"a strided gradient, in {expression}"
            # What comes out shares no memory with what went in: both may be written to.
            with torch.no_grad():
                gradient.fill_(-1)
                x.fill_(-1)
            assert cotangent.eq(1).all() and torch.equal(z, scale * y), expression
            block = y.detach()


def test_what_goes_in_is_left_alone() -> None:
    for mesh in (PAIR, GRID):
        on_ranks(mesh.n_devices, _untouched)


def resident_kib() -> int:
    """The memory of this process that is in use now."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def _many_calls() -> None:
    """On one of two ranks that send nothing: what a backend keeps is not ours."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = xs.Mesh(a=2)
    placed = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = torch.ones(4, 6, requires_grad=True)
    dtensor = DTensor.from_local(torch.ones(4, 6), placed, [Shard(0)]).requires_grad_()
    expressions = (
        "n/a d -> n d",
        "n/a d -> n d/a",
        "n/a d -> n/zigzag(a) d",
        "n d | max(a) -> n d",
    )

    used = []
    for _ in range(
        2
    ):  # the first calls make what is kept: plans, groups, pools of threads and memory
        for expression in expressions * 1200:
            torch.autograd.grad(xt.redistribute(x, expression, mesh).sum(), x)
        for _ in range(200):
            torch.autograd.grad(xt.dtensor.redistribute(dtensor, [Replicate()]).sum(), dtensor)
        gc.collect()
        used.append(resident_kib())
    assert used[1] - used[0] < 1024, f"5,000 calls took {used[1] - used[0]} KiB more"


def test_memory_is_flat_over_10000_calls() -> None:
    on_ranks(1, _many_calls)


def _meetings() -> None:
    store: Callable[[], int] = c10d._get_default_store().num_keys
    x = torch.ones(2, 2)
    mesh = xs.Mesh(a=2)
    xt.redistribute(x, "n/a d -> n d", mesh, debug=True)
    dist.barrier()
    before = store()
    for _ in range(20):
        xt.redistribute(x, "n/a d -> n d", mesh, debug=True)
    dist.barrier()
    assert store() <= before + 2


def test_comparisons_leave_nothing_in_the_store() -> None:
    on_ranks(2, _meetings)
