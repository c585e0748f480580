"""Attention over a cut sequence on ranks, beside that of one device: orders, ways, masks; refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
from tests.attention import (
    CROSS,
    JOINT,
    MASKS,
    ORDERS,
    ROW,
    Case,
    Mask,
    joint_problem,
    one_device,
    problem,
)
from tests.torch_bridge.helpers import SharedRanks, assert_refused
from torch_bridge.testing.byte_counter import Meter
from xshard.nn.attention import METHODS

on_four = SharedRanks(4)


@on_four
def test_every_combination_is_that_of_one_device() -> None:
    """Values and the gradients of queries, keys and values; every order meets three masks."""
    for i, (name, case) in enumerate(ORDERS.items()):
        for j, how in enumerate(METHODS):
            mask = MASKS[(i + 2 * j) % len(MASKS)]
            assert difference(case, mask, how) < 1e-12, (name, how, mask)
    for name, (case, mask) in CROSS.items():
        for how in METHODS:
            assert difference(case, mask, how) < 1e-12, (name, how)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for how in (*METHODS, "auto"):
            case = ORDERS["zigzag, fewer heads of keys than devices"]
            mask = Mask(True, has_documents=True, chunk=9, has_sinks=True)
            assert difference(case, mask, how, dtype) < most, (dtype, how)


def difference(case: Case, mask: Mask, how: str, dtype: torch.dtype = torch.float64) -> float:
    """The largest, relative to the largest number of its array."""
    given = problem(case, mask)
    worst = 0.0
    wanted = one_device(given, mask)
    x = [mine(case, x, dtype, of_keys=i in (1, 2)) for i, x in enumerate(given[:4])]
    sinks = []
    if given.sinks is not None:
        sinks = [mine(case, given.sinks, dtype, dims="h")]
    y = attended(case, mask, how, *x[:3], given=given, sinks=sinks)
    if mask.return_lse:
        y, lse = y
        torch.autograd.backward(
            (y, lse), (x[3], mine(case, given.lse_cotangent, lse.dtype, dims="bsh"))
        )
    else:
        y.backward(x[3])
    found = [y, *(block.grad for block in x[:3]), *([lse] if mask.return_lse else [])]
    found += [block.grad for block in sinks]
    dims = [*["bshk"] * 4, *["bsh"] * mask.return_lse, "h"]
    for i, (own, whole) in enumerate(zip(found, wanted, strict=True)):
        block = mine(case, whole, of_keys=i in (2, 3), dims=dims[i])
        assert own.shape == block.shape and (dims[i] == "bsh" or own.dtype == dtype)
        own, block = (x.double().clamp(min=-1e30) for x in (own, block))
        largest = max(1, np.abs(whole, where=np.isfinite(whole), out=np.zeros_like(whole)).max())
        if block.numel():
            worst = max(worst, (own - block).abs().max().item() / largest)
    return worst


def mine(
    case: Case,
    x: np.ndarray,
    dtype: torch.dtype = torch.float64,
    of_keys: bool = False,
    dims: str = "bshk",
) -> Tensor:
    """This rank's block of an array, with a gradient."""
    return (
        torch.from_numpy(case.blocks(x, dims, of_keys)[dist.get_rank()]).to(dtype).requires_grad_()
    )


def joint(case: Case, pairs: Any, **options: Any) -> Any:
    """pairs: (image, text) of queries, keys and values."""
    image, text = zip(*pairs[:3], strict=True)
    of_text = dict(zip(("text_q", "text_k", "text_v"), text, strict=True))
    return xt.nn.joint_attention(*image, case.layout, case.mesh, **of_text, **options)


def attended(
    case: Case, mask: Mask, how: str, *blocks: Tensor, given: Any = None, sinks: Any = ()
) -> Any:
    arrays = dict(zip(["sinks"], sinks, strict=False))
    for i, name in enumerate(("documents", "kv_documents")):
        if given is not None and (x := getattr(given, name)) is not None:
            arrays[name] = torch.from_numpy(case.blocks(x, "bs", bool(i))[dist.get_rank()])
    if given is not None and given.alibi is not None:
        arrays["alibi"] = torch.from_numpy(given.alibi)
    return xt.nn.attention(*blocks, case.layout, case.mesh, how=how, **mask.options(case), **arrays)


