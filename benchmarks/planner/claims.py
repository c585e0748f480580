"""The claims about the planner, judged on measured rows. A run fails for a claim, but not for an aim."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.claim import Named, Row
from benchmarks.planner.peers.collect import PEERS

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


def geomean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; 1 if there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def bytes_ratios(rows: Iterable[Row], peer: str | None = None) -> Iterator[tuple[str, float]]:
    """Bytes received by us or a peer over the lower bound, for even cases without partial sums."""
    for row in rows:
        bound = row["plans"]["bandwidth"]["bound_bytes"]
        received = (row["peers"][peer] if peer else row["plans"]["bandwidth"])["received_bytes"]
        if row["even"] and not row["partial"] and bound and received is not None:
            yield row["case"], received / bound


def seconds_ratios(
    rows: Iterable[Row], profile: str, peers: Sequence[str] = tuple(PEERS)
) -> Iterator[tuple[str, float]]:
    """Predicted time of our plan over the best peer's, if a peer's plan can be priced."""
    for row in rows:
        priced = [
            row["peers"][p]["seconds"][profile] for p in peers if "seconds" in row["peers"][p]
        ]
        if priced and min(priced) > 0:
            yield row["case"], row["plans"][profile]["seconds"] / min(priced)


def node_ratios(
    rows: Iterable[Row], peer: str | None = None, profile: str = "network"
) -> Iterator[tuple[str, float]]:
    """Bytes that cross nodes, sent by us or a peer, over the bytes that must, if some must."""
    for row in rows:
        if "nodes" in row and (bound := row["nodes"]["bound_bytes"]):
            ours = row["nodes"]["crossing_bytes"][profile]
            if crossing := row["peers"][peer].get("crossing_bytes") if peer else ours:
                yield row["case"], crossing / bound


def judge(
    public: Sequence[Row], scaled: Sequence[Row], speed: Row, *, quick: bool
) -> tuple[PeerClaim, ...]:
    """Every claim, in order. quick: planning times are aims."""
    return (
        *_bytes_and_seconds(scaled),
        *_nodes(scaled),
        *_sums_peaks_and_values(public, scaled),
        *_speed(public, speed, must=not quick),
    )


def _bytes_and_seconds(scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    text = "received bytes of the busiest device over the lower bound, planned for bandwidth"
    ours = list(bytes_ratios(scaled))
    peers = {name: list(bytes_ratios(scaled, name)) for name in PEERS}
    yield _mean("bytes_geomean", f"{text}: geometric mean", ours, 1.0, peers=peers)
    yield _worst("bytes_worst", f"{text}: worst case", ours, 1.0, peers=peers)
    for profile in SECONDS_PROFILES:
        text = f"predicted time over the best peer's, priced for {profile}"
        ours = list(seconds_ratios(scaled, profile))
        peers = {name: list(seconds_ratios(scaled, profile, [name])) for name in PEERS}
        yield _worst(f"seconds_worst_{profile}", f"{text}: worst case", ours, 1.0, peers=peers)
        name = f"seconds_geomean_{profile}"
        yield _mean(name, f"{text}: geometric mean", ours, 0.85, must=False, peers=peers)


def _nodes(scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    peers = {name: list(node_ratios(scaled, name)) for name in PEERS}
    for profile, what in (("network", "planned for what crosses"), ("h100", "planned for h100")):
        text = f"bytes crossing 8-device nodes over those that must, {what}: geometric mean"
        ours = list(node_ratios(scaled, profile=profile))
        must = profile == "network"
        yield _mean(f"nodes_geomean_{profile}", text, ours, 1.05, must=must, peers=peers)
    needless = [row for row in scaled if "nodes" in row and not row["nodes"]["bound_bytes"]]
    ours = [(row["case"], max(row["nodes"]["crossing_bytes"].values())) for row in needless]
    peers = {name: _of_peer(needless, name, "crossing_bytes") for name in PEERS}
    text = "bytes crossing 8-device nodes where none must: worst case"
    yield _worst("nodes_zero", text, ours, 0.0, unit="bytes", peers=peers)


def _of_peer(rows: Sequence[Row], peer: str, key: str) -> Named:
    """A peer's number of every case that has one."""
    return [(row["case"], row["peers"][peer][key]) for row in rows if key in row["peers"][peer]]


