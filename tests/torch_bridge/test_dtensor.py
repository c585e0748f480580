"""DTensors: placements and layouts say the same, blocks are the same, and so is what moves."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, numbers, on_ranks, still_connected
from xshard import reference
from xshard.layout.layout import parse_expression

AXES = xs.Mesh(a=2, b=2, c=2)


def _cuts() -> list[str]:
    """Every way to cut two dims over some of three axes, nested in every order."""
    orders = [order for n in range(4) for order in itertools.permutations("abc", n)]
    return [
        "".join(["n", *(f"/{a}" for a in rows), " d", *(f"/{a}" for a in columns)])
        for rows in orders
        for columns in orders
        if not set(rows) & set(columns)
    ]


@pytest.mark.parametrize(
    ("layout", "placements"),
    [
        ("d0/a/b/c d1", (Shard(0), Shard(0), Shard(0))),
        ("d0/c/a d1/b", (_StridedShard(0, split_factor=2), Shard(1), Shard(0))),
        ("d0/c/b/a d1", (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))),
        ("d0/b d1 | sum(a,c)", (Partial("sum"), Shard(0), Partial("sum"))),
        ("d0/b d1 | mean(a)", (Partial("avg"), Shard(0), Replicate())),
        ("d0 d1/c | max(a)", (Partial("max"), Replicate(), Shard(1))),
        ("d0 d1 | min(b)", (Replicate(), Partial("min"), Replicate())),
    ],
)
def test_layouts_and_placements(layout: str, placements: tuple[object, ...]) -> None:
    assert xt.dtensor.to_placements(layout, AXES) == placements
    assert str(xt.dtensor.from_placements(placements, AXES, 2)) == layout


def test_every_nesting_there_and_back() -> None:
    for text in _cuts():
        back = xt.dtensor.from_placements(xt.dtensor.to_placements(text, AXES), AXES, 2)
        assert [dim.axes for dim in back.dims] == [dim.axes for dim in xs.Layout.parse(text).dims]


def _torch_block(length: int, placements: Sequence[Any], mesh: xs.Mesh, device: int) -> list[int]:
    """The rows of a device, as torch's placements split them one after the other."""
    rows = torch.arange(length)
    for placement, n, at in zip(placements, mesh.sizes, mesh.coords(device), strict=True):
        if not isinstance(placement, Replicate):
            rows = placement._split_tensor(rows, n, with_padding=False, contiguous=False)[0][at]
    return rows.tolist()


def test_strided_shards_are_read_as_torch_cuts_and_written_back() -> None:
    draw, seen = random.Random(0), Counter[str]()
    for _ in range(300):
        mesh = xs.Mesh({axis: draw.choice((1, 2, 2, 3)) for axis in "abc"[: draw.choice((1, 2, 2, 3))]})
        factors = [draw.choice((0, 1, 1, 2, 3, 4)) for _ in mesh.axes]
        placements = [
            Shard(0) if f == 1 else _StridedShard(0, split_factor=f) if f else Replicate() for f in factors
        ]
        length = draw.choice((0, 7, 8, 16, 24, 30, 36))
        try:
            layout = xt.dtensor.from_placements(placements, mesh, 1, (length,))
        except xs.errors.PlanError:  # a nesting of three, or of uneven parts, which torch cuts in two ways
            assert xt.dtensor.from_placements(placements, mesh, 1).dims[0].axes and length % mesh.n_devices
            continue
        expected = [_torch_block(length, placements, mesh, device) for device in range(mesh.n_devices)]
        assert [b.tolist() for b in reference.scatter(np.arange(length), layout, mesh)] == expected
        assert xs.Layout.parse(str(layout)) == layout
        orders = [cut.order for cut in layout.dims[0].shards]
        if "intervals" not in orders or len(layout.axes) == 1:
            back = xt.dtensor.from_placements(
                xt.dtensor.to_placements(layout, mesh, (length,)), mesh, 1, (length,)
            )
            assert xs.Sharding(back, mesh, (length,)).means_the_same_as(xs.Sharding(layout, mesh, (length,)))
        seen.update(set(orders))
    assert min(seen[order] for order in ("block", "cyclic", "intervals")) > 20, seen


