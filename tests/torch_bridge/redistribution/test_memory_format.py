"""Blocks that lie in memory in any order: values of contiguous ones, in contiguous results, copied once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of,
    check_error,
    for_each,
    numbers,
)
from tests.torch_bridge.lower.test_parts import CPU
from torch_bridge.compat.nvsubquadratic import all_to_all_single_fn
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.subarray import subarray
from xshard.layout.runs import Run

MESH = xs.Mesh(a=2)
SHAPE = (2, 4, 8, 4)
EVERY_STEP = [
    "b c s/a w -> b c s w | copy(a)",
    "b c s w -> b c/a s w",
    "b c s w | sum(a) -> b c s w",
    "b c s w | sum(a) -> b c s/a w",
    "b c s/a w -> b c/a s w",
    "b c s/zigzag(a) w -> b c s w/zigzag(a)",
    "b c s/zigzag(a) w -> b c s/a w",
    "b c s/a w -> b c s/a:halo(1,2,constant(3)) w",
    "b c s/a:halo(1,1) w -> b c s/a w",
    "b c s/a w -> b c s/a:fold(halo(1,1)) w",
    "b c s/a w -> b c s w | sum(a)",
    "b c s w -> b c s w | sum(a)",
    "b c s w | sum(a) -> b c s w | mean(a)",
    "b c s w | max(a) -> b c s w",
    "b c s w -> b c s w | copy(a)",
]


def in_every_order(x: Tensor) -> Iterator[Tensor]:
    """Tensors equal to `x`: every order of dims in memory, every other element, a part of a larger one."""
    for order in itertools.permutations(range(x.ndim)):
        yield x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
    yield torch.stack([x, x + 1], -1)[..., 0]
    yield torch.nn.functional.pad(x, [1, 2] * x.ndim)[(slice(1, -2),) * x.ndim]


def expanded(x: Tensor) -> Iterator[Tensor]:
    """Tensors of the shape of `x` whose rows along the first, or the last, dim are one row in memory."""
    yield from (x.narrow(d, 0, 1).expand(x.shape) for d in (0, -1))


def check_every_order(text: str) -> None:
    """The results and gradients of a contiguous block, for blocks and cotangents in every order."""
    block = block_of(numbers(*SHAPE), text, MESH)

    def both(x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        y = xt.redistribute(x := x.detach().requires_grad_(), text, MESH, shape=SHAPE)
        return y, torch.autograd.grad(y, x, cotangent)[0]

    cotangent = torch.from_numpy(numbers(*xt.redistribute(block, text, MESH, shape=SHAPE).shape))
    wanted = both(block, cotangent)
    for found in map(both, in_every_order(block), in_every_order(cotangent)):
        assert all(map(torch.equal, found, wanted)) and all(t.is_contiguous() for t in found)
    for x, c in zip(expanded(block), expanded(cotangent), strict=True):
        assert all(map(torch.equal, both(x, c), both(x.contiguous(), c.contiguous())))


on_two = SharedRanks(2)


@on_two
def test_every_step_takes_blocks_in_every_order() -> None:
    for_each(EVERY_STEP, check_every_order)
    x = torch.from_numpy(numbers(*SHAPE)) + dist.get_rank()
    deep = torch.channels_last_3d
    halo = "b c s/a w -> b c s/a:halo(1,1) w"
    turn = "b c s/a w -> b c/a s w"
    wide, turned = (xt.redistribute(x, text, MESH) for text in (halo, turn))
    x = x.to(memory_format=torch.channels_last)
    assert torch.equal(xt.redistribute(x, turn, MESH, async_op=True).wait(), turned)
    assert all(
        map(
            torch.equal,
            xt.redistribute([x, x, x], [halo, turn, turn], MESH),
            [wide, turned, turned],
        )
    )
    assert torch.equal(xt.nn.HaloExchange(1, axis="a", mesh=MESH)(x), wide)
    moved = torch.func.vmap(lambda v: xt.redistribute(v, "c s/a w -> c/a s w", MESH))(x)
    assert torch.equal(moved, turned)
    x = torch.from_numpy(numbers(1, 4, 8, 2, 3))
    for kind in ("full_to_split", "split_to_full"):
        assert torch.equal(
            *(all_to_all_single_fn(None, kind, v) for v in (x, x.to(memory_format=deep)))
        )
    x = x.to(memory_format=deep).requires_grad_()

    def network(v: Tensor) -> Tensor:
        for text in ("b c s/a h w -> b c s/a:halo(1,1) h w", "b c h w s | sum(a) -> b c/a h w s"):
            v = xt.redistribute(v, text, MESH).to(memory_format=deep) * 2
        return v

    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    results = [f(x) for f in (network, compiled)]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in results))


@on_two
def test_views_move_as_their_values() -> None:
    real = torch.arange(8.0).view(2, 4) + 10 * dist.get_rank()
    z = torch.complex(real, real + 1).requires_grad_()
    for text in ("n/a d -> n d", "n/a d -> n d/a", "n d | sum(a) -> n d", "n/cyclic(a) d -> n/a d"):
        for view in (z.conj(), z.conj().imag, torch._neg_view(real).requires_grad_()):
            y, plain = (
                xt.redistribute(v, text, MESH) for v in (view, view.resolve_conj().resolve_neg())
            )
            assert torch.equal(y, plain)
            weights = (
                torch.ones_like(y).conj() if y.is_complex() else torch._neg_view(torch.ones_like(y))
            )
            assert torch.equal(*(torch.autograd.grad(v, view, weights)[0] for v in (y, plain)))


@on_two
def test_sparse_blocks_are_refused() -> None:
    dense = torch.ones(2, 4)
    w = torch.ones(2, 3, requires_grad=True)
    rows = xt.redistribute(w, "n/a d -> n d | copy(a)", MESH)
    looked_up = torch.nn.functional.embedding(torch.tensor([0, 2]), rows, sparse=True)
    sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
    with pytest.raises(xs.errors.ShapeError, match=r"^leaf 'odd': "):
        xt.redistribute({"w": dense, "odd": sparse[0]}, "n/a d -> n d", MESH)
    for call, layout in (
        (lambda: xt.redistribute(sparse[0], "n/a d -> n d", MESH), "coo"),
        (lambda: xt.redistribute(sparse[1], "n/a d -> n d", MESH), "csr"),
        (lambda: looked_up.sum().backward(), "coo"),
    ):
        check_error(call, "ShapeError", f"sparse (torch.sparse_{layout})", "to_dense()")


class Copied(TorchDispatchMode):
    """Counts the elements of new tensors."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize(
    ("shape", "dim"), [(SHAPE, 0), (SHAPE, 1), (SHAPE, 2), (SHAPE, 3), ((1, 2, 4, 2, 2), 1)]
)
def test_a_block_is_copied_once_at_most(shape: tuple[int, ...], dim: int) -> None:
    """Parts in turn, parts in another order and parts of other sizes: as they are in a contiguous block."""
    n = shape[dim]
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for cuts in ((n // 2,), (n // 2, n // 4)):
        runs = [Run(a, b - a) for a, b in itertools.pairwise(sorted({0, *cuts, n})) if b > a]
        for order in (runs, runs[::-1]):
            packing = Packing(shape, tuple(subarray(shape, {dim: (run,)}, CPU) for run in order))
            packed = torch.cat([x.narrow(dim, run.start, run.length).reshape(-1) for run in order])
            for block in in_every_order(x):
                with Copied() as copied:
                    found = packing.pack(block)
                in_place = packing.is_flat and block.is_contiguous()
                assert torch.equal(found.flatten(), packed) and copied.elements == (
                    0 if in_place else x.numel()
                )
                with Copied() as copied:
                    placed = packing.place(block, [m.read(block) for m in packing.messages])
                assert (
                    torch.equal(placed, x)
                    and placed.is_contiguous()
                    and copied.elements == x.numel()
                )
