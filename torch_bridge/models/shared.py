"""Parameters that several passes share: gathered once inside `no_sync`, their gradients summed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.models.gathered import GatheredParameter, ParameterMoves
from torch_bridge.models.gradients import Gradients
from torch_bridge.versions.autograd import writes_to
from xshard import XshardError


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

    Nothing tells a leaf when you drop gradients, as `zero_grad()` does to the parameters in storage. So
    `.grad` there, -0.0 if there is none, is marked whenever a leaf gets a gradient. If it is None or +0.0
    later, you have dropped what the leaf has added up. Any other change is an error: it would not reach the
    leaf. (-0.0 can be told from zeros of yours, and adding to it changes no bits.)

    A backward pass that fails may have added to some leaves, and not to others. If they had gradients of
    earlier passes, an error asks you to drop these.
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
        self._block_states: list[tuple[int, ...]] = []  # of these, at that time
        self._marks: dict[int, _GradientMark] = {}  # by the number of the leaf
        # Whether a backward pass has failed, and leaves lack a part of the gradients.
        self._is_incomplete = False

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Copy without what is held: the copy's parameters have gradients of their own."""
        return SharedParameters, (self.parameters, self._moves, self._gradients)

    @property
    def is_held(self) -> bool:
        """Whether gathered tensors wait for the next pass."""
        return bool(self._leaves)

    @property
    def serves_next_pass(self) -> bool:
        """Whether the next pass takes its parameters from here, and does not gather its own."""
        return self.is_held or not self._gradients.syncs

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether leaves have added up gradients that nothing has summed yet."""
        for i, leaf in enumerate(self._leaves):
            if leaf.grad is not None and not self._is_gradient_dropped(i):
                return True
        return False

    def take(self) -> dict[str, Tensor]:
        """Return the gathered parameters for a forward pass, by name; {}: the module gathers its own.

        - Inside `no_sync`: leaves of autograd, which are kept for the next pass. Their `.grad` adds up
          the gradients of all passes.
        - Outside, after such passes: the same values as results of `_LastPass`. Its backward pass sums
          over processes what the leaves have added up, and lets go of them.
        - Outside, with nothing kept: {}, as there are no earlier gradients to sum.
        """
        if self._is_incomplete:
            self._check_gradients_dropped()
            self._begin_anew()
        if not self.serves_next_pass:
            return {}
        self._gather_if_changed()
        tensors = self._leaves
        # A pass under `no_grad`, such as an evaluation, has no backward pass to sum in.
        if self._gradients.syncs and torch.is_grad_enabled():
            tensors = _LastPass.apply(self, *self._blocks)
        names = [parameter.name for parameter in self.parameters]
        return dict(zip(names, tensors, strict=True))

    def _gather_if_changed(self) -> None:
        """Gather the parameters, unless what is kept of an earlier pass is still up to date.

        It is outdated after an optimiser's step, or if another tensor is the parameter now: then new
        tensors are gathered, and take over the gradients that have added up. Sets `_leaves`, gathered
        tensors that are leaves of autograd: their `.grad` adds up over passes.
        """
        blocks = [gathered.parameter.tensor for gathered in self.parameters]
        block_states = [_state_of(x) for x in blocks]
        if self.is_held and block_states == self._block_states:
            return
        earlier_leaves = self._leaves
        for i, leaf in enumerate(earlier_leaves):
            is_trained = blocks[i].requires_grad
            if leaf.grad is not None and not is_trained and not self._is_gradient_dropped(i):
                reason = f"{self.parameters[i].name} was frozen between passes inside no_sync"
                raise XshardError(reason, hint="a pass outside of no_sync sums its gradient first")
        with torch.no_grad():
            self._leaves = self._moves.gather(self.parameters, blocks)
        self._blocks = blocks
        self._block_states = block_states
        for i, leaf in enumerate(self._leaves):
            if not blocks[i].requires_grad:  # frozen
                continue
            leaf.requires_grad_()
            if self.parameters[i].precision is not None:
                leaf.grad_dtype = self.parameters[i].dtypes().backward
            # Before each gradient, the hook notes `.grad` of the block, to see a later `zero_grad()`.
            leaf.register_hook(partial(self._before_gradient, i))
            if earlier_leaves:
                leaf.grad = earlier_leaves[i].grad

    def _before_gradient(self, i: int, _: Tensor) -> None:
        """Mark `.grad` in storage; a hook of leaf `i`, before autograd adds a gradient to it."""
        leaf = self._leaves[i]
        if self._is_gradient_dropped(i):
            leaf.grad = None
        undo = (
            self._note_incomplete if leaf.grad is not None else partial(self._undo_first, i, leaf)
        )
        self._gradients.begin_pass().undo.append(undo)
        self._mark_gradient(i)

    def _mark_gradient(self, i: int) -> None:
        """Mark `.grad` in storage: while it stays as it is, the leaf's gradient is wanted."""
        block = self._blocks[i]
        if block.grad is None:
            block.grad = torch.full_like(block, -0.0)
        self._marks[i] = _GradientMark(block.grad, writes_to(block.grad))

    def _undo_first(self, i: int, leaf: Tensor) -> None:
        """Take away a leaf's gradient of a pass that has failed; it was the first one."""
        leaf.grad = None
        self._marks.pop(i, None)

    def _note_incomplete(self) -> None:
        """Remember that a pass has failed which had added to, or taken, gradients of earlier ones."""
        self._is_incomplete = True
        for i, block in enumerate(self._blocks):
            if block.requires_grad:
                self._mark_gradient(i)

    def _check_gradients_dropped(self) -> None:
        """Raise XshardError unless `zero_grad()` has dropped every gradient since a pass has failed."""
        for i, block in enumerate(self._blocks):
            if block.requires_grad and not self._is_gradient_dropped(i):
                reason = (
                    "a backward pass failed after others inside no_sync: their gradients are lost"
                )
                raise XshardError(reason, hint="zero_grad(), and begin the step anew")

    def _begin_anew(self) -> None:
        """Forget a failed pass, and the leaves with it: the next pass gathers new ones."""
        self._leaves = []
        self._is_incomplete = False

    def _is_gradient_dropped(self, i: int) -> bool:
        """Return whether you have dropped what leaf `i` has added up, as by `zero_grad()`.

        True, too, before its first gradient. Raises XshardError if you have changed `.grad` in storage
        in another way.
        """
        mark = self._marks.get(i)
        gradient = self._blocks[i].grad
        if mark is None or gradient is None:
            return True
        if gradient is mark.gradient and writes_to(gradient) == mark.writes:
            return False
        if torch.any(gradient) or torch.any(torch.signbit(gradient)):
            reason = f"the gradient of {self.parameters[i].name} was changed between passes inside no_sync, "
            reason += "which keep it apart: keep= lets them share the gathered parameter"
            hint = "change gradients after a pass outside of no_sync"
            raise XshardError(reason, hint=hint)
        return True

    def sum_gradients(
        self, leaves: Sequence[Tensor], last_gradients: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Sum the gradients of all passes that shared gathered tensors, over passes and processes.

        A parameter stored as "o/dp i" on dp=2, and gathered to [o, i]: gradients [o, i] of several
        passes -> one block [o/2, i]. Afterwards no gathered tensors are kept.

        Args:
            leaves: The leaves of the last pass. Those held now may be newer.
            last_gradients: Their gradients by the last pass, which are not in `.grad` of the leaves.

        Returns:
            A gradient for each leaf, as a block in storage; None for a frozen parameter.
        """
        self._leaves = []
        self._gradients.begin_pass().undo.append(self._note_incomplete)
        sums_of_passes = {}  # of all passes on this process, by the number of the leaf
        for i, leaf in enumerate(leaves):
            if not leaf.requires_grad:
                continue
            sums_of_passes[i] = last_gradients[i]
            if leaf.grad is not None and not self._is_gradient_dropped(i):
                sums_of_passes[i] = leaf.grad + last_gradients[i]
            leaf.grad = None
        self._marks.clear()

        trained = [self.parameters[i] for i in sums_of_passes]
        sums = self._moves.reduce_gradients(trained, list(sums_of_passes.values()))
        sum_of_leaf = dict(zip(sums_of_passes, sums, strict=True))
        return [sum_of_leaf.get(i) for i in range(len(leaves))]


def _state_of(x: Tensor) -> tuple[int, ...]:
    """Return what changes when somebody replaces a parameter, writes to it, or freezes it."""
    return id(x), x.data_ptr(), writes_to(x), x.requires_grad


class _LastPass(torch.autograd.Function):
    """Maps parameters in storage to gathered tensors that are there already: nothing is sent forward.

    Backward it sums the gradients of this pass, and of all that shared the tensors, into storage.
    """

    @staticmethod
    def forward(ctx: Any, shared: SharedParameters, *blocks: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.leaves = shared._leaves
        # New tensors of the same memory: a leaf is no result of a function.
        tensors = tuple(leaf.detach() for leaf in ctx.leaves)
        frozen = [x for x, block in zip(tensors, blocks, strict=True) if not block.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.sum_gradients(ctx.leaves, gradients)
