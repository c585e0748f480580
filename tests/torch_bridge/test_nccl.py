"""Redistributions on GPUs: recorded in a CUDA graph, on streams, with nothing that waits for the device.

Skipped where there is no GPU (`pytest -rs` says so); one process is a world of its own on one GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import on_ranks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
MESH = xs.Mesh(a=1)
EXPRESSIONS = ["n/a d -> n d", "n d | sum(a) -> n/a d", "n/a d -> n d/a", "n/a d -> n/a:halo(1,1,periodic) d"]


def _nccl() -> None:
    """The gloo world of `run_ranks`, exchanged for one of NCCL."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def _captured() -> None:
    _nccl()
    x = torch.arange(32.0, device="cuda").view(8, 4)
    for expression in EXPRESSIONS:
        expected = xt.redistribute(x, expression, MESH)  # connections are made before a graph is recorded
        graph, block = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            y = xt.redistribute(block, expression, MESH)
        block.mul_(3)
        graph.replay()
        assert torch.equal(y, 3 * expected), expression


@needs_gpu
def test_a_redistribution_is_recorded_in_a_cuda_graph() -> None:
    on_ranks(1, _captured)


def _unsynchronised() -> None:
    _nccl()
    x = torch.arange(32.0, device="cuda").view(8, 4).requires_grad_()
    for expression in EXPRESSIONS:
        xt.redistribute(x, expression, MESH).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    for expression in EXPRESSIONS:
        xt.redistribute(x, expression, MESH).sum().backward()
        xt.redistribute(x, expression, MESH, async_op=True).wait()
    torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    on_ranks(1, _unsynchronised)


def _streams() -> None:
    _nccl()
    x, side = torch.arange(2.0**20, device="cuda").view(-1, 4), torch.cuda.Stream()
    for _ in range(20):
        pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
        with torch.cuda.stream(side):
            y = pending.wait() * 2
        del pending
        torch.empty_like(x).fill_(-1)  # would take the memory of a tensor that is still in use
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(y, 2 * x)


@needs_gpu
def test_a_result_may_be_used_on_another_stream() -> None:
    on_ranks(1, _streams)


def test_no_executor_asks_for_a_value() -> None:
    """Without a GPU: on tensors that have no values, whatever asks for one fails."""

    def valueless() -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            for expression in EXPRESSIONS[:3]:
                xt.redistribute(torch.ones(8, 4), expression, MESH)

    xt.run_ranks(1, valueless)
