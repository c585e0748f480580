"""Show that a JAX port of a torch transformer block is the same, sharded; then that a bug would be found.

    python examples/port_check.py [--bugs bias gelu norm]

The block is tensor- and sequence-parallel on four devices, as 1 x 4 and as 2 x 2 (port/shardings.py).
The kit compares its output, the gradients of the tokens and of all weights, and the weights after one
step of SGD: torch on four processes, JAX on four devices, and torch on one. Then a bug is planted in one
side (port/bugs.py), and the report says where it shows, on one of the meshes, and what it looks like.

The exit status is 1 if the port differs, or if a bug is not found.
"""

import sys
import time
from collections.abc import Callable

from port.bugs import BUGS
from port.shardings import MESHES, WEIGHTS, X, arrays
from port.with_jax import block as jax_block
from port.with_jax import update
from port.with_torch import block as torch_block
from port.with_torch import optimiser
from rich.console import Console
from support.runs import options

from xshard.testing import EquivalenceError, assert_equivalent


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--bugs", nargs="+", choices=sorted(BUGS), default=["bias"])
    chosen = parser.parse_args()
    console = Console()
    start = time.perf_counter()
    error = differences(torch_block, jax_block, MESHES)
    seconds = time.perf_counter() - start
    if error is not None:
        console.print(error.table())
        console.print("The port is not the same.", style="bold red")
        return 1
    console.print(
        f"The same on {MESHES}: output, {len(WEIGHTS) + 1} gradients, {len(WEIGHTS)} updated weights "
        f"({seconds:.1f} s).",
        style="bold green",
        soft_wrap=True,
    )

    for bug in map(BUGS.__getitem__, chosen.bugs):
        console.print(f"\nWith a bug in {bug.runtime}: {bug.what}.", style="bold")
        functions = {"torch": torch_block, "jax": jax_block, bug.runtime: bug.function}
        error = differences(functions["torch"], functions["jax"], bug.mesh)
        if error is None:
            console.print("It was not found.", style="bold red")
            return 1
        console.print(error.table())
    return 0


def differences(torch_fn: Callable, jax_fn: Callable, meshes: str) -> EquivalenceError | None:
    """What differs between the two functions on any of the meshes; None if nothing does."""
    try:
        assert_equivalent(
            torch_fn,
            jax_fn,
            args=arrays(),
            layouts=([WEIGHTS, X], X),
            mesh=meshes,
            parameters=[0],
            optimisers=(optimiser, update),
        )
    except EquivalenceError as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