@on_four
def test_joint_attention_is_that_of_one_device() -> None:
    for i, how in enumerate((*METHODS, "auto")):
        case, *others = JOINT[i % len(JOINT)]
        cases, given, wanted = joint_problem(case, *others)
        blocks = [[mine(*of_one) for of_one in zip(cases, pair, strict=True)] for pair in given]
        options = {"how": how, "causal": others[-1], "shape": case.shape}
        results = joint(case, blocks, kv_heads=case.heads[1], **options)
        torch.autograd.backward(results, blocks[3])
        found = [results, *([x.grad for x in pair] for pair in blocks[:3])]
        for pair, wanted_pair in zip(found, wanted, strict=True):
            for of_one, x, y in zip(cases, pair, wanted_pair, strict=True):
                assert torch.allclose(x, mine(of_one, y), atol=1e-12), (how, case)


@on_four
def test_what_joint_attention_sends() -> None:
    case, *others = JOINT[0]
    cases, given, _ = joint_problem(case, *others)
    blocks = [[mine(*of_one) for of_one in zip(cases, pair, strict=True)] for pair in given[:3]]
    with Meter() as meter:
        joint(case, blocks, how="ring", shape=case.shape)
    block = 2 * 2 * 6 * 10 * 8  # batch, heads of keys, rows, both widths, bytes of a number
    of_text = 2 * 6 * 5 * 8  # batch, heads, rows of the text, bytes of a number
    # From each other device: greatest log-sum-exps, and numerators beside denominators. No keys of the text.
    sums = [3 * of_text, 3 * of_text * (4 + 1)]
    assert sorted(meter.received) == sorted([*sums, *[block] * 3])


@on_four
def test_what_a_ring_sends() -> None:
    for order, n_rows, mask, n_blocks in (
        ("cp", 5, Mask(True), 3),
        ("cp", 5, Mask(True, 3), 1),  # of one other device
        ("zigzag(cp)", 6, Mask(True, 3), 2),  # of the devices before and after
        ("cp", 5, Mask(chunk=5), 0),
        ("cp", 5, Mask(True, chunk=8), 2),  # row 15 sees rows 8 and 9, two devices before
    ):
        case = Case(ROW, f"b s/{order} h k", (4, 4))
        given = problem(case, mask)
        q, k, v, _ = [mine(case, x) for x in given[:4]]
        with Meter() as meter:
            y = attended(case, mask, "ring", q, k, v)
            y.backward(torch.ones_like(y))
        one = 2 * 4 * n_rows * 10 * 8  # batch, heads, rows, both widths, bytes of a number
        # Blocks forward; again, and their sums; and sums home.
        assert meter.received == [one] * (3 * n_blocks + bool(n_blocks)), (order, mask)


@on_four
def test_a_mask_that_is_no_plain_tensor() -> None:
    case = Case(ROW, "b s/cp h k", (4, 4))
    with Meter():  # the mask of rows that are the last of their keys is no plain tensor
        assert difference(case, Mask(True), "gather") < 1e-12


