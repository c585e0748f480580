"""Parameters that modules use under another layout: how they move, and how autograd saves them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import check_not_swapped
from torch_bridge.calls.move import PLAIN, MoveCall
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtypes
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import world
from torch_bridge.models.parameters import ParallelContext, Place
from torch_bridge.models.torch_private import writes_to
from torch_bridge.redistribution import redistribute
from torch_bridge.redistribution.tree import SharedMove, share_collectives
from xshard import XshardError
from xshard.cost.machine import asked_for
from xshard.errors import located
from xshard.replicas import are_checked


@dataclass(eq=False)
class GatheredParameter:
    """A parameter that modules use under another layout than the one in which it is stored.

    Attributes:
        name: Its name in the model.
        places: Where modules use it so; several for a tied parameter, which is gathered once.
        to_use: The move of its block, as "o/dp i -> o i | copy(dp)".
        to_storage: The move of its gradient, as "o i | sum(dp) -> o/dp i".
        shape: Its global shape.
        is_kept: Whether autograd keeps the gathered tensor until the backward pass, which gathers it again
            otherwise.
        is_shared: Whether passes inside `no_sync` and the next one outside gather it once.
    """

    name: str
    places: list[Place]
    to_use: str
    to_storage: str
    shape: tuple[int, ...]
    is_kept: bool = True
    is_shared: bool = False

    @property
    def tensor(self) -> Any:
        """The tensor that modules have: the block, or the gathered one in a forward pass."""
        return self.places[0].get()

    def put(self, x: Any) -> None:
        """Let all modules use another tensor."""
        for place in self.places:
            place.put(x)


class _Prepared(dict[Hashable, list[SharedMove]]):
    """Prepared moves by kind of call. A copy of it is empty: executables hold process groups."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Prepared, ()


# What a plan depends on in a tensor, and what decides whether autograd records its move. All of it is read
# in C: a forward pass asks this of every parameter.
_kind_of = attrgetter(
    "shape", "dtype", "device", "requires_grad", "__class__", "layout", "is_nested"
)


