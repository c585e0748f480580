"""A run of the planner's benchmark as a table on the terminal, and as a plot."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.claim import Row
from benchmarks.planner.claims import (
    SECONDS_PROFILES,
    PeerClaim,
    bytes_ratios,
    node_ratios,
    seconds_ratios,
)
from benchmarks.planner.peers.collect import PEERS
from xshard.formatting import format_bytes


def print_table(claims: Sequence[PeerClaim]) -> None:
    """Print every claim with the peers' numbers, then the cases that break one."""
    console = record.console()
    lines = []
    for claim in claims:
        others = dict(claim.peers)
        numbers = (_number(value, claim.unit) for value in (claim.measured, claim.limit))
        peers = (_number(others[name], claim.unit) if name in others else "" for name in PEERS)
        lines.append((claim.statement, str(claim.n_cases), *numbers, _verdict(claim), *peers))
    heads = ("what", "cases", "xshard", "limit", "", *(peer.title for peer in PEERS.values()))
    console.print(record.table("The planner and four others", heads, lines))
    for claim in claims:
        if not claim.holds:
            word = "fails" if claim.must else "misses its aim"
            named = f": {record.named(claim.failing)}" if claim.failing else ""
            console.print(f"[bold]{claim.name}[/bold] {word}{named}", highlight=False)


def _verdict(claim: PeerClaim) -> str:
    if claim.holds:
        return "[green]holds[/green]"
    return "[red]fails[/red]" if claim.must else "[yellow]aim[/yellow]"


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "cases":
        return f"{value:.0f}"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.3g} {unit}"


def write_plot(folder: Path, scaled: Sequence[Row]) -> Path:
    """Draw four panels of the scaled set: every planner's cases in order, the lower the better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    (bytes_, nodes), (seconds, speed) = axes
    for panel, title, ratios in (
        (bytes_, "bytes received / lower bound", bytes_ratios),
        (nodes, "bytes crossing 8-device nodes / bound", node_ratios),
    ):
        _curve(panel, "xshard", (v for _, v in ratios(scaled)), color="black")
        for name, peer in PEERS.items():
            _curve(panel, peer.title, (v for _, v in ratios(scaled, name)))
        _label(panel, title)
    for profile in SECONDS_PROFILES:
        _curve(seconds, profile, (v for _, v in seconds_ratios(scaled, profile)))
    seconds.axhline(1, color="black", linewidth=0.6)
    _label(seconds, "predicted time / best peer's")
    _curve(speed, "xshard", (row["cold_s"] * 1e3 for row in scaled), color="black")
    for name, peer in PEERS.items():
        times = [
            row["peers"][name]["plan_s"] * 1e3 for row in scaled if "plan_s" in row["peers"][name]
        ]
        _curve(speed, peer.title, times)
    _label(speed, "planning time, ms")
    path = folder / "planner.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _curve(axes: Any, label: str, values: Iterable[float], **style: Any) -> None:
    ranked = sorted(values)
    if ranked:
        share = [100 * (i + 1) / len(ranked) for i in range(len(ranked))]
        axes.plot(share, ranked, label=label, **style)


def _label(axes: Any, title: str) -> None:
    axes.set(title=title, yscale="log", xlabel="% of cases")
    axes.legend(fontsize=8)