@on_four
def test_a_ring_has_one_derivative() -> None:
    case = Case(ROW, "b s/cp h k", (4, 4))
    mask = Mask(True, 3)
    given = problem(case, mask)
    q, k, v, _ = [mine(case, x) for x in given[:4]]
    (g,) = torch.autograd.grad(
        attended(case, mask, "ring", q, k, v).square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@on_four
def test_other_methods_are_under_torch_func() -> None:
    case = Case(ROW, "b s/cp h k", (4, 4))
    mask = Mask(True, 3)
    given = problem(case, mask)
    q, k, v, _ = [mine(case, x) for x in given[:4]]
    for how in ("gather", "ulysses", "auto"):
        loss = torch.func.grad(
            lambda *x, how=how: attended(case, mask, how, *x).square().sum(), (0, 1, 2)
        )
        wanted = torch.autograd.grad(
            attended(case, mask, "ring", q, k, v).square().sum(), (q, k, v)
        )
        for one, other in zip(loss(q.detach(), k.detach(), v.detach()), wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-12)


@on_four
def test_documents_of_one_row_are_for_all() -> None:
    case = Case(ROW, "b s/cp h k", (4, 4))
    given = problem(case, Mask(True, 3))
    whole = [mine(case, x).detach() for x in given[:3]]
    one_row = torch.from_numpy(case.blocks(np.arange(19) // 6, "s")[dist.get_rank()])
    assert torch.equal(
        xt.nn.attention(*whole, case.layout, ROW, documents=one_row, shape=case.shape),
        xt.nn.attention(
            *whole, case.layout, ROW, documents=one_row.expand(2, -1), shape=case.shape
        ),
    )


@on_four
def test_what_is_refused() -> None:
    case = Case(ROW, "b s/cp h k", (4, 4))
    mask = Mask(True, 3)
    given = problem(case, mask)
    q, k, v, _ = [mine(case, x) for x in given[:4]]
    whole = [mine(case, x).detach() for x in given[:3]]
    one_row = torch.from_numpy(case.blocks(np.arange(19) // 6, "s")[dist.get_rank()])
    heads = [x[:, :4, :n] for x, n in ((q, 3), (k, 2), (v, 2))]
    alibi: Any = [torch.ones(3), torch.ones(4, requires_grad=True)]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"window": (3, -1)}, "window=(3, -1)"),
        ({"softcap": 0.0}, "softcap is 0.0, not Positive"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": 0.5}, "dropout=0.5 without seed="),
        ({"alibi": alibi[0]}, "alibi (3,), 4 heads"),
        ({"alibi": alibi[1]}, "alibi with a gradient"),
        ({"kv_length": 7}, "kv_length=7"),
        ({"kv_documents": one_row}, "documents of one sequence"),
        ({"kv_layout": "b t/cp j k"}, "other dims of keys"),
        ({"chunk": 0}, "chunk is 0, not Count"),
        ({"sinks": torch.ones(3)}, "sinks (3,), 4 heads"),
        ({"sinks": [1.0]}, "sinks (), 4 heads"),
    )
    pairs = [(x, x[:, :2, :3]) for x in whole]
    both = partial(joint, case, pairs, shape=case.shape)
    ours = partial(xt.nn.attention, *whole, case.layout, ROW, shape=case.shape)
    assert_refused(
        (lambda: attended(case, mask, "rings", q, k, v), "XshardError: how is 'rings', not Method"),
        (lambda: attended(case, Mask(window=0), "ring", q, k, v), "XshardError: window=0"),
        (lambda: xt.nn.attention(q, k, v, "b t/cp h k", ROW), "NotationError: ...no dim 's'"),
        (
            lambda: xt.nn.attention(q, k, v, "b s h k/cp", ROW),
            "NotationError: the width of heads is sharded",
        ),
        (
            lambda: xt.nn.attention(*heads, case.layout, ROW),
            "ShapeError: 3 heads of queries, 2 of keys",
        ),
        (
            lambda: attended(case, mask, "ring", q, k[:1], v[:1]),
            "ShapeError: ...the block has shape (1,",
        ),
        (
            lambda: attended(case, mask, "ring", q, k.float(), v),
            "DtypeError: ...keys torch.float32",
        ),
        (
            lambda: torch.func.grad(lambda q: attended(case, mask, "ring", q, k, v).sum())(q),
            "XshardError: a ring under torch.func",
        ),
        (both, "ShapeError: the block has shape (2, 2, 3, 6), not (2, 2, 4, 6) in 'b text h k'"),
        (
            lambda: joint(case._replace(layout="b t/cp h k"), pairs, shape=case.shape),
            "ShapeError: no dim 's'",
        ),
        (partial(both, documents=one_row), "...unexpected argument 'documents'"),
        (
            lambda: xt.nn.joint_attention(*whole, case.layout, ROW, text_q=q, text_k=k),
            "...text_v",
        ),
        *((partial(ours, **options), f"...{text}") for options, text in wrong),
        is_alike=False,
    )
