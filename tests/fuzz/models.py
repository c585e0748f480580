"""Parallel models: random events, shared modules, copies, scalers, optimizers, attention of few rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import torch_bridge as xt
from tests.torch_bridge.helpers import on_threads
from tests.torch_bridge.models import test_block_guards as guards
from tests.torch_bridge.models import test_names as names
from tests.torch_bridge.models import test_passes as passes
from tests.torch_bridge.nn import test_empty_blocks as empty_blocks


def run(n: int, seed: int) -> Counter[str]:
    """Draw cases of every kind -> how many of each. Raises AssertionError where one is wrong."""
    drawn, _ = xt.testing.run_ranks(2, _draw, n, seed, timeout_s=60 + 10 * n)
    on_threads(4, empty_blocks.check_attentions, n, seed)
    return drawn + Counter({"attentions": n})


def _draw(n: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    drawn = Counter[str]()
    for _ in range(n):
        kind = rng.choice(list(KINDS))
        case = rng.randrange(10**6)
        try:
            KINDS[kind](case)
        except BaseException as error:
            error.add_note(f"{kind} of seed {case}")
            raise
        drawn[kind] += 1
    return drawn


def _check_scaler(seed: int) -> None:
    """A `GradScaler` skips the steps that it skips on one device."""
    assert guards.scaled(True, seed)[:2] == guards.scaled(False, seed)[:2]


def _check_trial(seed: int) -> None:
    guards.check_trial(seed, is_coupled=seed % 2 == 0)


KINDS: dict[str, Callable[[int], object]] = {
    "events": passes.check_events,
    "graphs": names.check_parallel,
    "deep copies": names.deep,
    "pickles": names.pickled,
    "scalers": _check_scaler,
    "optimizers": _check_trial,
}
