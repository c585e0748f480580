"""Several executables run in lock step: messages over the same processes share one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torch_bridge.lower.executable import Executable, Move, computed_once
from torch_bridge.lower.packed_collective import PackedCollective, run_together
from xshard.trees import groups


@dataclass(frozen=True, eq=False)
class BucketedExecutable:
    """Executables of linear plans as one map; a process sends about `most_bytes` in one bucket (None: no
    limit)."""

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

    @computed_once
    def backward(self) -> BucketedExecutable:
        return self._of([executable.backward for executable in self.executables])

    @computed_once
    def tangent(self) -> BucketedExecutable:
        return self._of([executable.tangent for executable in self.executables])

    def batched(self, n: int) -> BucketedExecutable:
        return self._of([executable.batched(n) for executable in self.executables])

    def _of(self, executables: Sequence[Executable]) -> BucketedExecutable:
        return BucketedExecutable(tuple(executables), self.most_bytes)

    @cached_property
    def _buckets(self) -> list[list[int]]:
        """Numbers of the executables in each bucket, with equal collectives and dtype, by the size of the
        largest block, which all processes agree on."""
        sizes, keys = [], []
        for i, executable in enumerate(self.executables):
            packed = [move.collective for move in executable.moves if isinstance(move, PackedCollective)]
            # Not the groups: meshes with more axes have others of the same processes.
            collectives = tuple((each.kind, each.op, each.group.process_group) for each in packed)
            # An executable that sends nothing has a bucket of its own.
            keys.append((collectives, executable.dtypes[1]) if collectives else i)
            sizes.append(executable.plan.source.max_local_size * executable.plan.itemsize)
        return groups(sizes, self.most_bytes, keys)


def _in_lock_step(executables: Sequence[Executable], blocks: Sequence[Tensor]) -> list[Tensor]:
    """The result of every executable; all have collectives of the same kinds in the same order."""
    if len(executables) == 1:
        return [executables[0](blocks[0])]
    moves = [iter(executable.moves) for executable in executables]
    outs = [executable.enter(block) for executable, block in zip(executables, blocks, strict=True)]
    while True:
        stops = [_until_collective(*each) for each in zip(executables, moves, outs, strict=True)]
        outs, packed = [out for out, _ in stops], [move for _, move in stops if move is not None]
        if not packed:
            return [executable.leave(out) for executable, out in zip(executables, outs, strict=True)]
        outs = executables[0].guarded(packed[0], run_together, packed, outs)


def _until_collective(
    executable: Executable, moves: Iterator[Move], out: Tensor
) -> tuple[Tensor, PackedCollective | None]:
    """Make local moves up to the next collective -> the block then, and that collective."""
    for move in moves:
        if isinstance(move, PackedCollective):
            return out, move
        out = executable.guarded(move, move, out)
    return out, None
