"""The losses of runs that should be equal: how far they are apart, as a table, and as an exit status."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from support.runs import Result

Results = Mapping[str, Result]


def differences(results: Results) -> NDArray[np.float64]:
    """Per step, the relative difference between the largest and the smallest loss of all runs."""
    losses = np.array([result.losses for result in results.values()])
    return np.ptp(losses, axis=0) / losses.min(axis=0)


def differing(results: Results, tolerance: float) -> list[str]:
    """A sentence if the losses are further apart than `tolerance`, or are no numbers; else none."""
    largest = differences(results).max()
    if largest <= tolerance:
        return []
    return [f"The losses differ by {largest:.1e} relative, allowed are {tolerance:.0e}."]


def loss_table(results: Results, rows: int | None = None) -> Table:
    """The losses by step, the first and the last included. rows: how many steps; None for all.

    Below them the accuracies, if the runs report them, and the seconds.
    """
    with_accuracy = any(not math.isnan(result.accuracy) for result in results.values())
    relative = differences(results)
    table = Table(title="Loss by step", box=SIMPLE, pad_edge=False, show_footer=True)
    table.add_column("step", "accuracy\nseconds" if with_accuracy else "seconds", justify="right")
    for name, result in results.items():
        accuracy = f"{result.accuracy:.1%}\n" if with_accuracy else ""
        table.add_column(name, f"{accuracy}{result.seconds:.1f}", justify="right")
    table.add_column(
        "difference", "largest\n" * with_accuracy + f"{relative.max():.1e}", justify="right"
    )
    last = len(relative) - 1
    steps = (
        range(last + 1)
        if rows is None
        else sorted({round(i * last / (rows - 1)) for i in range(rows)})
    )
    for step in steps:
        losses = [f"{result.losses[step]:.6f}" for result in results.values()]
        table.add_row(str(step + 1), *losses, f"{relative[step]:.1e}")
    return table


def concluded(console: Console, results: Results, complaints: Sequence[str]) -> int:
    """Print the complaints, or how little the losses differ; the exit status."""
    largest = differences(results).max()
    return verdict(
        console, complaints, f"The largest relative difference of any loss is {largest:.1e}."
    )


def verdict(console: Console, complaints: Sequence[str], good: str) -> int:
    """Print the complaints, or a sentence if there are none; the exit status."""
    for complaint in complaints:
        console.print(complaint, style="bold red")
    if not complaints:
        console.print(good, style="bold green")
    return 1 if complaints else 0
