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


def name_place(error: Exception, place: str) -> None:
    """Add the part of a plan to its error: to a CollectiveError, which is raised again, or as a note."""
    if isinstance(error, CollectiveError):
        raise CollectiveError(_failed(place), hint=error.hint) from error.__cause__
    error.add_note(f"in {place}")


def during(place: Callable[[], str], act: Callable[..., Any], *args: Any) -> Any:
    """Call a part of a plan; its errors name the `place`, as in `name_place`."""
    try:
        return act(*args)
    except Exception as error:
        name_place(error, place())
        raise


def raise_lost_peer(error: RuntimeError, what: str, ranks: Sequence[int]) -> None:
    """Raise CollectiveError if a backend's error in the operation `what` means a lost peer."""
    # gloo has no class for a lost peer, NCCL has; a lack of memory has another.
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        world = dist.group.WORLD
        said = str(error).strip().splitlines()
        waits = "" if world is None else f" within {timeout_of(world).total_seconds():g} s"
        hint = (
            f"one of the ranks {', '.join(map(str, ranks))} has ended, has failed, did not come{waits},"
            " or made another call"
            + (f"\n  the backend says: {said[0]}" if said else "")
            + "\n  with XSHARD_DEBUG=1 in the environment the ranks compare their calls, and say what differs"
        )
        raise CollectiveError(_failed(what), hint=hint) from error


def call_backend(what: str, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that only communicates. Raises CollectiveError as `raise_lost_peer` does."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise_lost_peer(error, what, ranks)
        raise


def _failed(what: str) -> str:
    return f"{what} failed on rank {dist.get_rank()}"


T = TypeVar("T")

_GRACE = timedelta(seconds=2)  # for what is over in time to say so itself


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of a group wait."""
    backends = (group._get_backend(kind) for kind in sorted(group._device_types, key=str))
    options = (getattr(backend, "options", None) for backend in backends)
    return max((o._timeout for o in options if o is not None), default=c10d.default_pg_timeout)


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread that ends with the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def within(timeout: timedelta, call: Callable[..., T], *args: Any) -> T:
    """The result of a call of a store, or its error. Raises DistStoreError if neither comes in time."""
    # As long as it waits, later calls of this store wait too: they come here as well.
    future = in_thread(call, *args)
    if not wait([future], (timeout + _GRACE).total_seconds()).done:
        waited = f"the store of the processes has not answered within {timeout.total_seconds():g} s"
        raise dist.DistStoreError(waited)
    return future.result()


def check_store(store: Any, timeout: timedelta) -> None:
    """Raise DistStoreError unless a store answers in time. One that cannot be asked, as a fake, passes."""
    try:
        within(timeout, store.check, ["xshard"])
    except dist.DistError:
        raise
    except RuntimeError:
        return
