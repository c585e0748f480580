"""Host time, bytes and values of every way, and time on gloo ranks."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from by_turns import Calls, Seconds, calls, timed
from torch.testing._internal.distributed.fake_pg import FakeStore

from drop_ins.ways import VERBS, Verb
from torch_bridge import compat
from torch_bridge.testing.byte_counter import Meter


def on_a_rank(verb: int, rounds: int) -> Seconds:
    """On one of several gloo ranks: median seconds and received bytes of every way.

    Raises AssertionError where a way comes to other values, or another gradient, than ours.
    """
    found: Seconds = {}
    ways, expected = _ways(VERBS[verb]), None
    for name, (forward, both) in ways.items():
        with Meter() as moved:
            y = forward()
        with Meter() as moved_twice:
            gradient = both()
        expected = expected or (y, gradient)
        assert torch.equal(y, expected[0]) and torch.equal(gradient, expected[1]), (VERBS[verb].name, name)
        found[name] = {
            "forward_bytes": float(sum(moved.received)),
            "both_bytes": float(sum(moved_twice.received)),
        }
    for name, seconds in timed(ways, rounds, dist.barrier).items():
        found[name] |= seconds
    return found


def host(ranks: int, rounds: int) -> list[Seconds]:
    """Seconds that the host needs per call, of every verb: no rank waits for another, nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        return [timed(_ways(verb), rounds, lambda: None) for verb in VERBS]
    finally:
        dist.destroy_process_group()


def _ways(verb: Verb) -> dict[str, Calls]:
    # nn.functional says at every call that it is deprecated; what it recommends is private.
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
    compat.initialize_domain_parallel(dist.get_world_size(), dist.get_world_size())
    return {name: calls(way, verb.block()) for name, way in verb.ways.items()}
