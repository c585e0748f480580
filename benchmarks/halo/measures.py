"""Times, bytes and values of the ways, taken together: every way once before any is taken again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from by_turns import Calls, Seconds, calls, timed
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from halos.ways import AXIS, WAYS, Way, mesh
from torch_bridge.nn import Conv2d
from torch_bridge.testing.byte_counter import Meter


def end_to_end(shape: Sequence[int], rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """On one of several gloo ranks: median seconds and received bytes of every way.

    Raises AssertionError where a way widens the block, or its gradient, to something else than ours.
    """
    block = torch.arange(float(torch.Size(shape).numel())).view(*shape) % 97
    ways = {way.name: _calls(way, block, rows) for way in WAYS}
    found: dict[str, dict[str, float]] = {}
    expected = None
    for name, (forward, both) in ways.items():
        with Meter() as meter:
            result = forward(), both()
        found[name] = {"received_bytes": float(sum(meter.received))}
        expected = result if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name
    for name, seconds in timed(ways, rounds, dist.barrier).items():
        found[name] |= seconds
    return found


def convolutions(shape: Sequence[int], kernel: int, rounds: int) -> Seconds:
    """Seconds of a convolution on one of several gloo ranks, by what it does about its halos.

    It waits for them, computes meanwhile, or has none: a convolution of the block alone.
    """
    torch.manual_seed(0)
    ordinary = torch.nn.Conv2d(shape[1], shape[1], kernel, padding=kernel // 2)
    ranks, layout = mesh(), f"b c h/{AXIS} w"
    made = {
        name: Conv2d.from_module(ordinary, ranks, layout, overlap=name == "overlapped")
        for name in ("waiting", "overlapped")
    }
    block = torch.randn(*shape)
    leaf = block.clone().requires_grad_()

    def both(layer: torch.nn.Module) -> Calls:
        def forward() -> Tensor:
            with torch.no_grad():
                return layer(block)

        return forward, lambda: torch.autograd.grad(layer(leaf).sum(), leaf)[0]

    layers = {name: both(layer) for name, layer in {**made, "no exchange": ordinary}.items()}
    assert torch.allclose(layers["waiting"][1](), layers["overlapped"][1](), rtol=1e-4, atol=1e-4)
    return timed(layers, rounds, dist.barrier)


def host(shape: Sequence[int], rows: int, ranks: int, rounds: int) -> Seconds:
    """Seconds that the host needs per call: no rank waits for another, nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        block = torch.ones(*shape)
        return timed({way.name: _calls(way, block, rows) for way in WAYS}, rounds, lambda: None)
    finally:
        dist.destroy_process_group()


def _calls(way: Way, block: Tensor, rows: int) -> Calls:
    made = way.prepare()
    return calls(lambda x: way.widen(x, rows, made), block)
