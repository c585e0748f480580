"""A plan as one process executes it, and several in lock step, with shared collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS, Pending
from torch_bridge.lower.packed_collective import PackedCollective, compare_new, run_together
from torch_bridge.mesh import desync
from torch_bridge.mesh.failures import during, name_place
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import Plan
from xshard.dtypes import name_of
from xshard.errors import DtypeError, ShapeError
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import find_plan
from xshard.trees import groups

Move = Callable[[Tensor], Tensor]
Moves = Move | list[Move]  # of one step
T = TypeVar("T")


class computed_once(Generic[T]):  # noqa: N801 (read as the decorator that it is)
    """A property computed once without the lock of Python 3.11's `cached_property`, which all objects share:
    a thread that makes a group would wait, holding it, for other ranks that wait for the lock.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, of: Any, owner: type) -> T:
        if of is None:
            return self  # type: ignore[return-value]
        of.__dict__[self.name] = value = self.compute(of)
        return value


class Casts(NamedTuple):
    """The dtype of blocks, and those in which they and their gradients travel."""

    block: torch.dtype
    forward: torch.dtype
    backward: torch.dtype


def check_dense(block: Tensor) -> None:
    """Raise ShapeError for a sparse tensor, or a nested one."""
    if block.is_nested:
        raise ShapeError("the block or gradient is nested", hint="x.to_padded_tensor(0.0)")
    if block.layout is not torch.strided:
        hint = "x.to_dense(); a gradient is dense with embedding(sparse=False)"
        raise ShapeError(f"the block or gradient is sparse ({block.layout})", hint=hint)


def dense(block: Tensor) -> Tensor:
    """The block, copied if it conjugates or negates lazily. Raises ShapeError for a sparse tensor."""
    if block.is_nested or block.layout is not torch.strided:
        check_dense(block)
    return block.resolve_conj().resolve_neg()


def in_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    """The plan for values of another dtype."""
    if plan.dtype == (name := name_of(dtype)):
        return plan
    return find_plan(replace(plan.request, dtype=name, memory_limit=None))


