"""A plan as one process executes it, and several in lock step, with shared collectives.

A move is a step of the plan, or one phase of it, as a function of the block: a collective with its packing,
or a local function that sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_bridge.comm_dtype import CommDtype
from torch_bridge.lower.beside import can_go_on_beside, go_on_beside
from torch_bridge.lower.collectives import CARRIERS, Pending
from torch_bridge.lower.packed_collective import (
    PackedCollective,
    begin_together,
    compare_new,
    run_together,
)
from torch_bridge.mesh import desync
from torch_bridge.mesh.failures import name_place, with_place_in_errors
from torch_bridge.mesh.process_mesh import ProcessMesh
from torch_bridge.versions.autograd import lazy_copies
from xshard import Plan
from xshard.dtypes import name_of
from xshard.errors import DtypeError, ShapeError
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import find_plan
from xshard.trees import group_by_bytes

LocalMove = Callable[[Tensor], Tensor]  # sends nothing
Move = PackedCollective | LocalMove  # a step, or a part of one, as this process runs it
Moves = Move | list[Move]  # of one step
T = TypeVar("T")


class computed_once(Generic[T]):  # noqa: N801 (read as the decorator that it is)
    """A property computed once, without the lock of Python 3.11's `cached_property`.

    All objects share that lock: a thread that makes a group would hold it while it waits for other ranks,
    which wait for the lock.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # read on the class, by documentation tools
        value = self.compute(instance)
        instance.__dict__[self.name] = value  # found first from now on
        return value


class Casts(NamedTuple):
    """The dtype of blocks, and the dtypes in which they and their gradients travel and arrive."""

    block: torch.dtype
    travels: CommDtype


class WinnerExecutables(NamedTuple):
    """What the derivatives of a max or min need: its result, the count of equal values, and two maps."""

    result: Executable
    winner_count: Executable
    cotangent: Executable
    tangent: Executable


def check_dense(block: Tensor) -> None:
    """Raise ShapeError for a sparse tensor, or a nested one."""
    if block.is_nested:
        raise ShapeError("the block or gradient is nested", hint="x.to_padded_tensor(0.0)")
    if block.layout is not torch.strided:
        hint = "x.to_dense(); a gradient is dense with embedding(sparse=False)"
        raise ShapeError(f"the block or gradient is sparse ({block.layout})", hint=hint)


def dense(block: Tensor) -> Tensor:
    """Return the block, copied if it conjugates or negates lazily. Raises ShapeError if it is sparse."""
    if block.is_nested or block.layout is not torch.strided:  # hot: no call for a dense one
        check_dense(block)
    return block.resolve_conj().resolve_neg()


def in_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    """Return the plan for values of another dtype."""
    name = name_of(dtype)
    if plan.dtype == name:
        return plan
    return find_plan(replace(plan.request, dtype=name, memory_limit=None))


