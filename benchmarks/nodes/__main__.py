"""Redistributions between nodes, joined by links that are slow for real: ours, blind ones, DTensor, by hand.

    python -m benchmarks.nodes            # 100, 400 and 1,600 Mbit/s, then JAX; needs namespaces
    python -m benchmarks.nodes --quick    # 400 Mbit/s, two moves

Two nodes of two ranks on this machine. On each link a profile is calibrated first; ours is planned for it,
the blind plan for the same machine without nodes. It prints tables and writes a JSON file. Exit status 1 if a
claim fails.
"""

import os
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.claim import Claim, Row, finish, mean, worst
from benchmarks.nodes import measures
from benchmarks.nodes.measures import BLIND, BY_HAND, DTENSOR, OURS
from xshard.testing.nodes import nodes

MBIT = 100, 400, 1600


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("nodes", __doc__, quick="400 Mbit/s, two moves").parse_args(arguments)
    quick = options.quick
    rows: list[Row] = []
    profiles: list[Row] = []
    jax: list[Row] = []
    for rate in (400,) if quick else MBIT:
        with nodes(2, ranks=2, rate=f"{rate}mbit") as cluster:
            sizes = rate * 125e3, 2 if quick else 7
            calibration = cluster.run_torch(measures.calibrated, *sizes, timeout_s=900.0)[0]
            profile = calibration.profile
            profiles.append(
                {"mbit": rate, "error": calibration.error, "profile": profile.to_json()}
            )
            work = rate * 125e3, profile, 3 if quick else 7, quick
            ours = cluster.run_torch(measures.rows, *work, timeout_s=900.0)[0]
            beside_xla = cluster.run_jax(measures.xla_rows, *work, timeout_s=900.0)[0]
            rows += [{"mbit": rate} | row for row in ours]
            jax += [{"mbit": rate} | row for row in beside_xla]
    _show(rows)
    _show(jax)
    judged = judge(rows, profiles, jax)
    files = {"cases": rows, "profiles": profiles, "jax": jax}
    return finish(
        options, "Between nodes", judged, "torch", "jax", rows=files, load=os.getloadavg()
    )


def judge(rows: Sequence[Row], profiles: Sequence[Row], jax: Sequence[Row]) -> tuple[Claim, ...]:
    """Every claim, in order."""

    def faster(way: str) -> list[tuple[str, float]]:
        with_way = [row for row in rows if way in row["seconds"]]
        return [
            (f"{r['mbit']} {r['case']}", r["seconds"][way] / r["seconds"][OURS]) for r in with_way
        ]

    others = [min(s for way, s in row["seconds"].items() if way != OURS) for row in rows]
    best = [
        (f"{r['mbit']} {r['case']}", r["seconds"][OURS] / s)
        for r, s in zip(rows, others, strict=True)
    ]
    beside_xla = [
        (f"{r['mbit']} {r['case']}", r["seconds"]["XLA"] / r["seconds"][OURS]) for r in jax
    ]
    errors = [(f"{row['mbit']} Mbit/s", row["error"]) for row in profiles]
    return (
        worst("ours / the best of the others: worst", best, measures.CLOSE),
        mean("DTensor / ours: geometric mean", faster(DTENSOR), 2.0, at_least=True),
        mean("blind to nodes / ours: geometric mean", faster(BLIND), 1.2, at_least=True),
        mean("by hand / ours: geometric mean", faster(BY_HAND), 1.0, at_least=True),
        mean("JAX: XLA / ours: geometric mean", beside_xla, 1.0, at_least=True),
        worst("predicted against measured, held-out plans: median error", errors, 0.25),
    )


def _show(rows: Sequence[Row]) -> None:
    ways = list(dict.fromkeys(way for row in rows for way in row["seconds"]))
    lines = []
    for row in rows:
        ms = (f"{1e3 * row['seconds'][way]:.0f}" if way in row["seconds"] else "" for way in ways)
        lines.append((row["case"], str(row["mbit"]), *ms))
    record.console().print(record.table("Milliseconds", ("move", "Mbit/s", *ways), lines))


if __name__ == "__main__":
    sys.exit(main())