def place_of(plan: Plan, step: int) -> str:
    """A step of a plan, as errors have it."""
    return (
        f"step {step + 1} of {len(plan.steps)}, '{plan.steps[step]}', of '{plan.src} -> {plan.dst}'"
    )


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan as this process executes it: its block -> a new tensor, its block under `plan.dst`."""

    plan: Plan
    processes: ProcessMesh
    moves: tuple[Move, ...]
    steps: tuple[int, ...]  # the step of every move
    lower: Callable[[Plan], Executable]  # of another plan on these processes
    casts: Casts | None = None
    lends: bool = False  # the result, which is only read, may be the block itself
    whole: str = ""  # the contraction that it is a move of, for errors
    is_new: ClassVar[bool] = desync.NEW  # until ranks have compared the plan

    def __call__(self, block: Tensor) -> Tensor:
        if self.is_new:
            compare_new([self], block.device)
        out = start = self.enter(block)
        try:
            for move in self.moves:
                out = move(out)
        except Exception as error:
            name_place(error, self._place(move))
            raise
        if out is start and not self.lends:  # callers may write to the result
            out = start.clone(memory_format=torch.contiguous_format)
        return self.leave(out)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this process's block after the plan."""
        return self.plan.target.local_shape(self.processes.device)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the plan, and the one as which its bits travel."""
        dtype = getattr(torch, self.plan.dtype)
        return dtype, CARRIERS.get(dtype, dtype)

    def enter(self, block: Tensor) -> Tensor:
        """A block -> the tensor that the first move takes. Raises ShapeError for one that is not dense."""
        block = dense(block)
        if self.casts and block.dtype != self.casts.forward:
            block = block.to(self.casts.forward, memory_format=torch.contiguous_format)
        dtype, carrier = self.dtypes
        return block if carrier is dtype else block.view(carrier)

    def leave(self, out: Tensor) -> Tensor:
        """The tensor that the last move returns -> the block, contiguous."""
        dtype, carrier = self.dtypes
        if carrier is not dtype:
            out = out.view(dtype)
        return out.to(self.casts.block) if self.casts else out

    def begin(self, block: Tensor) -> Pending:
        """Begin the plan up to its last collective -> a function that ends it and returns the result."""
        last = max(
            (i for i, move in enumerate(self.moves) if isinstance(move, PackedCollective)),
            default=-1,
        )
        packed = self.moves[last] if last >= 0 else None
        if not isinstance(packed, PackedCollective):
            return lambda: self(block)
        if self.is_new:
            compare_new([self], block.device)
        out = self.enter(block)
        for move in self.moves[:last]:
            out = self.guarded(move, move, out)
        arrive = self.guarded(packed, packed.begin, out)

        def end() -> Tensor:
            result = self.guarded(packed, arrive)
            for move in self.moves[last + 1 :]:
                result = self.guarded(move, move, result)
            return self.leave(result)

        return end

    def guarded(self, move: Move, act: Callable[..., Any], *args: Any) -> Any:
        """Run `act(*args)`, a part of a move; an error in it names the step."""
        return during(lambda: self._place(move), act, *args)

    def _place(self, move: Move) -> str:
        step = place_of(self.plan, self.steps[self.moves.index(move)])
        return f"{step}, for '{self.whole}'" if self.whole else step

    def casting(self, block: torch.dtype, backward: torch.dtype) -> Executable:
        """The same for blocks of another dtype, cast before and after. backward: the gradients'."""
        forward = self.dtypes[0]
        if not self.is_linear and forward != backward:
            what = (
                f"the gradient of '{self.plan.src}' goes to the values that are equal to the result"
            )
            raise DtypeError(what, hint=f"it travels in the same dtype: comm_dtype={forward}")
        return (
            self
            if block == forward == backward
            else replace(self, casts=Casts(block, forward, backward))
        )

    @cached_property
    def is_linear(self) -> bool:
        """Whether `backward` and `tangent` are its derivatives; a max or min has `winners` instead."""
        return self.plan.src.is_linear

    @computed_once
    def backward(self) -> Executable:
        """The plan of the adjoint. Raises LinearityError, DtypeError."""
        if self.casts is None:
            back = self.lower(self.plan.backward)
        else:
            block, forward, backward = self.casts
            back = self.lower(in_dtype(self.plan, backward).backward).casting(block, forward)
        return replace(back, whole=self.whole) if self.whole else back

    @property
    def sends_gradient(self) -> bool:
        """Whether a process sends something in the backward pass."""
        return not self.is_linear or self.backward.plan.bytes_received > 0

    def plan_gradient(self) -> None:
        """Lower the plan of the backward pass. Raises LinearityError, DtypeError where there is none."""
        _ = self.backward if self.is_linear else self.winners

    @computed_once
    def tangent(self) -> Executable:
        """The executable for tangents: the same, with zeros for constants beyond the ends of the array."""
        tangent = self.plan.tangent
        return self if tangent is self.plan else replace(self.lower(tangent), casts=self.casts)

    @computed_once
    def winners(self) -> tuple[Executable, Executable, Executable, Executable]:
        """Executables for the derivatives of a max or min: result, count, cotangent, tangent."""
        plans = max_min_plans(self.plan)
        result = self.lower(plans.result)
        count = self.lower(plans.count)
        return result, count, self.lower(plans.cotangent), self.lower(plans.tangent)

    def batched(self, n: int) -> Executable:
        """The same redistribution of a block with one more dim, whole and leading, of length `n`."""
        return replace(self.lower(find_plan(self.plan.request.batched(n))), casts=self.casts)


@dataclass(frozen=True, eq=False)
class BucketedExecutable:
    """Executables of linear plans as one map; a bucket sends about `most_bytes` (None: no limit)."""

    executables: tuple[Executable, ...]
    most_bytes: int | None = None
    is_linear: ClassVar[bool] = True

    def __call__(self, *blocks: Tensor) -> tuple[Tensor, ...]:
        results: list[Any] = [None] * len(blocks)
        for numbers in self._buckets:
            outs = _in_lock_step(
                [self.executables[i] for i in numbers], [blocks[i] for i in numbers]
            )
            for i, out in zip(numbers, outs, strict=True):
                results[i] = out
        return tuple(results)

    @property
    def sends_gradient(self) -> bool:
        return any(executable.sends_gradient for executable in self.executables)

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
        """Numbers of the executables in each bucket, by collectives, dtype and largest block."""
        sizes = []
        keys = []
        for i, executable in enumerate(self.executables):
            packed = [
                move.collective for move in executable.moves if isinstance(move, PackedCollective)
            ]
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
    if new := [executable for executable in executables if executable.is_new]:
        compare_new(new, blocks[0].device)
    moves = [iter(executable.moves) for executable in executables]
    outs = [executable.enter(block) for executable, block in zip(executables, blocks, strict=True)]
    while True:
        stops = [_until_collective(*each) for each in zip(executables, moves, outs, strict=True)]
        outs = [out for out, _ in stops]
        packed = [move for _, move in stops if move is not None]
        if not packed:
            return [
                executable.leave(out) for executable, out in zip(executables, outs, strict=True)
            ]
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
