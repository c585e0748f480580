"""The plan of a contraction as this process executes it.

Decides which of its moves are left out, and in which dtype each travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_bridge.comm_dtype import CommDtype
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.contractions.part import Move, PartExecutable, Stages
from torch_bridge.contractions.rounds import Rounds
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import Plan, dtypes
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.ring import ContractionRing
from xshard.plans.plan import find_plan


@dataclass(frozen=True, eq=False)
class ContractionExecutable:
    """The blocks of the operands -> the block of the result. lowering: how it was made of the plan."""

    plan: ContractionPlan
    lowering: Lowering
    parts: tuple[PartExecutable, ...]

    def __call__(self, blocks: Sequence[Tensor], keeps: bool, async_op: bool) -> Any:
        left = list(blocks)
        for part in self.parts:
            taken = [left[i] for i in part.takes]
            left = [block for i, block in enumerate(left) if i not in part.takes]
            left.append(part(taken, keeps, async_op and part.is_last))
        return left[0]


@dataclass(frozen=True, eq=False)
class Lowering:
    """How plans become executables, on which processes and for which blocks.

    differentiated: whether gradients are planned now, when all processes are here to make their groups.
    lower: the plan of a move, the processes and the device of tensors -> the move's executable.
    text: the contraction, for errors.
    """

    processes: ProcessMesh
    block: torch.dtype
    tensor_device: torch.device
    travels: CommDtype
    differentiated: bool
    lower: Callable[[Plan, ProcessMesh, torch.device], Executable] = lower
    text: str = ""

    def contraction(self, plan: ContractionPlan) -> ContractionExecutable:
        """The executable of a plan."""
        named = replace(self, text=plan.text)
        parts = [named._in_rounds(named._part(part), part.ring) for part in plan.parts]
        inner = (replace(part, is_last=False) for part in parts[:-1])
        return ContractionExecutable(plan, self, (*inner, parts[-1]))

    def _part(self, part: Part) -> PartExecutable:
        return PartExecutable(
            part.takes,
            tuple(self._move(move, lends=True) for move in part.moves),
            LocalContraction.of(part, self.processes.device),
            self._move(part.result),
        )

    def _in_rounds(self, made: PartExecutable, ring: ContractionRing | None) -> PartExecutable:
        """With its rounds; none if blocks travel in another dtype, in which sums would not be added."""
        if ring is None or self.travels != (self.block, self.block):
            return made
        rest = self._move(ring.rest, lends=ring.operand is not None)
        rotation = self._move(ring.rotation)
        moves = tuple(rest if i == ring.operand else move for i, move in enumerate(made.moves))
        result = rest if ring.operand is None else made.result
        return replace(made, in_rounds=Stages(moves, Rounds.of(made.local, ring, rotation), result))

    def _move(self, plan: Plan, *, lends: bool = False) -> Move:
        if not plan.steps:
            return None
        forward = self.travels.forward if plan.bytes_received else self.block  # what is not sent is not cast
        if plan.dtype != (name := dtypes.name_of(forward)):
            plan = find_plan(replace(plan.request, dtype=name, memory_limit=None))
        made = self.lower(plan, self.processes, self.tensor_device).casting(self.block, self.travels.backward)
        made = replace(made, lends=lends, whole=self.text)
        if self.differentiated:
            made.plan_gradient()
        return made
