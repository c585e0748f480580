"""The gradient of every collective under both conventions, against autograd on a single device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.conventions import CASES, N
from tests.torch_bridge.helpers import on_ranks

MESH = xs.Mesh(a=N)


def _both() -> dict[str, list[Tensor]]:
    """Of every case: gradients of this rank's block by the expression, by the named op, and on one device."""
    rank = dist.get_rank()
    found = {}
    for name, case in CASES.items():
        blocks = [torch.from_numpy(block) for block in case.blocks()]
        leaves = [block.clone().requires_grad_() for block in case.leaves(blocks)]
        results = case.devices(leaves, torch.cat)
        case.total(leaves, torch.cat).backward()
        ours = []
        for move in (
            lambda x, e=case.expression: xt.redistribute(x, e, MESH, check_replicated=True),
            lambda x, c=case: getattr(xt.ops, c.op)(x, axis="a", mesh=MESH, **c.options),
        ):
            x = blocks[rank].clone().requires_grad_()
            y = move(x)
            assert torch.equal(y, results[rank % len(results)])
            case.loss(x, y, 0 if case.is_replicated() else rank).backward()
            ours.append(x.grad)
        found[name] = [*ours, leaves[rank % len(leaves)].grad]
    return found


@pytest.fixture(scope="module")
def gradients() -> list[dict[str, list[Tensor]]]:
    return on_ranks(N, _both)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_a_single_device(
    name: str, gradients: list[dict[str, list[Tensor]]]
) -> None:
    for rank in gradients:
        by_expression, by_name, expected = rank[name]
        assert expected.abs().sum() > 0
        assert torch.equal(by_expression, expected) and torch.equal(by_name, expected)
