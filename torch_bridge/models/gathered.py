"""Parameters that modules use under another layout: gathered for one pass, again for its backward pass, or
once for several passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_bridge.comm_dtype import comm_dtypes
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.redistribution import redistribute
from xshard import XshardError


class GatheredParameter(NamedTuple):
    """A parameter that modules, its `owners`, use under another layout. back: the move of its gradient.
    keep: until the backward pass. once: from a pass inside `no_sync` to the next one outside.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    move: str
    back: str
    shape: tuple[int, ...]
    keep: bool = True
    once: bool = False

    @property
    def tensor(self) -> Any:
        owner, attribute = self.owners[0]
        return owner._parameters[attribute]

    def put(self, x: Any) -> None:
        for owner, attribute in self.owners:
            owner._parameters[attribute] = x


def gather_all(
    parts: Sequence[GatheredParameter],
    context: ParallelContext,
    tensors: Sequence[Tensor],
    back: bool = False,
) -> list[Tensor]:
    """Parameters under the layouts in which modules use them, gathered together, differentiable; or their
    gradients `back` under the layouts in storage.
    """
    comm_dtype = comm_dtypes(context.comm_dtype)[1] if back else context.comm_dtype
    options: Any = {"mesh": context.mesh, "profile": context.profile, "comm_dtype": comm_dtype}
    moves = [part.back if back else part.move for part in parts]
    shapes = [part.shape for part in parts]
    if torch.compiler.is_compiling():
        rows = zip(tensors, moves, shapes, strict=True)
        return [redistribute(x, move, shape=shape, **options) for x, move, shape in rows]
    return redistribute(list(tensors), moves, shape=shapes, **options) if parts else []


def regathered(
    stored: Sequence[Tensor],
    used: Sequence[Tensor],
    gather: Callable[[Sequence[Tensor]], list[Tensor]],
) -> Any:
    """Gathered parameters that the backward pass gathers again: autograd saves only which one it was."""
    versions = [x._version for x in stored]
    dtypes = [x.dtype for x in used]
    storages = {x.untyped_storage().data_ptr(): i for i, x in enumerate(used) if x.numel()}
    again: list[Tensor] = []

    def pack(x: Tensor) -> Any:
        i = storages.get(x.untyped_storage().data_ptr()) if x.layout is torch.strided else None
        return (
            x if i is None or x.dtype != dtypes[i] else (i, x.shape, x.stride(), x.storage_offset())
        )

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not again:
            if versions != [x._version for x in stored]:
                raise XshardError(
                    "a parameter was written to between its forward and its backward pass"
                )
            with torch.no_grad():
                again.extend(gather(stored))
        i, *view = packed
        return again[i].as_strided(*view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(eq=False, repr=False)
class KeptParameters:
    """Parameters of a module that are gathered by the first pass inside `no_sync`, for all up to the next
    backward pass outside. Inside they are leaves, which add up their gradients; one move sums all of them.

    stored, seen: the parameters that were gathered, and their state then. marks: `.grad` of these, as it was
    when a gradient was added to a leaf: if it is another one now, or was written to, somebody has dropped it.
    """

    parts: Sequence[GatheredParameter]
    context: ParallelContext
    gradients: Gradients
    leaves: list[Tensor] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    marks: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptParameters:
        parts, gradients = copy.deepcopy((self.parts, self.gradients), memo)
        return KeptParameters(parts, self.context, gradients)

    def used(self) -> dict[str, Tensor]:
        """Gathered parameters by name, if this pass is one of several that share them."""
        stored = [part.tensor for part in self.parts]
        if not stored or (self.gradients.syncs and not self.leaves):
            return {}
        seen = [(id(x), x.data_ptr(), x._version, x.requires_grad) for x in stored]
        if not self.leaves or seen != self.seen:
            self.stored = stored
            self.seen = seen
            self._gather()
        is_last = self.gradients.syncs and torch.is_grad_enabled()
        whole = _Last.apply(self, *stored) if is_last else self.leaves
        return {part.name: x for part, x in zip(self.parts, whole, strict=True)}

    def _gather(self) -> None:
        waiting = [leaf.grad for leaf in self.leaves] or [None] * len(self.stored)
        with torch.no_grad():
            self.leaves = gather_all(self.parts, self.context, self.stored)
        for i, (leaf, gradient) in enumerate(zip(self.leaves, waiting, strict=True)):
            if self.stored[i].requires_grad:
                leaf.requires_grad_().register_hook(partial(self._arrives, i))
                leaf.grad = gradient

    def _arrives(self, i: int, _: Tensor) -> None:
        """Before a gradient is added to a leaf."""
        stored = self.stored[i]
        if not self._waits(i):
            self.leaves[i].grad = None
        if stored.grad is None:
            stored.grad = torch.zeros_like(stored)
        self.marks[i] = stored.grad, stored.grad._version

    def _waits(self, i: int) -> bool:
        now, (mark, version) = self.stored[i].grad, self.marks.get(i, (None, 0))
        return now is not None and now is mark and now._version == version

    @property
    def waits(self) -> bool:
        """Whether gradients have been added up that nothing has summed yet."""
        return any(leaf.grad is not None and self._waits(i) for i, leaf in enumerate(self.leaves))

    def summed(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the last pass, and those that wait, under the layouts in storage."""
        trained = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        total = list[Tensor]()
        for i in trained:
            before = leaves[i].grad
            leaves[i].grad = None
            total.append(
                gradients[i] if before is None or not self._waits(i) else before + gradients[i]
            )
        self.leaves = []
        sums = gather_all([self.parts[i] for i in trained], self.context, total, back=True)
        by_number = dict(zip(trained, sums, strict=True))
        return [by_number.get(i) for i in range(len(leaves))]


class _Last(torch.autograd.Function):
    """Parameters in storage -> the gathered ones that are there already; the gradient is of all passes."""

    @staticmethod
    def forward(ctx: Any, kept: KeptParameters, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        ctx.leaves = kept.leaves
        whole = tuple(leaf.detach() for leaf in kept.leaves)
        pairs = zip(whole, kept.leaves, strict=True)
        ctx.mark_non_differentiable(*(x for x, leaf in pairs if not leaf.requires_grad))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.kept.summed(ctx.leaves, gradients)
