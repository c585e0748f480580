"""Train one transformer on handwritten digits three times, and compare every loss.

    python examples/train_parity.py

1. torch on a single device;
2. torch on four processes, its data, weights and sequence sharded;
3. JAX on four devices, sharded by the same expressions (parity/shardings.py).

Same digits, same initial weights, same batches: so the losses must be the same, to rounding.
The exit status is 1 if they are not, or if a model has not learned to read.
"""

import sys
from collections.abc import Mapping

from rich.console import Console
from support.losses import Results, concluded, differing, loss_table
from support.runs import follow_all, options

RUNS = {
    "torch, 1 device": ["parity.with_torch", "single"],
    "torch, 4 processes": ["parity.with_torch", "sharded"],
    "JAX, 4 devices": ["parity.with_jax"],
}
TOLERANCE = 1e-4  # relative; rounding alone stays below 1e-5 for 200 steps of float32
ACCURACY_FLOOR = 0.9
ROWS = 10  # of the table


def main(runs: Mapping[str, list[str]] = RUNS, what: str | None = __doc__) -> int:
    """Run them as the command line says, and judge them. what: a script's docstring."""
    parser = options(what, steps=200)
    parser.add_argument(
        "--any-accuracy", action="store_true", help="for few steps: compare the losses only"
    )
    chosen = parser.parse_args()
    floor = 0.0 if chosen.any_accuracy else ACCURACY_FLOOR
    return judge(follow_all(runs, chosen.steps), accuracy_floor=floor)


def judge(results: Results, accuracy_floor: float = ACCURACY_FLOOR) -> int:
    """Print the curves and what is wrong with them; 0 if nothing is."""
    console = Console()
    console.print(loss_table(results, ROWS))
    complaints = differing(results, TOLERANCE)
    for name, result in results.items():
        if not result.accuracy > accuracy_floor:  # NaN is none
            complaints.append(
                f"{name}: accuracy {result.accuracy:.1%}, it must exceed {accuracy_floor:.0%}."
            )
    return concluded(console, results, complaints)


if __name__ == "__main__":
    sys.exit(main())
