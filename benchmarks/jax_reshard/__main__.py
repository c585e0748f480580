"""The JAX bridge beside XLA's own reshard: bytes, memory, time to compile, time to run, dispatch.

    python -m benchmarks.jax_reshard           # all public cases of at most 64 devices
    python -m benchmarks.jax_reshard --quick   # a few of them, and one small timing

Prints a table and writes a JSON file. Compiled figures are exact. Run times are taken by turns with XLA's
program; each case runs in several processes of its own, and the middle one counts: XLA's program takes 20 ms
in one process and 32 in another, depending on what the allocator holds. Exit status 1 if a claim of
`jax_reshard.claims` fails; the cases are named.
"""

import os
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.by_turns import alone, middle
from benchmarks.cases import load, scaled
from benchmarks.claim import Row, finish
from benchmarks.jax_reshard import claims
from benchmarks.jax_reshard.claims import DEFAULT, FEWEST_BYTES, MAX_DEVICES
from xshard.formatting import format_bytes

TIMED_DEVICES = 8
# The stride through the cases; the bytes of timed arrays, with their rounds; the most timed cases of a size,
# and the processes for each; the calls that measure dispatch.
FULL = 1, ((16 << 20, 15), (128 << 20, 7)), None, 3, 2000
QUICK = 46, ((1 << 20, 3),), 1, 1, 50  # four cases: one with partial sums, one in bfloat16


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "a few cases, one small timing"
    options = record.options("jax_reshard", __doc__, quick=quick).parse_args(arguments)
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(MAX_DEVICES))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    rows, dispatch = measure(*(QUICK if options.quick else FULL))
    judged = claims.judge(**rows, dispatch=dispatch)
    title = "The JAX bridge and XLA's own reshard"
    return finish(options, title, judged, "jax", "jaxlib", rows=rows, dispatch=dispatch)


def measure(
    stride: int,
    sizes: Sequence[tuple[int, int]],
    most_timed: int | None,
    processes: int,
    calls: int,
) -> tuple[dict[str, list[Row]], Row]:
    """The rows of dispatch, and of every case that JAX can express: even, on at most 64 devices."""
    from benchmarks.jax_reshard import measures  # imports JAX, which reads its environment first
    from benchmarks.jax_reshard.measures import Move, addable

    measures.configure(MAX_DEVICES, x64=True)  # some cases have dtype float64
    cases = [c for c in load("public") if c.is_even and c.mesh.n_devices <= MAX_DEVICES][::stride]
    compiled = [
        measures.compiled([Move(addable(c), profile) for profile in (FEWEST_BYTES, DEFAULT)])
        for c in record.shown(cases, "compiling")
    ]
    timed = []
    for size, rounds in sizes:
        large = [scaled(c, size) for c in cases if c.mesh.n_devices == TIMED_DEVICES]
        distinct = {(c.src, c.dst, c.mesh, c.shape, c.dtype): c for c in large if c.is_even}
        for case in record.shown(
            [*distinct.values()][:most_timed], f"timing at {format_bytes(size)}"
        ):
            row = middle([alone(measures.timed, case, rounds) for _ in range(processes)])
            # One program timed twice differs by as much: in doubt, the middle of more processes counts.
            if row["faster"] < claims.LEAST and processes > 1:
                row = middle([alone(measures.timed, case, rounds) for _ in range(3 * processes)])
            timed.append(row)
    return {"compiled": compiled, "timed": timed}, measures.dispatch(calls)


if __name__ == "__main__":
    sys.exit(main())
