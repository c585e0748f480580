"""Bytes that a rank really receives, counted at the process group.

Decides how many bytes each collective counts. Reads the sizes of the tensors given to c10d; knows
no plan, so that a plan's numbers can be checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.lower.collectives import PERMUTE


class Meter(TorchDispatchMode):
    """While active, `received` lists the bytes that reach this rank from others, one entry per collective.

    An all-reduce over n ranks counts 2(n-1)/n of its bytes, the least that a ring or tree needs, whatever
    the backend does. Raises KeyError for an unknown collective.
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
            count = _COUNTS[func.namespace][func.overloadpacket.__name__]
            if count is not None:
                self.received.append(count(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _all_gather(output: Tensor, block: Tensor, *_: Any) -> int:
    return output.nbytes - block.nbytes


def _all_reduce(tensors: list[Tensor], group: Any, *_: Any) -> int:
    n = (group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)).size()
    return sum(-(-2 * (n - 1) * t.numel() // n) * t.element_size() for t in tensors)


def _reduce_scatter(output: Tensor, parts: Tensor, *_: Any) -> int:
    return parts.nbytes - output.nbytes


def _all_to_all(output: Tensor, _: Tensor, group: Any, sizes: list[int], *__: Any) -> int:
    ranks = ProcessGroup.unbox(group)
    rows = output.shape[0]
    own = sizes[ranks.rank()] if sizes else rows // ranks.size()
    return output.nbytes * (rows - own) // rows if rows else 0


def _scatter(outputs: list[Tensor], _: Any, group: Any, root: int, *__: Any) -> int:
    return 0 if ProcessGroup.unbox(group).rank() == root else sum(t.nbytes for t in outputs)


def _functional_all_to_all(block: Tensor, received: list[int], _: Any, group: Any) -> int:
    own = received[_resolve_process_group(group).rank()]
    return (sum(received) - own) * block[:1].nbytes


# By namespace and operation; None for operations that carry no data.
_COUNTS: dict[str, dict[str, Callable[..., int] | None]] = {
    "c10d": {
        "_allgather_base_": _all_gather,
        "allgather_": lambda outputs, blocks, *_: sum(t.nbytes for t in outputs[0]) - blocks[0].nbytes,
        "_reduce_scatter_base_": _reduce_scatter,
        "allreduce_": _all_reduce,
        "alltoall_base_": _all_to_all,
        "barrier": None,
        "recv_": lambda tensors, *_: sum(t.nbytes for t in tensors),
        "scatter_": _scatter,
        "send": None,
    },
    # Called by DTensor and torch.distributed._functional_collectives.
    "_c10d_functional": {
        "all_gather_into_tensor": lambda block, n, _: (n - 1) * block.nbytes,
        "all_reduce": lambda block, _, group: _all_reduce([block], _resolve_process_group(group)),
        "all_to_all_single": _functional_all_to_all,
        "reduce_scatter_tensor": lambda parts, _, n, __: parts.nbytes - parts.nbytes // n,
        "wait_tensor": None,
        "_wrap_tensor_autograd": None,
    },
}
