"""Collectives of one group of processes on flat dense tensors, on any backend and torch version. No argument
is written to, and every result is a new tensor: autograd forbids writing to views that a Function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from torch_bridge.mesh.failures import call_backend, raise_lost_peer
from torch_bridge.mesh.process_mesh import Group

# Methods of a process group, called directly: the checks of `dist` take as long as the rest of a small call.
# torch 2.13 has new names for them; torch 2.11 has only the old ones. They are looked up on the group itself,
# which may be of a subclass: ranks as threads have another.
_OLD = (("all_gather", "_allgather_base"), ("all_to_all", "alltoall_base"))
_METHODS = {
    kind: new if hasattr(dist.ProcessGroup, new := f"{kind}_single") else old
    for kind, old in (*_OLD, ("reduce_scatter", "_reduce_scatter_base"))
}

# What torch can only see as other dtypes.
FOUR_BITS = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2", "int4", "uint4"))

# Dtypes that no backend knows -> a dtype of the same size, as which their bits travel.
_FLOATS = "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"
CARRIERS = {
    **dict.fromkeys(
        (*(getattr(torch, f"float8_{name}") for name in _FLOATS), *FOUR_BITS), torch.uint8
    ),
    **dict.fromkeys((torch.int16, torch.uint16), torch.float16),
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_OPTIONS: dict[str, Any] = {
    "all_gather": c10d.AllgatherOptions,
    "all_reduce": c10d.AllreduceOptions,
    "all_to_all": c10d.AllToAllOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
}

# For messages from rank to rank: a tag that keeps them apart from others between the same ranks, the name of
# all of one collective in profiles and byte counters, and from how many bytes on they are faster than gloo's.
TAG = 7011
MESSAGES = "xshard.messages"
_LARGE = 1 << 17


_UNWATCHED = nullcontext()  # recording a name takes 6 us
Pending = Callable[[], Tensor]  # waits for a result that is under way and returns it


class Works(NamedTuple):
    """Several operations under way that are waited for as one."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _in_turn(sizes: Sequence[int]) -> list[slice]:
    """The positions of messages, one after the other."""
    return [slice(*rows) for rows in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True)
