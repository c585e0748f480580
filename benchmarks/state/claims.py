"""The claims about loads and transfers. Two times are compared by the median of each turn's ratio."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.claim import Claim, Row, none_of, worst
from benchmarks.state.weights import (
    BUCKET,
    DCP,
    DTENSOR,
    HF,
    MEMCPY,
    ORBAX,
    OURS,
    READING,
    SLICES,
    STATE_DICT,
    TORCH,
)

FASTER = {ORBAX: 8.0, DCP: 2.0, HF: 1.0, TORCH: 1.0}  # at least so many times as fast


def judge(loads: Sequence[Row], transfers: Sequence[Row]) -> tuple[Claim, ...]:
    """Loads, and transfers between nodes."""
    near = [(row["part"], to_floor(row["seconds"])) for row in loads]
    slices = [(row["part"], 1 / faster(row["seconds"], SLICES)) for row in loads]
    peers = []
    for peer, least in FASTER.items():
        ratios = [(row["part"], faster(row["seconds"], peer)) for row in loads if peer in row["seconds"]]
        if ratios:
            peers.append(worst(f"{peer} / ours", ratios, least, at_least=True))
    odd = [row["part"] for row in loads if row["bytes_read"] != row["bytes_needed"]]
    beyond = [(row["part"], row["bytes_beyond"] / BUCKET) for row in loads if row["bytes_beyond"] is not None]
    own = [
        (row["case"], min(faster(row["seconds"], way) for way in (DTENSOR, STATE_DICT))) for row in transfers
    ]
    across = [(row["case"], row["across_bytes"][OURS] / row["bound_bytes"]) for row in transfers]
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
    turns = zip(*(seconds[way] for way in (OURS, READING, MEMCPY)), strict=True)
    return statistics.median(ours / (reading + memcpy) for ours, reading, memcpy in turns)


def faster(seconds: Mapping[str, Sequence[float]], way: str) -> float:
    """The time of another way over ours."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[OURS], strict=True))
