"""The torch bridge beside DTensor, collectives by hand and plain copies: host and run time, memory, packing.

    python -m benchmarks.torch_redistribute           # public cases of 4 and 8 devices, 1 KiB to 64 MiB
    python -m benchmarks.torch_redistribute --quick   # a few of them

Prints a table and writes a JSON file. Every time is taken by turns with its peer's. Exit status 1 if a claim
of `torch_redistribute.claims` fails; the cases that break it are named.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks import record
from benchmarks.cases import load, scaled
from benchmarks.claim import Row, finish
from benchmarks.torch_redistribute import claims, host, packing, run_time
from xshard.formatting import format_bytes

RANKS = (4, 8)
# Bytes of the whole array, the stride of the cases that have this size, and rounds.
SIZES = ((1 << 10, 2, 31), (1 << 16, 2, 31), (1 << 20, 3, 21), (1 << 24, 6, 11), (1 << 26, 12, 7))
QUICK = ((1 << 12, 24, 3),)
PACKED = {"cpu": (1 << 24, 1 << 26), "cuda": (1 << 26, 1 << 28, 1 << 30, 1 << 31)}
QUICK_PACKED = (1 << 20,)
PROFILE = "gloo"


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "a few cases, few rounds"
    options = record.options("torch_redistribute", __doc__, quick=quick).parse_args(arguments)
    rows = measure(quick=options.quick)
    record.console().print(by_size(rows["ends"]))
    facts = {
        "backend": "gloo",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    title = "The torch bridge and its peers"
    judged = claims.judge(**rows)
    return finish(options, title, judged, "torch", rows=rows, **facts)


def measure(*, quick: bool) -> dict[str, Any]:
    """The rows of everything."""
    torch.set_num_threads(1)
    cases = [case for case in load("public") if case.mesh.n_devices in RANKS]
    chosen = []
    rounds = []
    for nbytes, stride, turns in QUICK if quick else SIZES:
        distinct: dict[Any, Any] = {}
        for case in cases:
            large = scaled(case, nbytes)
            if large.is_even or not case.is_even:
                distinct.setdefault(
                    (large.src, large.dst, large.mesh, large.shape, large.dtype), large
                )
        some = [*distinct.values()][::stride]
        chosen += some
        rounds += [turns] * len(some)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "host": host.call_times(20 if quick else 1000),
        "memory": host.memory(),
        "packs": packing.rates(QUICK_PACKED if quick else PACKED[kind], 3 if quick else 9),
        "ends": run_time.end_to_end(chosen, rounds, PROFILE, claims.LEAST),
    }


def by_size(ends: Sequence[Row]) -> Table:
    """How many times as fast as each peer, by the size of the array; and one program beside itself."""
    lines = []
    ways = sorted({way for row in ends for way in row["faster_than"]})
    for nbytes in sorted({_size(row["bytes"]) for row in ends}):
        rows = [row for row in ends if _size(row["bytes"]) == nbytes]
        by_way = [
            [row["faster_than"][way] for row in rows if way in row["faster_than"]] for way in ways
        ]
        by_way.append([row["noise"] for row in rows if row["noise"] is not None])
        cells = (f"{statistics.geometric_mean(v):.2f} ({min(v):.2f})" if v else "" for v in by_way)
        lines.append((format_bytes(nbytes), str(len(rows)), *cells))
    heads = ("array", "cases", *ways, "by hand, as by hand again")
    return record.table("Times as fast as: geometric mean (worst)", heads, lines, n_left=0)


def _size(nbytes: int) -> int:
    """The size in SIZES or QUICK that an array was made for: it is up to twice as large."""
    return max((size for size, *_ in (*SIZES, *QUICK) if size <= nbytes), default=SIZES[0][0])


if __name__ == "__main__":
    sys.exit(main())
