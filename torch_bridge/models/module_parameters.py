"""The parameters that one module gathers: which tensors it and the modules inside it use, and when."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_bridge.models.gathered import GatheredParameter, ParameterMoves, Regathering
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.models.shared import SharedParameters


class ModuleParameters:
    """Owns the parameters that one module gathers, for itself and for modules inside it.

        STORED --begin_pass--> GATHERED --end_pass--> STORED

    STORED: modules have the blocks in storage, which optimisers have. GATHERED: they have gathered tensors,
    during a forward pass.

    Nothing else puts gathered tensors in the place of blocks; blocks are replaced only between passes, by
    `ShardedParameter.set_block`. `begin_pass` and `end_pass` are called before and after each forward pass
    of the module, also of one that fails. A module may call itself: only the outermost pass counts.

    A gathered tensor has one of three lives:

    - It is kept by autograd until the backward pass (`GatheredParameter.is_kept`).
    - It is dropped after the forward pass; the backward pass gathers it again (`Regathering`).
    - It is shared by the passes inside `no_sync` and the next one (`is_shared`, `SharedParameters`).

    A tensor that is gathered before its pass begins would be a third state, between the two.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.parameters: list[GatheredParameter] = []
        self._moves = ParameterMoves(context)
        self._shared: SharedParameters | None = None
        self._passes = 0  # forward passes of the module that have begun and not ended
        self._blocks: Sequence[Tensor] = ()  # in storage, while GATHERED
        self._regathering: ExitStack | None = None  # autograd's hooks, while they save references

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleParameters:
        """Copy for the copy of a model, outside of any pass."""
        new = ModuleParameters(self._moves.context)
        memo[id(self)] = new
        memo[id(self._moves)] = new._moves  # which `_shared` uses, too
        new.parameters = copy.deepcopy(self.parameters, memo)
        new._shared = copy.deepcopy(self._shared, memo)
        return new

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether passes inside `no_sync` have left gradients that nothing has summed yet."""
        return self._shared is not None and self._shared.has_unsummed_gradients

    def add(self, new: GatheredParameter) -> None:
        """Gather one more parameter; if it is tied to one that is gathered alike, both are gathered once."""
        for parameter in self.parameters:
            if parameter.to_use == new.to_use and parameter.tensor is new.tensor:
                parameter.places += new.places
                return
        self.parameters.append(new)

    def share_between_passes(self, gradients: Gradients) -> None:
        """Let passes inside `no_sync` share the parameters that are marked so.

        gradients: knows whether passes are inside `no_sync`.
        """
        shared = [parameter for parameter in self.parameters if parameter.is_shared]
        if shared:
            self._shared = SharedParameters(shared, self._moves, gradients)

    def begin_pass(self) -> None:
        """Gather the parameters, and put them into the modules in place of the blocks.

        STORED -> GATHERED, before each forward pass of the module. A module may call itself: an
        inner pass uses what the outermost one has gathered, and nothing changes.
        """
        self._passes += 1
        if self._passes > 1 or not self.parameters:
            return
        # All are gathered before any is replaced: an error leaves the modules as they were.
        blocks = [parameter.tensor for parameter in self.parameters]
        tensors = self._gather_for_pass()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._begin_regathering(blocks, tensors)
        self._blocks = blocks
        self._set_tensors(tensors)

    def end_pass(self) -> None:
        """Give modules their blocks in storage again: GATHERED -> STORED, after the outermost pass."""
        if self._passes == 1 and self._blocks:
            self._set_tensors(self._blocks)
            self._blocks = ()
            if self._regathering is not None:
                self._regathering.close()
                self._regathering = None
        # An error before `begin_pass` ends a pass that never began.
        self._passes = max(self._passes - 1, 0)

    def _set_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Let modules use these tensors, one for each parameter in order."""
        for parameter, x in zip(self.parameters, tensors, strict=True):
            parameter.set_tensor(x)

    def _gather_for_pass(self) -> list[Tensor]:
        """Return the tensor of every parameter: shared with other passes, or gathered now, all together.

        Modules have their blocks still.
        """
        tensors: dict[str, Tensor] = {}
        if self._shared is not None and not torch.compiler.is_compiling():
            tensors = self._shared.take()
        # One message for all that are left.
        missing = [parameter for parameter in self.parameters if parameter.name not in tensors]
        gathered = self._moves.gather(missing, [parameter.tensor for parameter in missing])
        for parameter, x in zip(missing, gathered, strict=True):
            tensors[parameter.name] = x
        return [tensors[parameter.name] for parameter in self.parameters]

    def _begin_regathering(self, blocks: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Save memory: from now on, autograd does not keep gathered tensors for the backward pass.

        It keeps references to them instead, and the backward pass gathers the parameters again. This
        ends in `end_pass`, after the module's forward pass. Parameters with `is_kept` are kept as
        usual.

        Args:
            blocks: The parameters in storage.
            tensors: The gathered ones, in the same order.
        """
        # Of the parameters whose gathered tensors are dropped after the forward pass.
        numbers = [i for i, parameter in enumerate(self.parameters) if not parameter.is_kept]
        dropped_blocks = [blocks[i] for i in numbers]
        if not any(block.requires_grad for block in dropped_blocks):
            return  # no backward pass needs them
        gather = partial(self._moves.gather, [self.parameters[i] for i in numbers])
        regathering = Regathering(dropped_blocks, [tensors[i] for i in numbers], gather)
        # Not a `with` block: this hook runs before the forward pass, and `end_pass` in one after it.
        self._regathering = ExitStack()
        self._regathering.enter_context(regathering.saving())
