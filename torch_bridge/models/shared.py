"""Parameters that several passes share: gathered once inside `no_sync`, their gradients summed once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.models.gathered import GatheredParameter, ParameterMoves
from torch_bridge.models.gradients import Gradients
from torch_bridge.versions.autograd import writes_to


class _BlockState(NamedTuple):
    """What changes when somebody replaces a parameter, writes to it, or freezes it."""

    identity: int
    address: int
    writes: int
    requires_grad: bool


class _GradientMark(NamedTuple):
    """`.grad` of a parameter in storage, and the writes to it, when a leaf last got a gradient."""

    gradient: Tensor
    writes: int


class SharedParameters:
    """Parameters of a module that the passes inside `no_sync`, and the next one outside, gather once.

    The gathered tensors are leaves of autograd, so that `.grad` of a leaf adds up the gradients of all
    passes. They are in one of two states:

        EMPTY   nothing is gathered
        HELD    leaves wait for the next pass, with the gradients so far

        EMPTY --forward inside no_sync--> HELD
        HELD  --forward, a block has changed--> HELD      gathered again; the gradients so far go on
        HELD  --backward of a pass outside no_sync--> EMPTY      one move sums the gradients into storage

    Nothing can tell when you drop gradients, as `zero_grad()` does. So `.grad` of the parameter in storage
    is marked whenever a leaf gets a gradient, and zeros if there is none. If the mark no longer fits, what
    the leaf has added up belongs to the past, and is dropped too.
    """

    def __init__(
        self,
        parameters: Sequence[GatheredParameter],
        moves: ParameterMoves,
        gradients: Gradients,
    ) -> None:
        self.parameters = parameters
        self._moves = moves
        self._gradients = gradients
        self._leaves: list[Tensor] = []
        self._blocks: list[Tensor] = []  # from which the leaves were gathered
        self._block_states: list[_BlockState] = []  # of these, at that time
        self._marks: dict[int, _GradientMark] = {}  # by the number of the leaf

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedParameters:
        """Copy without what is held: the copy's parameters have gradients of their own."""
        parameters = copy.deepcopy(self.parameters, memo)
        moves = copy.deepcopy(self._moves, memo)
        return SharedParameters(parameters, moves, copy.deepcopy(self._gradients, memo))

    @property
    def is_held(self) -> bool:
        """Whether gathered tensors wait for the next pass."""
        return bool(self._leaves)

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether leaves have added up gradients that nothing has summed yet."""
        with_gradient = [i for i, leaf in enumerate(self._leaves) if leaf.grad is not None]
        return any(self._is_mark_valid(i) for i in with_gradient)

    def take(self) -> dict[str, Tensor]:
        """Return gathered parameters for a forward pass, by name; {} if it gathers its own.

        Inside `no_sync`, the first pass gathers the parameters, and all use these tensors, whose
        `.grad` adds up. The next pass outside uses them a last time: its backward pass sums the
        gradients of all passes over processes (`_LastPass`). A pass outside with no pass inside
        before it gets {}.
        """
        # Modules have their blocks now, as no pass has begun.
        blocks = [parameter.tensor for parameter in self.parameters]
        if not blocks or (self._gradients.syncs and not self.is_held):
            return {}  # outside `no_sync`, and no pass inside has gathered anything
        # After an optimiser's step, or with another tensor as a parameter, the gathered tensors
        # would be outdated: they are gathered again.
        states = [_state_of(x) for x in blocks]
        if not self.is_held or states != self._block_states:
            self._blocks = blocks
            self._block_states = states
            self._gather()
        # A pass under `no_grad`, as an evaluation, is not the last: the next training pass still
        # sums.
        is_last = self._gradients.syncs and torch.is_grad_enabled()
        tensors = _LastPass.apply(self, *blocks) if is_last else self._leaves
        return {p.name: x for p, x in zip(self.parameters, tensors, strict=True)}

    def _gather(self) -> None:
        """Gather all parameters as new leaves, which take over the gradients so far."""
        earlier = (
            [leaf.grad for leaf in self._leaves] if self.is_held else [None] * len(self._blocks)
        )
        with torch.no_grad():
            self._leaves = self._moves.gather(self.parameters, self._blocks)
        for i, leaf in enumerate(self._leaves):
            if self._blocks[i].requires_grad:  # a frozen parameter is gathered, and that is all
                leaf.requires_grad_()
                leaf.register_hook(partial(self._before_gradient, i))
                leaf.grad = earlier[i]

    def _before_gradient(self, i: int, _: Tensor) -> None:
        """Mark `.grad` in storage, before autograd adds a gradient to a leaf; a hook of the leaf."""
        block = self._blocks[i]
        if not self._is_mark_valid(i):  # you have dropped the gradients so far
            self._leaves[i].grad = None
        if block.grad is None:
            block.grad = torch.zeros_like(block)
        self._marks[i] = _GradientMark(block.grad, writes_to(block.grad))

    def _is_mark_valid(self, i: int) -> bool:
        """Return whether `.grad` in storage is as it was when the leaf last got a gradient."""
        mark = self._marks.get(i)
        gradient = self._blocks[i].grad
        if mark is None or gradient is None:
            return False
        return gradient is mark.gradient and writes_to(gradient) == mark.writes

    def sum_gradients(
        self, leaves: Sequence[Tensor], last_gradients: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Sum the gradients of all passes that shared gathered parameters, over processes too.

        The gathered tensors are freed. A gathered [o, i] on dp=2, stored as "o/dp i": gradients [o,
        i] of each pass -> one block [o/2, i].

        Args:
            leaves: The gathered tensors of the last pass.
            last_gradients: Their gradients by that pass, which autograd does not add to `.grad`.

        Returns:
            A gradient for each leaf, as a block in storage; None for a frozen parameter.
        """
        # These are the leaves of the pass whose backward pass this is. Those held now may be
        # others, if parameters were gathered again since.
        trained = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        totals = []
        for i in trained:
            earlier = leaves[i].grad
            leaves[i].grad = None
            if earlier is None or not self._is_mark_valid(i):
                totals.append(last_gradients[i])
            else:
                totals.append(earlier + last_gradients[i])
        self._leaves = []

        sums = self._moves.reduce_gradients([self.parameters[i] for i in trained], totals)
        results: list[Tensor | None] = [None] * len(leaves)
        for i, total in zip(trained, sums, strict=True):
            results[i] = total
        return results


def _state_of(x: Tensor) -> _BlockState:
    return _BlockState(id(x), x.data_ptr(), writes_to(x), x.requires_grad)


class _LastPass(torch.autograd.Function):
    """Maps parameters in storage to gathered tensors that are there already: nothing is sent forward.

    Backward it sums the gradients of this pass, and of all that shared the tensors, into storage.
    """

    @staticmethod
    def forward(ctx: Any, shared: SharedParameters, *blocks: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.leaves = shared._leaves
        # New tensors of the same memory: a leaf is no result of a function.
        tensors = [leaf.detach() for leaf in ctx.leaves]
        frozen = [x for x, leaf in zip(tensors, ctx.leaves, strict=True) if not leaf.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.sum_gradients(ctx.leaves, gradients)
