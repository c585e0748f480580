"""DTensor's einsum of two operands, as its users write it, counted on a fake process group.

    torch.einsum(equation, a, b).redistribute(placements=...)

and `backward()` with a cotangent under the placements of the result; every gradient is then redistributed to
the placements of its operand. Each collective counts the bytes that one device receives in a ring. Arrays
have no data. An all-to-all counts as on GPUs; on CPUs DTensor gathers instead.
"""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import xshard as xs
from benchmarks.cases import is_in_order
from benchmarks.claim import Row
from benchmarks.einsum.cases import Case
from benchmarks.einsum.peers import figures
from benchmarks.planner.peers.dtensor import device_mesh
from benchmarks.torch_redistribute.run_time import all_to_all
from torch_bridge.dtensor import to_placements

MOST_S = 10.0  # processor seconds of a case: on meshes of three axes DTensor plans some for minutes
NOTHING_SENT = ("wait_tensor", "_wrap_tensor_autograd")
# (bytes sent in, bytes that come back, devices) -> bytes received.
RECEIVED = {
    "all_gather_into_tensor": lambda before, after, n: after - after // n,
    "reduce_scatter_tensor": lambda before, after, n: before - before // n,
    "all_reduce": lambda before, after, n: 2 * (before - before // n),
    "all_to_all_single": lambda before, after, n: before - before // n,
    "shard_dim_alltoall": lambda before, after, n: before - before // n,
}


class Counted(TorchDispatchMode):
    """Counts what the functional collectives of one device receive."""

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = self.flops = 0
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on blocks come here, too
        result = func(*args, **(kwargs or {}))
        if (
            func._overloadpacket in flop_registry and FakeTensor not in types
        ):  # these are shapes only
            self.flops += flop_registry[func._overloadpacket](
                *args, **(kwargs or {}), out_val=result
            )
        if (
            func.namespace in ("_c10d_functional", "_dtensor")
            and (name := func._opname) not in NOTHING_SENT
        ):
            sizes = [x.numel() * x.element_size() for x in (args[0], result)]
            n = distributed.distributed_c10d._resolve_process_group(args[-1]).size()
            self.received_bytes += RECEIVED[name](*sizes, n)
            self.counts[name] += 1
        return result

    def row(self) -> Row:
        counts = dict(sorted(self.counts.items()))
        return {"received_bytes": self.received_bytes, "counts": counts, "flops": self.flops}


def measured(case: Case) -> Row:
    """Bytes, collectives and operations of one device; or the reason why there are none."""
    layouts = (*case.contraction.operands, case.contraction.result)
    if len(layouts) != 3:
        return {"reason": "not two operands"}
    if not all(is_in_order(layout, case.mesh) for layout in layouts):
        return {"reason": "axes that cut a dim in another order than the mesh's"}
    mesh = device_mesh(case.mesh)
    try:
        on_gpu = mock.patch.object(placement_types, "shard_dim_alltoall", all_to_all)
        with on_gpu, _ended_after(MOST_S):
            a, b, cotangent = (_array(case, layout, mesh) for layout in layouts)
            operands = a.requires_grad_(), b.requires_grad_()
            with Counted() as forward:
                y = torch.einsum(case.equation, a, b).redistribute(placements=cotangent.placements)
            with Counted() as backward:
                gradients = torch.autograd.grad(y, operands, cotangent)
                for gradient, operand in zip(gradients, operands, strict=True):
                    gradient.redistribute(placements=operand.placements)
            return figures(forward.row(), backward.row())
    except (RuntimeError, NotImplementedError, ValueError, TimeoutError) as error:
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def _array(case: Case, layout: xs.Layout, mesh: DeviceMesh) -> DTensor:
    shape = case.shape(layout)
    local = xs.Sharding(layout, case.mesh, shape).max_local_shape
    block = torch.empty(local, dtype=getattr(torch, case.dtype), device="meta")
    return DTensor.from_local(block, mesh, to_placements(layout, case.mesh, shape), run_check=False)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many processor seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} processor seconds")

    usual = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, usual)
