"""Contractions of blocks: values, gradients and bytes of a table, and what torch does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests import oracle
from tests.contractions.cases import CASES, Case
from tests.torch_bridge.helpers import on_ranks
from torch_bridge.testing.byte_counter import Meter
from xshard.contractions.plan import ContractionPlan


def dense(names: list[tuple[str, ...]], result: tuple[str, ...]) -> str:
    """The equation of torch's own einsum."""
    letters = {name: chr(97 + i) for i, name in enumerate(dict.fromkeys(n for dims in names for n in dims))}
    left = ",".join("".join(letters[name] for name in dims) for dims in names)
    return f"{left}->{''.join(letters[name] for name in result)}"


def planned(case: Case) -> ContractionPlan:
    _, mesh, sizes, text = case
    return xs.plan(text, xs.Mesh(mesh), sizes=sizes, dtype="float64", profile="bandwidth")


def blocks_of(layout: xs.Layout, plan: ContractionPlan, seed: int) -> list[np.ndarray]:
    """Whole numbers for every device."""
    lengths = {
        name: n
        for layout_, shape in zip(plan.contraction.operands, plan.shapes, strict=True)
        for name, n in zip(layout_.names, shape, strict=True)
    }
    shape = tuple(lengths[name] for name in layout.names)
    return oracle.random_blocks(layout, plan.mesh, shape, np.random.default_rng(seed), unit=4)


def _contracted(work: list[tuple[ContractionPlan, list[Any], Any]]) -> list[Any]:
    rank, found = dist.get_rank(), []
    for plan, operands, cotangent in work:
        blocks = [torch.from_numpy(each[rank]).requires_grad_() for each in operands]
        with Meter() as forward:
            y = xt.einsum(plan, *blocks, mesh=plan.mesh)
        assert y.is_contiguous() and y.data_ptr() not in [x.data_ptr() for x in blocks if x.numel()]
        with Meter() as backward:
            gradients = torch.autograd.grad(y, blocks, torch.as_tensor(cotangent[rank]))
        found.append(
            (y.detach().numpy(), [g.numpy() for g in gradients], forward.received, backward.received)
        )
    return found


def busiest(by_rank: list[list[int]]) -> int:
    """What the busiest rank receives, summed over collectives."""
    return sum(map(max, zip(*by_rank, strict=True)))


@pytest.mark.parametrize("n", [4, 8])
def test_values_gradients_and_bytes(n: int) -> None:
    cases = [case for case in CASES if xs.Mesh(case[1]).n_devices == n]
    plans = list(map(planned, cases))
    assert n != 4 or any(own for plan in plans for part in plan.parts for own in part.gradients)
    work = [
        (
            plan,
            [blocks_of(layout, plan, i) for i, layout in enumerate(plan.contraction.operands)],
            blocks_of(plan.contraction.result.dual, plan, 9),
        )
        for plan in plans
    ]
    ranks = on_ranks(n, _contracted, work)
    for at, (case, (plan, operands, cotangent)) in enumerate(zip(cases, work, strict=True)):
        given = plan.contraction
        ends = list(zip(given.operands, plan.shapes, strict=True))
        wholes = [
            torch.from_numpy(oracle.gather(each, layout, plan.mesh, shape)).requires_grad_()
            for each, (layout, shape) in zip(operands, ends, strict=True)
        ]
        expected = torch.einsum(dense([layout.names for layout, _ in ends], given.result.names), *wholes)
        pulled = oracle.gather(cotangent, given.result.dual, plan.mesh, tuple(expected.shape))
        gradients = torch.autograd.grad(expected, wholes, torch.as_tensor(pulled))
        blocks, found, forward, backward = zip(*(rank[at] for rank in ranks), strict=True)
        y = oracle.gather(list(blocks), given.result, plan.mesh, tuple(expected.shape))
        assert np.array_equal(y, expected.detach().numpy()), case
        for i, (layout, shape) in enumerate(ends):
            whole = oracle.gather([rank[i] for rank in found], layout.dual, plan.mesh, shape)
            whole *= plan.mesh.size(*layout.tagged("mean"))  # of a block, an n-th of an average
            assert np.array_equal(whole, gradients[i].numpy()), (case, i)
        assert busiest(forward) == plan.bytes_received, case
        assert busiest(backward) == plan.backward_bytes_received, case
