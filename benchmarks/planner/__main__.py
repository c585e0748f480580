"""The planner beside four others: bytes, seconds, node crossings, memory, values and planning time.

    python -m benchmarks.planner             # peers asked live if installed (torch, jaxlib)
    python -m benchmarks.planner --recorded  # peers as recorded: needs neither
    python -m benchmarks.planner --quick     # a few cases, peers as recorded

Prints a table, writes a JSON file and a plot. Exit status 1 if a claim of `planner.claims` fails; the cases
that break it are named.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.cases import load
from benchmarks.planner import claims, measures, report, timing
from benchmarks.planner.peers import collect

QUICK_STRIDE = 24  # a quick run takes every 24th case


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sets = {
        which: load(which)[:: QUICK_STRIDE if options.quick else 1]
        for which in ("public", "scaled")
    }
    # Times come first: live peers load torch and JAX into this process.
    h100 = measures.profiles()["h100"]
    speed = {
        "cached_s": timing.cached_s(sets["public"][::10], h100),
        "large_mesh_s": timing.large_mesh_s(h100),
    }
    rows = {}
    peers = {}
    for which, cases in sets.items():
        cold = [
            timing.cold_s(case, h100) for case in record.shown(cases, f"planning time, {which}")
        ]
        rows[which] = [measures.case_row(case) for case in record.shown(cases, f"plans, {which}")]
        for row, seconds in zip(rows[which], cold, strict=True):
            row["cold_s"] = seconds
    for (
        which,
        cases,
    ) in sets.items():  # peers have plans for the scaled set and for the public partial sums
        asked = [case for case in cases if which == "scaled" or case.is_partial]
        peers[which] = collect.answers(
            which, record.shown(asked, f"peers, {which}"), live=options.live
        )
        for row, case in zip(rows[which], cases, strict=True):
            answers = peers[which].get(case.name, {})
            row["peers"] = {
                name: measures.peer_facts(case, answer) for name, answer in answers.items()
            }
    if options.save_peers:
        collect.save(peers)
    judged = claims.judge(rows["public"], rows["scaled"], speed, quick=options.quick)
    report.print_table(judged)
    about = record.about(
        options,
        "rich",
        "matplotlib",
        command=options.command,
        peers="live where installed" if options.live else "recorded",
        peer_versions=collect.versions(live=options.live),
        quick=options.quick,
        speed=speed,
    )
    print(record.write(options, about, claims=[claim.to_dict() for claim in judged], **rows))
    print(report.write_plot(options.output, rows["scaled"]))
    return int(any(claim.must and not claim.holds for claim in judged))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = record.options("planner", __doc__, quick="every 24th case, peers as recorded")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--live",
        dest="live",
        action="store_true",
        default=None,
        help="ask installed peers (default)",
    )
    source.add_argument("--recorded", dest="live", action="store_false", help="peers as recorded")
    parser.add_argument(
        "--save-peers", action="store_true", help="record the live plans of the peers"
    )
    options = parser.parse_args(arguments)
    options.live = not options.quick if options.live is None else options.live
    if options.save_peers and (options.quick or not options.live):
        parser.error("--save-peers needs a full live run")
    flags = ["--live" if options.live else "--recorded"]
    flags += ["--quick"] * options.quick + ["--save-peers"] * options.save_peers
    options.command = " ".join(["python -m benchmarks.planner", *flags])
    return options


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    sys.exit(main())
