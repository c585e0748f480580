"""Gathered parameters in a backward pass: what autograd saves of them, and when modules have them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.turns import add_saving_hooks, forget_saving_hooks
from torch_bridge.models.gathered import (
    GatheredParameter,
    GatherUnderWay,
    ParameterMoves,
    no_gather,
)
from torch_bridge.versions.autograd import (
    backward_pass_id,
    call_after_backward,
    is_in_backward_pass,
    origin_of,
    origin_of_cast,
    remove_saving_hooks,
    top_saving_hooks,
    writes_to,
)
from xshard import XshardError


class _SavedView(NamedTuple):
    """What autograd saves instead of a gathered parameter: which one, and the view of it that was used.

    Attributes:
        parameter_index: The index of the parameter.
        dtype: Another one than the parameter's if a cast was used, as under autocast.
        shape: The shape of the view.
        stride: Its strides.
        offset: Its offset in the storage.
    """

    parameter_index: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _SavedByOthers(NamedTuple):
    """What hooks outside of ours, as those of a checkpoint, save instead of a tensor."""

    packed: Any


class Regathering:
    """The gathered parameters of one forward pass, in its backward pass.

    They come back in two ways. Autograd has saved references to them, and gets tensors for these. And while
    the backward pass is in the module, modules have them again: a checkpoint runs a part of the module
    once more, perhaps without calling any module, and reads the parameters from there.

        WAITING --the backward pass comes to the module--> GATHERED --it leaves it, or ends--> WAITING

    It leaves the module when autograd has freed all that the module saved: nothing refers to this object
    then.
    """

    def __init__(
        self,
        parameters: Sequence[GatheredParameter],
        blocks: Sequence[Tensor],
        tensors: Sequence[Tensor],
        moves: ParameterMoves,
    ) -> None:
        """Prepare the backward pass of a forward pass that gathered parameters.

        Args:
            parameters: The parameters.
            blocks: Their blocks in storage, in the same order.
            tensors: The gathered tensors.
            moves: Gathers blocks again.
        """
        self._parameters = parameters
        self._blocks = blocks
        self._moves = moves
        # Whether a backward pass comes to the module, and what takes a gather that has begun before.
        self.is_needed = False
        self.take_begun: Callable[[], GatherUnderWay | None] = no_gather
        self._writes = [writes_to(x) for x in blocks]
        self._dtypes = [x.dtype for x in tensors]
        # Autograd may save any view of a parameter, as a transposed weight. A view begins in the
        # same storage, by whose address its parameter is found.
        self._index_of_memory: dict[int, int] = {}
        for i, x in enumerate(tensors):
            if x.numel():
                self._index_of_memory[x.untyped_storage().data_ptr()] = i
        # A cast has memory of its own. Its parameter is found by the node that has gathered it.
        self._index_of_origin = {
            origin_of(x): i for i, x in enumerate(tensors) if x.grad_fn is not None
        }
        # While GATHERED. Emptied, not replaced, at its end, which must not refer to this object.
        self._gathered: list[Tensor] = []
        # The backward pass that has come to the module, and which kept tensors have a gradient in it.
        self._pass_id = -1
        self._with_gradient: set[int] = set()
        self._taking_back: weakref.finalize[..., Any] | None = None

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors of the forward pass for the backward pass, instead of gathering them again.

        Until all have their gradients: then the backward pass has nothing left to compute with them.
        A tensor without a gradient, as of a frozen parameter, is kept until the graph is gone.
        """
        self._gathered += tensors
        if all(x.grad_fn is not None for x in tensors):
            for i, x in enumerate(tensors):
                # Weakly: a tensor would refer to what keeps it, and never be freed.
                x.register_hook(partial(_note_gradient_of, weakref.ref(self), i))

    def note_gradient(self, i: int) -> None:
        """Let go of the kept tensors when the last of them has its gradient; GATHERED -> WAITING."""
        if backward_pass_id() != self._pass_id:
            return  # that of a reentrant checkpoint in the module: others may come
        self._with_gradient.add(i)
        if len(self._with_gradient) < len(self._parameters):
            return
        if self._taking_back is not None:
            self._taking_back()
        self._gathered.clear()

    def open(self, _: Any = None) -> None:
        """Let modules have the gathered parameters in the running backward pass; WAITING -> GATHERED.

        A hook of tensors that the module returns; also called for the first tensor that the module
        saved. Raises XshardError if a parameter was written to since the forward pass.
        """
        if self._taking_back is not None and self._taking_back.alive:
            return
        self._with_gradient.clear()
        self._pass_id = backward_pass_id()
        if not self._gathered:
            self._gathered = self._gather_again()
        if not is_in_backward_pass():
            return  # somebody looks at what a graph has saved
        for parameter, x in zip(self._parameters, self._gathered, strict=True):
            parameter.put(x)
        taking_back = weakref.finalize(self, _take_back, self._parameters, self._gathered)
        taking_back.atexit = False
        call_after_backward(taking_back, if_failed=taking_back)
        self._taking_back = taking_back

    def _gather_again(self) -> list[Tensor]:
        """Return the gathered parameters: what has been begun ahead, if anything, or a new gather."""
        # After an optimiser's step, say, other values than in the forward pass would come back.
        if self._writes != [writes_to(x) for x in self._blocks]:
            raise XshardError(
                "a parameter was written to between its forward and its backward pass"
            )
        # With gradients: a reentrant checkpoint runs a backward pass of its own to the blocks.
        with torch.enable_grad():
            begun_ahead = self.take_begun()
            if begun_ahead is not None:
                tensors = begun_ahead.wait(self._parameters, self._blocks)
                if tensors is not None:
                    return tensors
            return self._moves.gather(self._parameters, self._blocks)

    @property
    def begin_gather(self) -> Callable[[], GatherUnderWay | None]:
        """The function that begins to gather them; it does not refer to this object."""
        return partial(self._moves.begin_gather, self._parameters, self._blocks)

    def reference_to(self, x: Tensor) -> _SavedView | None:
        """Return what stands for a tensor that is a view of a gathered parameter; None for any other.

        Hot: called for every tensor that is saved.
        """
        self.is_needed = True
        if x.layout is torch.strided:
            i = self._index_of_memory.get(x.untyped_storage().data_ptr())
            if i is None or x.dtype != self._dtypes[i]:
                i = self._index_of_origin.get(origin_of_cast(x))
            if i is not None:
                return _SavedView(i, x.dtype, x.shape, x.stride(), x.storage_offset())
        return None

    def view(self, saved: _SavedView) -> Tensor:
        """Return the view that a reference stands for, of what has been gathered again."""
        gathered = self._gathered[saved.parameter_index].to(saved.dtype)
        return gathered.as_strided(saved.shape, saved.stride, saved.offset)


