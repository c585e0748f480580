"""The JAX bridge beside XLA's own reshard: bytes, memory, time to compile, time to run, dispatch.

    python -m benchmarks.jax_reshard           # all public cases of at most 64 devices
    python -m benchmarks.jax_reshard --quick   # a few of them, and one small timing

Prints a table and writes a JSON file. Compiled figures are exact. Run times are taken by turns with XLA's
program; each case runs in several processes of its own, and the middle one counts: XLA's program takes 20 ms
in one process and 32 in another, depending on what the allocator holds. Exit status 1 if a claim of
`jax_reshard.claims` fails; the cases are named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from operator import itemgetter

from benchmarks import record
from benchmarks.cases import Case, load, scaled
from benchmarks.claim import Row, finish
from benchmarks.jax_reshard import claims
from benchmarks.jax_reshard.claims import DEFAULT, FEWEST_BYTES
from xshard.formatting import format_bytes

MOST_DEVICES = 64
TIMED_DEVICES = 8


@dataclass(frozen=True)
class Extent:
    """How much a run measures."""

    stride: int  # through the cases
    timed: tuple[tuple[int, int], ...]  # bytes of the timed arrays, and rounds
    most_timed: int | None  # cases of a size
    processes: int  # for each of them
    calls: int  # to measure dispatch


FULL = Extent(1, ((16 << 20, 15), (128 << 20, 7)), None, 3, 2000)
QUICK = Extent(46, ((1 << 20, 3),), 1, 1, 50)  # four cases: one with partial sums, one in bfloat16


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("jax_reshard", __doc__, quick="a few cases, one small timing").parse_args(
        arguments
    )
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(MOST_DEVICES))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    rows, dispatch = measure(QUICK if options.quick else FULL)
    judged, title = claims.judge(**rows, dispatch=dispatch), "The JAX bridge and XLA's own reshard"
    return finish(options, title, judged, "jax", "jaxlib", rows=rows, dispatch=dispatch)


def measure(extent: Extent) -> tuple[dict[str, list[Row]], Row]:
    """The rows of dispatch, and of every case that JAX can express: even, on at most 64 devices."""
    # These import JAX, which reads its environment first.
    from benchmarks.jax_reshard import measures
    from benchmarks.jax_reshard.programs import Move, addable

    measures.configure(MOST_DEVICES)
    cases = [c for c in load("public") if c.is_even and c.mesh.n_devices <= MOST_DEVICES][:: extent.stride]
    compiled = [
        measures.compiled([Move(addable(case), profile) for profile in (FEWEST_BYTES, DEFAULT)])
        for case in record.shown(cases, "compiling")
    ]
    timed = []
    for size, rounds in extent.timed:
        large = [scaled(c, size) for c in cases if c.mesh.n_devices == TIMED_DEVICES]
        distinct = {(c.src, c.dst, c.mesh, c.shape, c.dtype): c for c in large if c.is_even}
        chosen = [*distinct.values()][: extent.most_timed]
        for case in record.shown(chosen, f"timing at {format_bytes(size)}"):
            row = timed_alone(case, rounds, extent.processes)
            # One program timed twice differs by as much: in doubt, the middle of more processes counts.
            doubtful = row["faster"] < claims.LEAST and extent.processes > 1
            timed.append(timed_alone(case, rounds, 3 * extent.processes) if doubtful else row)
    return {"compiled": compiled, "timed": timed}, measures.dispatch(extent.calls)


def timed_alone(case: Case, rounds: int, processes: int) -> Row:
    """A case's times in the middle one of several new processes."""
    from benchmarks.jax_reshard import measures  # imports JAX, which reads its environment first

    rows = []
    for _ in range(processes):
        with ProcessPoolExecutor(
            1, get_context("spawn"), initializer=measures.configure, initargs=(MOST_DEVICES,)
        ) as process:
            rows.append(process.submit(measures.timed, case, rounds).result())
    return sorted(rows, key=itemgetter("faster"))[processes // 2]


if __name__ == "__main__":
    sys.exit(main())
