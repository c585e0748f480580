"""Tensors without data, on `meta` and fake ones: the shapes and dtypes that results would have."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.autodiff.test_transforms import CHAINS, GRID, in_order, moves, shape_of
from tests.torch_bridge.helpers import on_ranks, still_connected
from xshard.layout.layout import parse_expression


def _alone() -> None:
    """One rank calls; it would wait for the others in any collective, and for any group to be made."""
    rank = dist.get_rank()
    if rank == 1:
        for step, chain in CHAINS.items():
            shape = shape_of(step)
            for text in moves(chain):
                whole = in_order(shape, text, 0)
                made = in_order(shape, text, 1)
                ends = zip(parse_expression(text), (whole, made), strict=True)
                src, dst = (xs.Sharding(end, GRID, at).local_shape(rank) for end, at in ends)
                x = torch.empty(src, device="meta", dtype=torch.bfloat16, requires_grad=True)
                move = functools.partial(xt.redistribute, layouts=text, mesh=GRID, shape=whole)
                assert torch.func.vmap(move)(x.detach().expand(3, *src)).shape == (3, *dst)
                many = xt.redistribute([x, x], text, GRID, shape=[whole, whole])
                for y in (move(x, async_op=True).wait(), move(x, check_replicated=True), *many):
                    assert y.is_meta and y.shape == dst and y.dtype == torch.bfloat16, text
                    (gradient,) = torch.autograd.grad(y.sum(), x)
                    assert gradient.is_meta and gradient.shape == src, text
    assert still_connected()
    empty = torch.empty(4, 6, device="meta", dtype=torch.uint16) if rank < 2 else None
    y = xt.redistribute(
        empty,
        "n/a d -> n d/a",
        src_mesh=xs.Mesh(a=2),
        dst_mesh=xs.Mesh(a=4),
        shape=(8, 6),
        dtype=torch.uint16,
        device="meta",
    )
    assert y.is_meta and y.shape == (8, [2, 2, 2, 0][rank]) and y.dtype == torch.uint16
    for text in ("n/a d -> n/a:halo(1,1,constant(2)) d", "n/a d -> n d/a", "n d | sum(a) -> n/a d"):
        with FakeTensorMode() as mode:
            x = torch.ones(4, 4, requires_grad=True)
            fake = xt.redistribute(x, text, GRID)
            (gradient,) = torch.autograd.grad(fake.sum(), x)
        with mode:
            again = torch.ones(4, 4)
        y = xt.redistribute(torch.ones(4, 4), text, GRID)  # nothing fake is left behind
        assert type(y) is torch.Tensor and gradient.shape == (4, 4)
        assert fake.shape == y.shape == xt.redistribute(again, text, GRID).shape, text


def test_shapes_are_answered_without_communication() -> None:
    on_ranks(4, _alone)
