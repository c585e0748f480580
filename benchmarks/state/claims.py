"""The claims about loads and transfers. Two times are compared by the median of each turn's ratio."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.by_turns import ratio
from benchmarks.claim import Claim, Row, none_of, worst
from benchmarks.state import weights

# At least so many times as fast.
FASTER = {weights.ORBAX: 8.0, weights.DCP: 2.0, weights.HF: 1.0, weights.TORCH: 1.0}


def judge(loads: Sequence[Row], transfers: Sequence[Row]) -> tuple[Claim, ...]:
    """Loads, and transfers between nodes."""
    near = [(row["part"], to_floor(row["seconds"])) for row in loads]
    slices = [(row["part"], 1 / faster(row["seconds"], weights.SLICES)) for row in loads]
    peers = []
    for peer, least in FASTER.items():
        ratios = [
            (row["part"], faster(row["seconds"], peer)) for row in loads if peer in row["seconds"]
        ]
        if ratios:
            peers.append(worst(f"{peer} / ours", ratios, least, at_least=True))
    odd = [row["part"] for row in loads if row["bytes_read"] != row["bytes_needed"]]
    counted = [row for row in loads if row["bytes_beyond"] is not None]
    beyond = [(row["part"], row["bytes_beyond"] / weights.BUCKET) for row in counted]
    ways = (weights.DTENSOR, weights.STATE_DICT)
    own = [(row["case"], min(faster(row["seconds"], way) for way in ways)) for row in transfers]
    across = [
        (row["case"], row["across_bytes"][weights.OURS] / row["bound_bytes"]) for row in transfers
    ]
    return (
        worst("load / (memcpy + reading)", near, 1.5),
        *peers,
        worst("load / safetensors' slices", slices, 1.1),
        none_of("loads that read other bytes than they need", odd, len(loads)),
        worst("memory beyond the result, in buckets", beyond, 1.0),
        worst("transfer: bytes over the link / the fewest", across, 1.05),
        worst("transfer: torch's own / ours", own, 1.5, at_least=True),
    )


def to_floor(seconds: Mapping[str, Sequence[float]]) -> float:
    turns = zip(
        *(seconds[way] for way in (weights.OURS, weights.READING, weights.MEMCPY)), strict=True
    )
    return statistics.median(ours / (reading + memcpy) for ours, reading, memcpy in turns)


def faster(seconds: Mapping[str, Sequence[float]], way: str) -> float:
    """The time of another way over ours."""
    return ratio(seconds, way, weights.OURS)
