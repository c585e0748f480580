"""How long processes wait for each other, and for their store.

A store behind a link that is cut does not answer, and its own timeouts wait for its answer before they say
that they are over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")

_GRACE = timedelta(seconds=2)  # for what is over in time to say so itself


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of a group wait."""
    options = (_options(group, kind) for kind in sorted(group._device_types, key=str))
    return max((o._timeout for o in options if o is not None), default=c10d.default_pg_timeout)


def within(timeout: timedelta, call: Callable[..., T], *args: Any) -> T:
    """The result of a call of a store, or its error. Raises DistStoreError if neither comes in time."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(*args), None))
        except BaseException as error:
            answers.put((None, error))

    # As long as it waits, later calls of this store wait too: they come here as well.
    threading.Thread(target=answer, daemon=True).start()
    try:
        result, error = answers.get(timeout=(timeout + _GRACE).total_seconds())
    except queue.Empty:
        waited = f"the store of the processes has not answered within {timeout.total_seconds():g} s"
        raise dist.DistStoreError(waited) from None
    if error is not None:
        raise error
    return result


def check_store(store: Any, timeout: timedelta) -> None:
    """Raise DistStoreError unless a store answers in time. One that cannot be asked, as a fake, passes."""
    try:
        within(timeout, store.check, ["xshard"])
    except dist.DistError:
        raise
    except RuntimeError:
        return


def _options(group: dist.ProcessGroup, device: torch.device) -> Any:
    return getattr(group._get_backend(device), "options", None)
