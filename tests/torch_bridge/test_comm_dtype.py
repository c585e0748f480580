"""Blocks that travel in another dtype: what is rounded, what is not, and how many bytes that takes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of,
    check_error,
    for_each,
    numbers,
    still_connected,
)
from torch_bridge.comm_dtype import CommDtype, comm_dtype_of
from torch_bridge.testing.byte_counter import Meter
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(a=4)
FLOAT8 = torch.float8_e4m3fn
EXPRESSIONS = [
    "n/a d -> n d | copy(a)",
    "n d | sum(a) -> n/a d",
    "n d | sum(a) -> n d",
    "n/zigzag(a) d -> n d/a",
    "n/a d -> n/a:halo(1,1) d",
    "n d | mean(a) -> n d",
    "n d | max(a) -> n d | copy(a)",
]


def check_narrow(expression: str) -> None:
    """The same as casting by hand before and after, forward and backward."""
    src, dst = parse_expression(expression)
    x = (block_of(numbers(8, 8), expression, MESH, torch.float32) / 7).requires_grad_()
    by_hand = xt.redistribute(x.bfloat16(), expression, MESH).float()
    with Meter() as meter:
        y = xt.redistribute(x, expression, MESH, comm_dtype=torch.bfloat16)
    assert y.dtype == torch.float32 and torch.equal(y, by_hand)
    with Meter() as plain:
        xt.redistribute(x, expression, MESH)
    assert sum(meter.received) * 2 == sum(plain.received)
    weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))
    found, expected = (torch.autograd.grad(out, x, weights)[0] for out in (y, by_hand))
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    if dst.is_linear and src.is_linear:
        values = x.detach()

        def move(v: Tensor) -> Tensor:
            return xt.redistribute(v, expression, MESH, comm_dtype=torch.bfloat16)

        assert torch.equal(torch.func.jvp(move, (values,), (values,))[1], by_hand)
        found = torch.func.vmap(move, in_dims=1)(torch.stack([values, values], 1))
        assert torch.equal(found, torch.stack([by_hand, by_hand]))


on_four = SharedRanks(4)


@on_four
def test_a_narrow_dtype_is_a_cast_around_the_move() -> None:
    for_each(EXPRESSIONS, check_narrow)


@on_four
def test_each_way_has_a_dtype_of_its_own() -> None:
    x = (block_of(numbers(8, 8), "n/a d", MESH, torch.float32) / 3).requires_grad_()
    rounded = x.detach().bfloat16().float()
    for pair, exact_values, exact_gradient in (
        ((torch.bfloat16, None), False, True),
        ((None, torch.bfloat16), True, False),
    ):
        with Meter() as forward:
            y = xt.redistribute(x, "n/a d -> n d/a", MESH, comm_dtype=pair)
        there = xt.redistribute(x.detach() if exact_values else rounded, "n/a d -> n d/a", MESH)
        assert torch.equal(y, there)
        weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))
        with Meter() as backward:
            (gradient,) = torch.autograd.grad(y, x, weights, create_graph=True)
        sent = weights if exact_gradient else weights.bfloat16().float()
        assert torch.equal(gradient, xt.redistribute(sent, "n d/a -> n/a d", MESH))
        assert [forward.received, backward.received] == (
            [[24], [48]] if exact_gradient else [[48], [24]]
        )
    # What travels forward, travels so in the second derivative too.
    y = xt.redistribute(x, "n/a d -> n d/a", MESH, comm_dtype=(torch.bfloat16, None))
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with Meter() as meter:
        torch.autograd.grad(first.sum(), x)
    assert meter.received == [24, 48]


@on_four
def test_a_wide_dtype_makes_sums_exact() -> None:
    """1 + 3 * 2^-9 in bfloat16: each addend is lost when the sum is rounded after every one of them."""
    small = torch.full((4,), 2.0**-8 if torch.distributed.get_rank() else 1.0, dtype=torch.bfloat16)
    exact = torch.tensor(1 + 3 * 2.0**-8).bfloat16()
    y = xt.redistribute(small, "n | sum(a) -> n", MESH, comm_dtype=torch.float32)
    assert y.dtype == torch.bfloat16 and (y == exact).all()
    rank = torch.distributed.get_rank()
    maps = {"near": xs.Needs.of_rows([[], [0], [0], [0]])}
    addends = torch.tensor([0, 0.4] if rank else [1e7])  # where neighbours differ by 1
    y = xt.redistribute(
        addends,
        "n/a:fold(reads(near)) -> n/a",
        MESH,
        shape=(4,),
        comm_dtype=torch.float64,
        maps=maps,
    )
    assert y.tolist() == [0 if rank else 1e7 + 1] and y.dtype == torch.float32


@on_four
def test_floats_of_eight_bits_travel_where_nothing_is_summed() -> None:
    x = (block_of(numbers(8, 8) % 8, "n/a d", MESH, torch.bfloat16)).requires_grad_()
    with Meter() as meter:
        y = xt.redistribute(x, "n/a d -> n d/a", MESH, comm_dtype=FLOAT8)
    assert meter.received == [12]
    assert torch.equal(
        y, xt.redistribute(x, "n/a d -> n d/a", MESH)
    )  # these numbers have 8-bit forms
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    # A gather's gradient is a sum, which 8 bits cannot hold: it travels in another dtype.
    y = xt.redistribute(x, "n/a d -> n d | copy(a)", MESH, comm_dtype=(FLOAT8, None))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 4))
    move = functools.partial(xt.redistribute, x, mesh=MESH)
    gather = "n/a d -> n d | copy(a)"
    largest = "n d | max(a) -> n d"
    check_error(lambda: move(gather, comm_dtype=FLOAT8), "DtypeError", "float8")
    wide = (None, torch.float32)
    check_error(lambda: move(largest, comm_dtype=wide), "DtypeError", "comm_dtype=torch.bfloat16")
    values = x.detach().to(FLOAT8)
    moved = xt.redistribute(values, "n/a d -> n d/a", MESH).float()
    assert torch.equal(moved, xt.redistribute(values.float(), "n/a d -> n d/a", MESH))
    assert still_connected()


@on_four
def test_any_dtype_moves_as_its_bytes() -> None:
    """A dtype moves as its bytes do, and zeros beyond the ends are zero bytes."""
    for name in ("int4", "uint4", "float4_e2m1fn_x2", "float8_e5m2", "int16", "uint64"):
        dtype = getattr(torch, name)
        values = torch.arange(16 * dtype.itemsize, dtype=torch.uint8).view(2, -1)
        values += 64 * torch.distributed.get_rank()
        for text in (
            "n/a d -> n d",
            "n/a d -> n d/a",
            "n/a d -> n/a:halo(1,3) d",
            "n/a d -> n/a d",
        ):
            expected = xt.redistribute(values, text, MESH)
            found = xt.redistribute(values.view(dtype), text, MESH)
            many = xt.redistribute([values.view(dtype)] * 2, text, MESH)
            assert all(
                y.dtype == dtype and torch.equal(y.view(torch.uint8), expected)
                for y in (found, *many)
            )
    for dtype in (torch.uint64, torch.uint16, torch.int8):
        y = xt.redistribute(torch.ones(2, dtype=dtype), "n/a -> n/a:halo(1,1,constant(7))", MESH)
        assert y.tolist() == {0: [7, 1, 1, 1], 3: [1, 1, 1, 7]}.get(
            torch.distributed.get_rank(), [1] * 4
        )
    x = torch.ones(4, 4, dtype=torch.uint8).view(torch.int4)
    assert xt.redistribute(x, "n d -> n/a d", MESH, check_replicated=True).shape == (1, 4)
    for text, words in (
        ("n d | sum(a) -> n d", "int4 cannot be reduced"),
        ("n/a d -> n/a:halo(1,1,constant(7)) d", "int4 cannot hold 7"),
    ):
        check_error(lambda text=text: xt.redistribute(x, text, MESH), "DtypeError", words)


@on_four
def test_a_move_that_is_begun_takes_it_too() -> None:
    x = (block_of(numbers(8, 8), "n/a d", MESH, torch.float32) / 3).requires_grad_()
    y = xt.redistribute(x, "n/a d -> n d/a", MESH, comm_dtype=torch.bfloat16, async_op=True)
    assert y.dtype == torch.float32
    assert torch.equal(
        y.wait(), xt.redistribute(x.detach().bfloat16(), "n/a d -> n d/a", MESH).float()
    )


@pytest.mark.parametrize(
    ("comm_dtype", "block", "reason"),
    [
        (torch.float4_e2m1fn_x2, torch.float32, "do not travel as torch.float4_e2m1fn_x2"),
        (torch.int8, torch.float32, "blocks of torch.float32 do not travel as torch.int8"),
        (
            torch.float32,
            torch.complex64,
            "blocks of torch.complex64 do not travel as torch.float32",
        ),
        (torch.int32, torch.int64, "blocks of torch.int64 do not travel as torch.int32"),
        ("bfloat16", torch.float32, "comm_dtype is 'bfloat16'"),
        ((torch.float32,), torch.float32, "comm_dtype is (torch.float32,)"),
    ],
)
def test_dtypes_of_another_kind_are_refused(comm_dtype, block: torch.dtype, reason: str) -> None:
    check_error(lambda: comm_dtype_of(comm_dtype, block), "DtypeError", reason)


def test_what_is_said_for_both_ways() -> None:
    assert comm_dtype_of(torch.float16, torch.float32) == CommDtype(
        torch.float16, torch.float16, torch.float32
    )
    assert comm_dtype_of((None, torch.complex64), torch.complex128) == CommDtype(
        torch.complex128, torch.complex64, torch.complex128
    )
    assert comm_dtype_of(None, torch.int8) == CommDtype(torch.int8, torch.int8, torch.int8)
