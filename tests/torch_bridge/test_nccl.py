"""On GPUs: values, CUDA graphs, streams, compilers, autocast, layers, DTensors, and no waiting for kernels.

Skipped where there is no GPU (`pytest -rs` says so). Ranks share a GPU where there are fewer of them: their
kernels then take turns, and messages go through sockets. The case tables run by gloo on CUDA tensors, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.cases import CASES, one_of_each
from tests.contractions.cases import CASES as CONTRACTIONS
from tests.torch_bridge.gpus import needs_gpu, on_gpus
from tests.torch_bridge.helpers import block_of, check_error, numbers, on_ranks
from tests.torch_bridge.nn.test_layers import check_all
from torch_bridge.autodiff import blocks as arrays
from torch_bridge.testing import worker
from xshard.testing.plans import backward_bytes, in_numpy, is_linear, judge, plan_question
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
        expression: lambda x, e=expression: xt.redistribute(x, e, MESH)
        for expression in EXPRESSIONS
    }
    for text in PRODUCTS:
        for overlap in ("never", "always"):
            calls[f"{text}, overlap {overlap}"] = lambda x, text=text, overlap=overlap: xt.einsum(
                text, x, (x * 2).mT, mesh=MESH, overlap=overlap
            )
    return calls


def _block(name: str) -> Tensor:
    """This rank's block of the numbers under the layout with which a text begins, where the backend is."""
    block = block_of(numbers(8, 8) % 7 + 1, name.split(",")[0], MESH, torch.float32)
    return block.cuda() if dist.get_backend() == "nccl" else block


def _answers(questions: Sequence[Question]) -> list[Any]:
    """The answers of the kit's worker, of tensors on the GPU."""
    to_gpu = mock.patch.object(worker, "tensor_of", lambda block: arrays.tensor_of(block).cuda())
    from_gpu = mock.patch.object(worker, "array_of", lambda tensor: arrays.array_of(tensor.cpu()))
    with to_gpu, from_gpu:
        return worker.answer_all(questions)


@pytest.mark.parametrize(
    ("backend", "n"), [("nccl", 2), ("nccl", 3), ("nccl", 4), ("gloo", 2), ("gloo", 4)]
)
@needs_gpu
def test_every_case_does_what_its_plan_says(backend: str, n: int) -> None:
    """Of those on more than two ranks one of each kind: kernels of ranks that share a GPU take turns."""
    plans: dict[str, Any] = {case.name: case.plan() for case in CASES if case.mesh.n_devices == n}
    kept = set(plans if n == 2 else one_of_each(plans))
    for i, (name, mesh, sizes, text) in enumerate(CONTRACTIONS):
        if xs.Mesh(mesh).n_devices == n and i % 4 == 0:
            plans[name] = xs.plan(
                text, xs.Mesh(mesh), sizes=sizes, dtype="float64", profile="bandwidth"
            )
            kept.add(name)
    questions = {name: plan_question(plan) for name, plan in plans.items() if name in kept}
    by_rank = on_gpus(n, backend, _answers, list(questions.values()))
    wrong = []
    for (name, question), *parts in zip(questions.items(), *by_rank, strict=True):
        answer = worker.merge_ranks(parts)
        plan = question.plan
        verdict = judge(answer, in_numpy(question))
        planned = plan.bytes_received, backward_bytes(plan)
        counted = answer.forward_bytes, answer.backward_bytes
        if not verdict.agrees or counted != (
            planned if is_linear(plan) else (planned[0], counted[1])
        ):
            wrong.append((name, verdict, counted, planned))
    assert questions and not wrong


def _captured() -> None:
    """Calls are recorded in a CUDA graph."""
    for name, call in _calls().items():
        x = _block(name)
        expected = call(x)  # connections are made before a graph is recorded
        graph = torch.cuda.CUDAGraph()
        block = x.clone()
        with torch.cuda.graph(graph):
            y = call(block)
        block.mul_(3)
        graph.replay()
        power = 2 if name.split(",")[0] in [p.split(",")[0] for p in PRODUCTS] else 1
        assert torch.equal(y, 3**power * expected), name


