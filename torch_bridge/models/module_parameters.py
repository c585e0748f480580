"""The parameters that one module gathers: which tensors it and the modules inside it use, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.turns import BatchPart, PerPart, current_part, without_pauses
from torch_bridge.models.calls import call_of_hook, is_running
from torch_bridge.models.gathered import GatheredParameter, GatherUnderWay, ParameterMoves
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.models.prefetch import Prefetch, Turn
from torch_bridge.models.regathering import Regathering, Saving
from torch_bridge.models.shared import SharedParameters
from torch_bridge.versions.autograd import is_in_backward_pass, writes_to
from torch_bridge.versions.functorch import has_functorch_transforms
from torch_bridge.versions.pytree import tree_leaves
from xshard import Sharding, XshardError


class _Gathered:
    """What one gather has brought to the modules: the tensors, and which passes use them.

    That is one pass; if a batch is computed in parts (`halves`), the pass of each part: the first one
    gathers, and modules have the tensors until all parts are done.

    Attributes:
        blocks: The blocks in storage from which they were gathered.
        tensors: The gathered tensors.
        is_recorded: Whether autograd knows of the gather.
        writes: The writes to the tensors before the pass.
        regathering: Gathers them again in the backward pass, if autograd does not keep them.
        turns: The parts of the batch; None for a pass of the whole batch.
        parts_done: The parts whose last pass has ended.
    """

    def __init__(self, blocks: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.blocks = blocks
        self.tensors = tensors
        self.is_recorded = torch.is_grad_enabled()
        self.writes: Sequence[int] = ()
        self.regathering: Regathering | None = None
        part = current_part()
        self.turns = None if part is None else part.turns
        self.parts_done: set[BatchPart] = set()

    @property
    def is_done(self) -> bool:
        """Whether the passes of all parts of the batch have ended."""
        return self.turns is None or self.parts_done.issuperset(self.turns.parts)

    def serves(self, part: BatchPart | None) -> bool:
        """Return whether a pass that begins can use these tensors, too: one of the same batch."""
        is_same_batch = part is not None and part.turns is self.turns
        return is_same_batch and (self.is_recorded or not torch.is_grad_enabled())


class _Pass(NamedTuple):
    """The outermost call of the module that runs: what it uses, and what autograd saves in it."""

    gathered: _Gathered
    saving: Saving | None


class ModuleParameters:
    """Owns the parameters that one module gathers, for itself and for modules inside it.

        STORED --begin_pass--> GATHERED --end_pass--> STORED

    STORED: modules have the blocks in storage, which optimisers have. GATHERED: they have gathered tensors,
    during a forward pass.

    Nothing else puts gathered tensors in the place of blocks, except `Regathering` in a backward pass; blocks
    are replaced only between passes, by `ShardedParameter.set_block`. `begin_pass` and `end_pass` are called
    before and after each forward pass of the module, also of one that fails by an `Exception`. What another
    exception leaves, as when a notebook's cell is stopped, `end_unfinished_passes` mends before the next
    pass. A module may call itself: only the outermost pass counts. If a batch is computed in parts
    (`autodiff.turns`), each part has a pass of its own, and all of them use what the first one gathers.

    Their gather may have begun before the pass (`Prefetch`): what is on its way is no state of the module.

    A gathered tensor has one of three lives:

    - It is kept by autograd until the backward pass (`GatheredParameter.is_kept`).
    - It is dropped after the forward pass; the backward pass gathers it again (`Regathering`).
    - It is shared by the passes inside `no_sync` and the next one (`is_shared`, `SharedParameters`).
    """

    _changes_in_passes = False  # whether passes have written to them before they came to the module

    def __init__(self, name: str, context: ParallelContext, prefetch: Prefetch) -> None:
        self.name = name  # of the module
        self.parameters: list[GatheredParameter] = []
        self.n_bytes = 0  # of the gathered tensors, at most
        self._moves = ParameterMoves(context)
        self._prefetch = prefetch
        self._shared: SharedParameters | None = None
        self._forget_passes()

    def _forget_passes(self) -> None:
        # The calls of the module that run, the outermost first, and what that one uses.
        self._calls = PerPart[Sequence[FrameType | None]](())
        self._pass = PerPart[_Pass | None](None)
        self._gathered_for_parts: list[_Gathered] = []  # of batches whose parts are not all done

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: no pass, as frames cannot be copied."""
        copied = ("name", "parameters", "n_bytes", "_moves", "_prefetch", "_shared")
        return {name: getattr(self, name) for name in copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_passes()

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether passes inside `no_sync` have left gradients that nothing has summed yet."""
        return self._shared is not None and self._shared.has_unsummed_gradients

    def add(self, new: GatheredParameter) -> None:
        """Gather one more parameter; if it is tied to one that is gathered alike, both are gathered once."""
        for parameter in self.parameters:
            if parameter.to_use == new.to_use and parameter.parameter is new.parameter:
                parameter.slots += new.slots
                return
        self.parameters.append(new)

    def count_bytes(self, used: Mapping[str, Sharding]) -> None:
        """Count the bytes that the gathered parameters have; used: their layouts in use, by name."""
        for gathered in self.parameters:
            itemsize = gathered.dtypes().result.itemsize
            self.n_bytes += itemsize * used[gathered.name].max_local_size
            for sharding in (gathered.parameter.sharding, used[gathered.name]):
                # Sub-axes, for which `spread` stands, are parts of the mesh's axes.
                self._prefetch.axes.update(map(sharding.mesh.origin, sharding.layout.axes))

    def share_between_passes(self, gradients: Gradients) -> None:
        """Let passes inside `no_sync` share the parameters that are marked so.

        Args:
            gradients: Knows whether passes are inside `no_sync`.
        """
        shared = [parameter for parameter in self.parameters if parameter.is_shared]
        if shared:
            self._shared = SharedParameters(shared, self._moves, gradients)

    def begin_pass(self) -> None:
        """Gather the parameters, and put them into the modules in place of the blocks.

        STORED -> GATHERED, before each forward pass of the module. A module may call itself: an
        inner pass uses what the outermost one has gathered, and nothing changes.
        """
        self._calls.value = (*self._calls.value, call_of_hook())
        if len(self._calls.value) > 1 or not self.parameters:
            return
        part = current_part()
        gathered = self._gathered_for(part)
        if gathered is None:
            gathered = self._gather_and_put()
        if part is not None:
            gathered.parts_done.discard(part)  # it may come again before others have come
        saving = None
        if gathered.regathering is not None and torch.is_grad_enabled():
            saving = Saving(gathered.regathering)
            # Not a `with` block: this hook runs before the forward pass, and `end_pass` in one after it.
            saving.begin()
        self._pass.value = _Pass(gathered, saving)

    def _gathered_for(self, part: BatchPart | None) -> _Gathered | None:
        """Return what another part of the batch has gathered, if this one can use it."""
        for gathered in self._gathered_for_parts:
            if gathered.serves(part):
                return gathered
        return None

    def _gather_and_put(self) -> _Gathered:
        """Gather the parameters, and let modules have them: STORED -> GATHERED."""
        # All are gathered before any is replaced: an error leaves the modules as they were.
        blocks = [parameter.parameter.tensor for parameter in self.parameters]
        # Slots may hold tensors of another part of the batch that this one cannot use: autograd has not
        # recorded their gather.
        may_hold_gathered = current_part() is None or is_in_backward_pass()
        with without_pauses():
            tensors = self._gather_for_pass(blocks, may_hold_gathered)
        gathered = _Gathered(blocks, tensors)
        if not torch.compiler.is_compiling():
            # `torch.func` has no hooks of saved tensors: what it gathers stays until its backward pass.
            if gathered.is_recorded and not has_functorch_transforms():
                # Frozen parameters, too: the gradients of activations need them.
                not_kept = [
                    i for i, parameter in enumerate(self.parameters) if not parameter.is_kept
                ]
                if not_kept:
                    gathered.regathering = self._regathering_of(not_kept, gathered)
            gathered.writes = [writes_to(x) for x in gathered.tensors if not x.is_inference()]
        if gathered.turns is not None:
            self._gathered_for_parts.append(gathered)
            gathered.turns.at_end.append(self._end_parts)
        for parameter, x in zip(self.parameters, gathered.tensors, strict=True):
            parameter.put(x)
        return gathered

    def end_pass(self, result: Any) -> None:
        """Give modules their blocks in storage again: GATHERED -> STORED, after the outermost pass.

        Raises XshardError if the pass has written to a gathered tensor: the write would be lost, as
        the block stays as it was.

        Args:
            result: What the forward pass returned; None if it raised.
        """
        calls = self._calls.value
        if not calls:
            return  # an error came before `begin_pass`
        call = call_of_hook()
        innermost = calls[-1]
        # Compiled code has no frame: its call is None, and fits any.
        have_frames = call is not None and innermost is not None
        if have_frames and call is not innermost:
            return  # an error came before `begin_pass` of an inner call
        self._calls.value = calls[:-1]
        ending = self._pass.value
        if self._calls.value or ending is None:
            return
        self._end(ending)
        if result is not None and not torch.compiler.is_compiling():
            self._check_not_written(ending.gathered)
            if torch.is_grad_enabled():
                self._keep_for_backward(ending.gathered, result)

    def end_unfinished_passes(self) -> bool:
        """End passes of calls that run no more, as after KeyboardInterrupt: GATHERED -> STORED.

        Returns whether there were any.
        """
        calls = self._calls.value
        if not calls:  # hot: asked for every module with rules, before each forward pass
            return False
        running = [call for call in calls if call is None or is_running(call)]
        is_unfinished = len(running) < len(calls)
        self._calls.value = running
        unfinished = self._pass.value
        if is_unfinished and not running and unfinished is not None:
            self._end(unfinished)
        return is_unfinished

    def _end(self, ending: _Pass) -> None:
        """End a pass: let autograd save tensors as usual; after the last part modules have their blocks."""
        self._pass.value = None
        if ending.saving is not None:
            ending.saving.end()
        part = current_part()
        if part is not None:
            ending.gathered.parts_done.add(part)
        if ending.gathered.is_done:
            self._take_back(ending.gathered)

    def _end_parts(self) -> None:
        """Give modules their blocks at the end of a batch; called also if a part failed or never came."""
        while self._gathered_for_parts:
            self._take_back(self._gathered_for_parts[-1])

    def _take_back(self, gathered: _Gathered) -> None:
        """Give modules their blocks: GATHERED -> STORED."""
        for parameter, x in zip(self.parameters, gathered.tensors, strict=True):
            parameter.take_back(x)
        if gathered.turns is not None:
            self._gathered_for_parts.remove(gathered)
        regathering = gathered.regathering
        if regathering is not None and regathering.is_needed:
            turn = self._turn._replace(begin=regathering.begin_gather)
            regathering.take_begun = self._prefetch.gathers_again(turn)

    def _gather_for_pass(self, blocks: Sequence[Tensor], may_hold_gathered: bool) -> list[Tensor]:
        """Return the tensor of every parameter: one that modules have, a shared one, or gathered now.

        Modules have gathered tensors already if a backward pass is in this module, and computes it
        again. All that are gathered now are gathered together.
        """
        tensors: dict[str, Tensor] = {}
        if may_hold_gathered:
            for parameter in self.parameters:
                if parameter.gathered_tensor is not None:
                    tensors[parameter.name] = parameter.gathered_tensor
        if self._shared is not None and not tensors and not torch.compiler.is_compiling():
            tensors = self._shared.take()
        missing = []
        missing_blocks = []
        for parameter, block in zip(self.parameters, blocks, strict=True):
            if parameter.name not in tensors:
                missing.append(parameter)
                missing_blocks.append(block)
        for parameter, x in zip(missing, self._gather(missing, missing_blocks), strict=True):
            tensors[parameter.name] = x
        return [tensors[parameter.name] for parameter in self.parameters]

    def _gather(
        self, missing: Sequence[GatheredParameter], blocks: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gather parameters for a pass, or await what has begun to travel."""
        if not torch.compiler.is_compiling():
            begun = self._prefetch.take(self._turn)
            if begun is not None:
                tensors = begun.wait(missing, blocks)
                if tensors is not None:
                    return tensors
                self._changes_in_passes = True
                self._prefetch.compare_pass()
        return self._moves.gather(missing, blocks)

    @cached_property
    def _turn(self) -> Turn:
        return Turn(self.name, self.n_bytes, self._begin_gather)

    def _begin_gather(self) -> GatherUnderWay | None:
        """Begin to gather what the module's next pass will gather; nothing changes."""
        if self._changes_in_passes:
            return None
        missing = self.parameters
        if self._shared is not None and self._shared.serves_next_pass:
            missing = [parameter for parameter in missing if not parameter.is_shared]
        blocks = [parameter.parameter.tensor for parameter in missing]
        return self._moves.begin_gather(missing, blocks)

    def _keep_for_backward(self, gathered: _Gathered, result: Any) -> None:
        """Let modules have the kept tensors again, when the backward pass comes to what they returned."""
        kept = [i for i, parameter in enumerate(self.parameters) if parameter.is_kept]
        if kept and not has_functorch_transforms():
            regathering = self._regathering_of(kept, gathered)
            regathering.keep([gathered.tensors[i] for i in kept])
            for x in tensors_with_gradient(result):
                x.register_hook(regathering.open)

    def _regathering_of(self, indices: Sequence[int], gathered: _Gathered) -> Regathering:
        """Prepare the backward pass for some of the parameters, by their indices."""
        parameters = [self.parameters[i] for i in indices]
        return Regathering(
            parameters,
            [gathered.blocks[i] for i in indices],
            [gathered.tensors[i] for i in indices],
            self._moves,
        )

    def _check_not_written(self, gathered: _Gathered) -> None:
        """Raise XshardError if a pass wrote to a gathered tensor, whose memory is not the block's."""
        for i, writes in enumerate(gathered.writes):
            x = gathered.tensors[i]
            if writes_to(x) != writes and x.data_ptr() != gathered.blocks[i].data_ptr():
                name = self.parameters[i].name
                reason = f"{name} was written to in a forward pass, in which it is gathered: "
                reason += "the write is lost"
                hint = f"write to the block between passes, or store {name} as it is used"
                raise XshardError(reason, hint=hint)


def tensors_with_gradient(result: Any) -> list[Tensor]:
    """Return the tensors in the result of a module by which a backward pass may come into it."""
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