def _sums_peaks_and_values(public: Sequence[Row], scaled: Sequence[Row]) -> Iterator[PeerClaim]:
    sums = [row for row in public if row["partial"] and row["total_bound_bytes"]]
    bounds = {row["case"]: row["total_bound_bytes"] for row in sums}
    ours = [
        (row["case"], row["plans"]["bandwidth"]["total_bytes"] / bounds[row["case"]])
        for row in sums
    ]
    totals = {name: _of_peer(sums, name, "total_bytes") for name in PEERS}
    peers = {
        name: [(case, n / bounds[case]) for case, n in pairs] for name, pairs in totals.items()
    }
    text = (
        "partial sums: bytes of all devices over the lower bound, planned for bandwidth: worst case"
    )
    yield _worst("partial_worst", text, ours, 1.10, peers=peers)
    every = [*public, *scaled]
    peaks = [
        (row["case"], max(p["peak_over_ends"] for p in row["plans"].values())) for row in every
    ]
    yield _worst(
        "peak_worst", "largest local array over that of the two ends: worst case", peaks, 1.0
    )
    plans = [
        (r["case"], r["plans"]["bandwidth"]) for r in public if not r["even"] and not r["partial"]
    ]
    uneven = [
        (case, p["received_bytes"] / p["bound_bytes"]) for case, p in plans if p["bound_bytes"]
    ]
    text = "uneven cuts: received bytes of the busiest device over the lower bound: worst case"
    yield _worst("uneven_worst", text, uneven, 1.0)
    for name, which, rows in (
        ("values_wrong", "cases", every),
        ("values_wrong_uneven", "uneven cases", [row for row in public if not row["even"]]),
    ):
        wrong = [(r["case"], not all(p["values_right"] for p in r["plans"].values())) for r in rows]
        text = f"{which} with a plan that gives wrong values on the reference"
        yield _claim(sum, name, text, wrong, 0, unit="cases")


def _speed(public: Sequence[Row], speed: Row, *, must: bool) -> Iterator[PeerClaim]:
    cold = [(row["case"], row["cold_s"] * 1e3) for row in public]
    large = [(move, seconds * 1e3) for move, seconds in speed["large_mesh_s"].items()]
    cached = [("", speed["cached_s"] * 1e6)] * len(public)
    took = "processor time of a plan"
    median = partial(_claim, statistics.median, must=must)
    yield median("cached_us", f"{took} asked for again: median", cached, 5.0, unit="us")
    text = f"{took} with empty caches, public cases: median"
    yield median("cold_median_ms", text, cold, 2.0, unit="ms")
    for name, what, times, limit in (
        ("cold_worst_ms", "with empty caches, public cases", cold, 50.0),
        ("large_mesh_ms", "on 4096 x 32 devices, even cuts", large, 10.0),
    ):
        yield _worst(name, f"{took} {what}: worst case", times, limit, must=must, unit="ms")


def _claim(
    aggregate: Callable[[list[float]], float],
    name: str,
    statement: str,
    values: Named,
    limit: float,
    *,
    must: bool = True,
    unit: str = "ratio",
    peers: Mapping[str, Named] | None = None,
) -> PeerClaim:
    """A claim on a number made of the values of all cases; if it fails, the cases above the limit are named.

    Medians, and means that are aims, name none.
    """
    measured = float(aggregate([v for _, v in values])) if values else 0.0
    failing: tuple[str, ...] = ()
    is_mean = aggregate in (geomean, statistics.median)
    if (
        measured > limit * (1 + EXACT)
        and aggregate is not statistics.median
        and (must or not is_mean)
    ):
        ranked = sorted(values, key=lambda pair: -pair[1])
        failing = tuple(f"{case} ({v:.4g})" for case, v in ranked if v > limit * (1 + EXACT))
    others = {p: aggregate([v for _, v in pairs]) for p, pairs in (peers or {}).items() if pairs}
    every = tuple(others.items())
    return PeerClaim(
        name, statement, unit, measured, float(limit), must, len(values), failing, every
    )


_mean = partial(_claim, geomean)
_worst = partial(_claim, max)
