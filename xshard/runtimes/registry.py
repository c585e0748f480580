"""Who can run a plan: the runtimes by name, what each needs, and which meshes it takes.

Decides which runtimes are asked for a mesh, and that one that is asked and missing is an
error. What they are asked is in `tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.runtimes.backends import BACKENDS, Backend, NoRuntimeError
from xshard.runtimes.processes import FunctionError
from xshard.runtimes.tasks import Outcome, Task, run_reference
from xshard.runtimes.verdict import Verdict, audit, judge


@dataclass(frozen=True)
class Runtime:
    """A runtime and how to ask it.

    backend: the framework; none for numpy. mode: how JAX runs a program on its devices.
    one_axis: it knows one mesh axis only; further axes must be of size 1.
    """

    name: str
    backend: Backend | None = None
    mode: str = ""
    one_axis: bool = False

    def takes(self, mesh: Mesh) -> bool:
        """Whether the runtime can run on the mesh."""
        return not self.one_axis or len(mesh.axes) == 1 or sum(n > 1 for n in mesh.sizes) == 1

    def run(self, tasks: Sequence[Task], timeout_s: float) -> list[Outcome]:
        """The outcome of every task. timeout_s: see `Process.ask`. Raises FunctionError."""
        if self.backend is None:
            return [run_reference(task) for task in tasks]
        n = max((task.plan.mesh.n_devices for task in tasks), default=1)
        options = [self.mode] if self.mode else []
        try:
            outcomes: list[Outcome] = self.backend.process(n).ask(
                self.backend.worker, tasks, *options, timeout_s=timeout_s, quiet=True
            )
        except XshardError as error:
            raise FunctionError(
                f"{self.name}: {error.reason}", text=error.text, span=error.span, hint=error.hint
            ) from None
        return outcomes

    def judge(self, task: Task, outcome: Outcome, expected: Outcome) -> Verdict:
        """The outcome against the reference; numpy, which is the reference, against the definition."""
        return audit(task, outcome) if self.backend is None else judge(outcome, expected)


RUNTIMES = (
    Runtime("numpy"),
    Runtime("torch", BACKENDS["torch"]),
    Runtime("jax-vma", BACKENDS["jax"], "vma"),
    Runtime("jax-novma", BACKENDS["jax"], "novma"),
    Runtime("jax-pmap", BACKENDS["jax"], "pmap", one_axis=True),
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
        if runtime.backend is not None:
            runtime.backend.check_installed(f", or leave {runtime.name} out with --runtime")
    return chosen