def test_groups_and_orders_that_are_plain_when_even() -> None:
    assert xt.dtensor.to_placements("n/(a,b)", AXES, (8,)) == (Shard(0), Shard(0), Replicate())
    assert xt.dtensor.to_placements("n/balanced(b) | copy(a)", AXES, (8,)) == (
        Replicate(),
        Shard(0),
        Replicate(),
    )
    assert xt.dtensor.to_placements("... d/c", AXES, (2, 3, 4)) == (Replicate(), Replicate(), Shard(2))


def test_what_a_dtensor_cannot_hold() -> None:
    kind, text = error_of(lambda: xt.dtensor.to_placements("b s/zigzag(a)", AXES, (2, 8)))
    assert kind == "PlanError" and "a DTensor cannot hold 's/zigzag(a)' in\n    'b s/zigzag(a)'" in text
    kind, text = error_of(lambda: xt.dtensor.to_placements("b s/zigzag(a)", AXES))
    assert kind == "PlanError" and "shape=" not in text, "a shape does not help"
    kind, text = error_of(lambda: xt.dtensor.to_placements("n/(a,b)", AXES))
    assert kind == "PlanError" and "pass shape=" in text
    kind, text = error_of(lambda: xt.dtensor.to_placements("n/(a,b)", AXES, (5,)))
    assert kind == "PlanError" and "pass shape=" not in text
    kind, text = error_of(lambda: xt.dtensor.to_placements("n/b/a", xs.Mesh(a=3, b=2), (7,)))
    assert kind == "PlanError" and "mesh order" in text
    unclear = (_StridedShard(0, split_factor=2), Shard(0))
    kind, text = error_of(lambda: xt.dtensor.from_placements(unclear, xs.Mesh(a=3, b=2), 1, (7,)))
    assert kind == "PlanError" and "in two ways for 7 rows" in text
    strided = (_StridedShard(0, split_factor=3), Shard(0), Replicate())
    kind, text = error_of(lambda: xt.dtensor.from_placements(strided, AXES, 1))
    assert kind == "PlanError" and "not a nesting" in text
    kind, text = error_of(lambda: xt.dtensor.from_placements((Partial("product"),), xs.Mesh(a=2), 1))
    assert kind == "PlanError" and "partials: sum, avg, max, min" in text
    kind, text = error_of(lambda: xt.dtensor.from_placements((Shard(0),), AXES, 1))
    assert kind == "PlanError" and "one placement per mesh axis" in text


def _blocks() -> int:
    """Blocks of `distribute_tensor` are those of the layout; where they are not, the layout is refused."""
    mesh, rank, compared = (
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")),
        dist.get_rank(),
        0,
    )
    for shape in ((8, 8), (7, 5), (5, 9), (3, 2)):
        x = numbers(*shape)
        for text in _cuts():
            try:
                placements = xt.dtensor.to_placements(text, mesh, shape)
            except xs.errors.PlanError:
                assert text.count("/") == 3 and shape != (8, 8)
                continue
            theirs = distribute_tensor(torch.from_numpy(x), mesh, placements, src_data_rank=None)
            assert np.array_equal(theirs.to_local(), reference.scatter(x, text, AXES)[rank]), (text, shape)
            compared += 1
    return compared


def test_blocks_are_those_of_distribute_tensor() -> None:
    assert min(on_ranks(8, _blocks)) > 150


