"""The worked examples in torch, on gloo: results and gradients to the last bit, inputs left as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.compat.table import SYSTEM_OF, WORKED
from tests.torch_bridge.helpers import on_ranks
from torch_bridge import compat

Found = dict[str, tuple[np.ndarray, np.ndarray]]


def _run(names: list[str]) -> Found:
    """The result and the gradient of every example on this rank."""
    rank, found = dist.get_rank(), {}
    for name in names:
        worked = WORKED[name]
        x = torch.from_numpy(worked.blocks[rank].copy()).requires_grad_()
        cotangent = torch.from_numpy(worked.cotangents[rank].copy())
        y = worked.torch(getattr(compat, SYSTEM_OF[name]), x)
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        assert np.array_equal(x.detach(), worked.blocks[rank]), f"{name}: the input was written to"
        assert np.array_equal(cotangent, worked.cotangents[rank]), f"{name}: the gradient was written to"
        found[name] = y.detach().numpy(), gradient.numpy()
    return found


@pytest.fixture(scope="module")
def ran() -> dict[int, list[Found]]:
    sizes = sorted({worked.n for worked in WORKED.values()})
    return {n: on_ranks(n, _run, [name for name, w in WORKED.items() if w.n == n]) for n in sizes}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str, ran: dict[int, list[Found]]) -> None:
    worked = WORKED[name]
    for rank, found in enumerate(ran[worked.n]):
        result, gradient = found[name]
        assert result.shape == worked.results[rank].shape
        assert np.array_equal(result, worked.results[rank]), f"rank {rank}"
        assert np.array_equal(gradient, worked.gradients[rank]), f"rank {rank}"
