"""Coroutines of one thread that compute in turn: while messages of one travel, the next one goes on.

torch keeps state for a thread that each coroutine would need for itself: whether gradients are recorded,
autocast, modes, hooks of saved tensors. So a coroutine lets others go on only where this state is as at the
start, but for hooks of saved tensors that xshard has added, which it takes off until it goes on. Everywhere
else it waits, which is correct and slower. It knows nothing of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from torch_bridge.versions.autograd import (
    SavingHooks,
    drop_saving_hooks_above,
    outside_function,
    push_saving_hooks,
    take_off_saving_hooks,
    top_saving_hooks,
)
from torch_bridge.versions.modes import state_of_thread
from xshard import XshardError

T = TypeVar("T")


class PartEnded(Exception):  # noqa: N818  no error: it ends a coroutine after the error of another one
    """Another part of the batch has failed, and this one ends: its hooks and contexts undo what they did."""


class BatchPart:
    """The part of a batch that one coroutine computes.

    Attributes:
        turns: Those of the batch.
        values: This part's value of each `PerPart`.
        saving_hooks: Hooks of saved tensors that xshard has added, the innermost last.
        is_in_function: Whether it is in the forward pass of a Function that lets others go on.
    """

    def __init__(self, turns: Turns, call: Callable[[], Any]) -> None:
        self.turns = turns
        self.values: dict[PerPart[Any], Any] = {}
        self.saving_hooks: list[SavingHooks] = []
        self.is_in_function = False
        self._call = call
        self._is_ended = False
        self.result: Any = None
        self.coroutine = load_greenlet().greenlet(self._run)
        self.coroutine.gr_context = copy_context()

    def _run(self) -> None:
        _PART.set(self)  # in a context of its own
        self.result = self._call()

    def pause(self) -> None:
        """Let the other parts go on, if this one can be left here."""
        if self._is_ended:
            raise PartEnded
        if self.is_in_function:
            with outside_function():
                self._pause()
        else:
            self._pause()

    def _pause(self) -> None:
        """Switch to the other parts, unless torch keeps something for the thread that is not theirs.

        Hooks of saved tensors that are ours are taken off meanwhile.
        """
        if not self.is_as_at_start():
            return
        own_hooks = list(self.saving_hooks)
        if not take_off_saving_hooks(own_hooks):
            return  # others, as a checkpoint's, are above ours
        try:
            if top_saving_hooks() == self.turns.saving_hooks:
                self.coroutine.parent.switch()
        finally:
            for pack_and_unpack in own_hooks:
                push_saving_hooks(*pack_and_unpack)

    def is_as_at_start(self) -> bool:
        """Return whether torch keeps for the thread what it kept at the start, but for hooks."""
        return state_of_thread() == self.turns.thread_state

    def end(self) -> None:
        """End the coroutine, after an error in another one.

        By an exception that torch's hooks of modules are called for, and not as Python's garbage would end.
        """
        self._is_ended = True
        if self.coroutine:  # it has begun, and has not ended
            with suppress(Exception):
                self.coroutine.throw(PartEnded)


_PART: ContextVar[BatchPart | None] = ContextVar("_PART", default=None)
# By what computes its batch in parts. Hot code looks whether it is empty, before it asks for a part.
RUNNING: dict[object, Turns] = {}


class Turns:
    """The coroutines that compute the parts of one batch, in turn.

    Attributes:
        thread_state: What torch kept for the thread at the start.
        saving_hooks: The hooks of saved tensors then.
        lag: How many turns each part begins after the one before.
        parts: The parts.
        at_end: Functions that are called when all parts have ended, also after an error.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], lag: int = 0) -> None:
        self.thread_state = state_of_thread()
        self.saving_hooks = top_saving_hooks()
        self.lag = lag
        self.at_end: list[Callable[[], None]] = []
        self.parts = [BatchPart(self, call) for call in calls]

    def run(self, owner: object) -> list[Any]:
        """Compute all parts; return their results in order. The first error ends the others.

        Args:
            owner: The object whose batch it is.

        Raises:
            XshardError: The owner computes another batch, in another thread.
        """
        if RUNNING.setdefault(owner, self) is not self:
            hint = "one batch after the other, or a copy of the model"
            raise XshardError("another thread computes a batch in parts", hint=hint)
        try:
            turn = 0
            while not all(part.coroutine.dead for part in self.parts):
                for part_index, part in enumerate(self.parts):
                    if turn >= part_index * self.lag and not part.coroutine.dead:
                        part.coroutine.switch()
                turn += 1
            return [part.result for part in self.parts]
        except BaseException:
            drop_saving_hooks_above(self.saving_hooks)  # of a call that was interrupted
            for part in self.parts:
                part.end()
            raise
        finally:
            for call_at_end in self.at_end:
                call_at_end()
            del RUNNING[owner]
            # Nothing is left for the garbage collector: results would keep their memory until then.
            for part in self.parts:
                part.coroutine = None
            self.parts.clear()

    def suspended_frames(self) -> Iterator[FrameType]:
        """Yield the innermost frame of each coroutine that is not running, and of what waits for all."""
        coroutines = [part.coroutine for part in self.parts]
        for coroutine in (*coroutines, coroutines[0].parent):
            if coroutine.gr_frame is not None:
                yield coroutine.gr_frame


