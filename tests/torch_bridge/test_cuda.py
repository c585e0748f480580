"""What torch does on GPUs with redistributions and contractions: compilers, autocast, layers, DTensors.

Skipped where there is no GPU, as `test_nccl.py`; the ranks share one where there are fewer of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.gpus import needs_gpu, on_gpus
from tests.torch_bridge.helpers import block_of, numbers
from tests.torch_bridge.test_nn import check_all

MESH = xs.Mesh(a=2)


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


@needs_gpu
def test_inductor_compiles_moves_and_products() -> None:
    on_gpus(2, "nccl", _compiled)


def _autocast() -> None:
    """Products in bfloat16, of operands that are cast before they travel; float32 again in gradients."""
    x, w = (block.requires_grad_() for block in _blocks("n d/a", "d/a e"))
    with torch.autocast("cuda", torch.bfloat16):
        y = xt.einsum("n d/a, d/a e -> n e", x, w, mesh=MESH)
    y.sum().backward()
    whole = torch.from_numpy((numbers(8, 8) % 5) @ (numbers(8, 8) % 3))
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert torch.equal(y.cpu(), whole.bfloat16()), "small whole numbers are exact"


@needs_gpu
def test_autocast() -> None:
    on_gpus(2, "nccl", _autocast)


def _added_in_float32() -> None:
    """Addends that are lost one after the other, but not together: 256 + 1 is 256 in bfloat16."""
    rank, mesh = torch.distributed.get_rank(), xs.Mesh(a=4)
    x = torch.full((4, 4), 1.0 if rank else 256.0, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for text in ("n d | sum(a) -> n d", "n d | sum(a) -> n/a d"):
        y = xt.redistribute(x, text, mesh, comm_dtype=torch.float32)
        assert y.dtype == torch.bfloat16 and (y == 260).all()
    ones = torch.ones(4, 4, dtype=torch.bfloat16, device="cuda") / 4
    z = xt.einsum("n d/a, d/a e -> n e", x, ones, mesh=mesh, comm_dtype=torch.float32)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert (z == 260).all() and (gradient == 1).all()


@needs_gpu
def test_sums_of_bfloat16_in_float32() -> None:
    on_gpus(4, "nccl", _added_in_float32)


def _eight_bits() -> None:
    """Dtypes that NCCL does not know travel as bits."""
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.bool,
    ):
        whole = torch.from_numpy(numbers(8, 8) % 2).to(dtype)
        x = whole.view(torch.uint8).chunk(2)[torch.distributed.get_rank()].view(dtype).cuda()
        for text in ("n/a d -> n d", "n/a d -> n/zigzag(a) d"):
            y = xt.redistribute(x, text, MESH)
            z = xt.redistribute(y, " -> ".join(reversed(text.split(" -> "))), MESH)
            assert torch.equal(z.view(torch.uint8), x.view(torch.uint8)), (dtype, text)


@needs_gpu
def test_dtypes_that_the_backend_does_not_know() -> None:
    on_gpus(2, "nccl", _eight_bits)


@pytest.mark.parametrize("n", [2, 4])
@needs_gpu
def test_layers_equal_their_modules(n: int) -> None:
    on_gpus(n, "nccl", check_all, n, "cuda")


def _placed() -> None:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("a",))
    x, w = (torch.from_numpy(numbers(4, 4) % k).cuda().requires_grad_() for k in (5, 3))
    rows, columns = (
        distribute_tensor(t.detach(), mesh, [Shard(d)]).requires_grad_() for d, t in enumerate((x, w))
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
        assert all(torch.equal(g.full_tensor(), e) for g, e in zip(found, expected, strict=True)), text
    moved = xt.redistribute(rows, "s/a d -> s d/a")
    assert moved.placements == (Shard(1),) and torch.equal(moved.full_tensor(), x)


@needs_gpu
def test_dtensors() -> None:
    on_gpus(2, "nccl", _placed)


def _several() -> None:
    """Several moves in one collective, and a move to another mesh."""
    blocks = _blocks("n/a d", "n/a d")
    wanted = _blocks("n d/a", "n d/a")
    found = xt.redistribute(blocks, ["n/a d -> n d/a"] * 2, MESH)
    assert all(map(torch.equal, found, wanted))
    moved = xt.redistribute(
        blocks[0], "n/a d -> n d/b", src_mesh=MESH, dst_mesh=xs.Mesh(b=2), shape=(8, 8), dtype="float32"
    )
    assert torch.equal(moved, wanted[0])


@needs_gpu
def test_many_at_once() -> None:
    on_gpus(2, "nccl", _several)
