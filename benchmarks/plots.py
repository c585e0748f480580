"""The plots of docs/benchmarks.md, from the recorded results.

python -m benchmarks.plots      writes docs/images/benchmarks/*.svg

A plot names the runs that it shows, so that a test sees when one is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

FOLDER = Path(__file__).parents[1] / "docs/images/benchmarks"
INK = "#7d8590"
OURS = "#4493f8"
THEIRS = "#db6d28"  # are seen on white and on black
SHOWN = {  # a plot, with the files that it is made of
    "ratios": ("torch_redistribute", "jax_reshard", "einsum", "nodes", "state"),
    "host": ("torch_redistribute",),
    "torch": ("torch_redistribute",),
    "jax": ("jax_reshard",),
}
# What the bars show: the label, the file, the statement of the claim, and whether it is ours / theirs.
BARS = (
    ("host time of a cached redistribution, torch / DTensor", "torch_redistribute",
     "DTensor's host time / ours, forward: geometric mean", False),
    ("time to load a checkpoint / orbax", "state", "orbax / ours", False),
    ("bytes of einsums with gradients, JAX / XLA", "einsum",
     "forward+backward: XLA's received bytes / ours, geometric mean", False),
    ("run time between two nodes, torch / DTensor", "nodes", "DTensor / ours: geometric mean", False),
    ("run time of redistributions, torch / DTensor", "torch_redistribute",
     "run time, DTensor / ours: geometric mean", False),
    ("bytes of reshards, JAX / XLA", "jax_reshard", "received bytes / XLA's: geometric mean", True),
    ("run time of einsums, JAX / XLA", "einsum", "XLA's run time / ours: geometric mean", False),
    ("run time of reshards, JAX / XLA", "jax_reshard", "XLA's run time / ours: geometric mean", False),
    ("run time of redistributions, torch / by hand", "torch_redistribute",
     "run time, by hand / ours: geometric mean", False),
)  # fmt: skip


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(plot: str) -> str:
    """The runs that a plot shows."""
    return ", ".join(f"{name}.json of {recorded(name)['date']}" for name in SHOWN[plot])


def ratios(axes: Any) -> None:
    """A bar for each subject: theirs / ours."""
    for label, name, statement, inverse in reversed(BARS):
        ratio = next(c["measured"] for c in recorded(name)["claims"] if c["statement"] == statement)
        ratio = 1 / ratio if inverse else ratio
        bar = axes.barh(label, ratio, color=OURS if ratio >= 1 else THEIRS)
        axes.bar_label(bar, [f"{ratio:.2f}"], padding=3, color=INK)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set(xlabel="theirs / xshard's; above 1, xshard needs less", xlim=(0, 9.5))


def host(axes: Any) -> None:
    """Microseconds of a cached call of each kind, ours and DTensor's."""
    rows = [row for row in recorded("torch_redistribute")["host"] if "DTensor" in row]
    for shift, name, colour in ((-0.2, "DTensor", THEIRS), (0.2, "xshard", OURS)):
        seconds = [row[name]["forward_s"] * 1e6 for row in rows]
        axes.barh([i - shift for i in range(len(rows))], seconds, 0.4, color=colour, label=name)
    axes.set(yticks=range(len(rows)), yticklabels=[row["move"] for row in rows])
    axes.set(xlabel="host time of a cached forward call, microseconds")
    axes.legend(frameon=False, labelcolor=INK)


def torch(axes: Any) -> None:
    """Run time of each redistribution, ours across, DTensor's up."""
    rows = [
        row["seconds"]
        for row in recorded("torch_redistribute")["ends"]
        if "DTensor" in row["seconds"]
    ]
    _against(
        axes,
        [row["xshard"] for row in rows],
        [row["DTensor"] for row in rows],
        "seconds",
        "DTensor",
    )


def jax(axes: Any) -> None:
    """Bytes that the busiest device receives in each reshard, ours across, XLA's up."""
    pairs = [(row["ours"]["bandwidth"], row["xla"]) for row in recorded("jax_reshard")["compiled"]]
    ours, theirs = zip(
        *[(a["received_bytes"], b["received_bytes"]) for a, b in pairs if a["received_bytes"]],
        strict=True,
    )
    _against(axes, ours, theirs, "bytes received", "XLA")


def _against(axes: Any, ours: Any, theirs: Any, unit: str, peer: str) -> None:
    axes.scatter(ours, theirs, s=10, color=OURS)
    ends = min(*ours, *theirs), max(*ours, *theirs)
    axes.plot(ends, ends, color=INK, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=f"xshard, {unit}", ylabel=f"{peer}, {unit}")
    axes.text(
        ends[0],
        ends[1],
        f"{len(ours)} cases; above the line, {peer} needs more",
        color=INK,
        va="top",
    )


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    inked = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    plt.rcParams.update(
        {**dict.fromkeys(inked, INK), "svg.fonttype": "none", "svg.hashsalt": "xshard"}
    )
    FOLDER.mkdir(exist_ok=True)
    for plot in SHOWN:
        figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        globals()[plot](axes)
        figure.savefig(
            FOLDER / f"{plot}.svg",
            transparent=True,
            metadata={"Date": None, "Description": source(plot)},
        )
        plt.close(figure)


if __name__ == "__main__":
    main()
