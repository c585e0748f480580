"""Loads in torch: by one process, whole, and by four gloo ranks, under another layout.

All ways give the same blocks in new memory.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torch_bridge as xt
from benchmarks import by_turns
from benchmarks.claim import Row
from benchmarks.state import floor, weights
from xshard import Mesh, Sharding
from xshard.state.files import open_checkpoint

RANKS = 4


def save(folder: Path, scale: int) -> None:
    """The weights, cut as a trainer has them, as safetensors and by DCP. On every rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    trained = weights.shardings(weights.TRAINED, Mesh(fsdp=RANKS), scale)
    tree = {}
    for i, (name, sharding) in enumerate(trained.items()):
        local = sharding.local_shape(dist.get_rank())
        pattern = torch.rand(
            2**20 + 7, generator=torch.Generator().manual_seed(RANKS * i + dist.get_rank())
        )
        n = torch.Size(local).numel()
        block = pattern.bfloat16().repeat(-(-n // len(pattern)))[:n].view(local)
        tree[name] = as_dtensor(block, sharding, mesh)
    xt.save(tree, folder / "safetensors")
    dcp.save(tree, checkpoint_id=folder / "dcp")


def resharded(folder: Path, scale: int, rounds: int) -> Row:
    """As a server has them. On every rank; a turn takes as long as on its slowest rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    served = weights.shardings(weights.SERVED, Mesh(tp=RANKS), scale)
    blocks: dict[str, Tensor] = {}
    n_bytes = sum(2 * math.prod(sharding.local_shape(rank)) for sharding in served.values())

    def before() -> None:
        """Take memory for DCP to fill, as new as the others' memory."""
        blocks.update(
            (name, torch.empty(x.local_shape(rank), dtype=torch.bfloat16))
            for name, x in served.items()
        )
        floor.memory_at_hand(n_bytes)
        dist.barrier()

    def by_dcp(**where: Any) -> dict[str, Tensor]:
        dcp.load({name: as_dtensor(blocks[name], x, mesh) for name, x in served.items()}, **where)
        return dict(blocks)

    own = {name: weights.index_of(x, rank) for name, x in served.items()}
    with open_checkpoint(folder / "safetensors") as checkpoint:
        expected = xt.load(checkpoint, weights.SERVED, Mesh(tp=RANKS))
        read = checkpoint.bytes_read
        needed = sum(x.nbytes for x in expected.values())
    load = lambda: xt.load(folder / "safetensors", weights.SERVED, Mesh(tp=RANKS))  # noqa: E731
    beyond = torch.tensor(floor.bytes_beyond(load, needed))
    dist.all_reduce(beyond, dist.ReduceOp.MAX)
    calls: floor.Calls = {
        weights.OURS: load,
        "xshard, from DCP's files": lambda: xt.load(folder / "dcp", weights.SERVED, Mesh(tp=RANKS)),
        weights.DCP: lambda: by_dcp(checkpoint_id=folder / "dcp"),
        weights.HF: lambda: by_dcp(
            storage_reader=HuggingFaceStorageReader(str(folder / "safetensors"))
        ),
        weights.SLICES: lambda: slices(folder / "safetensors", own),
    }
    for name, way in calls.items():
        before()
        loaded = way()
        assert all(torch.equal(loaded[key], x) for key, x in expected.items()), name
    del expected, loaded
    calls |= floor.calls(sorted((folder / "safetensors").glob("*.safetensors")), needed, rank)
    seconds = by_turns.slowest(calls, rounds, warm_up=1, before=before)
    counts = torch.tensor([read, needed])
    dist.all_reduce(counts)
    return row(f"torch, {RANKS} ranks", seconds, *counts.tolist(), int(beyond))


def whole(folder: Path, rounds: int, _: float) -> Row:
    """All of them, in this process alone."""
    stored = folder / "safetensors"
    pickled = folder / "torch.pt"
    with open_checkpoint(stored) as checkpoint:
        n_bytes = sum(x.nbytes for x in xt.load(checkpoint).values())
        read = checkpoint.bytes_read
    beyond = floor.bytes_beyond(lambda: xt.load(stored), n_bytes)
    torch.save(xt.load(stored), pickled)
    own = dict.fromkeys(weights.places(stored), ())
    calls: floor.Calls = {
        weights.OURS: lambda: xt.load(stored),
        weights.TORCH: lambda: torch.load(pickled, weights_only=True),
        weights.SLICES: lambda: slices(stored, own),
    }
    expected = slices(stored, own)
    for name in (weights.OURS, weights.TORCH):
        loaded = calls[name]()
        assert all(torch.equal(loaded[key], x) for key, x in expected.items()), name
    del expected, loaded
    calls |= floor.calls(sorted(stored.glob("*.safetensors")), n_bytes)
    seconds = by_turns.seconds(
        calls, rounds, warm_up=1, before=lambda: floor.memory_at_hand(n_bytes)
    )
    return row("torch, one process", seconds, read, n_bytes, beyond)


def slices(folder: Path, own: dict[str, tuple[slice, ...]]) -> dict[str, Tensor]:
    """Parts of arrays by safetensors itself. Rows are views of the file there: users copy them."""
    parts: dict[str, Tensor] = {}
    for name, stored in weights.slices(folder, "pt"):
        part = stored[own[name] or ...]
        parts[name] = torch.empty(part.shape, dtype=part.dtype).copy_(part)
    return parts


def row(
    part: str, seconds: dict[str, list[float]], read: int, needed: int, beyond: int | None = None
) -> Row:
    counts = {"bytes_read": read, "bytes_needed": needed}
    return {"part": part, **counts, "bytes_beyond": beyond, "seconds": seconds}


def as_dtensor(block: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    layout = sharding.layout
    like = torch.empty(sharding.shape, device="meta")
    placements = xt.dtensor.to_placements(layout, mesh)
    return DTensor.from_local(
        block, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
