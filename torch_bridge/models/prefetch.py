"""Parameters that travel before modules need them: which ones, in a forward and in a backward pass.

What a module's pass gathers begins to travel while an earlier module computes. Its gradients follow the
adjoint: they begin to travel when they are whole, and autograd, which runs nodes in the reverse order of
their making, awaits them after that earlier module.

Values are those of gathers without it, whatever a model does: what is not used is dropped at the end of a
pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch_bridge.autodiff.turns import caller_of_part
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.models.calls import call_of_hook, is_in_stack, is_running
from torch_bridge.models.gathered import GatherUnderWay, no_gather
from torch_bridge.models.names import title_of
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.versions.autograd import call_after_backward, is_in_backward_pass
from xshard.schedule import Schedule, Start, last_started, training_step
from xshard.schedule import Turn as ScheduledTurn
from xshard.signatures import Bytes


class Turn(NamedTuple):
    """A module's turn in a pass: what it gathers, and how to begin that before the turn comes.

    `begin` returns None where it cannot know what the module will gather, or need not gather it.
    """

    name: str
    n_bytes: int
    begin: Callable[[], GatherUnderWay | None]


def _label(turns: Sequence[Turn]) -> Iterator[tuple[str, Turn]]:
    """Yield turns with names that tell them apart: the second one of "up" is "up (2)"."""
    times = Counter[str]()
    for turn in turns:
        times[turn.name] += 1
        n_th = f" ({times[turn.name]})" if times[turn.name] > 1 else ""
        yield f"{title_of(turn.name)}{n_th}", turn


class _Queue:
    """The turns of one pass in their order; the gathers of some have begun."""

    def __init__(self, turns: Sequence[Turn], prefetch: Bytes) -> None:
        self.turns = turns
        # For each turn the last one whose gather begins with it.
        self._last_to_begin = last_started([turn.n_bytes for turn in turns], prefetch)
        self._under_way: dict[int, GatherUnderWay | None] = {}  # by position in `turns`
        self._had_turn: set[int] = set()

    def take(self, position: int) -> GatherUnderWay | None:
        """Return the gather of a turn that has come, if it could begin; those of later turns begin."""
        self._had_turn.add(position)
        # Its own first, if it has not begun, then those of later turns: while it is awaited, these travel.
        for later in range(position, self._last_to_begin[position] + 1):
            is_needed = later == position or later not in self._had_turn
            if is_needed and later not in self._under_way:
                self._under_way[later] = self.turns[later].begin()
        return self._under_way.pop(position)


class Prefetch:
    """The order of modules in the passes of a model, and what travels ahead in the running forward pass.

        IDLE --the model is called--> EXPECTED --a module comes out of order--> UNEXPECTED
        EXPECTED, UNEXPECTED --the model returns or raises--> IDLE

    EXPECTED: modules come as in the last two forward passes, and their gathers begin ahead. UNEXPECTED: they
    gather when they are called, as in the first two passes, or where the last two differ.

    Processes that gather together start the same gathers in the same order. The order of a pass is that of
    the gathers that it has awaited, whether it fails or not: so these processes know the same orders. They
    compare a new order before they use it, and the module that comes out of it.
    """

    # In a forward pass:
    _call: FrameType | None = None  # of the model
    _used: list[Turn]
    _expected: _Queue | None = None
    _to_gather_again: BackwardOrder | None = None

    def __init__(self, context: ParallelContext, prefetch: Bytes, axes: Iterable[str] = ()) -> None:
        # Raises XshardError for a text that is no number of bytes.
        last_started([], prefetch)
        self._context = context
        self.prefetch = prefetch
        self.axes = set(axes)  # along which processes gather
        # The orders of the last passes.
        self.forward: Sequence[Turn] = ()
        self.backward: Sequence[Turn] = ()
        self._is_repeated = False  # whether the last two forward passes had one order
        self._is_compared = False  # whether this is that of all processes

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Copy without orders: their turns are of the original's modules."""
        return Prefetch, (self._context, self.prefetch, self.axes)

    def begin_pass(self) -> None:
        """Expect the modules of the last forward passes; called before each pass, which may be inside one."""
        if self.prefetch == 0 or is_in_backward_pass() or self._call is not None:
            return
        self._call = call_of_hook()
        self._used = []
        self._to_gather_again = BackwardOrder(self)
        if self._is_repeated and len(self.forward) > 1:
            if not self._is_compared:
                self._compare(self.forward)
                self._is_compared = True
            self._expected = _Queue(self.forward, self.prefetch)

    def end_pass(self) -> None:
        """End the pass whose hook calls this, also one that fails."""
        if self._call is not None and call_of_hook() is self._call:
            self._end()

    def end_unfinished_pass(self) -> None:
        """End the pass of a call that runs no more, as after KeyboardInterrupt."""
        if self._call is not None and not is_running(self._call):
            self._end()

    def _end(self) -> None:
        """Drop what no module has used, and remember the order of the pass."""
        if self._used:  # else nothing has travelled: others may not know of this pass
            self._is_repeated = self._used == self.forward
            if not self._is_repeated:
                self.forward = self._used
                self._is_compared = False
        self._call = None
        # What is under way is awaited when it is dropped.
        self._expected = None
        self._to_gather_again = None

    @property
    def _is_in_pass(self) -> bool:
        """Whether the running code is the model's forward pass, not a part that is computed again."""
        if self._call is None or is_in_backward_pass():
            return False
        if is_in_stack(self._call, sys._getframe()):
            return True
        caller = caller_of_part()  # a part of a batch has a stack of its own
        return caller is not None and is_in_stack(self._call, caller)

    def take(self, turn: Turn) -> GatherUnderWay | None:
        """Return what has begun for the turn of a module, which has come; None if it gathers now."""
        if not self._is_in_pass:
            return None
        i = len(self._used)
        self._used.append(turn)
        if self._expected is None:
            return None
        if i < len(self.forward) and self.forward[i] is turn:
            return self._expected.take(i)
        self._expected = None
        self.compare_pass()
        return None

    def compare_pass(self) -> None:
        """Compare what processes have gathered in this pass: the last module gathers now, on all of them."""
        self._compare(self._used)

    def schedule(self) -> Schedule:
        """Return the schedule of the next step, if modules take turns in it as in the last passes."""
        forward = []
        for name, turn in _label(self.forward):
            parameters = Start(f"{name} parameters", turn.n_bytes)
            forward.append(ScheduledTurn(name, parameters=parameters))
        # Modules that keep their parameters gather nothing in the backward pass, so that their turns
        # in it are not known. They come last, in the reversed order: the model itself is one of them.
        gathered_again = {turn.name for turn in self.backward}
        kept_turns = [turn for turn in reversed(self.forward) if turn.name not in gathered_again]
        backward = []
        for name, turn in _label([*self.backward, *kept_turns]):
            gradients = Start(f"{name} gradients", turn.n_bytes)
            scheduled = ScheduledTurn(f"{name}, backward", gradients=gradients)
            if turn.name in gathered_again:
                parameters = Start(f"{name} parameters", turn.n_bytes)
                scheduled = scheduled._replace(parameters=parameters)
            backward.append(scheduled)
        return training_step(forward, backward, self.prefetch)

    def _compare(self, turns: Sequence[Turn]) -> None:
        """Raise DesyncError unless modules come in one order on all processes that gather together."""
        ranks = self._context.processes.submesh(tuple(self.axes)).ranks
        facts = {"modules": ", ".join(title_of(turn.name) for turn in turns)}
        compare_ranks(
            ranks, "the order of modules in a pass", lambda: CallFacts(facts, peers=ranks)
        )

    def gathers_again(self, turn: Turn) -> Callable[[], GatherUnderWay | None]:
        """Note that a backward pass will gather parameters of a module again; return what takes them.

        Called when the module's forward pass ends: it is the first in the backward pass that has not had
        its turn.
        """
        if not self._is_in_pass or self._to_gather_again is None:
            return no_gather
        return self._to_gather_again.add(turn)


class BackwardOrder:
    """The modules of one forward pass whose parameters its backward pass gathers again."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch
        self._turns: list[Turn] = []  # in the order in which their forward passes ended
        self._queue: _Queue | None = None  # in a backward pass

    def add(self, turn: Turn) -> Callable[[], GatherUnderWay | None]:
        """Add the module whose forward pass ends; return what its backward pass calls for its gather."""
        self._turns.append(turn)
        return partial(self._take, len(self._turns) - 1)

    def _take(self, position: int) -> GatherUnderWay | None:
        if not is_in_backward_pass():
            return None  # somebody looks at what a graph has saved
        if self._queue is None:
            turns = self._turns[::-1]
            self._prefetch.backward = [turn._replace(begin=no_gather) for turn in turns]
            self._queue = _Queue(turns, self._prefetch.prefetch)
            call_after_backward(self._drop, if_failed=self._drop)
        i = len(self._queue.turns) - 1 - position
        return self._queue.take(i) if i >= 0 else None

    def _drop(self) -> None:
        """Await what has begun, and was not used, at the end of a backward pass."""
        self._queue = None
