"""Whether the other of two programs is still at work: every rank counts in the store, and looks at others.

Decides after how many looks without a new number a rank has stopped, and who looks. Knows no versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from xshard import XshardError

T = TypeVar("T")

PAUSE_S = 0.02  # between two looks at what this program waits for
BEAT_S = 0.5  # between two numbers


class LostVersionError(XshardError, RuntimeError):
    """A version did not arrive whole: the other program has ended, failed, or did not come in time."""


class Heartbeat:
    """A number in the store that grows while this rank is at work, and a look at those of the other program.

    The first rank looks at all of the other's ranks, and leaves a notice for the ranks of its own program.
    Looks are counted, not seconds: where all processes stand still, as with a machine, none has stopped.
    ask: calls the store by the name of a method; raises LostVersionError where that does not answer.
    """

    def __init__(self, ask: Callable[..., Any], key: Callable[..., str]) -> None:
        self._ask, self._key, self._looks = ask, key, 0.0
        self._lost, self._notice = "", ""
        self._others: dict[str, str] = {}

    @contextmanager
    def beating(self, session: int, silent_s: float) -> Iterator[None]:
        """Count meanwhile, as a rank of this session. silent_s: of another rank that has stopped."""
        over = threading.Event()
        self._lost, self._others, self._looks = "", {}, silent_s / BEAT_S
        own = self._key("beats", session, dist.get_rank())
        thread = threading.Thread(target=self._beat, args=(own, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * BEAT_S)

    def watch(self, program: str, session: int, n: int, version: int) -> None:
        """From now on look at the `n` ranks of the other program while this version is on its way."""
        self._notice = self._key("stopped", session, version)
        self._others = {self._key("beats", session, r): f"rank {r} of the {program}" for r in range(n)}

    def check(self) -> None:
        """Raise LostVersionError where one of the other program's ranks has stopped, or the store has."""
        if self._lost:
            raise LostVersionError(self._lost)

    def guarded(self, call: Callable[[], T]) -> T:
        """What a call returns that waits for the other program. Where `check` raises it is left waiting."""
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([found], PAUSE_S).done:
            self.check()
        return found.result()

    def _beat(self, own: str, over: threading.Event) -> None:
        last: dict[str, tuple[int, int]] = {}  # the number of a rank, and how many looks found it
        try:
            while not over.wait(BEAT_S):
                self._ask("add", own, 1)
                for key, rank in self._others.items() if dist.get_rank() == 0 else ():
                    number, before = self._ask("add", key, 0), last.get(key, (-1, 0))
                    last[key] = number, before[1] + 1 if number == before[0] else 0
                    if last[key][1] >= self._looks:
                        self._ask("set", self._notice, rank)
                if self._others and self._ask("check", [self._notice]):
                    self._lost = self._ask("get", self._notice).decode() + " has stopped"
        except LostVersionError as error:
            self._lost = str(error)