def _unsynchronised() -> None:
    """Nothing waits for the device."""
    for name, call in _calls().items():
        x = _block(name).requires_grad_()
        call(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        call(x).sum().backward()
        if name in EXPRESSIONS:
            xt.redistribute(x, name, MESH, async_op=True).wait()
        torch.cuda.set_sync_debug_mode("default")


def _streams() -> None:
    """A result may be used on another stream."""
    x = torch.arange(2.0**20, device="cuda").view(-1, 4) + dist.get_rank()
    expected = xt.redistribute(x, "n/a d -> n d/a", MESH)
    side = torch.cuda.Stream()
    for _ in range(20):
        pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
        with torch.cuda.stream(side):
            y = pending.wait() * 2
        del pending
        torch.empty_like(x).fill_(-1)  # would take the memory of a tensor that is still in use
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(y, 2 * expected)


def _disagreeing() -> None:
    """Ranks that disagree meet without a collective."""
    gather = functools.partial(xt.redistribute, layouts="n/a d -> n d", mesh=MESH, debug=True)
    gather(torch.ones(2, 2, device="cuda"))
    block = torch.ones(2 + dist.get_rank(), 2, device="cuda")
    check_error(lambda: gather(block), "DesyncError", "rank 1: 'n/a d -> n d', block (3, 2)")


def _on_the_host() -> None:
    block = torch.ones(2, 2)
    check_error(lambda: xt.redistribute(block, "n/a d -> n d", MESH), "MeshError", "on 'cpu'")


def _pinned() -> None:
    """A world of two backends: each block goes by the one of its device."""
    block = block_of(numbers(8, 8), "n/a d", MESH)
    for x in (block, block.pin_memory(), block.pin_memory().to("cuda", non_blocking=True)):
        pending = xt.redistribute(x, "n/a d -> n d/a", MESH, async_op=True)
        y = xt.einsum(
            "n/a d, d e -> n/a e", x, torch.eye(8, dtype=x.dtype, device=x.device) * 2, mesh=MESH
        )
        assert pending.device == y.device == x.device and torch.equal(y, 2 * x)
        assert torch.equal(pending.wait().cpu(), block_of(numbers(8, 8), "n d/a", MESH))


def _blocks(*layouts: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """This rank's blocks of small whole numbers, on the GPU."""
    wholes = (numbers(8, 8) % k for k in (5, 3))
    return [block_of(x, t, MESH, dtype).cuda() for x, t in zip(wholes, layouts, strict=False)]


def _compiled() -> None:
    """By inductor, down to kernels for the GPU: moves and products in one graph, with gradients."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        y = xt.einsum("n/a d, d e/a -> n e/a", torch.sin(x), w, mesh=MESH)
        y = xt.redistribute(y * 2, "n e/a -> n/a e", MESH)
        wide = xt.redistribute(y, "n/a e -> n/a:halo(1,1) e", MESH)
        return xt.redistribute(wide[1:-1] + 1, "n/a e -> n/zigzag(a) e", MESH)

    x, w = (block.requires_grad_() for block in _blocks("n/a d", "d e/a"))
    with torch._inductor.config.patch(compile_threads=1):
        y = torch.compile(step, fullgraph=True)(x, w)
        found = torch.autograd.grad(y.sum(), (x, w))
    expected = step(x, w)
    assert y.is_cuda and torch.allclose(y, expected, rtol=1e-4)
    wanted = torch.autograd.grad(expected.sum(), (x, w))
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, wanted, strict=True))


def _autocast() -> None:
    """Products in bfloat16, of operands that are cast before they travel; float32 again in gradients."""
    x, w = (block.requires_grad_() for block in _blocks("n d/a", "d/a e"))
    with torch.autocast("cuda", torch.bfloat16):
        y = xt.einsum("n d/a, d/a e -> n e", x, w, mesh=MESH)
    y.sum().backward()
    whole = torch.from_numpy((numbers(8, 8) % 5) @ (numbers(8, 8) % 3))
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert torch.equal(y.cpu(), whole.bfloat16()), "small whole numbers are exact"


def _added_in_float32() -> None:
    """Addends that are lost one after the other, but not together: 256 + 1 is 256 in bfloat16."""
    rank = dist.get_rank()
    mesh = xs.Mesh(a=4)
    x = torch.full(
        (4, 4), 1.0 if rank else 256.0, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    for text in ("n d | sum(a) -> n d", "n d | sum(a) -> n/a d"):
        y = xt.redistribute(x, text, mesh, comm_dtype=torch.float32)
        assert y.dtype == torch.bfloat16 and (y == 260).all()
    ones = torch.ones(4, 4, dtype=torch.bfloat16, device="cuda") / 4
    z = xt.einsum("n d/a, d/a e -> n e", x, ones, mesh=mesh, comm_dtype=torch.float32)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert (z == 260).all() and (gradient == 1).all()


def _eight_bits() -> None:
    """Dtypes that NCCL does not know travel as bits."""
    for name in ("float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "bool"):
        dtype = getattr(torch, name)
        whole = torch.from_numpy(numbers(8, 8) % 2).to(dtype)
        x = whole.view(torch.uint8).chunk(2)[dist.get_rank()].view(dtype).cuda()
        for text in ("n/a d -> n d", "n/a d -> n/zigzag(a) d"):
            y = xt.redistribute(x, text, MESH)
            z = xt.redistribute(y, " -> ".join(reversed(text.split(" -> "))), MESH)
            assert torch.equal(z.view(torch.uint8), x.view(torch.uint8)), (dtype, text)


def _placed() -> None:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("a",))
    x, w = (torch.from_numpy(numbers(4, 4) % k).cuda().requires_grad_() for k in (5, 3))
    rows, columns = (
        distribute_tensor(t.detach(), mesh, [Shard(d)]).requires_grad_()
        for d, t in enumerate((x, w))
    )
    for text, placement in (
        ("s/a d, d f/a -> s f/a", Shard(1)),
        ("s/a d, d f/a -> s/a f", Shard(0)),
        ("s/a d, d f/a -> s f | copy(a)", Replicate()),
        ("s/a d, d f/a -> s f | sum(a)", Partial()),
    ):
        y = xt.einsum(text, rows, columns)
        assert y.placements == (placement,) and torch.equal(y.full_tensor(), x @ w)
        found = torch.autograd.grad((y.full_tensor() ** 2).sum(), (rows, columns))
        expected = torch.autograd.grad(((x @ w) ** 2).sum(), (x, w))
        assert all(torch.equal(g.full_tensor(), e) for g, e in zip(found, expected, strict=True)), (
            text
        )
    moved = xt.redistribute(rows, "s/a d -> s d/a")
    assert moved.placements == (Shard(1),) and torch.equal(moved.full_tensor(), x)


def _several() -> None:
    """Several moves in one collective, and a move to another mesh."""
    blocks = _blocks("n/a d", "n/a d")
    wanted = _blocks("n d/a", "n d/a")
    found = xt.redistribute(blocks, ["n/a d -> n d/a"] * 2, MESH)
    assert all(map(torch.equal, found, wanted))
    moved = xt.redistribute(
        blocks[0],
        "n/a d -> n d/b",
        src_mesh=MESH,
        dst_mesh=xs.Mesh(b=2),
        shape=(8, 8),
        dtype="float32",
    )
    assert torch.equal(moved, wanted[0])


@pytest.mark.parametrize(
    ("check", "n", "backend"),
    [
        (_captured, 2, "nccl"),
        (_unsynchronised, 2, "nccl"),
        (_streams, 2, "nccl"),
        (_disagreeing, 2, "nccl"),
        (_on_the_host, 2, "nccl"),
        (_pinned, 2, "cpu:gloo,cuda:nccl"),
        (_compiled, 2, "nccl"),
        (_autocast, 2, "nccl"),
        (_added_in_float32, 4, "nccl"),
        (_eight_bits, 2, "nccl"),
        (_placed, 2, "nccl"),
        (_several, 2, "nccl"),
    ],
)
@needs_gpu
def test_on_gpus(check: Callable[[], None], n: int, backend: str) -> None:
    on_gpus(n, backend, check)


@pytest.mark.parametrize("n", [2, 4])
@needs_gpu
def test_layers_equal_their_modules(n: int) -> None:
    on_gpus(n, "nccl", check_all, n, "cuda")


def _valueless() -> None:
    for expression in EXPRESSIONS:
        block = _block(expression)
        with FakeTensorMode() as mode:
            xt.redistribute(mode.from_tensor(block), expression, MESH)


def test_no_executor_asks_for_a_value() -> None:
    """Without a GPU: on tensors that have no values, whatever asks for one fails."""
    on_ranks(2, _valueless)