class Saving:
    """What autograd saves in one call of a module: references in place of gathered parameters.

    Several calls may use what one gather has brought, each inside hooks of its own, as of a checkpoint.
    """

    def __init__(self, regathering: Regathering) -> None:
        self._regathering = regathering
        self._hooks_around: Any = None

    def begin(self) -> None:
        """From now on, let autograd save references instead of gathered parameters."""
        # Ours hide the hooks around them, which are called for all other tensors.
        self._hooks_around = top_saving_hooks()
        add_saving_hooks((self._pack, self._unpack))

    def end(self) -> None:
        """Let autograd save tensors as before `begin`."""
        forget_saving_hooks((self._pack, self._unpack))
        was_there = remove_saving_hooks(self._pack, self._unpack)
        if not was_there and self._hooks_around is not None:
            # The call was interrupted, and the context around it, as a checkpoint's, has ended since: it has
            # removed the last hooks, which were ours, and has left its own.
            remove_saving_hooks(*self._hooks_around)

    def _pack(self, x: Tensor) -> Any:
        """Return what autograd saves of a tensor: a reference, if it is a view of a gathered parameter."""
        reference = self._regathering.reference_to(x)
        if reference is not None:
            return reference
        if self._hooks_around is None:
            return x
        pack, _ = self._hooks_around
        return _SavedByOthers(pack(x))

    def _unpack(self, saved: Any) -> Tensor:
        """Return to the backward pass the tensor of which `_pack` returned `saved`.

        The first call gathers all parameters again, in one message: the backward pass is in the module.
        """
        self._regathering.open()
        if isinstance(saved, _SavedView):
            return self._regathering.view(saved)
        if isinstance(saved, _SavedByOthers):
            _, unpack = self._hooks_around
            return unpack(saved.packed)
        return saved


def _note_gradient_of(reference: weakref.ref[Regathering], i: int, _: Tensor) -> None:
    """Tell a pass whose tensors are kept that one of them has its gradient; a hook of that tensor."""
    regathering = reference()
    if regathering is not None:
        regathering.note_gradient(i)


def _take_back(parameters: Sequence[GatheredParameter], tensors: list[Tensor]) -> None:
    """Let modules have their blocks, and free the gathered tensors."""
    for parameter, x in zip(parameters, tensors, strict=True):
        parameter.take_back(x)
    tensors.clear()
