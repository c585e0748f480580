"""Functions of a torch block, called forward and with the gradient, and timed on ranks of this machine."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
from benchmarks import by_turns
from torch_bridge.testing.byte_counter import Meter

Call = Callable[[], Tensor]
Calls = tuple[Call, Call]  # forward alone, and with the gradient
Figures = dict[str, dict[str, float]]  # by way, then by figure: "forward_s", "both_s" and others
HANG_S = 4 * 3600.0  # ends ranks that hang; the longest full run takes ten minutes


def calls(way: Callable[[Tensor], Tensor], block: Tensor) -> Calls:
    """The forward call alone, and the gradient of the block, with the result as its cotangent."""
    leaf = block.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return way(block)

    def both() -> Tensor:
        y = way(leaf)
        (gradient,) = torch.autograd.grad(y, leaf, y.detach())
        return gradient

    return forward, both


def medians(
    ways: Mapping[str, Calls], rounds: int, before: Callable[[], object] = lambda: None
) -> Figures:
    """Median seconds of every way. before: runs before each call."""
    keys = ("forward_s", "both_s")
    flat = {
        (way, k): call for way, pair in ways.items() for k, call in zip(keys, pair, strict=True)
    }
    times = by_turns.medians(flat, rounds, before=before)
    return {way: {key: times[way, key] for key in keys} for way in ways}


def compared(ways: Mapping[str, Calls], rounds: int) -> Figures:
    """Median seconds and received bytes of every way, on every gloo rank.

    Raises AssertionError if a way gives another result, or another gradient, than the first.
    """
    received = Figures()
    expected = None
    for name, (forward, both) in ways.items():
        with Meter() as once:
            y = forward()
        with Meter() as twice:
            gradient = both()
        expected = expected or (y, gradient)
        assert torch.equal(y, expected[0]) and torch.equal(gradient, expected[1]), name
        sent = float(sum(once.received)), float(sum(twice.received))
        received[name] = dict(zip(("forward_bytes", "both_bytes"), sent, strict=True))
    return {
        name: received[name] | times for name, times in medians(ways, rounds, dist.barrier).items()
    }


@contextmanager
def fake_group(n: int) -> Iterator[None]:
    """A world of `n` ranks without any other process: nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=n, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(n: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """`function(*arguments)` on `n` gloo ranks -> their results, by rank.

    Ranks are forks of a server without threads: autograd has started some in this process. The server has
    imported the module of `function`, and what DTensor imports at its first call, so that no rank has to.
    """
    multiprocessing.set_forkserver_preload(["torch_bridge", function.__module__, "torch._dynamo"])
    return xt.testing.run_ranks(
        n, function, *arguments, start_method="forkserver", timeout_s=HANG_S
    )


def largest(by_rank: Sequence[Figures]) -> Figures:
    """The largest of all ranks' figures: a collective is over when every rank is done."""
    first = by_rank[0]
    return {
        way: {key: max(rank[way][key] for rank in by_rank) for key in first[way]} for way in first
    }
