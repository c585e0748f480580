"""A plan as one process executes it.

Decides in which order moves run, begin and end, and which other plans derivatives take. What a move does
is settled in `lower`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS, Pending
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.mesh.failures import CollectiveError, is_loss, lost
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import DtypeError, Plan, dtypes
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import find_plan

Move = Callable[[Tensor], Tensor]


class Casts(NamedTuple):
    """The dtype of blocks, the one in which they travel, and the one in which their gradients do."""

    block: torch.dtype
    wire: torch.dtype
    adjoint: torch.dtype


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan as this process executes it: its block under `plan.src` -> its block under `plan.dst`.

    The result is a new tensor; the block is left as it is.
    lower: another plan on the same processes -> its executable.

    casts: the dtypes that blocks have and travel in, where they differ.
    """

    plan: Plan
    processes: ProcessMesh
    moves: tuple[Move, ...]
    lower: Callable[[Plan], Executable]
    casts: Casts | None = None

    def __call__(self, block: Tensor) -> Tensor:
        out = start = self.enter(block)
        try:
            for move in self.moves:
                out = move(out)
        except RuntimeError as error:
            if is_loss(error):
                raise self._lost(move, error) from error
            raise
        # Where nothing moves the result still is the caller's own, to write to as they like.
        return self.leave(start.clone(memory_format=torch.contiguous_format) if out is start else out)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this process's block after the plan."""
        return self.plan.target.local_shape(self.processes.device)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype that is planned for, and the one as which its bits travel."""
        dtype = getattr(torch, self.plan.dtype)
        return dtype, CARRIERS.get(dtype, dtype)

    def enter(self, block: Tensor) -> Tensor:
        """A block -> what the moves take."""
        if self.casts:
            block = block.to(self.casts.wire)
        dtype, carrier = self.dtypes
        return block if carrier is dtype else block.view(carrier)

    def leave(self, out: Tensor) -> Tensor:
        """What the moves have made -> the block."""
        dtype, carrier = self.dtypes
        if carrier is not dtype:
            out = out.view(dtype)
        return out.to(self.casts.block) if self.casts else out

    def begin(self, block: Tensor) -> Pending:
        """The plan begun -> what ends it and returns the result. What travels last travels in between.

        All processes begin and end their plans in the same order.
        """
        last = max((i for i, move in enumerate(self.moves) if isinstance(move, PackedCollective)), default=-1)
        relay = self.moves[last] if last >= 0 else None
        if not isinstance(relay, PackedCollective):
            return lambda: self(block)
        out = self.enter(block)
        for move in self.moves[:last]:
            out = self.guarded(move, move, out)
        arrive = self.guarded(relay, relay.begin, out)

        def end() -> Tensor:
            result = self.guarded(relay, arrive)
            for move in self.moves[last + 1 :]:
                result = self.guarded(move, move, result)
            return self.leave(result)

        return end

    def guarded(self, move: Move, act: Callable[..., Any], *args: Any) -> Any:
        """`act(*args)`, a part of a move. Raises CollectiveError, which names the step, for a lost peer."""
        try:
            return act(*args)
        except RuntimeError as error:
            if is_loss(error):
                raise self._lost(move, error) from error
            raise

    def _lost(self, move: Move, error: RuntimeError) -> CollectiveError:
        at, steps = self.moves.index(move), self.plan.steps
        return lost(self.plan, f"step {at + 1} of {len(steps)}, '{steps[at]}',", self.processes.ranks, error)

    def casting(self, block: torch.dtype, adjoint: torch.dtype) -> Executable:
        """The same for blocks of another dtype, cast to what is planned for before and back after.

        adjoint: the dtype in which gradients travel.
        """
        wire = self.dtypes[0]
        if not self.is_linear and wire != adjoint:
            raise DtypeError(
                f"the gradient of '{self.plan.src}' goes to the values that are equal to the result",
                hint=f"it travels as they do: comm_dtype={wire}",
            )
        return self if block == wire == adjoint else replace(self, casts=Casts(block, wire, adjoint))

    @cached_property
    def is_linear(self) -> bool:
        """Whether `backward` and `tangent` are its derivatives; those of a max or min need `winners`."""
        return self.plan.src.is_linear

    @cached_property
    def backward(self) -> Executable:
        """The plan of the adjoint. Raises LinearityError, DtypeError."""
        if self.casts is None:
            return self.lower(self.plan.backward)
        block, wire, adjoint = self.casts
        return self.lower(self._planned(adjoint).backward).casting(block, wire)

    def plan_gradient(self) -> None:
        """Lower what the backward pass runs. Raises LinearityError, DtypeError where there is none."""
        _ = self.backward if self.is_linear else self.winners

    @cached_property
    def tangent(self) -> Executable:
        """What tangents take: the same, but that constants beyond the ends of the array are zeros."""
        tangent = self.plan.tangent
        return self if tangent is self.plan else replace(self.lower(tangent), casts=self.casts)

    @cached_property
    def winners(self) -> tuple[Executable, Executable, Executable, Executable]:
        """For the derivatives of a max or min, as in `xshard.plans.max_min`: result, count, cotangent, tangent."""
        plans = max_min_plans(self.plan)
        result, count = self.lower(plans.result), self.lower(plans.count)
        return result, count, self.lower(plans.cotangent), self.lower(plans.tangent)

    def batched(self, n: int) -> Executable:
        """The same redistribution of a block with one more dim, whole and leading, of length `n`."""
        return replace(self.lower(find_plan(self.plan.request.batched(n))), casts=self.casts)

    def _planned(self, dtype: torch.dtype) -> Plan:
        name = dtypes.name_of(dtype)
        if self.plan.dtype == name:
            return self.plan
        return find_plan(replace(self.plan.request, dtype=name, memory_limit=None))