class ParameterMoves:
    """Moves parameters of a module between storage and use: several together, each kind prepared once.

    Layouts are known when a model is parallelized, shapes and dtypes at the first pass. Later passes run
    what was prepared then: executables that share collectives, and their adjoints. Casts, or a gather that
    begins earlier, would have their place in `_prepare` and `_move`.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.context = context
        self._prepared = _Prepared()

    def gather(
        self, parameters: Sequence[GatheredParameter], blocks: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return parameters as modules use them, from their blocks in storage, differentiably."""
        return self._move(parameters, blocks, is_gradient=False)

    def reduce_gradients(
        self, parameters: Sequence[GatheredParameter], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return gradients as parameters are stored, from those of the gathered tensors."""
        return self._move(parameters, gradients, is_gradient=True)

    def _move(
        self, parameters: Sequence[GatheredParameter], tensors: Sequence[Tensor], is_gradient: bool
    ) -> list[Tensor]:
        """Move tensors together. Hot: each forward pass of a module, and each regathering."""
        if not parameters:
            return []
        if torch.compiler.is_compiling():
            return self._redistribute_each(parameters, tensors, is_gradient)
        if desync.ALWAYS or are_checked(None):  # ranks compare what they are about to do
            return self._redistribute(parameters, tensors, is_gradient)

        check_not_swapped()
        profile = asked_for(self.context.profile)
        kinds = tuple(map(_kind_of, tensors))
        # Everything that the prepared moves depend on, and that may change from pass to pass.
        key = (tuple(parameters), is_gradient, profile, world(), torch.is_grad_enabled(), kinds)
        moves = self._prepared.get(key)
        if moves is None:
            if any(type(x) not in PLAIN for x in tensors):  # a fake tensor's must not be kept
                return self._redistribute(parameters, tensors, is_gradient)
            moves = self._prepare(parameters, tensors, is_gradient)
            self._prepared[key] = moves

        results: dict[int, Tensor] = {}
        for shared in moves:
            results.update(zip(shared.indices, shared.run(tensors), strict=True))
        return [results[i] for i in range(len(tensors))]

    def _prepare(
        self, parameters: Sequence[GatheredParameter], tensors: Sequence[Tensor], is_gradient: bool
    ) -> list[SharedMove]:
        """Plan the move of each tensor, and let those that can share collectives. Raises as redistribute."""
        context = self.context
        comm_dtype = self._comm_dtype(is_gradient)
        executables = {}
        for i, (parameter, x) in enumerate(zip(parameters, tensors, strict=True)):
            layouts = _layouts_of(parameter, is_gradient)
            with located(parameter.name):
                call = MoveCall.of(
                    layouts, context.mesh, parameter.shape, context.profile, comm_dtype
                )
                # Always linear: rules of parameters shard, copy and sum. Others could not share.
                executables[i] = call.executable_for(x)
        return share_collectives(executables, dict(enumerate(tensors)), bucket_bytes=None)

    def _redistribute(
        self, parameters: Sequence[GatheredParameter], tensors: Sequence[Tensor], is_gradient: bool
    ) -> list[Tensor]:
        """Move tensors by the public verb, which compares calls and replicas if you ask for it."""
        return redistribute(
            list(tensors),
            [_layouts_of(parameter, is_gradient) for parameter in parameters],
            self.context.mesh,
            shape=[parameter.shape for parameter in parameters],
            profile=self.context.profile,
            comm_dtype=self._comm_dtype(is_gradient),
        )

    def _redistribute_each(
        self, parameters: Sequence[GatheredParameter], tensors: Sequence[Tensor], is_gradient: bool
    ) -> list[Tensor]:
        """Move tensors one by one, as a graph records them; the compiler joins their collectives."""
        moved = []
        for parameter, x in zip(parameters, tensors, strict=True):
            y = redistribute(
                x,
                _layouts_of(parameter, is_gradient),
                self.context.mesh,
                shape=parameter.shape,
                profile=self.context.profile,
                comm_dtype=self._comm_dtype(is_gradient),
            )
            moved.append(y)
        return moved

    def _comm_dtype(self, is_gradient: bool) -> CommDtypeLike:
        """Return the dtypes that travel; a gradient moves forward here, in the dtype of gradients."""
        if is_gradient:
            return comm_dtypes(self.context.comm_dtype)[1]
        return self.context.comm_dtype


def _layouts_of(parameter: GatheredParameter, is_gradient: bool) -> str:
    return parameter.to_storage if is_gradient else parameter.to_use


class _SavedView(NamedTuple):
    """What autograd saves instead of a gathered parameter: which one, and the view of it that was used."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Regathering:
    """Lets autograd save gathered parameters as references; the backward pass gathers them again.

    blocks: the parameters in storage, which stay in memory. gathered: the tensors that modules use. gather:
    the function from the one to the other.
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        gathered: Sequence[Tensor],
        gather: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        self._blocks = blocks
        self._gather = gather
        self._writes = [writes_to(x) for x in blocks]
        self._dtypes = [x.dtype for x in gathered]
        # Modules may save any view, as a transposed weight: it has the memory of the parameter.
        self._index_of_memory: dict[int, int] = {}
        for i, x in enumerate(gathered):
            if x.numel():
                self._index_of_memory[x.untyped_storage().data_ptr()] = i
        self._gathered_again: list[Tensor] = []

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves references."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor | _SavedView:
        """Replace a view of a gathered parameter by a reference. Hot: for every tensor that is saved."""
        if x.layout is not torch.strided:
            return x
        i = self._index_of_memory.get(x.untyped_storage().data_ptr())
        if i is None or x.dtype != self._dtypes[i]:
            return x
        return _SavedView(i, x.shape, x.stride(), x.storage_offset())

    def _unpack(self, packed: Tensor | _SavedView) -> Tensor:
        """Return a saved tensor; the first reference gathers all parameters again."""
        if isinstance(packed, Tensor):
            return packed
        if not self._gathered_again:
            if self._writes != [writes_to(x) for x in self._blocks]:
                raise XshardError(
                    "a parameter was written to between its forward and its backward pass"
                )
            with torch.no_grad():
                self._gathered_again.extend(self._gather(self._blocks))
        whole = self._gathered_again[packed.index]
        return whole.as_strided(packed.shape, packed.stride, packed.offset)
