"""The claims about the torch bridge beside DTensor, collectives by hand and a plain copy."""

from collections.abc import Sequence

from benchmarks.claim import Claim, Row, mean, worst
from xshard.formatting import format_bytes

LEAST = 0.95  # a move is at least so many times as fast as by a peer


def judge(
    host: Sequence[Row], ends: Sequence[Row], memory: Sequence[Row], packs: Sequence[Row]
) -> tuple[Claim, ...]:
    """Every claim, in order."""
    run_time = []
    for way, least in (("DTensor", 2.0), ("by hand", LEAST)):
        rows = [row for row in ends if way in row["faster_than"]]
        faster = [
            (f"{row['case']} of {row['bytes']} bytes", row["faster_than"][way]) for row in rows
        ]
        run_time.append(
            mean(f"run time, {way} / ours: geometric mean", faster, least, at_least=True)
        )
        run_time.append(worst(f"run time, {way} / ours: worst", faster, LEAST, at_least=True))
    packed = [
        (r["move"], r["extra_bytes"] / r["packed_bytes"]) for r in memory if r["needs_packing"]
    ]
    flat = [(r["move"], r["extra_bytes"]) for r in memory if not r["needs_packing"]]
    return (
        *host_times(host),
        *run_time,
        worst("bytes held beyond input and result / one packed copy", packed, 1.0),
        worst("bytes held beyond input and result where nothing is packed", flat, 0.0),
        *packing(packs),
    )


def host_times(host: Sequence[Row]) -> tuple[Claim, ...]:
    """The cost of a cached call on the host."""
    ours = [row for row in host if "xshard" in row]
    beside = [row for row in ours if "DTensor" in row]
    forward, both = (
        [(row["move"], row["xshard"][key] * 1e6) for row in ours] for key in ("forward_s", "both_s")
    )
    ratios = [
        (row["move"], row["DTensor"]["forward_s"] / row["xshard"]["forward_s"]) for row in beside
    ]
    return (
        worst("host time of a forward call, us", forward, 60),
        worst("host time with the gradient, us", both, 200),
        mean("DTensor's host time / ours, forward: geometric mean", ratios, 2.0, at_least=True),
    )


def packing(packs: Sequence[Row]) -> tuple[Claim, ...]:
    """The time to pack blocks, beside copies of as many bytes."""
    on_gpu = bool(packs) and packs[0]["device"] == "cuda"
    limit = 1 / 0.85 if on_gpu else 1.3
    whole, pieces = (
        [(_label(row), row[key]) for row in packs]
        for key in ("slower_than_copy", "slower_than_copy_of_pieces")
    )
    return (
        worst(f"time to pack / to copy as many bytes, {'GPU' if on_gpu else 'CPU'}", whole, limit),
        worst("the same, to copy them in a quarter of a row each", pieces, limit),
    )


def _label(row: Row) -> str:
    return f"{row['move']}, {row['what']} of {format_bytes(row['block_bytes'])}"