def _redistributed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank, whole = dist.get_rank(), torch.from_numpy(numbers(7, 6))
    for expression in ("n/a d/b -> n/b d/a", "n/b/a d -> n d/a", "n d/b -> n/a d", "n/a d -> n d"):
        src, dst = parse_expression(expression)
        x = distribute_tensor(
            whole, mesh, xt.dtensor.to_placements(src, mesh, whole.shape), src_data_rank=None
        )
        x.requires_grad_()
        y = xt.redistribute(x, expression)
        assert (
            isinstance(y, DTensor)
            and y.placements == xt.dtensor.to_placements(dst, mesh)
            and y.shape == x.shape
        )
        assert torch.equal(y.full_tensor(), whole)
        # As one process would: the gradient of sum(y * whole) is `whole`, placed as x is.
        (y * distribute_tensor(whole, mesh, y.placements, src_data_rank=None)).sum().backward()
        assert x.grad is not None and x.grad.placements == x.placements
        assert torch.equal(x.grad.full_tensor(), whole), expression

    # Dims in another order, alone and with others.
    for expression in ("n/a d/b -> d/a n/b", "n/b d -> d n/b", "n/a d -> d n | copy(a)"):
        src, dst = parse_expression(expression)
        x = distribute_tensor(
            whole, mesh, xt.dtensor.to_placements(src, mesh, whole.shape), src_data_rank=None
        )
        x.requires_grad_()
        for y in (xt.redistribute(x, expression), xt.redistribute([x.detach()] * 2, expression)[0]):
            assert y.placements == xt.dtensor.to_placements(dst, mesh) and torch.equal(
                y.full_tensor(), whole.mT
            )
        y = xt.redistribute(x, expression.replace(" | copy(a)", ""))
        (y * distribute_tensor(whole.mT, mesh, y.placements, src_data_rank=None)).sum().backward()
        assert torch.equal(x.grad.full_tensor(), whole) and x.grad.placements == x.placements

    # Partials: a sum, and a mean, whose gradient is divided.
    for reduction, share in (("sum", 1.0), ("avg", 0.5)):
        local = ((rank // 2 + 1) * whole).requires_grad_()
        x = DTensor.from_local(local, mesh, (Partial(reduction), Replicate()))
        tag = {"sum": "sum", "avg": "mean"}[reduction]
        y = xt.redistribute(x, f"n d | {tag}(a) -> n/a d")
        assert torch.equal(y.full_tensor(), (3.0 if reduction == "sum" else 1.5) * whole)
        y.sum().backward()
        assert torch.equal(local.grad, torch.full_like(whole, share))

    # A maximum, whose gradient goes to the rank that has it.
    local = ((rank // 2 + 1) * whole).requires_grad_()
    x = DTensor.from_local(local, mesh, (Partial("max"), Replicate()))
    y = xt.redistribute(x, "n d | max(a) -> n d")
    assert torch.equal(y.to_local(), 2 * whole)
    y.sum().backward()
    assert torch.equal(local.grad, torch.full_like(whole, rank // 2))

    # Copies: each rank's own loss adds to the gradient.
    x = distribute_tensor(whole, mesh, (Shard(0), Replicate()), src_data_rank=None).requires_grad_()
    y = xt.redistribute(x, "n/a d -> n d | copy(a)")
    (y.to_local(grad_placements=(Partial(), Replicate())) * (rank // 2 + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 3.0))

    # The other way round: each rank's part of a copy gives its part of the gradient.
    x = distribute_tensor(whole, mesh, (Replicate(), Shard(1)), src_data_rank=None).requires_grad_()
    y = xt.redistribute(x, "n d/b | copy(a) -> n/a d/b")
    (y * distribute_tensor(whole, mesh, y.placements, src_data_rank=None)).sum().backward()
    assert x.grad.placements == (Partial(), Shard(1)) and torch.equal(x.grad.full_tensor(), whole)

    x = distribute_tensor(whole, mesh, (Shard(0), Replicate()), src_data_rank=None).requires_grad_()
    refused = [
        error_of(lambda: xt.redistribute(x, "n d/a -> n d")),
        error_of(lambda: xt.redistribute(x, "n/a d -> n/zigzag(a) d")),
        error_of(lambda: xt.redistribute(x, "n/a d -> n d", xs.Mesh(a=2, b=2))),
        error_of(lambda: xt.redistribute(x, "n/a d -> n d", shape=(8, 6))),
    ]
    average = DTensor.from_local(whole, mesh, (Partial("avg"), Replicate()))
    refused.append(error_of(lambda: xt.redistribute(average, "n d | sum(a) -> n d")))
    kinds = ["NotationError", "PlanError", "MeshError", "ShapeError", "NotationError"]
    assert [kind for kind, _ in refused] == kinds
    assert "the DTensor is placed as 'n d | mean(a)'" in refused[-1][1]
    assert "the DTensor is placed as 'n/a d' in\n    'n d/a -> n d'\n     ^^^^^" in refused[0][1]
    assert still_connected()


def test_redistribute_dtensors() -> None:
    on_ranks(4, _redistributed)
