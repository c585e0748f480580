"""Train a character model on English text with its sequence on four devices, and compare every loss.

    python examples/long_context.py            # --quick: a few steps

1. torch on a single device;
2. torch on four processes, the sequence cut over them in zigzag order;
3. JAX on four devices, cut by the same expressions (context/layouts.py).

Three layers mix the sequence in three ways: attention that gathers keys and values, a convolution as long
as the sequence (rows for channels, FFT), and Ulysses attention (rows for heads: six heads on four devices, in
two groups that share keys). The text is Python's own help. The second table shows why zigzag.
The exit status is 1 if a loss differs, or if nothing was learned.
"""

import sys

import numpy as np
from context.data import LENGTH
from context.layouts import CONTIGUOUS, MESH, ZIGZAG
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.losses import Results, concluded, differing, loss_table
from support.runs import follow_all, options

from xshard import Layout

RUNS = {
    "torch, 1 device": ["context.with_torch", "single"],
    "torch, 4 processes": ["context.with_torch", "sharded"],
    "JAX, 4 devices": ["context.with_jax"],
}
TOLERANCE = 1e-4  # relative, of float32 losses
ROWS = 10  # of the table
QUICK = 3
STEPS = 40


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} steps instead of {STEPS}")
    quick = parser.parse_args().quick
    return judge(follow_all(RUNS, QUICK if quick else STEPS))


def judge(results: Results) -> int:
    """Print the losses, the work, and what is wrong with them; 0 if nothing is."""
    console = Console()
    console.print(loss_table(results, ROWS))
    console.print(work_table())
    complaints = differing(results, TOLERANCE)
    for name, result in results.items():
        if not result.losses[-1] < result.losses[0]:  # NaN is no less
            complaints.append(
                f"{name}: the loss went from {result.losses[0]:.3f} to {result.losses[-1]:.3f}."
            )
    return concluded(console, results, complaints)


def work(cut: str) -> NDArray[np.int64]:
    """For every device, how many keys its queries look at: each query at its own row and all before it."""
    layout = Layout.parse(cut)
    rows = (layout.positions(MESH, (LENGTH,), 0, device) for device in range(MESH.n_devices))
    return np.array([(numbers + 1).sum() for numbers in rows])


def work_table() -> Table:
    table = Table(
        title=f"Causal attention over {LENGTH} rows: keys looked at", box=SIMPLE, pad_edge=False
    )
    table.add_column("order", no_wrap=True)
    for device in range(MESH.n_devices):
        table.add_column(f"device {device}", justify="right")
    table.add_column("busiest\n/ mean", justify="right")
    for name, cut in (("contiguous", CONTIGUOUS), ("zigzag", ZIGZAG)):
        keys = work(cut)
        table.add_row(f"{name}: {cut}", *map(str, keys), f"{keys.max() / keys.mean():.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
