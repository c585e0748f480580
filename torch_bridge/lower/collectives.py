"""Collectives of one group of processes on flat dense tensors, on any backend and torch version.

No argument is written to, and every result is a new tensor: autograd forbids writing to views that a
Function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from torch_bridge.lower.subarray import consecutive_slices
from torch_bridge.mesh.failures import call_backend, raise_if_peer_lost
from torch_bridge.mesh.process_mesh import Group
from torch_bridge.versions.autograd import make_if_lazy
from torch_bridge.versions.modes import dispatch_mode_count, is_profiling
from torch_bridge.versions.process_groups import METHODS, functional_collectives

# Torch cannot convert or compute in these dtypes: it can only view them as others.
# mypy does not know all of them.
FOUR_BITS: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in ("float4_e2m1fn_x2", "int4", "uint4")
)

_FLOATS_OF_8_BITS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
# Dtypes that no backend knows -> a dtype of the same size, as which their bits travel.
CARRIERS: dict[torch.dtype, torch.dtype] = {
    **dict.fromkeys((*_FLOATS_OF_8_BITS, *FOUR_BITS), torch.uint8),
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_OPTIONS: dict[str, Any] = {
    "all_gather": c10d.AllgatherOptions,  # type: ignore[attr-defined]  # in no `__all__`
    "all_reduce": c10d.AllreduceOptions,
    "all_to_all": c10d.AllToAllOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
}

# Point-to-point messages: a tag that keeps them apart from other messages between the same ranks, and the
# name in profiles and byte counters of all messages of one collective.
TAG = 7011
MESSAGES = "xshard.messages"

# Bytes from which on two messages are faster than gloo's collective of two ranks.
_LARGE_BYTES = 1 << 17

_UNRECORDED = nullcontext()

Pending = Callable[[], Tensor]  # waits for a result that is under way, and returns it


class Works(NamedTuple):
    """Several operations under way that are waited for together."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Peer(NamedTuple):
    """One rank of the group, and the elements of the two flat tensors that concern it."""

    rank: int
    sent: slice
    arriving: slice


class _UnderWay:
    """A collective under way: call it to wait for the result. It keeps the messages alive until then.

    If it is dropped, as after an error between its beginning and its end, it waits then: backends would
    write to memory that has another owner by now, and could take messages of the next collective for its.
    """

    def __init__(self, collective: Collective, out: Tensor, messages: Tensor, work: Any) -> None:
        self._collective = collective
        self._out: Tensor | None = out
        self._messages: Tensor | None = messages
        self._work = work

    def __call__(self) -> Tensor:
        """Wait for the end; return what arrived, once: then nothing is kept here."""
        work = self._work
        self._work = None
        if work is not None:
            call_backend(self._collective.kind, self._collective.group.ranks, work.wait)
        out, self._out = self._out, None
        messages, self._messages = self._messages, None
        assert out is not None and messages is not None, "a collective ends once"
        if messages.is_cuda:
            # The stream that waits may not be the one on which the tensors were allocated.
            for x in (out, messages):
                x.record_stream(torch.cuda.current_stream(x.device))
        return out

    def __del__(self) -> None:
        if self._work is not None:
            with suppress(Exception):  # nobody is there to be told
                self()


