"""Who can run a plan: the runtimes by name, what each needs, and what it can take.

Decides which runtimes are asked for a mesh, and that one that is asked and missing is an
error. What they are asked is in `tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from xshard.errors import XshardError
from xshard.layout.mesh import Mesh
from xshard.runtimes.processes import run_worker
from xshard.runtimes.tasks import Outcome, Task, run_reference
from xshard.runtimes.verdict import Verdict, audit, compare


class NoRuntimeError(XshardError):
    """A runtime that does not exist, is not installed, or cannot take the mesh."""


@dataclass(frozen=True)
class Runtime:
    """A runtime and how to ask it.

    package: what must be installed, also the name of the extra that brings it; none for numpy.
    module, options: its worker, as `run_worker` takes them.
    one_axis: it knows one mesh axis only; further axes must be of size 1.
    """

    name: str
    package: str | None = None
    module: str = ""
    options: tuple[str, ...] = ()
    one_axis: bool = False

    def takes(self, mesh: Mesh) -> bool:
        """Whether the runtime can run on the mesh."""
        return not self.one_axis or len(mesh.axes) == 1 or sum(n > 1 for n in mesh.sizes) == 1

    def check_installed(self) -> None:
        """Raise NoRuntimeError where the package is not installed; nothing is imported."""
        if self.package is not None and find_spec(self.package) is None:
            raise NoRuntimeError(
                f"{self.package} is not installed",
                hint=f"pip install 'xshard[{self.package}]', or leave {self.name} out with --runtime",
            )

    def run(self, tasks: Sequence[Task], timeout_s: float) -> list[Outcome]:
        """The outcome of every task. Raises WorkerError."""
        if self.package is None:
            return [run_reference(task) for task in tasks]
        return run_worker(self.module, tasks, *self.options, timeout_s=timeout_s)

    def judge(self, task: Task, outcome: Outcome, expected: Outcome) -> Verdict:
        """The outcome against the reference; numpy, which is the reference, against the definition."""
        return audit(task, outcome) if self.package is None else compare(outcome, expected)


RUNTIMES = (
    Runtime("numpy"),
    Runtime("torch", "torch", "torch_bridge.testing.worker"),
    Runtime("jax-vma", "jax", "jax_bridge.testing.worker", ("--mode", "vma")),
    Runtime("jax-novma", "jax", "jax_bridge.testing.worker", ("--mode", "novma")),
    Runtime("jax-pmap", "jax", "jax_bridge.testing.worker", ("--mode", "pmap"), one_axis=True),
)


def choose(names: Sequence[str], meshes: Sequence[Mesh]) -> tuple[Runtime, ...]:
    """The runtimes of these names; without names, all that can take one of the meshes.

    Raises NoRuntimeError for a name that does not exist, or a runtime that is not installed or can
    take none of the meshes.
    """
    known = {runtime.name: runtime for runtime in RUNTIMES}
    for name in names:
        if name not in known:
            raise NoRuntimeError(f"no runtime {name!r}", hint=f"runtimes are: {', '.join(known)}")
    if names:
        chosen = tuple(known[name] for name in dict.fromkeys(names))
    else:
        chosen = tuple(runtime for runtime in RUNTIMES if any(map(runtime.takes, meshes)))
    for runtime in chosen:
        if not any(map(runtime.takes, meshes)):
            raise NoRuntimeError(
                f"{runtime.name} cannot run on {meshes[0]!r}", hint="it knows one axis: others have size 1"
            )
        runtime.check_installed()
    return chosen
