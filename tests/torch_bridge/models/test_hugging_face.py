"""Models that nobody here wrote, in parallel: the loss and the gradients of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_bridge as xt
from tests.torch_bridge.helpers import on_ranks
from tests.torch_bridge.models.cases import (
    CASES,
    Case,
    batch,
    block_of_each,
    call,
    llama,
    loss_of,
    parallel,
    step,
    targets,
    whole_loss,
)
from torch_bridge.testing.byte_counter import Meter

# Collectives of a step, forward and backward, that a program by hand has too: activations that move,
# parameters gathered once per module, and again, gradients once per group of processes. Those of attention
# are counted where attention is.
COLLECTIVES = {
    "tensor, sequence and data": (10, 12),
    "two key-value heads on four devices": (5, 6),
    "parameters cut, gathered for use": (3, 5),
    "the same inside nodes, copies between": (3, 4),
    "data": (0, 1),
    "experts": (4, 8),
}


STEPS = 20


class Alone(NamedTuple):
    """A training on one device: losses, the first gradients and their norm, the last parameters."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    norm: Tensor
    parameters: dict[str, Tensor]


@functools.cache
def alone(build: Callable[[], nn.Module]) -> Alone:
    model, losses, first = build(), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        losses.append(loss_of(call(model), targets()))
        losses[-1].backward()
        first = first or {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    norm = torch.nn.utils.get_total_norm(first.values())
    return Alone(losses, first, norm, {name: p.detach() for name, p in model.named_parameters()})


def verified(model: nn.Module, case: Case, **options: Any) -> None:
    original = case.build() if case.counts else None
    xt.verify(model, batch(), loss=lambda y: whole_loss(y.logits, case), original=original, **options)


def _as_on_one_device() -> dict[str, tuple[int, int]]:
    counts = {}
    for name, case in CASES.items():
        want, model = alone(case.build), parallel(case)
        verified(model, case, tol=1e-12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            loss = step(model, case)
            assert abs(loss - want.losses[number]) < 1e-12 * loss, (name, number)
            if number == 0:
                blocks = block_of_each(model, want.gradients)
                for n, p in model.named_parameters():
                    worst = (p.grad - blocks[n]).abs().max()
                    assert worst < 1e-12 * want.gradients[n].abs().max(), (name, n)
                assert abs(xt.grad_norm(model) - want.norm) < 1e-12 * want.norm, name
            optimizer.step()
            optimizer.zero_grad()
        blocks = block_of_each(model, want.parameters)
        assert max((p - blocks[n]).abs().max() for n, p in model.named_parameters()) < 1e-9, name
        if name not in COLLECTIVES:
            continue
        with Meter() as forward:
            logits = call(model)
        with Meter() as backward:
            logits.sum().backward()
        counts[name] = len(forward.received), len(backward.received)
    short = CASES["tensor, sequence and data"]._replace(build=lambda: llama().float())
    verified(parallel(short), short, tol=1e-5)
    return counts


def test_losses_gradients_and_twenty_steps() -> None:
    for counts in on_ranks(4, _as_on_one_device):
        assert counts == COLLECTIVES
    for name, case in CASES.items():
        assert sum(len(case.rules.get(kind, ())) for kind in ("parameters", "inputs", "outputs")) <= 12, name
