"""The parameters that one module gathers: which tensors it and the modules inside it use, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from torch_bridge.models.calls import call_of_hook, is_running
from torch_bridge.models.gathered import GatheredParameter, GatherUnderWay, ParameterMoves
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.models.prefetch import Prefetch, Turn
from torch_bridge.models.regathering import Regathering
from torch_bridge.models.shared import SharedParameters
from torch_bridge.versions.autograd import writes_to
from torch_bridge.versions.pytree import tree_leaves
from xshard import Sharding, XshardError


class ModuleParameters:
    """Owns the parameters that one module gathers, for itself and for modules inside it.

        STORED --begin_pass--> GATHERED --end_pass--> STORED

    STORED: modules have the blocks in storage, which optimisers have. GATHERED: they have gathered tensors,
    during a forward pass.

    Nothing else puts gathered tensors in the place of blocks, except `Regathering` in a backward pass; blocks
    are replaced only between passes, by `ShardedParameter.set_block`. `begin_pass` and `end_pass` are called
    before and after each forward pass of the module, also of one that fails by an `Exception`. What another
    exception leaves, as when a notebook's cell is stopped, `end_unfinished_passes` mends before the next
    pass. A module may call itself: only the outermost pass counts.

    Their gather may have begun before the pass (`Prefetch`): what is on its way is no state of the module.

    A gathered tensor has one of three lives:

    - It is kept by autograd until the backward pass (`GatheredParameter.is_kept`).
    - It is dropped after the forward pass; the backward pass gathers it again (`Regathering`).
    - It is shared by the passes inside `no_sync` and the next one (`is_shared`, `SharedParameters`).
    """

    # The calls of the module that run, and what the outermost one has gathered from which blocks.
    _calls: Sequence[FrameType | None] = ()
    _blocks: Sequence[Tensor] = ()
    _tensors: Sequence[Tensor] = ()
    _writes: Sequence[int] = ()  # to the gathered tensors, before the pass
    _regathering: Regathering | None = None  # while autograd saves references
    _changes_in_passes = False  # whether passes have written to them before they came to the module

    def __init__(self, name: str, context: ParallelContext, prefetch: Prefetch) -> None:
        self.name = name  # of the module
        self.parameters: list[GatheredParameter] = []
        self.n_bytes = 0  # of the gathered tensors, at most
        self._moves = ParameterMoves(context)
        self._prefetch = prefetch
        self._shared: SharedParameters | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: no pass, as frames cannot be copied."""
        copied = ("name", "parameters", "n_bytes", "_moves", "_prefetch", "_shared")
        return {name: getattr(self, name) for name in copied}

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether passes inside `no_sync` have left gradients that nothing has summed yet."""
        return self._shared is not None and self._shared.has_unsummed_gradients

    def add(self, new: GatheredParameter) -> None:
        """Gather one more parameter; if it is tied to one that is gathered alike, both are gathered once."""
        for parameter in self.parameters:
            if parameter.to_use == new.to_use and parameter.parameter is new.parameter:
                parameter.places += new.places
                return
        self.parameters.append(new)

    def count_bytes(self, used: Mapping[str, Sharding]) -> None:
        """Count the bytes that the gathered parameters have; used: their layouts in use, by name."""
        for gathered in self.parameters:
            itemsize = gathered.parameter.tensor.element_size()
            self.n_bytes += itemsize * used[gathered.name].max_local_size
            for sharding in (gathered.parameter.sharding, used[gathered.name]):
                self._prefetch.axes.update(sharding.layout.axes)

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
        self._calls = (*self._calls, call_of_hook())
        if len(self._calls) > 1 or not self.parameters:
            return
        # All are gathered before any is replaced: an error leaves the modules as they were.
        self._blocks = [gathered.parameter.tensor for gathered in self.parameters]
        tensors = self._gather_for_pass()
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._begin_regathering(tensors)
            self._writes = [writes_to(x) for x in tensors if not x.is_inference()]
        self._tensors = tensors
        for parameter, x in zip(self.parameters, tensors, strict=True):
            parameter.put(x)

    def end_pass(self, result: Any) -> None:
        """Give modules their blocks in storage again: GATHERED -> STORED, after the outermost pass.

        Raises XshardError if the pass has written to a gathered tensor: the write would be lost, as
        the block stays as it was.

        result: what the forward pass returned; None if it raised.
        """
        if not self._calls:
            return  # an error came before `begin_pass`
        call = call_of_hook()
        innermost = self._calls[-1]
        # Compiled code has no frame: its call is None, and fits any.
        have_frames = call is not None and innermost is not None
        if have_frames and call is not innermost:
            return  # an error came before `begin_pass` of an inner call
        self._calls = self._calls[:-1]
        if self._calls or not self._tensors:
            return
        tensors = self._tensors
        self._take_back()
        if result is not None and not torch.compiler.is_compiling():
            self._check_not_written(tensors)
            if torch.is_grad_enabled():
                self._keep_for_backward(tensors, result)

    def end_unfinished_passes(self) -> bool:
        """End passes of calls that run no more, as after KeyboardInterrupt: GATHERED -> STORED.

        Returns whether there were any.
        """
        if not self._calls:  # hot: asked for every module with rules, before each forward pass
            return False
        running = [call for call in self._calls if call is None or is_running(call)]
        is_unfinished = len(running) < len(self._calls)
        self._calls = running
        if is_unfinished and not running:
            self._take_back()
        return is_unfinished

    def _take_back(self) -> None:
        """Give modules their blocks, and let autograd save tensors as usual."""
        if self._tensors:
            for parameter, x in zip(self.parameters, self._tensors, strict=True):
                parameter.take_back(x)
        self._tensors = ()
        regathering = self._regathering
        if regathering is None:
            return
        self._regathering = None
        regathering.end_saving()
        if regathering.is_needed:
            turn = self._turn._replace(begin=regathering.begin_gather)
            regathering.take_begun = self._prefetch.gathers_again(turn)

    def _gather_for_pass(self) -> list[Tensor]:
        """Return the tensor of every parameter: one that modules have, a shared one, or gathered now.

        Modules have gathered tensors already if a backward pass is in this module, and computes it
        again. All that are gathered now are gathered together.
        """
        tensors: dict[str, Tensor] = {}
        for parameter in self.parameters:
            if parameter.in_place is not None:
                tensors[parameter.name] = parameter.in_place
        if self._shared is not None and not tensors and not torch.compiler.is_compiling():
            tensors = self._shared.take()
        numbers = [i for i, p in enumerate(self.parameters) if p.name not in tensors]
        missing = [self.parameters[i] for i in numbers]
        gathered = self._gather(missing, [self._blocks[i] for i in numbers])
        for parameter, x in zip(missing, gathered, strict=True):
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
        blocks = [gathered.parameter.tensor for gathered in missing]
        return self._moves.begin_gather(missing, blocks)

    def _begin_regathering(self, tensors: Sequence[Tensor]) -> None:
        """Save memory: from now on, autograd does not keep gathered tensors for the backward pass.

        It keeps references to them instead, and the backward pass gathers the parameters again. This
        ends after the module's forward pass. Parameters with `is_kept` are kept as usual.
        """
        # Frozen parameters, too: the gradients of activations need them.
        numbers = [i for i, p in enumerate(self.parameters) if not p.is_kept]
        if numbers:
            self._regathering = self._regathering_of(numbers, tensors)
            # Not a `with` block: this hook runs before the forward pass, and `end_pass` in one after it.
            self._regathering.begin_saving()

    def _keep_for_backward(self, tensors: Sequence[Tensor], result: Any) -> None:
        """Let modules have the kept tensors again, when the backward pass comes to what they returned."""
        numbers = [i for i, p in enumerate(self.parameters) if p.is_kept]
        if numbers:
            kept = self._regathering_of(numbers, tensors)
            kept.keep([tensors[i] for i in numbers])
            for x in tensors_with_gradient(result):
                x.register_hook(kept.open)

    def _regathering_of(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Regathering:
        """Prepare the backward pass for some of the parameters, by their numbers."""
        parameters = [self.parameters[i] for i in numbers]
        return Regathering(
            parameters,
            [self._blocks[i] for i in numbers],
            [tensors[i] for i in numbers],
            self._moves,
        )

    def _check_not_written(self, tensors: Sequence[Tensor]) -> None:
        """Raise XshardError if a pass wrote to a gathered tensor, whose memory is not the block's."""
        for i, writes in enumerate(self._writes):
            x = tensors[i]
            if writes_to(x) != writes and x.data_ptr() != self._blocks[i].data_ptr():
                name = self.parameters[i].name
                what = f"{name} was written to in a forward pass, in which it is gathered: "
                what += "the write is lost"
                hint = f"write to the block between passes, or store {name} as it is used"
                raise XshardError(what, hint=hint)


def tensors_with_gradient(result: Any) -> list[Tensor]:
    """Return the tensors in the result of a module by which a backward pass may come into it."""
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
