"""What the planner must show, judged on measured rows.

Decides which cases count for a claim, how its number is formed and when it holds. An aim is reported and
judged like a claim, but a run does not fail for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planner.measures import Row
from benchmarks.planner.peers.collect import PEERS
from benchmarks.planner.ratios import (
    Ratio,
    bytes_ratios,
    geomean,
    node_ratios,
    our_bytes,
    our_crossing,
    peer_bytes,
    peer_crossing,
    seconds_ratios,
)

EXACT = 1e-9  # relative: rounding of floating point
SECONDS_PROFILES = ("h100", "h100_nvlink")


@dataclass(frozen=True)
class PeerClaim:
    """A statement with its number, and the same number of the peers.

    must: whether a run fails for it. failing: the cases that break it, the worst first.
    """

    name: str
    statement: str
    unit: str
    measured: float
    limit: float
    must: bool
    n_cases: int
    failing: tuple[str, ...] = ()
    peers: tuple[tuple[str, float], ...] = ()

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit * (1 + EXACT)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peers": dict(self.peers), "holds": self.holds}


def judge(public: Sequence[Row], scaled: Sequence[Row], speed: Row, *, quick: bool) -> tuple[PeerClaim, ...]:
    """Every claim, in order. quick: planning times are aims."""
    return (
        *_bytes(scaled),
        *(claim for profile in SECONDS_PROFILES for claim in _seconds(scaled, profile)),
        *_nodes(scaled),
        _partial(public),
        _peak([*public, *scaled]),
        _uneven_bytes(public),
        *_values(public, scaled),
        *_speed(public, speed, must=not quick),
    )


def _bytes(scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    ours = list(bytes_ratios(scaled, our_bytes))
    peers = {name: [v for _, v in bytes_ratios(scaled, peer_bytes(name))] for name in PEERS}
    statement = "received bytes of the busiest device over the lower bound, planned for bandwidth"
    yield _mean(
        "bytes_geomean",
        f"{statement}: geometric mean",
        ours,
        1.0,
        peers={name: geomean(values) for name, values in peers.items() if values},
    )
    yield _worst(
        "bytes_worst",
        f"{statement}: worst case",
        ours,
        1.0,
        peers={name: max(values) for name, values in peers.items() if values},
    )


def _seconds(scaled: Sequence[Row], profile: str) -> Iterator[PeerClaim]:
    ours = list(seconds_ratios(scaled, profile))
    statement = f"predicted time over the best peer's, priced for {profile}"
    by_peer = {name: list(seconds_ratios(scaled, profile, [name])) for name in PEERS}
    yield _worst(
        f"seconds_worst_{profile}",
        f"{statement}: worst case",
        ours,
        1.0,
        peers={name: max(v for _, v in ratios) for name, ratios in by_peer.items() if ratios},
    )
    yield _mean(
        f"seconds_geomean_{profile}",
        f"{statement}: geometric mean",
        ours,
        0.85,
        must=False,
        peers={name: geomean(v for _, v in ratios) for name, ratios in by_peer.items() if ratios},
    )


def _nodes(scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    peers = {name: [v for _, v in node_ratios(scaled, peer_crossing(name))] for name in PEERS}
    for profile, what in (("network", "planned for what crosses"), ("h100", "planned for h100")):
        yield _mean(
            f"nodes_geomean_{profile}",
            f"bytes crossing 8-device nodes over those that must, {what}: geometric mean",
            list(node_ratios(scaled, our_crossing(profile))),
            1.05,
            must=profile == "network",
            peers={name: geomean(values) for name, values in peers.items() if values},
        )
    needless = [row for row in scaled if "nodes" in row and not row["nodes"]["bound_bytes"]]
    crossed = [(row["case"], max(row["nodes"]["crossing_bytes"].values())) for row in needless]
    yield _worst(
        "nodes_zero",
        "bytes crossing 8-device nodes where none must: worst case",
        crossed,
        0.0,
        unit="bytes",
        peers={
            name: max((row["peers"][name].get("crossing_bytes", 0.0) for row in needless), default=0.0)
            for name in PEERS
            if any("crossing_bytes" in row["peers"][name] for row in needless)
        },
    )


def _partial(public: Sequence[Row]) -> PeerClaim:
    rows = [row for row in public if row["partial"] and row["total_bound_bytes"]]
    by_peer = {
        name: [
            row["peers"][name]["total_bytes"] / row["total_bound_bytes"]
            for row in rows
            if "total_bytes" in row["peers"][name]
        ]
        for name in PEERS
    }
    return _worst(
        "partial_worst",
        "partial sums: bytes of all devices over the lower bound, planned for bandwidth: worst case",
        [(r["case"], r["plans"]["bandwidth"]["total_bytes"] / r["total_bound_bytes"]) for r in rows],
        1.10,
        peers={name: max(values) for name, values in by_peer.items() if values},
    )


def _peak(rows: Sequence[Row]) -> PeerClaim:
    peaks = [(row["case"], max(p["peak_over_ends"] for p in row["plans"].values())) for row in rows]
    return _worst("peak_worst", "largest local array over that of the two ends: worst case", peaks, 1.0)


def _uneven_bytes(public: Sequence[Row]) -> PeerClaim:
    plans = [
        (row["case"], row["plans"]["bandwidth"]) for row in public if not row["even"] and not row["partial"]
    ]
    return _worst(
        "uneven_worst",
        "uneven cuts: received bytes of the busiest device over the lower bound: worst case",
        [(case, p["received_bytes"] / p["bound_bytes"]) for case, p in plans if p["bound_bytes"]],
        1.0,
    )


def _values(public: Sequence[Row], scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    sets = {
        "values_wrong": [*public, *scaled],
        "values_wrong_uneven": [row for row in public if not row["even"]],
    }
    for name, rows in sets.items():
        wrong = [r["case"] for r in rows if not all(p["values_right"] for p in r["plans"].values())]
        which = "uneven cases" if name.endswith("uneven") else "cases"
        yield _claim(
            name,
            f"{which} with a plan that gives wrong values on the reference",
            len(wrong),
            0,
            len(rows),
            unit="cases",
            failing=wrong,
        )


def _speed(public: Sequence[Row], speed: Row, *, must: bool) -> Iterator[PeerClaim]:
    cold = [(row["case"], row["cold_s"] * 1e3) for row in public]
    large = [(move, seconds * 1e3) for move, seconds in speed["large_mesh_s"].items()]
    took = "processor time of a plan"
    yield _claim(
        "cached_us",
        f"{took} asked for again: median",
        speed["cached_s"] * 1e6,
        5.0,
        len(public),
        must=must,
        unit="us",
    )
    yield _claim(
        "cold_median_ms",
        f"{took} with empty caches, public cases: median",
        statistics.median(v for _, v in cold),
        2.0,
        len(cold),
        must=must,
        unit="ms",
    )
    for name, what, times, limit in (
        ("cold_worst_ms", "with empty caches, public cases", cold, 50.0),
        ("large_mesh_ms", "on 4096 x 32 devices, even cuts", large, 10.0),
    ):
        yield _worst(name, f"{took} {what}: worst case", times, limit, must=must, unit="ms")


def _mean(
    name: str,
    statement: str,
    values: Sequence[Ratio],
    limit: float,
    *,
    must: bool = True,
    peers: Mapping[str, float] | None = None,
) -> PeerClaim:
    """A claim on the geometric mean; if it fails, the cases above the limit are named."""
    measured = geomean(v for _, v in values)
    above = _above(values, limit) if must and measured > limit * (1 + EXACT) else []
    return _claim(name, statement, measured, limit, len(values), must=must, failing=above, peers=peers)


def _worst(
    name: str,
    statement: str,
    values: Sequence[Ratio],
    limit: float,
    *,
    must: bool = True,
    unit: str = "ratio",
    peers: Mapping[str, float] | None = None,
) -> PeerClaim:
    """A claim on the largest value; the cases above the limit are named."""
    return _claim(
        name,
        statement,
        max((v for _, v in values), default=0.0),
        limit,
        len(values),
        must=must,
        unit=unit,
        failing=_above(values, limit),
        peers=peers,
    )


def _above(values: Sequence[Ratio], limit: float) -> list[str]:
    """The cases above a limit with their numbers, the worst first."""
    ranked = sorted(values, key=lambda pair: -pair[1])
    return [f"{case} ({v:.4g})" for case, v in ranked if v > limit * (1 + EXACT)]


def _claim(
    name: str,
    statement: str,
    measured: float,
    limit: float,
    n_cases: int,
    *,
    must: bool = True,
    unit: str = "ratio",
    failing: Sequence[str] = (),
    peers: Mapping[str, float] | None = None,
) -> PeerClaim:
    return PeerClaim(
        name,
        statement,
        unit,
        float(measured),
        float(limit),
        must,
        n_cases,
        tuple(failing),
        tuple((peers or {}).items()),
    )
