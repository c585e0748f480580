"""Several executables in lock step: what travels over the same processes travels together.

Decides which executables share their collectives. Their plans are what they are alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torch_bridge.lower.executable import Executable, Move
from torch_bridge.lower.packed_collective import PackedCollective, run_together


@dataclass(frozen=True, eq=False)
class Bucket:
    """Executables of linear plans as one map: a block of each -> the result of each.

    most_bytes: of what a process sends together, about; None for no limit.
    """

    executables: tuple[Executable, ...]
    most_bytes: int | None = None

    def __call__(self, *blocks: Tensor) -> tuple[Tensor, ...]:
        results: list[Any] = [None] * len(blocks)
        for numbers in self._buckets:
            outs = _in_lock_step([self.executables[i] for i in numbers], [blocks[i] for i in numbers])
            for i, out in zip(numbers, outs, strict=True):
                results[i] = out
        return tuple(results)

    @property
    def is_linear(self) -> bool:
        return True

    @cached_property
    def backward(self) -> Bucket:
        return self._of([executable.backward for executable in self.executables])

    @cached_property
    def tangent(self) -> Bucket:
        return self._of([executable.tangent for executable in self.executables])

    def batched(self, n: int) -> Bucket:
        return self._of([executable.batched(n) for executable in self.executables])

    def _of(self, executables: Sequence[Executable]) -> Bucket:
        return Bucket(tuple(executables), self.most_bytes)

    @cached_property
    def _buckets(self) -> list[list[int]]:
        """Which executables go together: those with the same collectives on the same dtype, in order.

        Sizes are those of the largest block: every process must come to the same buckets.
        """
        found: dict[Any, list[list[int]]] = {}
        held: dict[Any, int] = {}
        for i, executable in enumerate(self.executables):
            collectives = tuple(m.collective for m in executable.moves if isinstance(m, PackedCollective))
            # What sends nothing shares nothing.
            key = (collectives, executable.dtypes[1]) if collectives else i
            nbytes = executable.plan.source.max_local_size * executable.plan.itemsize
            buckets = found.setdefault(key, [[]])
            if self.most_bytes is not None and buckets[-1] and held[key] + nbytes > self.most_bytes:
                buckets.append([])
                held[key] = 0
            buckets[-1].append(i)
            held[key] = held.get(key, 0) + nbytes
        return [bucket for buckets in found.values() for bucket in buckets]


def _in_lock_step(executables: Sequence[Executable], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Every executable's result; all of them have collectives of the same kinds in the same order."""
    if len(executables) == 1:
        return [executables[0](blocks[0])]
    moves = [iter(executable.moves) for executable in executables]
    outs = [executable.enter(block) for executable, block in zip(executables, blocks, strict=True)]
    while True:
        stops = [_until_relay(left, out) for left, out in zip(moves, outs, strict=True)]
        outs, relays = [out for out, _ in stops], [relay for _, relay in stops if relay is not None]
        if not relays:
            return [executable.leave(out) for executable, out in zip(executables, outs, strict=True)]
        outs = executables[0].guarded(relays[0], run_together, relays, outs)


def _until_relay(moves: Iterator[Move], out: Tensor) -> tuple[Tensor, PackedCollective | None]:
    """Local moves made up to the next in which messages travel, and that one."""
    for move in moves:
        if isinstance(move, PackedCollective):
            return out, move
        out = move(out)
    return out, None
