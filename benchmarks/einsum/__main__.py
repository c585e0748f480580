"""Planned contractions beside XLA, DTensor and the plainest planner: bytes, planning time, run time.

    python -m benchmarks.einsum             # all cases, peers' bytes as recorded
    python -m benchmarks.einsum --live      # XLA and DTensor again: both compile or count, neither runs
    python -m benchmarks.einsum --quick     # a few cases, one small timing

Prints tables and writes a JSON file. Run times are taken by turns with XLA's own einsum between the same
shardings; a case that seems slower is timed in more processes, and the middle one counts. Exit status 1 if a
claim of `einsum.claims` fails; the cases are named.
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
from benchmarks.claim import Named, Row, finish
from benchmarks.einsum import claims, peers
from benchmarks.einsum.cases import Case, load, scaled
from benchmarks.einsum.claims import BOTH, FORWARD, TIMED_DEVICES
from benchmarks.planner.claims import geomean


@dataclass(frozen=True)
class Extent:
    """How much a run measures."""

    stride: int  # through the cases
    flops: float  # most operations of all devices in a timed case
    most_timed: int | None
    rounds: int
    processes: int  # in which a case is timed that seems slower than XLA


FULL = Extent(1, 1e9, None, 7, 3)
QUICK = Extent(28, 1e7, 1, 3, 1)  # five cases


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("einsum", __doc__, quick="five cases, one small timing")
    parser.add_argument("--live", action="store_true", help="measure the peers' bytes again, and record them")
    options = parser.parse_args(arguments)
    if options.live and options.quick:
        parser.error("--live needs a full run")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    extent = QUICK if options.quick else FULL
    cases = load()[:: extent.stride]
    known = peers.recorded()
    # Planning times come first: live peers load torch and JAX into this process.
    rows = measure_plans(cases, known)
    cached_s = claims.cached_s(cases[::10])
    if options.live:
        known = peers.live(cases)
        peers.save(known)
        rows = [
            row | claims.planned(case, peers.of(case, known)) for row, case in zip(rows, cases, strict=True)
        ]
    timed = measure_runs([case for case in cases if case.mesh.n_devices == TIMED_DEVICES], extent)
    judged, results = claims.judge(rows, cached_s, timed), {"cases": rows, "timed": timed}
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


def measure_runs(cases: Sequence[Case], extent: Extent) -> list[Row]:
    """The run times of scaled cases, forward and with gradients."""
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(8 * TIMED_DEVICES))
    chosen = [scaled(case, extent.flops) for case in cases[: extent.most_timed]]
    runs = [timed_alone(chosen, extent.rounds)]
    # One program timed twice differs by as much: in doubt, the middle of more processes counts.
    doubtful = [case for case, rows in zip(chosen, runs[0], strict=True) if slowest(rows) < claims.LEAST]
    for _ in record.shown(range(extent.processes - 1), "timing the doubtful again"):
        again = iter(timed_alone(doubtful, extent.rounds))
        runs.append(
            [next(again) if case in doubtful else rows for case, rows in zip(chosen, runs[0], strict=True)]
        )
    return [middle(rows) for pairs in zip(*runs, strict=True) for rows in zip(*pairs, strict=True)]


def timed_alone(cases: Sequence[Case], rounds: int) -> list[list[Row]]:
    """The rows of every case, measured in a new process."""
    from benchmarks.einsum import run_time  # imports JAX, which reads its environment first

    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(run_time.rows, cases, rounds).result()


def slowest(rows: Sequence[Row]) -> float:
    return min(row["faster"] for row in rows)


def middle(rows: Sequence[Row]) -> Row:
    return sorted(rows, key=itemgetter("faster"))[len(rows) // 2]


def show_peers(rows: Sequence[Row], known: Row) -> None:
    """How much more every peer receives than we do, at XLA's operations."""
    title, lines = "Received bytes of the busiest device / ours, geometric mean", []
    for peer in rows[0]["peers"]:
        pairs = [claims.ratios(rows, objective, peer) for objective in (FORWARD, BOTH)]
        cells = [text for named in pairs for text in (str(len(named)), _mean(named))]
        lines.append((peer, known["versions"].get(peer, ""), *cells))
    heads = ("", "version", "cases", FORWARD, "cases", BOTH)
    record.console().print(record.table(title, heads, lines, n_left=2))


def _mean(named: Named) -> str:
    return f"{geomean(value for _, value in named):.2f}" if named else ""


if __name__ == "__main__":
    sys.exit(main())