class PerPart(Generic[T]):
    """A value that each part of a batch has for itself, and code outside of parts, too.

    Attributes:
        outside: The one outside of parts.
    """

    def __init__(self, initial: T) -> None:
        self._initial = initial
        self.outside = initial

    @property
    def value(self) -> T:
        """The value of the running part; in code outside of parts `outside`."""
        part = current_part()
        if part is None:
            return self.outside
        return part.values.get(self, self._initial)

    @value.setter
    def value(self, new: T) -> None:
        part = current_part()
        if part is None:
            self.outside = new
        else:
            part.values[self] = new


def current_part() -> BatchPart | None:
    """Return the part of a batch that this code computes; None outside of parts, and to a compiler."""
    if torch.compiler.is_compiling():
        return None
    return _PART.get()


def let_others_compute() -> None:
    """Let other parts of the batch go on, before a wait for what is under way."""
    part = current_part()
    if part is not None:
        part.pause()


@contextmanager
def without_pauses() -> Iterator[None]:
    """Keep the turn inside a `with` block, as while modules get what all parts will use."""
    if current_part() is None:
        yield
        return
    part = _PART.set(None)
    try:
        yield
    finally:
        _PART.reset(part)


@contextmanager
def with_pauses_in_function() -> Iterator[None]:
    """Let others go on in the forward pass of a Function of ours, in which torch records nothing.

    Not if it would be wrong around it already, as in a checkpoint, which is such a Function, too.
    """
    part = current_part()
    if part is None:
        yield
        return
    part.is_in_function = part.is_as_at_start()
    try:
        yield
    finally:
        part.is_in_function = False


def add_saving_hooks(hooks: SavingHooks) -> None:
    """Push hooks of ours, which a pause takes off."""
    push_saving_hooks(*hooks)
    part = current_part()
    if part is not None:
        part.saving_hooks.append(hooks)


def forget_saving_hooks(hooks: SavingHooks) -> None:
    """Note that hooks of ours have been removed."""
    part = current_part()
    if part is not None and hooks in part.saving_hooks:
        part.saving_hooks.remove(hooks)


def suspended_frames() -> list[FrameType]:
    """Return the innermost frames of all coroutines that are not running."""
    frames: list[FrameType] = []
    for turns in list(RUNNING.values()):
        frames += turns.suspended_frames()
    return frames


def caller_of_part() -> FrameType | None:
    """Return the innermost frame of what waits for the running part; None outside of parts."""
    if not RUNNING:
        return None
    caller = load_greenlet().getcurrent().parent
    return None if caller is None else caller.gr_frame


def load_greenlet() -> Any:
    """Import greenlet. Raises XshardError if it is not installed."""
    try:
        import greenlet
    except ImportError:
        hint = "pip install 'xshard[halves]'"
        raise XshardError("parts of a batch need greenlet", hint=hint) from None
    return greenlet
