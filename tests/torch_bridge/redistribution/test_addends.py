"""Sums in the order of ranks: equal bits by every path, batch and order of axes, forward and backward."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import torch_bridge as xt
import xshard as xs
from tests.reductions import N_DEVICES, Reduction, bits, random_reductions
from tests.torch_bridge.helpers import SharedRanks, on_threads, same_bits
from xshard.errors import XshardError

on_six = SharedRanks(N_DEVICES, on_threads)
MESH = xs.Mesh(a=2, b=3)
move = functools.partial(xt.redistribute, addends="ranks")


def as_tensor(block: np.ndarray, dtype: str) -> Tensor:
    return torch.from_numpy(block.astype(np.float64)).to(getattr(torch, dtype))


def check_paths(reduction: Reduction) -> None:
    rank = dist.get_rank()
    x = as_tensor(reduction.blocks[rank], reduction.dtype)
    on_mesh = functools.partial(move, mesh=reduction.mesh, shape=reduction.shape)
    text = reduction.expression
    stack = torch.stack([x, -x])
    batched = "e " + text.replace("-> ", "-> e ")
    found = {
        "search": on_mesh(x, text),
        "axes in another order": on_mesh(
            x, reduction.text_of(reduction.dst, reduction.summed[::-1])
        ),
        "direct": xt.redistribute(x, reduction.direct, reduction.mesh),
        "in a tree": on_mesh([x, -x], text, shape=[reduction.shape] * 2)[0],
        "begun": on_mesh(x, text, async_op=True) + 0,
        "in a batch": on_mesh(stack, batched, shape=(2, *reduction.shape))[0],
        "under vmap": torch.func.vmap(lambda block: on_mesh(block, text))(stack)[0],
    }
    part = x
    for plan in reduction.gathered:
        part = xt.redistribute(part, plan, reduction.mesh)
    found["scattered and gathered"] = part
    if reduction.kind == "sum":
        adjoint = reduction.adjoint
        copies = torch.zeros(adjoint.source.local_shape(rank), dtype=x.dtype, requires_grad=True)
        layouts = (adjoint.src, adjoint.dst)
        on_mesh(copies, layouts, shape=adjoint.shape).backward(x)
        found["gradient of copies"] = copies.grad
    wanted = bits(reduction.wanted[rank])
    for name, y in found.items():
        values = y.detach().double().numpy()
        if name == "begun":  # -0.0 + 0 is 0.0
            values = np.where(values == 0, reduction.wanted[rank].astype(np.float64), values)
        assert bits(values) == wanted, (name, reduction)


@on_six
def test_every_path_has_the_bits_of_the_sum_in_the_order_of_ranks() -> None:
    for reduction in random_reductions(8, seed=1):
        check_paths(reduction)


@on_six
def test_einsum_adds_products_in_the_order_of_ranks() -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    # Products of a device are exact in any order; sums over devices are not.
    scales = 2.0 ** torch.tensor([0, 9, -7, 14, 3, -2])
    x = torch.randint(-9, 9, (6, 2, 64), generator=generator).float()
    w = torch.randint(1, 4000, (6, 64, 3), generator=generator) * scales[:, None, None]
    total = functools.reduce(torch.add, x @ w)
    for text in ("b d/a/b, d/a/b f -> b f", "b d/(a,b), d/(a,b) f -> b f | copy(a)"):
        mine = (x[rank], w[rank].clone().requires_grad_())
        options = {"addends": "ranks", "profile": "bandwidth"}
        plan = xs.plan(text, MESH, sizes={"b": 2, "d": 384, "f": 3}, **options)
        assert plan.local.endswith("| sum(a,b)")
        assert same_bits(xt.einsum(text, *mine, mesh=MESH, **options), total)

    # The gradient of a DTensor of copies moves before the einsum's own moves do.
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    x, w = (DTensor.from_local(torch.ones(1, 1), mesh, [Replicate()] * 2) for _ in range(2))
    y = xt.einsum("m k, k n -> m n | copy(a)", x, w.requires_grad_(), addends="ranks")
    assert str(y.grad_fn.profile).endswith(":ranks")
    y.backward(DTensor.from_local(torch.ones(1, 1), mesh, [Partial()] * 2))
    assert w.grad.full_tensor() == N_DEVICES


@on_six
def test_gradients_of_a_parallel_model_add_in_the_order_of_ranks() -> None:
    """Of weights that are whole, and of those that are stored in parts, on meshes of one and two axes."""
    rank = dist.get_rank()
    rows = torch.randn(N_DEVICES, 8, generator=torch.Generator().manual_seed(1))
    wanted = functools.reduce(torch.add, rows)
    for mesh, axes in ((MESH, "(a,b)"), (xs.Mesh(a=6), "a")):
        for stored in ("o i", f"o/{axes} i -> o i"):
            model = nn.Linear(8, 6, bias=False)
            nn.init.zeros_(model.weight)
            layouts = {"weight": stored}
            xt.parallelize(model, layouts, {"": f"b/{axes} i"}, mesh, addends="ranks")
            model(rows[rank : rank + 1]).sum().backward()
            gradient = xt.redistribute(model.weight.grad, f"{stored.split(' ->')[0]} -> o i", mesh)
            assert same_bits(gradient, wanted.expand(6, 8)), (mesh, stored)


@on_six
def test_float64_rounds_once_by_every_path() -> None:
    """Wider addends need no order: with them short and long paths have equal bits too."""
    wide = functools.partial(xt.redistribute, mesh=MESH, comm_dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        addends = torch.randn(6, 12, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
        x = addends[dist.get_rank()].clone()
        wanted = addends.double().sum(0).to(dtype)
        assert same_bits(wide(x, "n d | sum(a,b) -> n d"), wanted)
        part = wide(x, "n d | sum(a,b) -> n/b/a d")
        assert same_bits(xt.redistribute(part, "n/b/a d -> n d", MESH), wanted)
        assert same_bits(wide(x[:1], "n d | sum(b,a) -> n d"), wanted[:1])
        copies = torch.zeros(2, 6, dtype=dtype, requires_grad=True)
        wide(copies, "n/a/b d -> n d | copy(a,b)").backward(x)
        assert same_bits(copies.grad, wanted[2 * dist.get_rank() :][:2])


def test_another_order_is_named() -> None:
    plan = xs.plan("n | sum(a) -> n", MESH, (2,))
    for verb in (xt.redistribute, lambda x, text, **options: xt.einsum(text, x, **options)):
        with pytest.raises(XshardError, match="addends is 'rank'"):
            verb(torch.ones(2), "n -> n", mesh=MESH, addends="rank")
        with pytest.raises(XshardError, match="the plan adds in any order"):
            verb(torch.ones(2), plan, mesh=MESH, addends="ranks")
