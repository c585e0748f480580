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
from torch_bridge.calls.move import PLAIN_TYPES, MoveCall
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtypes
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import world_key
from torch_bridge.models.parameters import ParallelContext, Place
from torch_bridge.redistribution import redistribute
from torch_bridge.redistribution.tree import SharedMove, share_collectives
from torch_bridge.versions.autograd import writes_to
from xshard import XshardError
from xshard.cost.machine import resolve_profile
from xshard.errors import located
from xshard.replicas import are_replicas_checked


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

    def set_tensor(self, x: Any) -> None:
        """Let all modules use another tensor."""
        for place in self.places:
            place.set_tensor(x)


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
        return self._move(parameters, blocks, is_gradient=False)

    def reduce_gradients(
        self, parameters: Sequence[GatheredParameter], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return gradients as parameters are stored, from those of the gathered tensors."""
        return self._move(parameters, gradients, is_gradient=True)

    def _move(
        self, parameters: Sequence[GatheredParameter], tensors: Sequence[Tensor], is_gradient: bool
    ) -> list[Tensor]:
        # Gather blocks of parameters, or with `is_gradient` bring gradients back to storage,
        # together.
        if not parameters:
            return []
        if (
            torch.compiler.is_compiling()
        ):  # nothing is kept for the next pass: the graph is what is kept
            return _Move(parameters, self.context, is_gradient).record(tensors)
        # A move is prepared once per set of parameters. There are a few: all of a module, those
        # that are not shared between passes, and those that the backward pass gathers again.
        key = (tuple(parameters), is_gradient)
        move = self._moves.get(key)
        if move is None:
            move = _Move(parameters, self.context, is_gradient)
            self._moves[key] = move
        return move(tensors)


# What a plan depends on in a tensor, and what decides whether autograd records its move. It is read in C,
# as a forward pass asks every parameter.
_kind_of = attrgetter(
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
        self._names = [parameter.name for parameter in parameters]
        self._shapes = [parameter.shape for parameter in parameters]
        # Texts "layout -> layout", one per parameter: to storage for gradients, to use for
        # parameters.
        if is_gradient:
            self._layouts = [parameter.to_storage for parameter in parameters]
            # `comm_dtypes` gives (forward, backward). The move of gradients is called as a forward
            # move, and has to travel in the second.
            self._comm_dtype: CommDtypeLike = comm_dtypes(context.comm_dtype)[1]
        else:
            self._layouts = [parameter.to_use for parameter in parameters]
            self._comm_dtype = context.comm_dtype
        self._prepared: dict[Hashable, list[SharedMove]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move the tensors of all parameters with few collectives, by kept executables.

        Blocks in storage -> gathered tensors, as [o/dp, i] -> [o, i], or gradients the other way
        round. Every forward pass of a module calls this, so that a call with known tensors has to
        be quick.
        """
        # These debugging modes compare calls or replicas each time, which only `redistribute` does.
        if desync.ALWAYS or are_replicas_checked(None):
            return self._redistribute(tensors)
        check_not_swapped()
        profile = resolve_profile(self._context.profile)
        kinds = tuple(map(_kind_of, tensors))
        # All that the prepared moves depend on and that may change from pass to pass: the machine's
        # profile, the process groups (new ones with a new world), whether autograd records, and the
        # tensors' shapes and dtypes.
        key = (profile, world_key(), torch.is_grad_enabled(), kinds)
        moves = self._prepared.get(key)
        if moves is None:
            if any(type(x) not in PLAIN_TYPES for x in tensors):
                return self._redistribute(tensors)  # an executable would keep fake tensors
            moves = self._prepare(tensors)
            self._prepared[key] = moves

        # At most two: tensors with a gradient move together, and those without.
        results: dict[int, Tensor] = {}
        for shared in moves:
            results.update(zip(shared.indices, shared.run(tensors), strict=True))
        return [results[i] for i in range(len(tensors))]

    def _prepare(self, tensors: Sequence[Tensor]) -> list[SharedMove]:
        """Plan the move of each tensor, and group the moves that share collectives.

        Returns at most two groups: tensors with a gradient, and those without. An error begins with
        the name of the parameter.
        """
        executables = {}
        for i, x in enumerate(tensors):
            with located(self._names[i]):
                call = MoveCall.of(
                    self._layouts[i],
                    self._context.mesh,
                    self._shapes[i],
                    self._context.profile,
                    self._comm_dtype,
                )
                # Only linear moves can share collectives. All are: rules of parameters shard, copy
                # and sum, and never take a max or min.
                executables[i] = call.executable_for(x)
        return share_collectives(executables, dict(enumerate(tensors)), bucket_bytes=None)

    def _redistribute(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move tensors together by the public verb."""
        return redistribute(
            list(tensors),
            self._layouts,
            self._context.mesh,
            shape=self._shapes,
            profile=self._context.profile,
            comm_dtype=self._comm_dtype,
        )

    def record(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move tensors one by one while torch.compile records, and return the moved ones.

        They do not share collectives here: the compiler joins those of a graph by itself.
        """
        moved = []
        for i, x in enumerate(tensors):
            y = redistribute(
                x,
                self._layouts[i],
                self._context.mesh,
                shape=self._shapes[i],
                profile=self._context.profile,
                comm_dtype=self._comm_dtype,
            )
            moved.append(y)
        return moved


class _SavedView(NamedTuple):
    """What autograd saves instead of a gathered parameter: which one, and the view of it that was used."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


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
        # blocks: the parameters in storage. gathered: the same ones as modules use them, in the
        # same order. gather: makes the gathered tensors from the blocks.
        self._blocks = blocks
        self._gather = gather
        self._writes = [writes_to(x) for x in blocks]
        self._dtypes = [x.dtype for x in gathered]
        # Autograd may save any view of a parameter, as a transposed weight. A view begins in the
        # same storage, by whose address its parameter is found.
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
        if i is None or x.dtype != self._dtypes[i]:  # not a parameter, or one seen as another dtype
            return x
        return _SavedView(i, x.shape, x.stride(), x.storage_offset())

    def _unpack(self, packed: Tensor | _SavedView) -> Tensor:
        """Return a tensor that autograd saved, when the backward pass asks for it.

        Of a gathered parameter only the shape, stride and offset of the saved view were kept. The
        first such request gathers all parameters again, in one message; the view is then taken of
        the new tensor. Any other tensor was saved as it is. Raises XshardError if a parameter was
        written to since the forward pass.
        """
        if isinstance(packed, Tensor):
            return packed
        if not self._gathered_again:
            # After an optimiser's step in between, other values than in the forward pass would come
            # back.
            if self._writes != [writes_to(x) for x in self._blocks]:
                raise XshardError(
                    "a parameter was written to between its forward and its backward pass"
                )
            with torch.no_grad():
                self._gathered_again.extend(self._gather(self._blocks))
        whole = self._gathered_again[packed.number]
        return whole.as_strided(packed.shape, packed.stride, packed.offset)
