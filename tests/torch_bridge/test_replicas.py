"""`check_replicated`: gradients that should be one and are not are told on every rank; others pass."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of,
    check_error,
    derivatives,
    error_of,
    for_each,
    numbers,
    on_ranks,
    still_connected,
)
from xshard import replicas
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(dp=2, tp=2)


def _gradient(expression: str, weight: float, **options: object) -> Tensor:
    """Of the loss `weight * sum(y)`: where ranks have their own weight, each uses y in its own way."""
    x = block_of(numbers(4, 4), expression, MESH).requires_grad_()
    y = xt.redistribute(x, expression, MESH, **options)
    (weight * y).sum().backward()
    return x.grad


def _silent_bug() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    found = []
    for axis, weight in (("tp", 1.0 + rank % 2), ("dp", 1.0 + rank // 2)):
        gather = f"n/{axis} d -> n d"
        _gradient(gather, weight)  # silent: the gradient lacks what the other rank's loss adds
        found.append(error_of(lambda e=gather, w=weight: _gradient(e, w, check_replicated=True)))
        assert still_connected()
        right = _gradient(f"{gather} | copy({axis})", weight, check_replicated=True)
        assert (right == 3).all()
        assert (_gradient(gather, 5.0, check_replicated=True) == 5).all()
    # One group of two is right, the other is not: all four ranks are told, whatever axes are named.
    for expression in ("n/dp d -> n d", "n d/tp | sum(dp) -> n d/tp"):
        found.append(
            error_of(lambda e=expression: _gradient(e, float(rank == 3), check_replicated=True))
        )
        assert still_connected()
    return found


# For every error: along which axis, on which ranks first, the largest value, and what is marked.
TOLD = [
    ("tp", "0, 1", 2, "n d"),
    ("dp", "0, 2", 2, "n d"),
    ("dp", "1, 3", 1, "n d"),
    ("dp", "1, 3", 1, "n d/tp"),
]


def test_the_silent_bug_is_told_on_every_rank_alike() -> None:
    told = on_ranks(4, _silent_bug)
    assert all(errors == told[0] for errors in told)
    for (kind, message), (axis, ranks, largest, side) in zip(told[0], TOLD, strict=True):
        first, text, carets, differ, way_out = message.splitlines()
        assert (kind, first) == (
            "ReplicaError",
            f"cotangents differ along {axis!r}, where one value is meant in",
        )
        assert text[carets.index("^") : carets.rindex("^") + 1] == side
        assert differ.strip() == f"by 1 on ranks {ranks}, where the largest value is {largest}"
        assert way_out.endswith(f"say so: copy({axis}) on the right")


on_four = SharedRanks(4)


@on_four
def test_blocks_that_differ_are_told() -> None:
    rank = dist.get_rank()

    def move(x: Tensor, expression: str) -> Tensor:
        return xt.redistribute(x, expression, MESH, check_replicated=True)

    x = torch.full((2, 2), rank)
    kind = "ReplicaError"
    check_error(lambda: move(x, "n d -> n/tp d"), kind, "blocks differ along 'tp'", "sum(tp)")
    move(x // 2, "n d -> n/tp d")
    check_error(lambda: move(x, "n d | copy(dp) -> n/dp d"), kind, "'dp'")
    addends = "n d -> n d | sum(tp)"
    check_error(
        lambda: _gradient(addends, 1.0 + rank, check_replicated=True), kind, "reduce sum(tp) before"
    )
    assert still_connected()


@on_four
def test_what_counts_as_equal() -> None:
    """What counts as equal: rounding, infinities and NaN on all ranks; what does not: NaN on one."""
    odd = dist.get_rank() % 2

    def move(x: Tensor) -> None:
        xt.redistribute(x, "n -> n/tp", MESH, check_replicated=True)

    for same in (
        torch.tensor([1.0, 1.0 + odd * 1e-6]),
        torch.tensor([1e6, odd * 10.0]),
        torch.tensor([torch.inf, torch.nan]),
        torch.tensor([1.0, 1.0 + odd * 0.0078125]).bfloat16(),
        torch.tensor([1 + 2j, 3]),
        torch.tensor([True, False]),
        torch.zeros(0),
    ):
        move(same)
    for other in (
        torch.tensor([1.0, 1.0 + odd * 1e-3]),
        torch.tensor([1.0, torch.nan if odd else 1.0]),
        torch.tensor([1.0, torch.inf if odd else 1.0]),
        torch.tensor([1, 2**62 + odd]),
        torch.tensor([-(2**63) if odd else 0, 0]),
        torch.tensor([1 + 2j, 3 + odd * 1j]),
        torch.tensor([True, bool(odd)]),
        torch.tensor([1.0, 2.0 if odd else 1.0]).to(torch.float8_e4m3fn),
    ):
        check_error(lambda x=other: move(x), "ReplicaError")
    assert still_connected()


EVERY = [
    "n/tp d -> n d",
    "n d -> n/tp d",
    "n d | sum(tp) -> n d",
    "n d -> n d | copy(tp)",
    "n d | copy(tp) -> n/tp d",
    "n d | mean(dp) -> n/tp d",
    "n/dp d -> n d/dp",
]


def check_unchanged(expression: str) -> None:
    """With the check, the same values and derivatives of every order and mode."""
    _, dst = parse_expression(expression)
    x = block_of(numbers(4, 4) % 5, expression, MESH)
    weight = block_of(numbers(4, 4) % 3, str(dst.dual), MESH)

    def plain(v: Tensor) -> Tensor:
        return xt.redistribute(v, expression, MESH)

    def checked(v: Tensor) -> Tensor:
        return xt.redistribute(v, expression, MESH, check_replicated=True)

    assert all(map(torch.equal, derivatives(checked, x, weight), derivatives(plain, x, weight)))
    y = checked(x.clone().requires_grad_())
    y *= 2  # a tensor of its own, as without the check


@on_four
def test_nothing_else_changes() -> None:
    for_each(EVERY, check_unchanged)


@on_four
def test_every_verb_has_the_check() -> None:
    x = torch.full((2, 2), float(dist.get_rank()))
    with mock.patch.object(
        replicas, "ALWAYS", True
    ):  # as the environment variable XSHARD_CHECK_REPLICATED
        check_error(lambda: xt.ops.shard(x, 0, "tp", MESH, grad="replicated"), "ReplicaError")
        check_error(lambda: xt.ops.copy_to(x, "tp", MESH), "ReplicaError")
        xt.redistribute(x, "n d -> n/tp d", MESH, check_replicated=False)
    xt.ops.shard(x, 0, "tp", MESH, grad="replicated")

    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placed = DTensor.from_local(x, named, [Replicate(), Replicate()])
    xt.redistribute(placed, "n d -> n/tp d")
    move = functools.partial(xt.redistribute, layouts="n d -> n/tp d", check_replicated=True)
    check_error(lambda: move(placed), "ReplicaError")
    compiled = torch.compile(lambda v: move(v, mesh=MESH), backend="eager")
    check_error(lambda: compiled(x), "ReplicaError")  # compared between two graphs
