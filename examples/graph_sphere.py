"""A graph network on the mesh of a sphere, in torch and in JAX, on 4 and on 8 devices.

    python examples/graph_sphere.py           # --refinements 3: a small mesh; --parts 4

An icosahedron that is refined five times has 10,242 nodes, and 61,440 edges between neighbours. Four layers
of message passing have an MLP of edges and one of nodes. Each device owns the nodes of a part, and the edges
into them; before a layer it gets the nodes around its part. One network (sphere/network.py) runs in both
frameworks, in float64. The exit status is 1 if an output or a gradient differs from one device.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from sphere import with_jax, with_torch
from sphere.mesh import bands, bisection
from sphere.network import NODES, Array, Parts, Problem, Run
from sphere.picture import drawn
from support.losses import verdict
from support.runs import options

from xshard import plan

TOLERANCE = 1e-12  # relative, of float64


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--refinements", type=int, default=5)
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--picture", type=Path, help="draw the parts into this file, as SVG")
    asked = parser.parse_args()
    problem = Problem(asked.refinements)
    console = Console()
    several = {n: Parts(problem, bisection(problem.points, n)) for n in asked.parts}
    if asked.picture:
        ranges = Parts(problem, bands(problem.points, asked.parts[-1]))
        asked.picture.write_text(drawn([*several.values(), ranges]))
    one = with_torch.alone(problem)
    runs = {f"torch, {n} ranks": with_torch.run(parts) for n, parts in several.items()}
    jax.config.update("jax_platforms", "cpu")  # after torch: ranks are forked, and JAX has threads
    jax.config.update("jax_num_cpu_devices", max(asked.parts))
    jax.config.update("jax_enable_x64", True)
    runs |= {f"JAX, {n} devices": with_jax.run(parts) for n, parts in several.items()}
    console.print(layer_table(several))
    return judge(one, runs, console)


def layer_table(several: Mapping[int, Parts]) -> Table:
    """Bytes that the busiest device receives before a layer, by ways to share the nodes out."""
    table = Table(box=SIMPLE, pad_edge=False, title="KiB that a device receives before a layer")
    for column in ("devices", "all nodes", "around bands", "around parts", "bound", "back"):
        table.add_column(column, justify="right")
    for n, parts in several.items():
        halo = parts.exchange
        points = parts.problem.points
        ways = (
            plan(f"{NODES} -> n d | copy(gp)", parts.mesh, halo.shape, "float64", maps=parts.maps),
            Parts(parts.problem, bands(points, n)).exchange,
            halo,
        )
        received = [way.bytes_received for way in ways]
        row = [*received, halo.bytes_lower_bound, halo.backward.bytes_received]
        table.add_row(str(n), *(f"{value / 1024:,.1f}" for value in row))
    return table


def judge(one: Run, runs: Mapping[str, Run], console: Console) -> int:
    """Print how runs differ from one device; 0 if they do not."""
    table = Table(box=SIMPLE, pad_edge=False, title="Beside one device")
    largest = 0.0
    for column in ("", "output differs", "gradients differ", "KiB before a layer"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in runs.items():
        output = apart(run.output, one.output)
        gradients = np.max(
            [apart(run.gradients[key], expected) for key, expected in one.gradients.items()]
        )
        table.add_row(
            name, f"{output:.1e}", f"{gradients:.1e}", f"{run.received_bytes / 1024:,.1f}"
        )
        largest = np.max([largest, output, gradients])
    console.print(table)
    complaint = f"They differ by {largest:.1e} relative, allowed are {TOLERANCE:.0e}."
    good = f"The largest relative difference of an output or a gradient is {largest:.1e}."
    return verdict(console, [] if largest <= TOLERANCE else [complaint], good)


def apart(actual: Array, expected: Array) -> float:
    """The largest difference of any number, relative to the largest number."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    sys.exit(main())
