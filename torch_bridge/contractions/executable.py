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
from torch_bridge.contractions.part import Lent, Move, OwnGradient, PartExecutable
from torch_bridge.lower.computed_once import computed_once
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import Plan, dtypes
from xshard.contractions.plan import ContractionPlan, Part
from xshard.plans.plan import find_plan
from xshard.steps import Retag


@dataclass(frozen=True, eq=False)
class ContractionExecutable:
    """The blocks of the operands -> the block of the result.

    lowering: how it was made of the plan.
    """

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

    @computed_once
    def has_gradients(self) -> bool:
        """True, once the plans of the backward pass are lowered: its groups are made while all are here."""
        for part in self.parts:
            part.plan_gradients()
        return True


@dataclass(frozen=True, eq=False)
class Lowering:
    """How plans become executables, on which processes and for which blocks.

    lower: the plan of a move, the processes and the device of tensors -> the move's executable.
    """

    processes: ProcessMesh
    block: torch.dtype
    tensor_device: torch.device
    travels: CommDtype
    lower: Callable[[Plan, ProcessMesh, torch.device], Executable] = lower

    def contraction(self, plan: ContractionPlan) -> ContractionExecutable:
        """The executable of a plan."""
        last = len(plan.parts) - 1
        parts = (
            self._part(part, [self.travels] * len(part.takes), self.travels, i == last)
            for i, part in enumerate(plan.parts)
        )
        return ContractionExecutable(plan, self, tuple(parts))

    def _part(
        self, part: Part, travel: Sequence[CommDtype], result: CommDtype, is_last: bool
    ) -> PartExecutable:
        """travel, result: in which dtypes operands and result travel, forward and back."""
        return PartExecutable(
            part.takes,
            tuple(map(self._lent, part.moves, travel)),
            LocalContraction.of(part, self.processes.device),
            self._move(part.result, result),
            tuple(own and self._own(part, i, own) for i, own in enumerate(part.gradients)),
            is_last,
        )

    def _own(self, part: Part, i: int, gradient: ContractionPlan) -> OwnGradient:
        others = [move.dst for j, move in enumerate(part.moves) if j != i]
        back = CommDtype(self.travels.backward, self.travels.forward)
        own = self._part(gradient.parts[0], [back, *(self.travels for _ in others)], back, True)
        pairs = zip(gradient.contraction.operands[1:], others, strict=True)
        return OwnGradient(own, tuple(layout == used for layout, used in pairs))

    def _lent(self, plan: Plan, travels: CommDtype) -> Move:
        """The move of an operand, which is only read."""
        move = self._move(plan, travels)
        return Lent(move) if move and all(isinstance(step, Retag) for step in plan.steps) else move

    def _move(self, plan: Plan, travels: CommDtype) -> Executable | None:
        if not plan.steps:
            return None
        name = dtypes.name_of(travels.forward)
        if plan.dtype != name:
            plan = find_plan(replace(plan.request, dtype=name, memory_limit=None))
        return self.lower(plan, self.processes, self.tensor_device).casting(self.block, travels.backward)
