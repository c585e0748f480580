"""Planned contractions beside XLA, DTensor and the plainest planner: bytes, planning time, run time.

    python -m benchmarks.einsum             # all cases, peers' bytes as recorded
    python -m benchmarks.einsum --live      # XLA and DTensor again: both compile or count, neither runs
    python -m benchmarks.einsum --quick     # a few cases, one small timing

Prints tables and writes a JSON file. Run times are taken by turns with XLA's own einsum between the same
shardings; a case that seems slower is timed in more processes, and the middle one counts. Exit status 1 if a
claim of `einsum.claims` fails; the cases are named.
"""

import os
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.by_turns import alone, middle
from benchmarks.claim import Row, finish
from benchmarks.einsum import claims, peers
from benchmarks.einsum.cases import Case, load, scaled
from benchmarks.einsum.claims import BOTH, FORWARD, TIMED_DEVICES
from benchmarks.planner.claims import geomean

# The stride through the cases; the number of timed ones, the most operations of all devices in one, its
# rounds, and the processes in which a case is timed that seems slower than XLA.
FULL = (1, None, 1e9, 7, 3)
QUICK = (28, 1, 1e7, 3, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("einsum", __doc__, quick="five cases, one small timing")
    parser.add_argument(
        "--live", action="store_true", help="measure the peers' bytes again, and record them"
    )
    options = parser.parse_args(arguments)
    if options.live and options.quick:
        parser.error("--live needs a full run")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    stride, most_timed, flops, rounds, processes = QUICK if options.quick else FULL
    cases = load()[::stride]
    known = peers.recorded()
    # Planning times come first: live peers load torch and JAX into this process.
    rows = measure_plans(cases, known)
    cached_s = claims.cached_s(cases[::10])
    if options.live:
        known = peers.live(cases)
        peers.save(known)
        rows = [
            row | claims.planned(case, peers.of(case, known))
            for row, case in zip(rows, cases, strict=True)
        ]
    large = [scaled(case, flops) for case in cases if case.mesh.n_devices == TIMED_DEVICES]
    timed = measure_runs(large[:most_timed], rounds, processes)
    judged = claims.judge(rows, cached_s, timed)
    results = {"cases": rows, "timed": timed}
    show_peers(rows, known)
    facts = {"peers": known["versions"], "cached_s": cached_s}
    return finish(options, "Planned contractions", judged, "jax", "jaxlib", rows=results, **facts)


def measure_plans(cases: Sequence[Case], known: Row) -> list[Row]:
    """Our plans of every case beside the peers', and the seconds to find them."""
    rows = []
    for case in record.shown(cases, "plans"):
        beside = peers.of(case, known)
        cold_s = claims.cold_s(case, claims.beside_xla(case, beside["xla"]))
        rows.append(claims.planned(case, beside) | {"cold_s": cold_s})
    return rows


def measure_runs(cases: Sequence[Case], rounds: int, processes: int) -> list[Row]:
    """The run times of cases, forward and with gradients."""
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(8 * TIMED_DEVICES))
    from benchmarks.einsum import run_time  # imports JAX, which reads its environment first

    runs = [dict(zip(cases, alone(run_time.rows, cases, rounds), strict=True))]
    # One program timed twice differs by as much: in doubt, the middle of more processes counts.
    doubtful = [
        case for case, rows in runs[0].items() if min(r["faster"] for r in rows) < claims.LEAST
    ]
    for _ in record.shown(range(processes - 1), "timing the doubtful again"):
        again = alone(run_time.rows, doubtful, rounds)
        runs.append(runs[0] | dict(zip(doubtful, again, strict=True)))
    return [
        middle(rows) for case in cases for rows in zip(*(run[case] for run in runs), strict=True)
    ]


def show_peers(rows: Sequence[Row], known: Row) -> None:
    """How much more every peer receives than we do, at XLA's operations."""
    title = "Received bytes of the busiest device / ours, geometric mean"
    lines = []
    for peer in rows[0]["peers"]:
        pairs = [claims.ratios(rows, objective, peer) for objective in (FORWARD, BOTH)]
        means = [f"{geomean(value for _, value in named):.2f}" if named else "" for named in pairs]
        cells = [
            text
            for named, mean in zip(pairs, means, strict=True)
            for text in (str(len(named)), mean)
        ]
        lines.append((peer, known["versions"].get(peer, ""), *cells))
    heads = ("", "version", "cases", FORWARD, "cases", BOTH)
    record.console().print(record.table(title, heads, lines, n_left=2))


if __name__ == "__main__":
    sys.exit(main())