@dataclass(frozen=True)
class Collective:
    """One collective of a group: every rank sends one flat tensor and receives another."""

    # One of `_OPTIONS`; or "permute": at most one message from every rank, which compilers cannot record.
    kind: str
    group: Group
    # Elements per rank, or one number if all ranks have the same.
    sent: Sequence[int] = field(compare=False)
    received: Sequence[int] = field(compare=False)
    op: str | None = None
    is_even: bool = field(default=False, compare=False)  # all messages of all ranks have one size

    # Hot: `run` and what it calls are executed for every cached collective, in a straight line.

    def run(self, messages: Tensor, shape: Sequence[int]) -> Tensor:
        """Send a contiguous tensor of messages -> the received messages, in a new tensor of `shape`."""
        if self.group.graph_name:
            return self.begin(messages, shape)()
        # In its final shape: of a view, the caller could not write to the result under autograd.
        out = messages.new_empty(shape)
        self._issue(out.view(-1), messages.view(-1), async_op=False)
        return out

    def begin(self, messages: Tensor, shape: Sequence[int]) -> Pending:
        """Start the collective; return a function that waits and returns what arrived.

        Args:
            messages: The contiguous tensor of what is sent. It must not change until the end.
            shape: The shape of the result.
        """
        if self.group.graph_name:
            arriving = self._functional(messages)
            return lambda: functional_collectives.wait_tensor(arriving).view(shape)
        make_if_lazy(messages)
        out = messages.new_empty(shape)
        work = self._issue(out.view(-1), messages.view(-1), async_op=True)
        return _UnderWay(self, out, messages, work)

    @cached_property
    def _splits(self) -> tuple[list[int], list[int]]:
        """The elements from and for every rank, as an all-to-all takes them.

        Both are empty where all messages have one size, which is faster. All ranks give them or
        none: NCCL's call without them skips a rank with nothing to send.
        """
        if self.is_even:
            return [], []
        return list(self.received), list(self.sent)

    def _issue(self, out: Tensor, messages: Tensor, *, async_op: bool) -> Any:
        """Call the backend; return its handle to wait for, or None if there is none.

        Args:
            out: A flat tensor, which gets what arrives.
            messages: The flat messages, which stay as they are.
            async_op: Whether to return at once; else this waits until everything has arrived.
        """
        if messages.is_meta:  # only shapes are asked for
            return None
        if self.kind == "all_reduce":
            # Backends reduce in place: they get a copy, so that the caller's messages stay as they
            # are.
            out.copy_(messages)
        if messages.dtype.is_complex:
            # Not every backend sends complex numbers; pairs of numbers do as well, also for sums.
            out = torch.view_as_real(out)
            messages = torch.view_as_real(messages)
        try:
            work = self._start(out, messages, async_op)
            if work is not None and not async_op:
                work.wait()  # some backends return before the end
        except RuntimeError as error:
            raise_if_peer_lost(error, self.kind, self.group.ranks)
            raise  # no rank is lost: the backend's own error says more
        return work

    def _start(self, out: Tensor, messages: Tensor, async_op: bool) -> Any:
        """Call the backend."""
        if self.kind == "permute" or (self._is_a_pair and self._is_better_as_messages(messages)):
            return self._send_directly(out, messages)
        process_group = self.group.process_group
        options = self._options[async_op]
        if self.kind == "all_reduce":
            return process_group.allreduce([out], options)
        method = getattr(process_group, METHODS[self.kind])
        if self.kind == "all_to_all":
            received, sent = self._splits
            return method(out, messages, received, sent, options)
        return method(out, messages, options)

    @cached_property
    def _is_a_pair(self) -> bool:
        """Whether two ranks could exchange one message each instead."""
        return len(self.group.devices) == 2 and self.kind in ("all_gather", "all_to_all")

    def _is_better_as_messages(self, messages: Tensor) -> bool:
        """Return whether a collective of two ranks is large, and on gloo, which sends before it receives."""
        if messages.device.type != "cpu" or not self.group.serves(messages.device, "gloo"):
            return False
        peer = self._peers[1]
        elements = peer.sent.stop - peer.sent.start + peer.arriving.stop - peer.arriving.start
        return elements * messages.itemsize >= _LARGE_BYTES

    def _send_directly(self, out: Tensor, messages: Tensor) -> Works:
        """Start a send and a receive for each other rank, and copy what this rank has for itself.

        Args:
            out: A flat tensor, which gets what arrives, rank by rank.
            messages: A flat tensor of what is sent, rank by rank; for an all-gather, to each all of it.
        """
        process_group = self.group.process_group
        this_rank, *other_ranks = self._peers  # this rank comes first
        works = []
        is_recorded = dispatch_mode_count() > 0 or is_profiling()
        with torch.profiler.record_function(MESSAGES) if is_recorded else _UNRECORDED:
            # Receives first: a gloo sender waits until the receiver says that it is ready, and
            # behind this rank's own sends that notice would come late.
            for peer in other_ranks:
                if peer.arriving.stop > peer.arriving.start:
                    works.append(process_group.recv([out[peer.arriving]], peer.rank, TAG))
            for peer in other_ranks:
                if peer.sent.stop > peer.sent.start:
                    works.append(process_group.send([messages[peer.sent]], peer.rank, TAG))
        # This rank's message to itself does not travel: it is copied while the others do.
        if this_rank.arriving.stop > this_rank.arriving.start:
            out[this_rank.arriving] = messages[this_rank.sent]
        return Works(works)

    @cached_property
    def _peers(self) -> list[Peer]:
        """The ranks to exchange with, from this one on: on rank 1 of 4, they are 1, 2, 3, 0.

        In this order no two ranks send to the same one first. Each comes with two slices: of the
        flat tensor that is sent, what goes to it; of the flat tensor that arrives, what comes from
        it.
        """
        arriving = consecutive_slices(self.received)
        if self.kind == "all_gather":
            # Every rank gets all of it.
            sent = [slice(0, sum(self.sent))] * len(arriving)
        else:
            sent = consecutive_slices(self.sent)
        peers = list(map(Peer, range(len(arriving)), sent, arriving))
        rank = self.group.process_group.rank()
        return peers[rank:] + peers[:rank]

    @cached_property
    def _options(self) -> dict[bool, Any]:
        """The backend's options of a call that returns at once (True), and of one that waits."""
        # Made once: all calls of a collective have equal options, except for `asyncOp`.
        options_by_async = {}
        for async_op in (False, True):
            options_by_async[async_op] = _OPTIONS[self.kind]()
            options_by_async[async_op].asyncOp = async_op
            if self.op is not None:
                options_by_async[async_op].reduceOp = _REDUCE_OPS[self.op]
        return options_by_async

    def _functional(self, messages: Tensor) -> Tensor:
        """Return the result of the operator that compilers record; `wait_tensor` waits for it."""
        name = self.group.graph_name
        rank_count = len(self.group.devices)
        if self.kind == "all_to_all":
            return functional_collectives.all_to_all_single(
                messages.view(-1), list(self.received), list(self.sent), name
            )
        if self.kind == "all_gather":
            return functional_collectives.all_gather_into_tensor(messages, rank_count, name)
        if self.kind == "all_reduce":
            return functional_collectives.all_reduce(messages, self.op, name)
        if messages.shape[0] % rank_count:  # its rows are not divided, only its elements
            messages = messages.view(-1)
        return functional_collectives.reduce_scatter_tensor(messages, self.op, rank_count, name)
