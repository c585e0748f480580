"""Train one transformer on handwritten digits three times, and compare every loss.

    python examples/train_parity.py

1. torch on a single device;
2. torch on four processes, its data, weights and sequence sharded;
3. JAX on four devices, sharded by the same expressions (parity/shardings.py).

Same digits, same initial weights, same batches: so the losses must be the same, to rounding.
The exit status is 1 where they are not, or where a model has not learned to read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from subprocess import CalledProcessError

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.runs import Result, concluded, differences, follow_all

RUNS = {
    "torch, 1 device": ["parity.with_torch", "single"],
    "torch, 4 processes": ["parity.with_torch", "sharded"],
    "JAX, 4 devices": ["parity.with_jax"],
}
TOLERANCE = 1e-4  # relative; rounding alone stays below 1e-5 for 200 steps of float32
ACCURACY_FLOOR = 0.9
ROWS = 10  # of the table

Results = Mapping[str, Result]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--any-accuracy", action="store_true", help="for few steps: compare the losses only")
    options = parser.parse_args()
    try:
        results = follow_all(RUNS, options.steps)
    except CalledProcessError as error:  # the run has said why
        print(error, file=sys.stderr)
        return 1
    return judge(results, accuracy_floor=0.0 if options.any_accuracy else ACCURACY_FLOOR)


def judge(results: Results, accuracy_floor: float = ACCURACY_FLOOR) -> int:
    """Print the curves and what is wrong with them; 0 if nothing is."""
    console = Console()
    console.print(table(results))
    return concluded(console, results, complaints(results, accuracy_floor))


def complaints(results: Results, accuracy_floor: float) -> list[str]:
    """A sentence for everything that is wrong; a loss or accuracy that is no number is wrong."""
    found = []
    largest = differences(results).max()
    if not largest <= TOLERANCE:
        found.append(f"The losses differ by {largest:.1e} relative, allowed are {TOLERANCE:.0e}.")
    for name, result in results.items():
        if not result.accuracy > accuracy_floor:
            found.append(f"{name}: accuracy {result.accuracy:.1%}, it must exceed {accuracy_floor:.0%}.")
    return found


def table(results: Results) -> Table:
    """Losses of some of the steps, the first and the last included."""
    made = Table(title="Loss by step", box=SIMPLE, pad_edge=False, show_footer=True)
    made.add_column("step", "accuracy\nseconds", justify="right")
    for name, result in results.items():
        made.add_column(name, f"{result.accuracy:.1%}\n{result.seconds:.1f}", justify="right")
    relative = differences(results)
    made.add_column("difference", f"largest\n{relative.max():.1e}", justify="right")
    last = len(relative) - 1
    for step in sorted({round(i * last / (ROWS - 1)) for i in range(ROWS)}):
        losses = [f"{result.losses[step]:.6f}" for result in results.values()]
        made.add_row(str(step + 1), *losses, f"{relative[step]:.1e}")
    return made


if __name__ == "__main__":
    sys.exit(main())
