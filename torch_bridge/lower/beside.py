"""Where a begun plan goes on by itself, beside what its caller computes.

A collective can begin only when what it sends is there. The first one of a plan begins at once; those after
it, and the local moves between them, are called beside the caller: on CPUs in a thread, on GPUs on a stream.
They run on groups of their own. Ranks must call the collectives of a group in one order, and what runs beside
the caller has no order with what the caller itself calls on its groups.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from torch_bridge.mesh.process_mesh import Group
from torch_bridge.versions.autograd import make_if_lazy
from torch_bridge.versions.modes import dispatch_mode_count

T = TypeVar("T", bound=Sequence[Tensor])


def can_go_on_beside(group: Group, device: torch.device) -> bool:
    """Return whether something can run beside the caller on such groups and tensors.

    Not where compilers record the caller, and where ranks are threads, which are known by them.
    """
    if group.graph_name:
        return False
    return device.type == "cuda" or group.serves(device, "gloo")


def go_on_beside(
    call: Callable[[], T], device: torch.device, blocks: Sequence[Tensor]
) -> Callable[[], T]:
    """Call a function beside the caller; return one that waits for its results and returns them.

    Calls run one after the other, in the order in which they come here, equal on all ranks. A dispatch mode
    sees its own thread alone: under one, the function is called at once.

    Args:
        call: Awaits the first collective of some plans and makes all moves after it; returns tensors.
        device: That of the tensors.
        blocks: Blocks of the caller that the function reads.
    """
    if dispatch_mode_count():
        results = call()
        return lambda: results
    if device.type == "cuda":
        return _on_stream(call, device, blocks)
    for block in blocks:
        make_if_lazy(block)  # the caller and the thread would let go of the memory that they share
    return _thread(os.getpid()).submit(call).result


@functools.cache
def _thread(process_id: int) -> ThreadPoolExecutor:
    """Return the thread of this process: a forked one has none of its parent's."""
    # In a new thread torch records gradients.
    return ThreadPoolExecutor(1, "xshard", initializer=torch.set_grad_enabled, initargs=(False,))


def _on_stream(
    call: Callable[[], T], device: torch.device, blocks: Sequence[Tensor]
) -> Callable[[], T]:
    """Call a function whose kernels wait for each other on a stream beside the caller's."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for block in blocks:
        block.record_stream(stream)  # its memory is not free before the stream has read it
    with torch.cuda.stream(stream):
        results = call()
    finished = stream.record_event()

    def wait() -> T:
        caller = torch.cuda.current_stream(device)
        caller.wait_event(finished)
        for result in results:
            result.record_stream(caller)
        return results

    return wait


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
