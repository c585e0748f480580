"""Bytes that a rank really receives, counted at the process group.

Decides how many bytes each collective of torch counts. Reads the sizes of the tensors given to it; knows
no plan, so that a plan's numbers can be checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.lower.collectives import PERMUTE
from xshard import XshardError


class Meter(TorchDispatchMode):
    """While active, `received` lists the bytes that reach this rank from others, one entry per collective.

    An all-reduce over n ranks counts 2(n-1)/n of its bytes, the least that a ring or tree needs, whatever
    the backend does; a reduction to one rank counts its bytes there. Works around anything that calls
    `torch.distributed`, DTensor, DDP and FSDP among them. Raises XshardError for a collective that it does
    not know.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> def count():
    ...     with Meter() as meter:
    ...         dist.broadcast(torch.ones(3), src=0)
    ...     return meter.received
    >>> xt.run_ranks(2, count)
    [[0], [12]]
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []
        self.permuting = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "profiler":  # messages from rank to rank, which together are one collective
            begins = func.overloadpacket.__name__ == "_record_function_enter_new"
            if begins and args[0] == PERMUTE:
                self.received.append(0)
            self.permuting = begins and args[0] == PERMUTE
        elif self.permuting and func.overloadpacket.__name__ == "recv_":
            self.received[-1] += sum(t.nbytes for t in args[0])
        elif func.namespace in _COUNTS:
            counts, name = _COUNTS[func.namespace], func.overloadpacket.__name__
            if name not in counts:
                raise XshardError(f"a Meter does not know how many bytes {func} receives")
            count = counts[name]
            if count is not None:
                self.received.append(count(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of lists of tensors."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def _group(group: Any) -> ProcessGroup:
    """The process group that an operation of c10d, or a functional one, was given."""
    if isinstance(group, torch.ScriptObject):
        return ProcessGroup.unbox(group)
    return group if isinstance(group, ProcessGroup) else _resolve_process_group(group)


def _larger(outputs: Any, inputs: Any, *_: Any) -> int:
    """Of gathers, whose outputs hold the input, and of reduce-scatters, whose inputs hold the output."""
    return abs(_nbytes(outputs) - _nbytes(inputs))


def _all_reduce(tensors: Any, group: Any, *_: Any) -> int:
    n = _group(group).size()
    flat = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(-(-2 * (n - 1) * t.numel() // n) * t.element_size() for t in flat)


def _all_to_all(output: Tensor, _: Tensor, group: Any, sizes: Sequence[int], *__: Any) -> int:
    ranks, rows = _group(group), output.shape[0]
    own = sizes[ranks.rank()] if sizes else rows // ranks.size()
    return output.nbytes * (rows - own) // rows if rows else 0


def _all_to_all_lists(outputs: Sequence[Tensor], _: Any, group: Any, *__: Any) -> int:
    return _nbytes(outputs) - outputs[_group(group).rank()].nbytes


def _functional_all_to_all(block: Tensor, received: Sequence[int], _: Any, group: Any) -> int:
    return (sum(received) - received[_group(group).rank()]) * block[:1].nbytes


def _at_root(tensors: Any, group: Any, root: int) -> int:
    return _nbytes(tensors) if _group(group).rank() == root else 0


def _but_root(tensors: Any, group: Any, root: int) -> int:
    return 0 if _group(group).rank() == root else _nbytes(tensors)


def _functional_gather(blocks: Any, n: int, *_: Any, **__: Any) -> int:
    return (n - 1) * _nbytes(blocks)


def _functional_scatter(parts: Any, _: Any, n: int, *__: Any, **___: Any) -> int:
    return _nbytes(parts) // n * (n - 1)


def _received(tensors: Any, *_: Any) -> int:
    return _nbytes(tensors)


_Count = Callable[..., int] | None


def _also(counts: dict[str, _Count], *endings: str) -> dict[str, _Count]:
    """The same operations with names that end in another way, too."""
    return {name + ending: count for name, count in counts.items() for ending in ("", *endings)}


# By namespace and operation; None for operations that carry no data.
_COUNTS: dict[str, dict[str, _Count]] = {
    "c10d": {
        "_allgather_base_": _larger,
        "allgather_": _larger,
        "allgather_coalesced_": _larger,
        "allgather_into_tensor_coalesced_": _larger,
        "_reduce_scatter_base_": _larger,
        "reduce_scatter_": _larger,
        "reduce_scatter_tensor_coalesced_": _larger,
        "allreduce_": _all_reduce,
        "allreduce_coalesced_": _all_reduce,
        "alltoall_": _all_to_all_lists,
        "alltoall_base_": _all_to_all,
        "broadcast_": lambda tensors, group, root, *_: _but_root(tensors, group, root),
        "scatter_": lambda outputs, _, group, root, *__: _but_root(outputs, group, root),
        "gather_": lambda outputs, own, group, root, *_: _larger(outputs, own) * bool(outputs),
        "reduce_": lambda tensors, group, _, root, *__: _at_root(tensors, group, root),
        "recv_": _received,
        "recv_any_source_": _received,
        "send": None,
        "barrier": None,
        "monitored_barrier_": None,
        "check_for_nan": None,
    },
    # Called by DTensor and torch.distributed._functional_collectives.
    "_c10d_functional": {
        **_also({"all_gather_into_tensor": _functional_gather}, "_coalesced", "_out"),
        **_also({"reduce_scatter_tensor": _functional_scatter}, "_coalesced", "_out"),
        **_also(
            {"all_reduce": lambda tensors, _, group: _all_reduce(tensors, group)},
            *("_", "_coalesced", "_coalesced_"),
        ),
        **_also({"broadcast": lambda tensor, root, group: _but_root(tensor, group, root)}, "_"),
        "all_to_all_single": _functional_all_to_all,
        "irecv": _received,
        "isend": None,
        "batch_p2p_ops": lambda kinds, _, __, tensors, ___: sum(
            t.nbytes for kind, t in zip(kinds, tensors, strict=True) if "recv" in kind
        ),
        "wait_tensor": None,
        "_wrap_tensor_autograd": None,
    },
    "_dtensor": {
        "shard_dim_alltoall": lambda block, _, __, group: _functional_scatter(
            block, "", _group(group).size()
        ),
        "mesh_get_process_group": None,
    },
    "symm_mem": {},  # between GPUs: what they receive is not known here
}
