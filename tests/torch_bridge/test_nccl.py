"""Redistributions and contractions by NCCL: values, CUDA graphs, streams, and no waiting for the device.

Skipped where there is no GPU (`pytest -rs` says so). Ranks share a GPU where there are fewer of them: their
kernels then take turns, and messages go through sockets. The case tables run by gloo on CUDA tensors, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_bridge as xt
import xshard as xs
from tests.cases import CASES, one_of_each
from tests.contractions.cases import CASES as CONTRACTIONS
from tests.torch_bridge.gpus import needs_gpu, on_gpus
from tests.torch_bridge.helpers import block_of, error_of, numbers, on_ranks
from torch_bridge.autodiff import blocks as arrays
from torch_bridge.testing import worker
from xshard.testing.plans import answer_in_numpy, backward_bytes, is_linear, judge, plan_question
from xshard.testing.question import Question

MESH = xs.Mesh(a=2)
EXPRESSIONS = [
    "n/a d -> n d",
    "n d | sum(a) -> n/a d",
    "n d | sum(a) -> n d",
    "n/a d -> n d/a",
    "n/zigzag(a) d -> n/a d",
    "n/a d -> n/a:halo(1,1,periodic) d",
]
PRODUCTS = ["n/a d, d e/a -> n e/a", "n d/a, d/a e -> n/a e"]
Call = Callable[[Tensor], Tensor]


def _calls() -> dict[str, Call]:
    """Functions of this rank's block of (4, 8) or, where it is whole, (8, 8) numbers."""
    calls: dict[str, Call] = {
        expression: lambda x, e=expression: xt.redistribute(x, e, MESH) for expression in EXPRESSIONS
    }
    for text in PRODUCTS:
        for overlap in ("never", "always"):
            calls[f"{text}, overlap {overlap}"] = lambda x, text=text, overlap=overlap: xt.einsum(
                text, x, (x * 2).mT, mesh=MESH, overlap=overlap
            )
    return calls


def _block(name: str) -> Tensor:
    """This rank's block of the numbers under the layout with which a text begins, where the backend is."""
    layout = name.split("->")[0].split(",")[0].strip()
    block = block_of(numbers(8, 8) % 7 + 1, layout, MESH, torch.float32)
    return block.cuda() if dist.get_backend() == "nccl" else block


def _answers(questions: Sequence[Question]) -> list[Any]:
    """The answers of the kit's worker, of tensors on the GPU."""
    to_gpu = mock.patch.object(worker, "tensor_of", lambda block: arrays.tensor_of(block).cuda())
    from_gpu = mock.patch.object(worker, "array_of", lambda tensor: arrays.array_of(tensor.cpu()))
    with to_gpu, from_gpu:
        return worker.answer_all(questions)


@pytest.mark.parametrize(("backend", "n"), [("nccl", 2), ("nccl", 3), ("nccl", 4), ("gloo", 2), ("gloo", 4)])
@needs_gpu
def test_values_gradients_and_bytes_of_the_case_tables(backend: str, n: int) -> None:
    """Of those on more than two ranks one of each kind: kernels of ranks that share a GPU take turns."""
    plans: dict[str, Any] = {case.name: case.plan() for case in CASES if case.mesh.n_devices == n}
    kept = set(plans if n == 2 else one_of_each(plans))
    for i, (name, mesh, sizes, text) in enumerate(CONTRACTIONS):
        if xs.Mesh(mesh).n_devices == n and i % 4 == 0:
            plans[name] = xs.plan(text, xs.Mesh(mesh), sizes=sizes, dtype="float64", profile="bandwidth")
            kept.add(name)
    questions = {name: plan_question(plan) for name, plan in plans.items() if name in kept}
    by_rank, wrong = on_gpus(n, backend, _answers, list(questions.values())), []
    for (name, question), *parts in zip(questions.items(), *by_rank, strict=True):
        answer, plan = worker.merge_ranks(parts), question.plan
        verdict = judge(answer, answer_in_numpy(question))
        planned = plan.bytes_received, backward_bytes(plan)
        counted = answer.forward_bytes, answer.backward_bytes
        if not verdict.agrees or counted != (planned if is_linear(plan) else (planned[0], counted[1])):
            wrong.append((name, verdict, counted, planned))
    assert questions and not wrong


