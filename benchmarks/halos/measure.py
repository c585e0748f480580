"""Times, bytes and values of the ways, taken together: every way once before any is taken again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from halos.ways import AXIS, WAYS, mesh
from torch_bridge.meter import Meter
from torch_bridge.nn import Conv2d

Seconds = dict[str, dict[str, float]]  # by way, then by "forward" and "both"
WARM_UP = 3


def end_to_end(shape: Sequence[int], rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """On one of several gloo ranks: median seconds and received bytes of every way.

    Raises AssertionError where a way widens the block, or its gradient, to something else than ours.
    """
    block = torch.arange(float(torch.Size(shape).numel())).view(*shape) % 97
    calls = {way.name: _calls(way, block, rows) for way in WAYS}
    found: dict[str, dict[str, float]] = {}
    expected = None
    for name, (forward, both) in calls.items():
        with Meter() as meter:
            result = forward(), both()
        found[name] = {"received_bytes": float(sum(meter.received))}
        expected = result if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name
    for name, seconds in _timed(calls, rounds, dist.barrier).items():
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

    def calls(layer: torch.nn.Module) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        def forward() -> Tensor:
            with torch.no_grad():
                return layer(block)

        return forward, lambda: torch.autograd.grad(layer(leaf).sum(), leaf)[0]

    layers = {name: calls(layer) for name, layer in {**made, "no exchange": ordinary}.items()}
    assert torch.allclose(layers["waiting"][1](), layers["overlapped"][1](), rtol=1e-4, atol=1e-4)
    return _timed(layers, rounds, dist.barrier)


def host(shape: Sequence[int], rows: int, ranks: int, rounds: int) -> Seconds:
    """Seconds that the host needs per call: no rank waits for another, nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        block = torch.ones(*shape)
        return _timed({way.name: _calls(way, block, rows) for way in WAYS}, rounds, lambda: None)
    finally:
        dist.destroy_process_group()


def _calls(way: object, block: Tensor, rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The forward call alone, and the gradient of the block too."""
    made = way.prepare()
    leaf = block.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return way.widen(block, rows, made)

    def both() -> Tensor:
        y = way.widen(leaf, rows, made)
        (gradient,) = torch.autograd.grad(y, leaf, y.detach())
        return gradient

    return forward, both


def _timed(
    calls: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]],
    rounds: int,
    together: Callable[[], object],
) -> Seconds:
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in calls}
    for turn in range(rounds + WARM_UP):
        # By turns the first: what runs before leaves its traces in caches and memory.
        first = turn % len(calls)
        for name, pair in (*list(calls.items())[first:], *list(calls.items())[:first]):
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
