"""Host time and memory of a call on a fake process group: nothing is sent, and no rank waits."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_bridge as xt
import xshard as xs
from benchmarks import by_turns, torch_calls
from benchmarks.torch_redistribute.by_hand import all_gather
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from xshard.layout.layout import parse_expression
from xshard.steps import Scale

RANKS = 4
MESH = xs.Mesh(a=RANKS)
CELLS = xs.Owners([i * 7 % 16 // 4 for i in range(16)])
NEAR, _ = xs.Needs.of_edges(CELLS, range(16), [(i + 1) % 16 for i in range(16)])
# A move for every kind of step.
MOVES = {
    "all_gather": "n/a d -> n d | copy(a)",
    "reduce_scatter": "n d | sum(a) -> n/a d",
    "all_reduce": "n d | sum(a) -> n d",
    "all_to_all": "n/a d -> n d/a",
    "all_to_all of zigzag": "n/zigzag(a) d -> n d/a",
    "exchange of zigzag": "n/zigzag(a) d -> n/a d",
    "exchange of halos": "n/a d -> n/a:halo(1,1) d",
    "slice": "n d -> n/a d",
    "embed": "n/a d -> n d | sum(a)",
    "mask": "n d -> n d | sum(a)",
    "scale and all_reduce": "n d | mean(a) -> n d",
    "retag": "n d -> n d | copy(a)",
}
GRAPH = {
    "exchange of a graph": f"n/by(a,{CELLS}) d -> n/by(a,{CELLS}):reads({NEAR}) d"
}  # of 16 rows


@contextmanager
def nobody(device: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh of processes that do not exist, on a fake process group; calls are planned for GPUs."""
    with torch_calls.fake_group(RANKS), xs.use_profile("h100"):
        yield init_device_mesh(device, (RANKS,), mesh_dim_names=("a",))


def call_times(rounds: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Seconds per cached call of every kind of step, beside DTensor and torch's own all-gather."""
    rows = []
    with nobody(device) as mesh:
        for name, text in (MOVES | GRAPH).items():
            src, dst = parse_expression(text)
            block = torch.ones(xs.Sharding(src, MESH, (16, 8)).local_shape(1), device=device)
            row: dict[str, Any] = {"move": name, "expression": text}
            row["xshard"] = _both(
                lambda x, text=text: xt.redistribute(x, text, mesh), block, rounds
            )
            try:
                placements = [xt.dtensor.to_placements(end, mesh, (16, 8)) for end in (src, dst)]
                row["DTensor"] = _both(
                    lambda x, placements=placements: _placed(x, mesh, *placements), block, rounds
                )
            except (xs.errors.PlanError, NotImplementedError, RuntimeError):
                pass  # DTensor has no placements for halos, zigzag, and partial sums made from replicas
            rows.append(row)
        out = torch.empty(16, 8, device=device)
        block = torch.ones(4, 8, device=device)
        raw = {"forward_s": _median(lambda: all_gather(out, block), rounds)}
        return [*rows, {"move": "dist.all_gather_single", "raw": raw}]


def _placed(x: Tensor, mesh: DeviceMesh, src: Any, dst: Any) -> Tensor:
    return DTensor.from_local(x, mesh, src, run_check=False).redistribute(mesh, dst).to_local()


def _both(move: Callable[[Tensor], Tensor], block: Tensor, rounds: int) -> dict[str, float]:
    forward, both = torch_calls.calls(move, block)
    return {"forward_s": _median(forward, rounds), "both_s": _median(both, rounds)}


def _median(call: Callable[[], Any], rounds: int) -> float:
    return by_turns.medians({"call": call}, rounds, warm_up=rounds // 10)["call"]


class Allocations(TorchDispatchMode):
    """While active, counts allocated bytes; `peak` is the most that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before, after = (
            {
                t.untyped_storage()._cdata: t.untyped_storage()
                for t in tree_leaves(x)
                if isinstance(t, Tensor)
            }
            for x in ((args, kwargs), result)
        )
        for key in after.keys() - before.keys() - self._known:
            self._known.add(key)
            self.live += after[key].nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(after[key], self._released, key, after[key].nbytes())
        return result

    def _released(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def memory() -> list[dict[str, Any]]:
    """The most bytes that a call holds beyond its input and its result, and the bytes of one packed copy."""
    rows = []
    with nobody() as mesh:
        for name, text in MOVES.items():
            plan = xs.plan(text, MESH, (1024, 256), "float32")
            block = torch.ones(plan.source.local_shape(1))
            xt.redistribute(block, text, mesh)
            with torch.no_grad(), Allocations() as allocations:
                y = xt.redistribute(block, text, mesh)
            moves = lower(plan, process_mesh(plan.mesh), torch.device("cpu")).moves
            packed = [move for move in moves if isinstance(move, PackedCollective)]
            copies = [
                max(sum(move.collective.sent), sum(move.collective.received)) * 4 for move in packed
            ]
            flat = all(move.sent.is_flat and len(move.arriving) > 1 for move in packed)
            if any(isinstance(step, Scale) for step in plan.steps):
                copies = [block.nbytes]
                flat = False  # the scaled copy is sent
            rows.append(
                {
                    "move": name,
                    "extra_bytes": allocations.peak - y.untyped_storage().nbytes(),
                    "packed_bytes": max(copies, default=0),
                    "needs_packing": not flat,
                }
            )
    return rows
