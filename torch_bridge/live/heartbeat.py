"""Heartbeats of two programs: every rank counts in their store, and the first rank watches the other program.

Timeouts of a process group would not do: NCCL ends the process that waits, and a server has to go on.
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

PAUSE_S = 0.02  # between two looks at the store or at a thread
BEAT_S = 0.5  # between two counts


class LostVersionError(XshardError, RuntimeError):
    """A version did not arrive whole: the other program has ended, failed, or did not come in time."""


class Heartbeat:
    """A count in the store that grows while this rank works, and a watch on the counts of the other program.

    The first rank watches all ranks of the other program, and leaves a notice for the ranks of its own. It
    counts looks, not seconds: if a whole machine stands still, no rank has stopped. store_call: calls the
    store by the name of a method; raises LostVersionError if the store does not answer.
    """

    def __init__(self, store_call: Callable[..., Any], key: Callable[..., str]) -> None:
        self._store_call, self._key, self._max_looks = store_call, key, 0.0
        self._error, self._notice = "", ""
        self._watched: dict[str, str] = {}

    @contextmanager
    def beating(self, session: int, silent_s: float) -> Iterator[None]:
        """Count in a thread. silent_s: a rank without a new count for so long has stopped."""
        over = threading.Event()
        self._error, self._watched, self._max_looks = "", {}, silent_s / BEAT_S
        own = self._key("beats", session, dist.get_rank())
        thread = threading.Thread(target=self._beat, args=(own, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * BEAT_S)

    def watch(self, program: str, session: int, n: int, version: int) -> None:
        """From now on watch the `n` ranks of the other program, while this version is on its way."""
        self._notice = self._key("stopped", session, version)
        self._watched = {self._key("beats", session, r): f"rank {r} of the {program}" for r in range(n)}

    def check(self) -> None:
        """Raise LostVersionError if a rank of the other program has stopped, or the store does not answer."""
        if self._error:
            raise LostVersionError(self._error)

    def guarded(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for the other program, unless `check` raises first."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([future], PAUSE_S).done:
            self.check()
        return future.result()

    def _beat(self, own: str, over: threading.Event) -> None:
        looks: dict[str, tuple[int, int]] = {}  # the last count of a rank, and how many looks have shown it
        try:
            while not over.wait(BEAT_S):
                self._store_call("add", own, 1)
                for key, rank in self._watched.items() if dist.get_rank() == 0 else ():
                    count, (last, n) = self._store_call("add", key, 0), looks.get(key, (-1, 0))
                    looks[key] = count, n + 1 if count == last else 0
                    if looks[key][1] >= self._max_looks:
                        self._store_call("set", self._notice, rank)
                if self._watched and self._store_call("check", [self._notice]):
                    self._error = self._store_call("get", self._notice).decode() + " has stopped"
        except LostVersionError as error:
            self._error = str(error)