def _captured() -> None:
    for name, call in _calls().items():
        x = _block(name)
        expected = call(x)  # connections are made before a graph is recorded
        graph, block = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            y = call(block)
        block.mul_(3)
        graph.replay()
        power = 2 if name.split(",")[0] in [p.split(",")[0] for p in PRODUCTS] else 1
        assert torch.equal(y, 3**power * expected), name


@needs_gpu
def test_calls_are_recorded_in_a_cuda_graph() -> None:
    on_gpus(2, "nccl", _captured)


def _unsynchronised() -> None:
    for name, call in _calls().items():
        x = _block(name).requires_grad_()
        call(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        call(x).sum().backward()
        if name in EXPRESSIONS:
            xt.redistribute(x, name, MESH, async_op=True).wait()
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    on_gpus(2, "nccl", _unsynchronised)


def _streams() -> None:
    x = torch.arange(2.0**20, device="cuda").view(-1, 4) + dist.get_rank()
    expected, side = xt.redistribute(x, "n/a d -> n d/a", MESH), torch.cuda.Stream()
    for _ in range(20):
        pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
        with torch.cuda.stream(side):
            y = pending.wait() * 2
        del pending
        torch.empty_like(x).fill_(-1)  # would take the memory of a tensor that is still in use
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(y, 2 * expected)


@needs_gpu
def test_a_result_may_be_used_on_another_stream() -> None:
    on_gpus(2, "nccl", _streams)


def _disagreeing() -> tuple[str, str]:
    xt.redistribute(torch.ones(2, 2, device="cuda"), "n/a d -> n d", MESH, debug=True)
    rows = 2 + dist.get_rank()
    return error_of(
        lambda: xt.redistribute(torch.ones(rows, 2, device="cuda"), "n/a d -> n d", MESH, debug=True)
    )


@needs_gpu
def test_ranks_that_disagree_meet_without_a_collective() -> None:
    for kind, message in on_gpus(2, "nccl", _disagreeing):
        assert kind == "DesyncError" and "rank 1: 'n/a d -> n d', block (3, 2)" in message


def _on_the_host() -> tuple[str, str]:
    return error_of(lambda: xt.redistribute(torch.ones(2, 2), "n/a d -> n d", MESH))


@needs_gpu
def test_a_block_on_the_host_is_refused() -> None:
    for kind, message in on_gpus(2, "nccl", _on_the_host):
        assert kind == "MeshError" and "on 'cpu'" in message


def _pinned() -> Any:
    """A world of two backends: each block goes by the one of its device."""
    block = block_of(numbers(8, 8), "n/a d", MESH)
    for x in (block, block.pin_memory(), block.pin_memory().to("cuda", non_blocking=True)):
        pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
        y = xt.einsum("n/a d, d e -> n/a e", x, torch.eye(8, dtype=x.dtype, device=x.device) * 2, mesh=MESH)
        assert pending.device == y.device == x.device and torch.equal(y, 2 * x)
        assert torch.equal(pending.wait().cpu(), block_of(numbers(8, 8), "n d/a", MESH))


@needs_gpu
def test_blocks_of_the_host_and_of_the_device_in_one_world() -> None:
    on_gpus(2, "cpu:gloo,cuda:nccl", _pinned)


def _valueless() -> None:
    for expression in EXPRESSIONS:
        block = _block(expression)
        with FakeTensorMode() as mode:
            xt.redistribute(mode.from_tensor(block), expression, MESH)


def test_no_executor_asks_for_a_value() -> None:
    """Without a GPU: on tensors that have no values, whatever asks for one fails."""
    on_ranks(2, _valueless)
