"""The torch bridge on one GPU: the rates of the machine, packing, layers, and the host's time of a call.

    python -m benchmarks.gpu           # about two minutes on an H100
    python -m benchmarks.gpu --quick   # small arrays, few rounds

Prints the claims and writes a JSON file. Exit status 1 if a claim fails, 2 where there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import record
from benchmarks.claim import finish
from benchmarks.gpu import measures
from benchmarks.torch_redistribute import __main__ as redistribute
from benchmarks.torch_redistribute import claims, host, packing

ROWS, QUICK_ROWS = 8192, 1024
COPIES, QUICK_COPIES = (1 << 26, 1 << 30), (1 << 20,)
# (batch, channels, rows, columns) of a block, and the kernel.
LAYERS = (((1, 64, 256, 1024), 3), ((4, 128, 128, 256), 3), ((1, 32, 512, 2048), 7))


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("gpu", __doc__, quick="small arrays, few rounds").parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device is here", file=sys.stderr)
        return 2
    rows = measure(quick=options.quick)
    judged = (*claims.host_times(rows["host"]), *claims.packing(rows["packs"]))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "nccl": nccl}
    return finish(options, "The torch bridge on a GPU", judged, "torch", rows=rows, **facts)


def measure(*, quick: bool) -> dict[str, Any]:
    """The rows of everything."""
    rounds, calls = (3, 20) if quick else (21, 1000)
    return {
        "rates": measures.rates(QUICK_ROWS if quick else ROWS, rounds),
        "copies": measures.copies(QUICK_COPIES if quick else COPIES, rounds),
        "launches": measures.launches(rounds),
        "packs": packing.rates(
            redistribute.QUICK_PACKED if quick else redistribute.PACKED["cuda"], 3 if quick else 9
        ),
        "layers": measures.layers(LAYERS[:1] if quick else LAYERS, rounds),
        "host": host.call_times(calls, "cuda"),
        "products": measures.products(calls),
    }


if __name__ == "__main__":
    sys.exit(main())
