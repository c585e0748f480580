"""How long processes wait for each other and for their store, and errors of a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.errors import CollectiveError
from torch_bridge.versions.process_groups import timeouts_of

T = TypeVar("T")

# For a call that ends just in time to say so itself: its own error is better than ours.
_GRACE = timedelta(seconds=2)


def name_place(error: Exception, place: str) -> None:
    """Say in an error in which step of which plan it arose: `place`, as "step 1 of 2, ...".

    A CollectiveError is raised again, with the place; any other error gets a note.
    """
    if isinstance(error, CollectiveError):
        raise CollectiveError(_failure_text(place), hint=error.hint) from error.__cause__
    error.add_note(f"in {place}")


def with_place_in_errors(place: Callable[[], str], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function for a step of a plan; its errors name the `place`, as in `name_place`."""
    # On the way of every step: `place` is a function, since its text costs time and errors are
    # rare.
    try:
        return function(*args)
    except Exception as error:
        name_place(error, place())
        raise


def raise_if_peer_lost(
    error: RuntimeError, operation: str, ranks: Sequence[int], timeout: timedelta | None = None
) -> None:
    """Raise CollectiveError if the error of a backend means that another rank is lost.

    Returns if the error means something else, such as a lack of memory: the caller re-raises it.

    Args:
        error: Of gloo or NCCL.
        operation: What failed, for the message.
        ranks: Those that took part.
        timeout: How long it waited; None: as long as a collective does.
    """
    # gloo has no class for a lost peer, NCCL has; a lack of memory is a subclass of RuntimeError.
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return
    world = dist.group.WORLD
    waited = ""
    if timeout is None and world is not None:
        timeout = timeout_of(world)
    if timeout is not None:
        waited = f" within {timeout.total_seconds():g} s"
    suspects = f"one of the ranks {', '.join(map(str, ranks))}"
    if len(ranks) == 1:
        suspects = f"rank {ranks[0]}"
    lines = [f"{suspects} has ended, has failed, did not come{waited}, or made another call"]
    backend_lines = str(error).strip().splitlines()
    if backend_lines:
        lines.append(f"the backend says: {backend_lines[0]}")
    lines.append(
        "with XSHARD_DEBUG=1 in the environment the ranks compare their calls, and say what differs"
    )
    raise CollectiveError(_failure_text(operation), hint="\n  ".join(lines)) from error


def call_backend(
    operation: str, ranks: Sequence[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function that only communicates. Raises CollectiveError as `raise_if_peer_lost` does."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise_if_peer_lost(error, operation, ranks)
        raise


def _failure_text(operation: str) -> str:
    return f"{operation} failed on rank {dist.get_rank()}"


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of a group wait: the longest of its backends."""
    return max(timeouts_of(group), default=c10d.default_pg_timeout)


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread that ends with the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    # An executor's threads would keep the program from ending while one of them waits.
    threading.Thread(target=run, daemon=True).start()
    return future


def call_within(timeout: timedelta, call: Callable[..., T], *args: Any) -> T:
    """Return the result of a call of a store, or raise its error.

    Raises DistStoreError if neither comes in time: a store on a lost node may not answer at all.
    """
    # As long as it waits, later calls of this store wait too: they come here as well.
    future = in_thread(call, *args)
    if not wait([future], (timeout + _GRACE).total_seconds()).done:
        limit = f"{timeout.total_seconds():g} s"
        raise dist.DistStoreError(f"the store of the processes has not answered within {limit}")
    return future.result()


def can_ask_store(store: Any, timeout: timedelta) -> bool:
    """Return whether a store can be asked; a fake cannot.

    Raises DistStoreError unless it answers in time.
    """
    try:
        call_within(timeout, store.check, ["xshard"])
    except dist.DistError:
        raise
    except RuntimeError:
        return False
    return True
