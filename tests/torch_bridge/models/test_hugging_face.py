"""Models that nobody here wrote, in parallel: the loss and the gradients of one device."""

from __future__ import annotations

import torch

import torch_bridge as xt
from tests.torch_bridge.helpers import on_ranks
from tests.torch_bridge.models.cases import CASES, block_of_each, loss_of, parallel, step, tokens
from torch_bridge.testing.byte_counter import Meter

# Collectives of a step, forward and backward, that a program by hand has too: activations that move,
# parameters gathered once per module, and again, gradients once per group of processes.
COLLECTIVES = {
    "tensor, sequence and data": (10, 12),
    "two key-value heads on four devices": (5, 6),
    "parameters cut, gathered for use": (3, 5),
    "the same inside nodes, copies between": (3, 4),
    "data": (0, 1),
    "experts": (4, 8),
}


def _as_on_one_device() -> dict[str, tuple[int, int]]:
    counts = {}
    for name, case in CASES.items():
        alone, model = case.build(), parallel(case)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (alone, model)]
        for number in range(20):
            want = loss_of(alone(tokens()).logits, tokens())
            want.backward()
            loss = step(model, case)
            assert abs(loss - want) < 1e-12 * want, (name, number)
            if number == 0:
                gradients = {n: p.grad for n, p in alone.named_parameters()}
                blocks = block_of_each(model, gradients)
                for n, p in model.named_parameters():
                    worst = (p.grad - blocks[n]).abs().max()
                    assert worst < 1e-12 * gradients[n].abs().max(), (name, n)
            if number == 1:
                norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
                assert abs(xt.grad_norm(model) - norm) < 1e-12 * norm, name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        blocks = block_of_each(model, dict(alone.named_parameters()))
        assert max((p - blocks[n]).abs().max() for n, p in model.named_parameters()) < 1e-9, name
        with Meter() as forward:
            logits = model(tokens()).logits
        with Meter() as backward:
            logits.sum().backward()
        counts[name] = len(forward.received), len(backward.received)
    return counts


def test_losses_gradients_and_twenty_steps() -> None:
    for counts in on_ranks(4, _as_on_one_device):
        assert counts == COLLECTIVES
    for name, case in CASES.items():
        assert sum(len(case.rules.get(kind, ())) for kind in ("parameters", "inputs", "outputs")) <= 12, name
