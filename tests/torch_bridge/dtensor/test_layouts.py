"""DTensors: placements and layouts say the same, and so do their blocks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import assert_refused, error_of, in_ranks, numbers, on_threads
from xshard import reference

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
        (
            "d0/c/b/a d1",
            (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)),
        ),
        ("d0/b d1 | sum(a,c)", (Partial("sum"), Shard(0), Partial("sum"))),
        ("d0/b d1 | mean(a)", (Partial("avg"), Shard(0), Replicate())),
        ("d0 d1/c | max(a)", (Partial("max"), Replicate(), Shard(1))),
        ("d0 d1 | min(b)", (Replicate(), Partial("min"), Replicate())),
    ],
)
def test_layouts_are_placements(layout: str, placements: tuple[object, ...]) -> None:
    assert xt.dtensor.to_placements(layout, AXES) == placements
    assert str(xt.dtensor.from_placements(placements, AXES, 2)) == layout


def test_every_nesting_survives() -> None:
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


def test_strided_shards_are_read_as_torch_cuts() -> None:
    draw = random.Random(0)
    seen = Counter[str]()
    for _ in range(300):
        mesh = xs.Mesh(
            {axis: draw.choice((1, 2, 2, 3)) for axis in "abc"[: draw.choice((1, 2, 2, 3))]}
        )
        factors = [draw.choice((0, 1, 1, 2, 3, 4)) for _ in mesh.axes]
        placements = [
            Shard(0) if f == 1 else _StridedShard(0, split_factor=f) if f else Replicate()
            for f in factors
        ]
        length = draw.choice((0, 7, 8, 16, 24, 30, 36))
        try:
            layout = xt.dtensor.from_placements(placements, mesh, 1, (length,))
        except (
            xs.errors.PlanError
        ):  # a nesting of three, or of uneven parts, which torch cuts in two ways
            assert (
                xt.dtensor.from_placements(placements, mesh, 1).dims[0].axes
                and length % mesh.n_devices
            )
            continue
        expected = [
            _torch_block(length, placements, mesh, device) for device in range(mesh.n_devices)
        ]
        assert [b.tolist() for b in reference.scatter(np.arange(length), layout, mesh)] == expected
        assert xs.Layout.parse(str(layout)) == layout
        orders = [cut.order for cut in layout.dims[0].shards]
        if "intervals" not in orders or len(layout.axes) == 1:
            back = xt.dtensor.from_placements(
                xt.dtensor.to_placements(layout, mesh, (length,)), mesh, 1, (length,)
            )
            assert xs.Sharding(back, mesh, (length,)).means_the_same_as(
                xs.Sharding(layout, mesh, (length,))
            )
        seen.update(set(orders))
    assert min(seen[order] for order in ("block", "cyclic", "intervals")) > 20, seen


def test_cuts_that_are_plain_when_even() -> None:
    assert xt.dtensor.to_placements("n/(a,b)", AXES, (8,)) == (Shard(0), Shard(0), Replicate())
    copied = xt.dtensor.to_placements("n/balanced(b) | copy(a)", AXES, (8,))
    assert copied == (Replicate(), Shard(0), Replicate())
    assert xt.dtensor.to_placements("... d/c", AXES, (2, 3, 4)) == (
        Replicate(),
        Replicate(),
        Shard(2),
    )


def test_what_a_dtensor_cannot_hold() -> None:
    there = xt.dtensor.to_placements
    back = xt.dtensor.from_placements
    odd, halves, thirds = xs.Mesh(a=3, b=2), *(_StridedShard(0, split_factor=n) for n in (2, 3))
    zigzag = "b s/zigzag(a)"
    assert_refused(
        (
            lambda: there(zigzag, AXES, (2, 8)),
            f"PlanError: ...cannot hold 's/zigzag(a)' in\n    '{zigzag}'",
        ),
        (lambda: there("n/(a,b)", AXES), "PlanError: ...pass shape="),
        (lambda: there("n/b/a", odd, (7,)), "PlanError: ...mesh order"),
        (lambda: back((halves, Shard(0)), odd, 1, (7,)), "PlanError: ...in two ways for 7 rows"),
        (lambda: back((thirds, Shard(0), Replicate()), AXES, 1), "PlanError: ...not a nesting"),
        (
            lambda: back((Partial("product"),), xs.Mesh(a=2), 1),
            "PlanError: ...partials: sum, avg, max, min",
        ),
        (lambda: back((Shard(0),), AXES, 1), "PlanError: ...one placement per mesh axis"),
    )
    for text, *shape in ((zigzag,), ("n/(a,b)", (5,))):
        kind, said = error_of(partial(there, text, AXES, *shape))
        assert kind == "PlanError" and "shape=" not in said, "a shape does not help"


@cache
def _blocks(shape: tuple[int, ...], text: str) -> list[np.ndarray]:
    """Return all blocks of `numbers`: every rank that is a thread needs one of them."""
    return reference.scatter(numbers(*shape), text, AXES)


@in_ranks(8, on_threads)
def test_blocks_are_those_of_distribute_tensor() -> None:
    """Where they are not, the layout is refused."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    compared = 0
    for shape in ((8, 8), (7, 5), (5, 9), (3, 2)):
        x = numbers(*shape)
        for text in _cuts():
            try:
                placements = xt.dtensor.to_placements(text, mesh, shape)
            except xs.errors.PlanError:
                assert text.count("/") == 3 and shape != (8, 8)
                continue
            theirs = distribute_tensor(torch.from_numpy(x), mesh, placements, src_data_rank=None)
            mine = _blocks(shape, text)[dist.get_rank()]
            assert np.array_equal(theirs.to_local(), mine), (text, shape)
            compared += 1
    assert compared > 150
