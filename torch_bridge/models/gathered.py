"""Parameters that modules use under another layout: how they move, and which tensor modules have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import check_not_swapped
from torch_bridge.autodiff.pending import begin
from torch_bridge.calls.move import PLAIN_TYPES, MoveCall
from torch_bridge.comm_dtype import CommDtype, CommDtypeLike
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import world_key
from torch_bridge.models.offload import copy_to_device
from torch_bridge.models.parameters import ParallelContext, ShardedParameter, TensorSlot
from torch_bridge.precision import Precision, parameter_dtypes
from torch_bridge.redistribution import redistribute
from torch_bridge.redistribution.tree import SharedMove, share_collectives
from torch_bridge.versions.autograd import addresses_of, lazy_copies, writes_to
from torch_bridge.versions.functorch import has_functorch_transforms
from xshard.cost.machine import resolve_profile
from xshard.errors import located
from xshard.replicas import are_replicas_checked


@dataclass(eq=False)
class GatheredParameter:
    """A parameter that modules use under another layout than the one in which it is stored.

    Slots hold the block, except while they hold gathered tensors: in a forward pass, and while a backward
    pass computes some of it again, as a checkpoint does. Passes may overlap: slots hold the tensor that was
    put there last.

    Attributes:
        name: Its name in the model.
        slots: The modules and attributes that use it so; several for a tied parameter, gathered once.
        parameter: The parameter in storage.
        to_use: The move of its block, as "o/dp i -> o i | copy(dp)".
        to_storage: The move of its gradient, as "o i | sum(dp) -> o/dp i".
        is_kept: Whether autograd keeps the gathered tensor until the backward pass, which gathers it again
            otherwise.
        is_shared: Whether passes inside `no_sync` and the next one outside gather it once.
        precision: The dtypes in which it is used and its gradients are added; None: that in storage.
    """

    name: str
    slots: list[TensorSlot]
    parameter: ShardedParameter
    to_use: str
    to_storage: str
    is_kept: bool
    is_shared: bool
    precision: Precision | None = None
    # Put into slots, the current one last.
    _gathered_tensors: list[Tensor] = field(default_factory=list)

    def dtypes(self, comm_dtype: CommDtypeLike = None) -> CommDtype:
        """Return how it travels into use; comm_dtype: how it travels without a precision."""
        return parameter_dtypes(self.precision, comm_dtype, self.parameter.tensor.dtype)

    @property
    def moves(self) -> bool:
        """Whether it is used under another layout, and not only cast or copied."""
        stored, used = self.to_use.split(" -> ")
        return stored != used

    @property
    def gathered_tensor(self) -> Tensor | None:
        """The gathered tensor that slots hold now; None while they hold the block."""
        return self._gathered_tensors[-1] if self._gathered_tensors else None

    def put(self, x: Tensor) -> None:
        """Put a gathered tensor into the slots, until `take_back`."""
        if not self._gathered_tensors:
            self.parameter.set_aside()
        self._gathered_tensors.append(x)
        self._set_slots(x)

    def take_back(self, x: Tensor) -> None:
        """Take a gathered tensor out of the slots; nothing changes if it has been taken out already."""
        if not self._gathered_tensors:
            return
        for i, gathered_tensor in enumerate(self._gathered_tensors):
            if gathered_tensor is x:
                del self._gathered_tensors[i]
                break
        if self._gathered_tensors:
            self._set_slots(self._gathered_tensors[-1])
        else:
            self._set_slots(self.parameter.tensor)
            self.parameter.bring_back()

    def _set_slots(self, x: Tensor) -> None:
        for slot in self.slots:
            slot.set_tensor(x)


class GatherUnderWay:
    """Parameters on their way, begun before their module needs them.

    What travels are the values of the beginning: blocks that are written to meanwhile are seen.
    """

    def __init__(
        self,
        parameters: list[GatheredParameter],
        blocks: Sequence[Tensor],
        end: Callable[[], list[Tensor]],
        copies: Sequence[Tensor],
    ) -> None:
        self._parameters = parameters
        self._end = end
        # As long as there is a lazy copy, a write to a block moves the block.
        self._kept_alive = (blocks, copies)
        self._state = _state_of(blocks)

    def wait(
        self, parameters: Sequence[GatheredParameter], blocks: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return the gathered tensors; None if a gather that begins now would differ.

        Meanwhile a parameter may have been written to, replaced or frozen, or shared between passes.

        Args:
            parameters: Those to gather now.
            blocks: Their blocks.
        """
        if list(parameters) != self._parameters or _state_of(blocks) != self._state:
            return None
        return self._end()


