"""How fast blocks are packed and unpacked, beside `Tensor.copy_` of as many bytes.

On a GPU if there is one, else on the CPU; nothing is sent. Packing is compared with copies of
contiguous memory and of rows in pieces, as a cut through the columns makes them.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

import xshard as xs
from benchmarks import by_turns
from benchmarks.memory import keep_freed_memory
from benchmarks.torch_redistribute.host import MESH, nobody
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh

# Moves of an array of (rows, columns) with blocks to pack or unpack.
MOVES = {
    "transposed": "n/a d -> n d/a",
    "zigzag to columns": "n/zigzag(a) d -> n d/a",
    "columns to zigzag": "n d/a -> n/zigzag(a) d",
    "zigzag to contiguous": "n/zigzag(a) d -> n/a d",
    "halo of rows": "n/a d -> n/a:halo(64,64) d",
    "halo of columns": "n d/a -> n d/a:halo(64,64)",
}
COLUMNS = 4096


def rates(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds per byte of every pack and unpack, over `Tensor.copy_`; sizes: bytes of a block."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    with nobody():
        return [row for n, name in product(sizes, MOVES) for row in _rows(name, n, device, rounds)]


def _rows(name: str, nbytes: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    rows = nbytes * MESH.n_devices // (2 * COLUMNS)
    plan = xs.plan(MOVES[name], MESH, (rows, COLUMNS), "bfloat16")
    (packed,) = (
        m for m in lower(plan, process_mesh(MESH), device).moves if isinstance(m, PackedCollective)
    )
    block = torch.ones(plan.source.local_shape(1), dtype=torch.bfloat16, device=device)
    messages = packed.sent.pack(block)
    arrived = torch.ones(packed.arriving, dtype=torch.bfloat16, device=device)
    written = {"pack": messages.nbytes, "unpack": packed.unpack(block, arrived).nbytes}
    pieces = block.view(block.shape[0], MESH.n_devices, -1).transpose(0, 1)
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: torch.empty_like(block).copy_(block),  # packs are new tensors too
        "copy of pieces": lambda: block.new_empty(pieces.shape).copy_(pieces),
        "pack": lambda: packed.sent.pack(block),
        "unpack": lambda: packed.unpack(block, arrived),
    }

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def finished(way: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            way()
            wait()

        return call

    calls = {name: finished(way) for name, way in ways.items()}
    times = by_turns.seconds(calls, rounds, warm_up=2, before=wait)
    whole, in_pieces = (
        statistics.median(times[way]) / block.nbytes for way in ("copy", "copy of pieces")
    )
    # A view takes no time; a few small edges take less than the clock resolves.
    return [
        {
            "move": name,
            "what": what,
            "device": device.type,
            "block_bytes": block.nbytes,
            "bytes": n,
            "copy_bytes_per_s": 1 / whole,
            "slower_than_copy": statistics.median(times[what]) / n / whole,
            "slower_than_copy_of_pieces": statistics.median(times[what]) / n / in_pieces,
        }
        for what, n in written.items()
        if n >= block.nbytes // 2 and not (what == "pack" and packed.sent.is_flat)
    ]
