"""Ways to do the same, timed by turns: every way once before any is timed again.

Decides how a way is called and how its time is taken; a slow spell of the machine falls on all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Call = Callable[[], Tensor]
Calls = tuple[Call, Call]  # forward alone, and the gradient too
Seconds = dict[str, dict[str, float]]  # by way, then by "forward_s" and "both_s"
WARM_UP = 3


def calls(way: Callable[[Tensor], Tensor], block: Tensor) -> Calls:
    """The forward call alone, and the gradient of the block too, whose cotangent is the result."""
    leaf = block.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return way(block)

    def both() -> Tensor:
        y = way(leaf)
        (gradient,) = torch.autograd.grad(y, leaf, y.detach())
        return gradient

    return forward, both


def timed(ways: Mapping[str, Calls], rounds: int, together: Callable[[], object]) -> Seconds:
    """Median seconds of every way. together: called before each."""
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in ways}
    for turn in range(rounds + WARM_UP):
        # By turns the first: what runs before leaves its traces in caches and memory.
        first = turn % len(ways)
        for name, pair in (*list(ways.items())[first:], *list(ways.items())[:first]):
            for what, call in zip(("forward", "both"), pair, strict=True):
                together()
                start = time.perf_counter()
                call()
                if turn >= WARM_UP:
                    times[name][what].append(time.perf_counter() - start)
    return {
        name: {f"{what}_s": statistics.median(taken) for what, taken in each.items()}
        for name, each in times.items()
    }
