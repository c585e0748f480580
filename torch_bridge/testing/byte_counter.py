"""Count the bytes that a rank really receives, to check a plan's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_bridge.lower.collectives import MESSAGES
from torch_bridge.versions.modes import TorchDispatchMode
from torch_bridge.versions.process_groups import group_by_name
from xshard import XshardError
from xshard.layout.partition import ceil_div

Count = Callable[..., int]
# By namespace and operation of torch; None for operations that carry no data.
_COUNTS: dict[str, dict[str, Count | None]] = {
    "c10d": dict.fromkeys(("send", "barrier", "monitored_barrier_", "check_for_nan")),
    # Called by DTensor and torch.distributed._functional_collectives.
    "_c10d_functional": dict.fromkeys(("isend", "wait_tensor", "_wrap_tensor_autograd")),
    "_dtensor": {"mesh_get_process_group": None},
    "symm_mem": {},  # between GPUs: their bytes are unknown here
}


class Meter(TorchDispatchMode):
    """While active, `received` lists the bytes from other ranks, one entry per collective.

    An all-reduce over n ranks counts 2(n-1)/n of its bytes, the least that a ring or tree needs,
    whatever the backend does; a reduction to one rank counts its bytes there. It counts for any code
    inside: calls of `torch.distributed`, of DTensor, DDP and FSDP. Raises XshardError for a
    collective that it does not know.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> def count():
    ...     with Meter() as meter:
    ...         dist.broadcast(torch.ones(3), src=0)
    ...     return meter.received
    >>> xt.testing.run_ranks(2, count)
    [[0], [12]]
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []
        self.in_messages = False  # whether messages from rank to rank are one collective of xshard

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self._see_mark(func, args)
        elif func.namespace in _COUNTS:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _see_mark(self, func: Any, args: tuple[Any, ...]) -> None:
        """Begin or end a collective that we send as single messages, and mark in the profiler."""
        is_begin = func.overloadpacket.__name__ == "_record_function_enter_new"
        self.in_messages = is_begin and args[0] == MESSAGES
        if self.in_messages:
            self.received.append(0)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Append the bytes that one call of torch.distributed receives to `self.received`.

        Where xshard sends the messages of one collective singly (`self.in_messages`), its entry is
        there already, and each message received adds to it.

        Args:
            func: The operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            XshardError: `_COUNTS` has no entry for the operation.
        """
        name = func.overloadpacket.__name__
        counts = _COUNTS[func.namespace]
        if self.in_messages and name == "recv_":
            self.received[-1] += _nbytes(args[0])
            return
        if name not in counts:
            raise XshardError(f"a Meter does not know how many bytes {func} receives")
        count = counts[name]
        if count is not None:  # None: it receives nothing
            self.received.append(count(*args, **kwargs))


def _counts(namespace: str, names: str) -> Callable[[Count], Count]:
    """Register a function of an operation's arguments that returns the bytes it receives."""

    def register(count: Count) -> Count:
        _COUNTS[namespace].update(dict.fromkeys(names.split(), count))
        return count

    return register


