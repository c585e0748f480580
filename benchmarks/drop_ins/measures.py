"""What is measured of every way: host time, bytes, values, and seconds on gloo ranks.

Decides which values and gradients must agree; what a way does is decided in `ways`.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.drop_ins.ways import VERBS, Verb
from benchmarks.torch_calls import Calls, Figures, calls, medians
from torch_bridge.compat import credit
from torch_bridge.testing.byte_counter import Meter


def on_a_rank(rounds: int) -> list[Figures]:
    """On one of several gloo ranks: median seconds and received bytes of every way, by verb.

    Raises AssertionError if a way gives other values, or another gradient, than ours.
    """
    return [_figures(verb, rounds) for verb in VERBS]


def _figures(verb: Verb, rounds: int) -> Figures:
    received: Figures = {}
    ways, expected = _ways(verb), None
    for name, (forward, both) in ways.items():
        with Meter() as once:
            y = forward()
        with Meter() as twice:
            gradient = both()
        expected = expected or (y, gradient)
        assert torch.equal(y, expected[0]) and torch.equal(gradient, expected[1]), (verb.name, name)
        received[name] = {
            "forward_bytes": float(sum(once.received)),
            "both_bytes": float(sum(twice.received)),
        }
    return {name: received[name] | seconds for name, seconds in medians(ways, rounds, dist.barrier).items()}


def host(ranks: int, rounds: int) -> list[Figures]:
    """Seconds that the host needs per call, by verb: no rank waits for another, nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        return [medians(_ways(verb), rounds) for verb in VERBS]
    finally:
        dist.destroy_process_group()


def _ways(verb: Verb) -> dict[str, Calls]:
    # nn.functional warns at every call that it is deprecated; the replacement it names is private.
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
    credit.initialize_domain_parallel(dist.get_world_size(), dist.get_world_size())
    return {name: calls(way, verb.block()) for name, way in verb.ways.items()}