def place_of(plan: Plan, step: int) -> str:
    """Return the text by which errors name a step of a plan."""
    text = str(plan.steps[step])
    return f"step {step + 1} of {len(plan.steps)}, '{text}', of '{plan.src} -> {plan.dst}'"


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan as this process executes it: its block -> a new tensor, its block under `plan.dst`."""

    plan: Plan
    processes: ProcessMesh
    moves: tuple[Move, ...]
    steps: tuple[int, ...]  # the step of every move
    lower: Callable[[Plan], Executable]  # of another plan on these processes
    casts: Casts | None = None
    may_return_input: bool = False  # the result is only read, so that it may be the block itself
    contraction: str = ""  # the text of the contraction of which it is a move, for errors
    is_new: ClassVar[bool] = desync.NEW  # until ranks have compared the plan

    # Hot: every cached call comes through here.
    def __call__(self, block: Tensor) -> Tensor:
        """Run all moves on this process's block, in order, and return the block afterwards.

        Under "b i/tp -> b i" on tp=4: [b, i/4] -> [b, i]. An error names the step in which it
        arises.
        """
        if self.is_new:
            compare_new([self], block.device)
        start = self.enter(block)
        out = start
        # One `try` around the loop, not one per move, which would cost time: in the handler, `move`
        # is the one that failed.
        try:
            for move in self.moves:
                out = move(out)
        except Exception as error:
            name_place(error, self._place(move))
            raise
        # Without any move or cast the result would be the input itself, and callers may write to the
        # result.
        if out is start and block.dtype == self.dtype and not self.may_return_input:
            out = start.clone(memory_format=torch.contiguous_format)
        return self.leave(out)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this process's block after the plan."""
        return self.plan.target.local_shape(self.processes.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the plan."""
        dtype: torch.dtype = getattr(torch, self.plan.dtype)
        return dtype

    @cached_property
    def carrier(self) -> torch.dtype:
        """The dtype as which its bits travel: backends do not know some dtypes."""
        return CARRIERS.get(self.dtype, self.dtype)

    @cached_property
    def collectives(self) -> list[PackedCollective]:
        """The moves that send something."""
        return [move for move in self.moves if isinstance(move, PackedCollective)]

    def enter(self, block: Tensor) -> Tensor:
        """Return a block as the first move takes it. Raises ShapeError if it is not dense."""
        block = dense(block)
        if self.casts and block.dtype != self.dtype:
            block = block.to(self.dtype, memory_format=torch.contiguous_format)
        if self.carrier is self.dtype:
            return block
        return block.view(self.carrier)

    def before_collective(self, block: Tensor) -> Tensor:
        """Make the moves before the first collective, which casts the block if there are none."""
        if self.carrier is self.dtype and not self._local_moves[0]:
            return dense(block)
        return self.run_local(0, self.enter(block))

    def leave(self, out: Tensor) -> Tensor:
        """Return what the last move returns as the block, contiguous, in its dtype."""
        if self.carrier is not self.dtype:
            out = out.view(self.dtype)
        if self.casts:
            return out.to(self.casts.travels.result)
        return out

    def begin(self, block: Tensor) -> Pending:
        """Begin the plan, which then goes on by itself; return a function that ends it.

            end = executable.begin(block)       # the first collective travels
            ...                                 # compute beside it, and beside all that follow
            y = end()                           # wait for the result

        A plan without a collective has nothing to begin: the returned function runs all of it. Where
        nothing can run beside the caller, it makes all moves after the first collective.
        """
        if not self.collectives:
            return partial(self, block)
        if self.is_new:
            compare_new([self], block.device)
        first = self.collectives[0]
        out = self.run_local(0, self.enter(block))
        wait = self.with_step_in_errors(first, first.begin, out)
        if not self._goes_on_beside(block.device):
            return partial(self._go_on, wait)
        go_on = self.on_own_groups._go_on
        kept = [out] if first.keeps_rows else []
        end = go_on_beside(lambda: [go_on(wait)], block.device, kept)
        return lambda: end()[0]

    def _goes_on_beside(self, device: torch.device) -> bool:
        """Whether collectives follow the first, and run beside the caller once the plan has begun."""
        first, *others = self.collectives
        return bool(others) and can_go_on_beside(first.collective.group, device)

    def _go_on(self, wait: Pending) -> Tensor:
        """Wait for the first collective, make all moves after it, and return the block."""
        first = self.collectives[0]
        out = self.with_step_in_errors(first, wait)
        for move in self.moves[self.moves.index(first) + 1 :]:
            if isinstance(move, PackedCollective):
                # A block is free as soon as its messages are packed, and these before they are unpacked.
                wait = self.with_step_in_errors(move, move.begin, out)
                del out
                out = self.with_step_in_errors(move, wait)
            else:
                out = self.with_step_in_errors(move, move, out)
        return self.leave(out)

    @computed_once
    def on_own_groups(self) -> Executable:
        """Return this executable for what runs beside the caller: on groups that nothing else uses."""
        return replace(self, moves=tuple(map(_on_own_group, self.moves)))

    @cached_property
    def _local_moves(self) -> list[list[LocalMove]]:
        """The moves before the first collective, between each two, and after the last."""
        groups: list[list[LocalMove]] = [[]]
        for move in self.moves:
            if isinstance(move, PackedCollective):
                groups.append([])
            else:
                groups[-1].append(move)
        return groups

    def run_local(self, n_collectives_done: int, block: Tensor) -> Tensor:
        """Make the local moves after the first `n_collectives_done` collectives, up to the next one."""
        for move in self._local_moves[n_collectives_done]:
            block = self.with_step_in_errors(move, move, block)
        return block

    def with_step_in_errors(self, move: Move, function: Callable[..., Any], *args: Any) -> Any:
        """Run `act(*args)`, a part of a move; an error in it names the step."""
        return with_place_in_errors(partial(self._place, move), function, *args)

    def _place(self, move: Move) -> str:
        step = place_of(self.plan, self.steps[self.moves.index(move)])
        if self.contraction:
            return f"{step}, for '{self.contraction}'"
        return step

    def casting(self, block_dtype: torch.dtype, travels: CommDtype) -> Executable:
        """Return this executable for blocks of another dtype, which are cast before and after it.

        A plan in bfloat16 with casting(float32, (bfloat16, float32, float32)): float32 blocks travel in
        bfloat16 and arrive in float32; their gradients travel in float32.

        Args:
            block_dtype: The dtype of blocks before.
            travels: The dtypes in which blocks travel, that of the plan, and arrive, and gradients travel.

        Raises:
            DtypeError: For a max or min, whose gradient travels as its values do.
        """
        if not self.is_linear and self.dtype != travels.backward:
            text = self.plan.src
            reason = f"the gradient of '{text}' goes to the values that are equal to the result"
            raise DtypeError(reason, hint=f"it travels in the same dtype: comm_dtype={self.dtype}")
        if all(dtype == self.dtype for dtype in (block_dtype, *travels)):
            return self
        return replace(self, casts=Casts(block_dtype, travels))

    @cached_property
    def is_linear(self) -> bool:
        """Whether `backward` and `tangent` are its derivatives; else it has `max_min_derivatives`."""
        return self.plan.src.is_linear

    @computed_once
    def backward(self) -> Executable:
        """Return the executable of the adjoint. Raises LinearityError, DtypeError."""
        if self.casts is None:
            adjoint = self.lower(self.plan.backward)
        else:
            # Cotangents travel in their own dtype, and their cotangents in the one of the blocks.
            block, travels = self.casts
            adjoint = self.lower(in_dtype(self.plan, travels.backward).backward)
            adjoint = adjoint.casting(travels.result, travels.adjoint(block))
        if self.contraction:
            return replace(adjoint, contraction=self.contraction)
        return adjoint

    @property
    def sends_gradient(self) -> bool:
        """Whether a process sends something in the backward pass."""
        return not self.is_linear or self.backward.plan.bytes_received > 0

    def plan_gradient(self) -> None:
        """Lower the plan of the backward pass. Raises LinearityError, DtypeError where there is none."""
        _ = self.backward if self.is_linear else self.max_min_derivatives

    @computed_once
    def tangent(self) -> Executable:
        """Return the executable for tangents: constants beyond the ends of the array are zeros."""
        # Another plan only where a boundary is constant: a constant has no tangent.
        tangent = self.plan.tangent
        if tangent is self.plan:
            return self
        return replace(self.lower(tangent), casts=self.casts)

    @computed_once
    def max_min_derivatives(self) -> WinnerExecutables:
        """Return the executables for the derivatives of a max or min."""
        plans = max_min_plans(self.plan)
        # All ranks lower them in this order: groups may be made.
        return WinnerExecutables(
            result=self.lower(plans.result),
            winner_count=self.lower(plans.count),
            cotangent=self.lower(plans.cotangent),
            tangent=self.lower(plans.tangent),
        )

    def batched(self, n: int) -> Executable:
        """Return the same redistribution of a block with one more leading dim, whole, of length `n`."""
        return replace(self.lower(find_plan(self.plan.request.batched(n))), casts=self.casts)


@dataclass(frozen=True, eq=False)
class BucketedExecutable:
    """Executables of linear plans as one map; a bucket sends about `bucket_bytes` (None: no limit)."""

    executables: tuple[Executable, ...]
    bucket_bytes: int | None = None
    is_linear: ClassVar[bool] = True

    def __call__(self, *blocks: Tensor) -> tuple[Tensor, ...]:
        """Run the executables in buckets: the collectives of one bucket are shared."""
        return self._in_order(
            [_run_in_lock_step(*bucket) for bucket in self._buckets_with_blocks(blocks)]
        )

    def begin(self, *blocks: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin the buckets in order, as `Executable.begin` does; return a function that ends all."""
        finish_each = [_begin_in_lock_step(*bucket) for bucket in self._buckets_with_blocks(blocks)]
        return lambda: self._in_order([finish() for finish in finish_each])

    def _buckets_with_blocks(
        self, blocks: Sequence[Tensor]
    ) -> Iterator[tuple[list[Executable], list[Tensor]]]:
        """Yield the executables of each bucket, and their blocks."""
        for bucket in self._buckets:
            yield [self.executables[i] for i in bucket], [blocks[i] for i in bucket]

    def _in_order(self, results_by_bucket: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Return the results of all buckets in the order of the blocks."""
        results: dict[int, Tensor] = {}
        for bucket, outs in zip(self._buckets, results_by_bucket, strict=True):
            results.update(zip(bucket, outs, strict=True))
        return tuple(results[i] for i in range(len(results)))

    @property
    def sends_gradient(self) -> bool:
        return any(executable.sends_gradient for executable in self.executables)

    @computed_once
    def backward(self) -> BucketedExecutable:
        return self._with([executable.backward for executable in self.executables])

    @computed_once
    def tangent(self) -> BucketedExecutable:
        return self._with([executable.tangent for executable in self.executables])

    def batched(self, n: int) -> BucketedExecutable:
        return self._with([executable.batched(n) for executable in self.executables])

    def _with(self, executables: Sequence[Executable]) -> BucketedExecutable:
        return BucketedExecutable(tuple(executables), self.bucket_bytes)

    @cached_property
    def _buckets(self) -> list[list[int]]:
        """Indices of the executables in each bucket: equal in collectives and dtype, limited in bytes."""
        block_bytes = [
            executable.plan.source.max_local_size * executable.plan.itemsize
            for executable in self.executables
        ]
        keys: list[Any] = []
        for i, executable in enumerate(self.executables):
            if not executable.collectives:
                keys.append(i)  # an executable that sends nothing has a bucket of its own
                continue
            # Equal collectives, in one order, can run as one. Process groups, not groups: meshes
            # with more axes have other groups of the same processes.
            signature: list[Any] = [executable.carrier]
            for move in executable.collectives:
                collective = move.collective
                signature += [collective.kind, collective.op, collective.group.process_group]
            keys.append(tuple(signature))
        return group_by_bytes(block_bytes, self.bucket_bytes, keys)


def _on_own_group(move: Move) -> Move:
    """Return a move on a group that only what runs beside the caller uses."""
    if not isinstance(move, PackedCollective):
        return move
    collective = move.collective
    return replace(move, collective=replace(collective, group=collective.group.beside))


def _run_in_lock_step(executables: Sequence[Executable], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Run several plans together: the k-th collective of each is sent as one collective for all.

    Three plans of a pad, an all-gather and a slice each: three pads, one joint all-gather, three
    slices. All plans have collectives of the same kinds in the same order; the local moves in
    between may differ. Returns the result of each plan.
    """
    first, *others = executables
    if not others:
        return [first(blocks[0])]
    outs = _before_collectives(executables, blocks)
    collectives = [executable.collectives[0] for executable in executables]
    run_first = partial(run_together, collectives, outs, first.carrier)
    return _go_on_in_lock_step(executables, first.with_step_in_errors(collectives[0], run_first))


def _begin_in_lock_step(
    executables: Sequence[Executable], blocks: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """Begin several plans together, which then go on by themselves; return what ends them."""
    # Rows of blocks are sent, or kept, until the end: the caller may write to the blocks meanwhile.
    blocks = lazy_copies(blocks)
    first, *others = executables
    if not others:
        end_one = first.begin(*blocks)
        return lambda: [end_one()]
    outs = _before_collectives(executables, blocks)
    collectives = [executable.collectives[0] for executable in executables]
    wait = first.with_step_in_errors(
        collectives[0], begin_together, collectives, outs, first.carrier
    )

    def go_on(executables: Sequence[Executable]) -> list[Tensor]:
        return _go_on_in_lock_step(executables, first.with_step_in_errors(collectives[0], wait))

    if not first._goes_on_beside(outs[0].device):
        return partial(go_on, executables)
    on_own_groups = [executable.on_own_groups for executable in executables]
    kept = [out for move, out in zip(collectives, outs, strict=True) if move.keeps_rows]
    return go_on_beside(partial(go_on, on_own_groups), outs[0].device, kept)


def _before_collectives(
    executables: Sequence[Executable], blocks: Sequence[Tensor]
) -> list[Tensor]:
    """Compare plans that are new, and make the moves of each before its first collective."""
    new = [executable for executable in executables if executable.is_new]
    if new:
        compare_new(new, blocks[0].device)
    return [
        executable.before_collective(block)
        for executable, block in zip(executables, blocks, strict=True)
    ]


def _go_on_in_lock_step(
    executables: Sequence[Executable], arrived: Sequence[Tensor]
) -> list[Tensor]:
    """Make all moves of several plans after their first collective, of what it brought to each."""
    first = executables[0]
    n_collectives = len(first.collectives)
    for index in range(1, n_collectives):
        outs = _run_local(executables, index, arrived)
        del arrived
        collectives = [executable.collectives[index] for executable in executables]
        # A block is free as soon as its messages are packed, and these before they are unpacked.
        wait = first.with_step_in_errors(
            collectives[0], begin_together, collectives, outs, first.carrier
        )
        del outs
        arrived = first.with_step_in_errors(collectives[0], wait)
    outs = _run_local(executables, n_collectives, arrived)
    return [executable.leave(out) for executable, out in zip(executables, outs, strict=True)]


def _run_local(
    executables: Sequence[Executable], n_collectives_done: int, blocks: Sequence[Tensor]
) -> list[Tensor]:
    return [
        executable.run_local(n_collectives_done, block)
        for executable, block in zip(executables, blocks, strict=True)
    ]