@_counts("c10d", "recv_ recv_any_source_")
@_counts("_c10d_functional", "irecv")
def _nbytes(tensors: Any, *_: Any) -> int:
    """Return the bytes of a tensor, or of lists of tensors."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def _group(group: Any) -> ProcessGroup:
    """Return the process group that an operation of c10d, or a functional one, was given.

    Functional operations have its name.
    """
    if isinstance(group, torch.ScriptObject):
        return ProcessGroup.unbox(group)
    return group if isinstance(group, ProcessGroup) else group_by_name(group)


@_counts("c10d", "_allgather_base_ allgather_ allgather_coalesced_")
@_counts("c10d", "allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_")
@_counts("c10d", "_reduce_scatter_base_ reduce_scatter_")
def _larger(outputs: Any, inputs: Any, *_: Any) -> int:
    """Count all but the own part.

    A gather has the input among the outputs, a reduce-scatter the output among the inputs.
    """
    return abs(_nbytes(outputs) - _nbytes(inputs))


@_counts("c10d", "allreduce_ allreduce_coalesced_")
def _all_reduce(tensors: Any, group: Any, *_: Any) -> int:
    """Count 2(n-1)/n of the elements of each tensor, rounded up."""
    n = _group(group).size()
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    n_bytes = 0
    for x in tensors:
        n_elements = ceil_div(2 * (n - 1) * x.numel(), n)
        n_bytes += n_elements * x.element_size()
    return n_bytes


@_counts("c10d", "alltoall_")
def _all_to_all_lists(outputs: Any, _: Any, group: Any, *__: Any) -> int:
    own_output = outputs[_group(group).rank()]
    return _nbytes(outputs) - own_output.nbytes


@_counts("c10d", "alltoall_base_")
def _all_to_all(output: Tensor, _: Tensor, group: Any, sizes: Sequence[int], *__: Any) -> int:
    """Count the bytes from other ranks; `sizes` has the rows from each, or is empty if they are equal."""
    process_group = _group(group)
    n_rows = output.shape[0]
    if not n_rows:
        return 0
    own_rows = n_rows // process_group.size()
    if sizes:
        own_rows = sizes[process_group.rank()]
    return output.nbytes * (n_rows - own_rows) // n_rows


@_counts("c10d", "broadcast_")
def _broadcast(tensors: Any, group: Any, root: int, *_: Any) -> int:
    """Count all bytes on all ranks but the one that sends them."""
    return 0 if _group(group).rank() == root else _nbytes(tensors)


@_counts("_c10d_functional", "broadcast broadcast_")
def _functional_broadcast(x: Tensor, root: int, group: Any) -> int:
    return _broadcast(x, group, root)


@_counts("c10d", "scatter_")
def _scatter(outputs: Any, _: Any, group: Any, root: int, *__: Any) -> int:
    return _broadcast(outputs, group, root)


@_counts("c10d", "gather_")
def _gather(outputs: Any, own_input: Any, *_: Any) -> int:
    return _larger(outputs, own_input) if outputs else 0  # others than the root have no outputs


@_counts("c10d", "reduce_")
def _reduce(tensors: Any, group: Any, _: Any, root: int, *__: Any) -> int:
    return _nbytes(tensors) if _group(group).rank() == root else 0


@_counts(
    "_c10d_functional",
    "all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out",
)
def _functional_gather(blocks: Any, n: int, *_: Any, **__: Any) -> int:
    return (n - 1) * _nbytes(blocks)


@_counts(
    "_c10d_functional",
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_out",
)
def _functional_scatter(blocks: Any, _: Any, n: int, *__: Any, **___: Any) -> int:
    return _nbytes(blocks) // n * (n - 1)


@_counts("_c10d_functional", "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_")
def _functional_all_reduce(tensors: Any, _: Any, group: Any) -> int:
    return _all_reduce(tensors, group)


@_counts("_c10d_functional", "all_to_all_single")
def _functional_all_to_all(block: Tensor, out_rows: Sequence[int], _: Any, group: Any) -> int:
    """Count the bytes from other ranks; `out_rows` has the rows from each."""
    n_rows = sum(out_rows) - out_rows[_group(group).rank()]
    return n_rows * block[:1].nbytes


@_counts("_c10d_functional", "batch_p2p_ops")
def _functional_messages(kinds: Any, _: Any, __: Any, tensors: Any, ___: Any) -> int:
    received = [x for kind, x in zip(kinds, tensors, strict=True) if "recv" in kind]
    return _nbytes(received)


@_counts("_dtensor", "shard_dim_alltoall")
def _shard_dim_all_to_all(x: Tensor, _: Any, __: Any, group: Any) -> int:
    return _functional_scatter(x, None, _group(group).size())