class Collective:
    """One collective of a group: every rank sends one flat tensor and receives another."""

    kind: (
        str  # as in `_OPTIONS`, or permute: at most one message from every rank, not for compilers
    )
    group: Group
    sent: Sequence[int] = field(
        compare=False
    )  # elements per rank, or one number if all are the same
    received: Sequence[int] = field(compare=False)
    op: str | None = None
    is_even: bool = field(default=False, compare=False)  # messages have one size everywhere

    def run(self, messages: Tensor, shape: Sequence[int]) -> Tensor:
        """A flat tensor of the messages to send -> the messages received, in a tensor of `shape`."""
        if self.group.graph_name:
            return self.begin(messages, shape)()
        out = messages.new_empty(shape)
        self._issue(out.view(-1), messages, async_op=False)
        return out

    def begin(self, messages: Tensor, shape: Sequence[int]) -> Pending:
        """Begin `run` -> a function that waits for its end and returns its result."""
        if self.group.graph_name:
            arriving = self._functional(messages)
            return lambda: torch.ops._c10d_functional.wait_tensor(arriving).view(shape)
        out = messages.new_empty(shape)
        work = self._issue(out.view(-1), messages, async_op=True)

        def end(
            _messages: Tensor = messages,
        ) -> Tensor:  # keeps the messages alive until they have been sent
            if work is not None:
                call_backend(self.kind, self.group.ranks, work.wait)
            if out.is_cuda:  # the stream that waits may not be the one on which they were allocated
                for x in (out, _messages):
                    x.record_stream(torch.cuda.current_stream(x.device))
            return out

        return end

    @cached_property
    def _splits(self) -> tuple[list[int], list[int]]:
        """The split sizes of an all-to-all: none where all messages have one size, which is faster."""
        # All ranks give them or none: NCCL's call without them skips a rank with nothing to send.
        return ([], []) if self.is_even else (list(self.received), list(self.sent))

    def _issue(self, out: Tensor, messages: Tensor, *, async_op: bool) -> Any:
        """Begin it -> the work to wait for, or None where it has ended."""
        if messages.is_meta:  # shapes alone are asked for
            return None
        if self.kind == "all_reduce":
            out.copy_(messages)
        if messages.dtype.is_complex:
            out = torch.view_as_real(out)
            messages = torch.view_as_real(messages)
        try:
            work = self._started(out, messages, async_op)
            if work is not None and not async_op:
                work.wait()  # some backends return before the end
        except RuntimeError as error:
            raise_lost_peer(error, self.kind, self.group.ranks)
            raise
        return work

    def _started(self, out: Tensor, messages: Tensor, async_op: bool) -> Any:
        if self.kind == "permute" or (self._is_a_pair and self._is_better_as_messages(messages)):
            return self._sent_directly(out, messages)
        group = self.group.process_group
        options = self._options[async_op]
        if self.kind == "all_reduce":
            return group.allreduce([out], options)
        splits = self._splits if self.kind == "all_to_all" else ()
        return getattr(group, _METHODS[self.kind])(out, messages, *splits, options)

    @cached_property
    def _is_a_pair(self) -> bool:
        return len(self.group.devices) == 2 and self.kind in ("all_gather", "all_to_all")

    def _is_better_as_messages(self, messages: Tensor) -> bool:
        """Whether a collective of two ranks is large, and on gloo, which sends before it receives."""
        if messages.device.type != "cpu" or not self.group.serves(messages.device, "gloo"):
            return False
        _, (_, sent, arrives) = self._peers
        return sum(rows.stop - rows.start for rows in (sent, arrives)) * messages.itemsize >= _LARGE

    def _sent_directly(self, out: Tensor, messages: Tensor) -> Works:
        """Begin to receive, then to send: else gloo's word that one is ready comes too late."""
        group, ((_, sent, arrives), *others) = self.group.process_group, self._peers
        is_watched = (
            torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()
        )
        with torch.profiler.record_function(MESSAGES) if is_watched else _UNWATCHED:
            works = [
                group.recv([part], to, TAG) for to, _, rows in others if len(part := out[rows])
            ]
            works += [
                group.send([part], to, TAG) for to, rows, _ in others if len(part := messages[rows])
            ]
        if arrives.stop > arrives.start:
            out[arrives] = messages[sent]
        return Works(works)

    @cached_property
    def _peers(self) -> list[tuple[int, slice, slice]]:
        """Every rank, what is sent there, and where what it sends arrives; from this rank on."""
        n = len(self.received)
        me = self.group.process_group.rank()
        sent = (
            _in_turn([*self.sent]) if self.kind != "all_gather" else [slice(0, sum(self.sent))] * n
        )
        peers = list(zip(range(n), sent, _in_turn(self.received), strict=True))
        return peers[me:] + peers[:me]

    @cached_property
    def _options(self) -> tuple[Any, Any]:
        """The options of a call that waits for its end, and of one that does not."""
        options = waiting, _ = _OPTIONS[self.kind](), _OPTIONS[self.kind]()
        for each in options:
            each.asyncOp = each is not waiting
            if self.op is not None:
                each.reduceOp = _OPS[self.op]
        return options

    def _functional(self, messages: Tensor) -> Tensor:
        """The collective as a functional operator; wait for its result with `wait_tensor`."""
        functional = torch.ops._c10d_functional
        name = self.group.graph_name
        n = len(self.group.devices)
        if self.kind == "all_to_all":
            return functional.all_to_all_single(messages, [*self.received], [*self.sent], name)
        if self.kind == "all_gather":
            return functional.all_gather_into_tensor(messages, n, name)
        if self.kind == "all_reduce":
            return functional.all_reduce(messages, self.op, name)
        return functional.reduce_scatter_tensor(messages, self.op, n, name)
