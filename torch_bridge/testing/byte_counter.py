"""Bytes that a rank really receives, counted by the sizes of tensors, to check a plan's numbers against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.lower.collectives import MESSAGES
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
    >>> xt.testing.run_ranks(2, count)
    [[0], [12]]
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []
        self.in_messages = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (
            func.namespace == "profiler"
        ):  # messages from rank to rank, which together are one collective
            begins = func.overloadpacket.__name__ == "_record_function_enter_new"
            self.in_messages = begins and args[0] == MESSAGES
            if self.in_messages:
                self.received.append(0)
        elif self.in_messages and func.overloadpacket.__name__ == "recv_":
            self.received[-1] += sum(t.nbytes for t in args[0])
        elif func.namespace in _COUNTS:
            counts = _COUNTS[func.namespace]
            name = func.overloadpacket.__name__
            if name not in counts:
                raise XshardError(f"a Meter does not know how many bytes {func} receives")
            if (count := counts[name]) is not None:
                self.received.append(count(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _nbytes(tensors: Any, *_: Any) -> int:
    """Bytes of a tensor, or of lists of tensors."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def _group(group: Any) -> ProcessGroup:
    """The process group that an operation of c10d, or a functional one, was given."""
    if isinstance(group, torch.ScriptObject):
        return ProcessGroup.unbox(group)
    return group if isinstance(group, ProcessGroup) else _resolve_process_group(group)


def _larger(outputs: Any, inputs: Any, *_: Any) -> int:
    """Gathers have the input among the outputs, reduce-scatters the output among the inputs."""
    return abs(_nbytes(outputs) - _nbytes(inputs))


def _all_reduce(tensors: Any, group: Any, *_: Any) -> int:
    n = _group(group).size()
    flat = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(-(-2 * (n - 1) * t.numel() // n) * t.element_size() for t in flat)


def _all_to_all(output: Tensor, _: Tensor, group: Any, sizes: Sequence[int], *__: Any) -> int:
    ranks = _group(group)
    rows = output.shape[0]
    own = sizes[ranks.rank()] if sizes else rows // ranks.size()
    return output.nbytes * (rows - own) // rows if rows else 0


def _but_root(tensors: Any, group: Any, root: int) -> int:
    return 0 if _group(group).rank() == root else _nbytes(tensors)


def _functional_scatter(parts: Any, _: Any, n: int, *__: Any, **___: Any) -> int:
    return _nbytes(parts) // n * (n - 1)


# By namespace and operation; None for operations that carry no data.
_COUNTS: dict[str, dict[str, Callable[..., int] | None]] = {
    "c10d": {
        **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_coalesced_"), _larger),
        **dict.fromkeys(
            ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"), _larger
        ),
        **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_"), _larger),
        **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), _all_reduce),
        "alltoall_": lambda outs, _, group, *__: _nbytes(outs) - outs[_group(group).rank()].nbytes,
        "alltoall_base_": _all_to_all,
        "broadcast_": lambda tensors, group, root, *_: _but_root(tensors, group, root),
        "scatter_": lambda outputs, _, group, root, *__: _but_root(outputs, group, root),
        "gather_": lambda outputs, own, *_: _larger(outputs, own) if outputs else 0,
        "reduce_": lambda tensors, group, _, root, *__: (
            _nbytes(tensors) * (_group(group).rank() == root)
        ),
        **dict.fromkeys(("recv_", "recv_any_source_"), _nbytes),
        **dict.fromkeys(("send", "barrier", "monitored_barrier_", "check_for_nan")),
    },
    # Called by DTensor and torch.distributed._functional_collectives.
    "_c10d_functional": {
        **dict.fromkeys(
            (f"all_gather_into_tensor{end}" for end in ("", "_coalesced", "_out")),
            lambda blocks, n, *_, **__: (n - 1) * _nbytes(blocks),
        ),
        **{
            f"reduce_scatter_tensor{end}": _functional_scatter for end in ("", "_coalesced", "_out")
        },
        **dict.fromkeys(
            (f"all_reduce{end}" for end in ("", "_", "_coalesced", "_coalesced_")),
            lambda tensors, _, group: _all_reduce(tensors, group),
        ),
        **dict.fromkeys(
            ("broadcast", "broadcast_"), lambda x, root, group: _but_root(x, group, root)
        ),
        "all_to_all_single": lambda block, received, _, group: (
            (sum(received) - received[_group(group).rank()]) * block[:1].nbytes
        ),
        "irecv": _nbytes,
        "batch_p2p_ops": lambda kinds, _, __, tensors, ___: sum(
            x.nbytes for kind, x in zip(kinds, tensors, strict=True) if "recv" in kind
        ),
        **dict.fromkeys(("isend", "wait_tensor", "_wrap_tensor_autograd")),
    },
    "_dtensor": {
        "shard_dim_alltoall": lambda x, _, __, group: _functional_scatter(
            x, "", _group(group).size()
        ),
        "mesh_get_process_group": None,
    },
    "symm_mem": {},  # between GPUs: their bytes are unknown here
}
