"""Train one transformer block of a Llama, written as expressions, in torch and in JAX on 2x2 devices.

    python examples/llama_block.py            # --steps 3: a short run

Grouped-query attention, SwiGLU, RMSNorm and rotary embeddings: every product is an einsum of cut arrays,
and both models (llama/model_torch.py, llama/model_jax.py, 60 lines each) read the same expressions
(llama/layouts.py). The expressions make them tensor- and sequence-parallel, or ZeRO-3: nothing else says what
is sent, nor which gradients are added up. In float64, so that all but the order of additions is the same.
The exit status is 1 if a loss or a gradient differs from one process, or if nothing was learned.
"""

import sys
from collections.abc import Mapping
from itertools import product

import jax
import numpy as np
from llama import with_jax, with_torch
from llama.data import Run
from llama.layouts import SCHEMES
from numpy.typing import ArrayLike
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.losses import verdict
from support.runs import options

from xshard import use_profile

TOLERANCE = 1e-12  # relative, of float64
STEPS = 50


def main() -> int:
    steps = options(__doc__, steps=STEPS).parse_args().steps
    schemes = list(SCHEMES.values())
    with use_profile("h100"):  # one machine for both frameworks, so that their plans are the same
        one, *_ = with_torch.train([schemes[0].alone()], steps)
        runs = {
            "torch": with_torch.train(schemes, steps)
        }  # before JAX has threads: ranks are forked
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", schemes[0].mesh.n_devices)
        jax.config.update("jax_enable_x64", True)
        runs["JAX"] = [with_jax.train(scheme, steps) for scheme in schemes]
    pairs = product(runs, enumerate(SCHEMES))
    named = {f"{scheme}, {framework}": runs[framework][i] for framework, (i, scheme) in pairs}
    return judge(one, named, Console())


def apart(actual: ArrayLike, expected: ArrayLike) -> float:
    """The largest difference of any number, relative to the largest number."""
    return float(np.abs(np.subtract(actual, expected)).max() / np.abs(expected).max())


def judge(one: Run, runs: Mapping[str, Run], console: Console) -> int:
    """Print how runs differ from one device; 0 if they do not, and something was learned."""
    title = "Training, and what a device receives in a step"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title)
    table.add_column("", no_wrap=True)
    for title in (
        "first\nloss",
        "last\nloss",
        "losses\ndiffer",
        "gradients\ndiffer",
        "collectives",
        "bytes",
    ):
        table.add_column(title, justify="right")
    differences = []
    for name, run in {"one device, torch": one, **runs}.items():
        losses = apart(run.losses, one.losses)
        gradients = np.max(
            [apart(run.gradients[key], expected) for key, expected in one.gradients.items()]
        )
        differences += [losses, gradients]
        numbers = (
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{losses:.1e}",
            f"{gradients:.1e}",
        )
        table.add_row(name, *numbers, str(run.collectives), f"{run.received_bytes:,}")
    console.print(table)

    largest = np.max(differences)
    complaints = []
    if not largest <= TOLERANCE:
        complaints.append(f"They differ by {largest:.1e} relative, allowed are {TOLERANCE:.0e}.")
    if not one.losses[-1] < one.losses[0]:
        complaints.append(f"The loss went from {one.losses[0]:.3f} to {one.losses[-1]:.3f}.")
    good = f"The largest relative difference of any loss or gradient is {largest:.1e}."
    return verdict(console, complaints, good)


if __name__ == "__main__":
    sys.exit(main())
