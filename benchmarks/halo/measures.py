"""What is measured of every way to widen a block: seconds, bytes and values, by turns.

Decides which blocks and gradients must agree; how a way widens a block is decided in `ways`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.halo.ways import WAYS, Way
from benchmarks.torch_calls import Calls, Figures, calls, medians
from torch_bridge.testing.byte_counter import Meter


def end_to_end(shape: Sequence[int], rows: int, rounds: int) -> Figures:
    """On one of several gloo ranks: median seconds and received bytes of every way.

    Raises AssertionError if a way gives another block, or another gradient, than ours.
    """
    block = torch.arange(float(torch.Size(shape).numel())).view(*shape) % 97
    ways = {way.name: _calls(way, block, rows) for way in WAYS}
    received, expected = {}, None
    for name, (forward, both) in ways.items():
        with Meter() as meter:
            result = forward(), both()
        received[name] = {"received_bytes": float(sum(meter.received))}
        expected = result if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name
    return {name: received[name] | seconds for name, seconds in medians(ways, rounds, dist.barrier).items()}


def host(shape: Sequence[int], rows: int, ranks: int, rounds: int) -> Figures:
    """Seconds that the host needs per call: no rank waits for another, nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        block = torch.ones(*shape)
        return medians({way.name: _calls(way, block, rows) for way in WAYS}, rounds)
    finally:
        dist.destroy_process_group()


def _calls(way: Way, block: Tensor, rows: int) -> Calls:
    made = way.prepare()
    return calls(lambda x: way.widen(x, rows, made), block)