def _state_of(blocks: Sequence[Tensor]) -> list[object]:
    """Return what changes when somebody writes to blocks, replaces or freezes one."""
    writes = [writes_to(x) for x in blocks if not x.is_inference()]
    return [*map(id, blocks), *addresses_of(blocks), *[x.requires_grad for x in blocks], *writes]


def no_gather() -> None:
    """Return None: no gather has begun."""


class ParameterMoves:
    """Moves parameters of a module between storage and use, several together.

    Layouts are known when a model is parallelized, shapes and dtypes at the first pass. Later passes run
    what was prepared then.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.context = context
        self._moves: dict[Hashable, _Move] = {}

    def __reduce__(self) -> tuple[type, tuple[ParallelContext]]:
        """Copy without what is prepared: executables hold process groups."""
        return ParameterMoves, (self.context,)

    def gather(
        self, parameters: Sequence[GatheredParameter], blocks: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return parameters as modules use them, from their blocks in storage, differentiably."""
        return self._move_of(parameters, is_gradient=False)(self._in_use(blocks))

    def begin_gather(
        self, parameters: Sequence[GatheredParameter], blocks: Sequence[Tensor]
    ) -> GatherUnderWay | None:
        """Begin to gather parameters; None where they cannot be gathered ahead, on all processes alike."""
        if not parameters or any(map(Tensor.is_inference, blocks)):
            return None
        if not torch.is_grad_enabled():
            # Who awaits it decides whether its gradient is recorded: a graph is prepared in any case.
            with torch.inference_mode(False):  # which enables gradients, too
                return self.begin_gather(parameters, blocks)
        end = self._move_of(parameters, is_gradient=False).begin(self._in_use(blocks))
        if end is None:
            return None
        # Copies on another device have the values of the beginning already.
        copies = lazy_copies(blocks) if self.context.device is None else []
        return GatherUnderWay(list(parameters), blocks, end, copies)

    def reduce_gradients(
        self, parameters: Sequence[GatheredParameter], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return gradients as parameters are stored, from those of the gathered tensors."""
        moved = self._move_of(parameters, is_gradient=True)(gradients)
        if self.context.device is None:
            return moved
        return [
            copy_to_device(x, gathered.parameter.tensor.device)
            for x, gathered in zip(moved, parameters, strict=True)
        ]

    def _in_use(self, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return blocks on the device where modules use them, differentiably."""
        if self.context.device is None:
            return blocks
        return [copy_to_device(x, self.context.device) for x in blocks]

    def _move_of(self, parameters: Sequence[GatheredParameter], is_gradient: bool) -> _Move:
        """Return the move that gathers some parameters, or that reduces their gradients; cached.

        A module asks for a few sets of parameters again and again: for all, for those that passes do
        not share, and for those that the backward pass gathers again.
        """
        if torch.compiler.is_compiling():
            return _Move(parameters, self.context, is_gradient)  # only the graph is kept
        key = (tuple(parameters), is_gradient)
        if key not in self._moves:
            self._moves[key] = _Move(parameters, self.context, is_gradient)
        return self._moves[key]


# The attributes of a tensor on which its plan depends, and whether autograd records its move. They are read
# in C, as a forward pass asks every parameter.
_plan_facts_of = attrgetter(
    "shape", "dtype", "device", "requires_grad", "__class__", "layout", "is_nested"
)


class _Move:
    """The move of some parameters, or of their gradients, prepared once for each kind of tensors.

    `redistribute` would find out each time what is the same in every pass: the call of each tensor, its
    executable, which executables share collectives, and their adjoints.
    """

    def __init__(
        self, parameters: Sequence[GatheredParameter], context: ParallelContext, is_gradient: bool
    ) -> None:
        self._context = context
        self._parameters = parameters
        self._is_gradient = is_gradient
        self._shapes = [gathered.parameter.sharding.shape for gathered in parameters]
        # Texts "layout -> layout", one per parameter.
        self._layouts = [parameter.to_use for parameter in parameters]
        if is_gradient:
            self._layouts = [parameter.to_storage for parameter in parameters]
        self._prepared: dict[Hashable, list[SharedMove]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move one tensor for each parameter: blocks to use, as [o/dp, i] -> [o, i], or gradients back.

        Hot: every forward pass of a module calls it. Tensors of a known kind move by executables
        that were prepared before, with few collectives.
        """
        if not tensors:
            return []
        prepared = None
        if not torch.compiler.is_compiling():
            prepared = self._prepared_for(tensors)
        if prepared is None:
            # One by one: the compiler joins the collectives of a graph by itself.
            return [self._redistribute(i, x) for i, x in enumerate(tensors)]
        return _in_order(prepared, [shared.run(tensors) for shared in prepared])

    def begin(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]] | None:
        """Begin to move the tensors; return a function that ends it. None: they only move at once."""
        prepared = None if has_functorch_transforms() else self._prepared_for(tensors)
        if prepared is None:
            return None
        finish_each = [begin(shared.executable, *shared.own_blocks(tensors)) for shared in prepared]
        return lambda: _in_order(prepared, [finish() for finish in finish_each])

    def _prepared_for(self, tensors: Sequence[Tensor]) -> list[SharedMove] | None:
        """Return the prepared moves of tensors of a kind; None if only `redistribute` can move them."""
        # These debugging modes compare calls or replicas each time.
        if desync.ALWAYS or are_replicas_checked(None):
            return None
        check_not_swapped()
        profile = resolve_profile(self._context.profile)
        plan_facts = tuple(map(_plan_facts_of, tensors))
        # All that the prepared moves depend on and that may change from pass to pass: the machine's
        # profile, the process groups (new ones with a new world), whether autograd records, and the
        # tensors' shapes and dtypes.
        key = (profile, world_key(), torch.is_grad_enabled(), plan_facts)
        prepared = self._prepared.get(key)
        if prepared is None:
            if any(type(x) not in PLAIN_TYPES for x in tensors):
                return None  # an executable would keep fake tensors
            prepared = self._prepare(tensors)
            self._prepared[key] = prepared
        return prepared

    def _prepare(self, tensors: Sequence[Tensor]) -> list[SharedMove]:
        """Plan the move of each tensor, and join moves so that many tensors share one collective.

        Returns at most two joined moves: of tensors with a gradient, and of those without. An error
        begins with the name of the parameter.
        """
        executables = {}
        for i, x in enumerate(tensors):
            with located(self._parameters[i].name):
                call = MoveCall.of(
                    self._layouts[i],
                    self._context.mesh,
                    self._shapes[i],
                    self._context.profile,
                    self._comm_dtypes(i),
                )
                # Only linear moves can share collectives. All are: rules of parameters shard, copy
                # and sum, and never take a max or min.
                executable = call.executable_for(x)
                is_on_way_to_use = not self._is_gradient
                if self._context.device is not None and is_on_way_to_use:
                    # `_in_use` has copied it to that device already: nobody else has this copy, which
                    # may be the result.
                    executable = replace(executable, may_return_input=True)
                executables[i] = executable
        return share_collectives(executables, dict(enumerate(tensors)), bucket_bytes=None)

    def _comm_dtypes(self, i: int) -> Any:
        """Return the dtypes in which tensor `i` travels and arrives."""
        parameter = self._parameters[i]
        travels = parameter.dtypes(self._context.comm_dtype)
        if self._is_gradient:
            return travels.adjoint(parameter.parameter.tensor.dtype)
        return travels

    def _redistribute(self, i: int, x: Tensor) -> Tensor:
        """Move one tensor by the public verb."""
        return redistribute(
            x,
            self._layouts[i],
            self._context.mesh,
            shape=self._shapes[i],
            profile=self._context.profile,
            comm_dtype=self._comm_dtypes(i),
        )


def _in_order(
    moves: Sequence[SharedMove], results_of_moves: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the results of all moves in the order of their tensors."""
    results: dict[int, Tensor] = {}
    for shared, moved in zip(moves, results_of_moves, strict=True):
        results.update(zip(shared.indices, moved, strict=True))
    return [results[i] for i in range(len(results))]
