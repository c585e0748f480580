"""The runtimes that answer questions about plans: numpy, torch, and JAX in each of its modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.runtimes.backends import BACKENDS, Backend, NoRuntimeError
from xshard.runtimes.processes import FunctionError
from xshard.testing.plans import Verdict, answer_in_numpy, audit, judge
from xshard.testing.question import Answer, Question


@dataclass(frozen=True)
class Runtime:
    """A runtime by name. backend: the framework; none for numpy. mode: one of the backend's."""

    name: str
    backend: Backend | None = None
    mode: str = ""

    def takes(self, mesh: Mesh) -> bool:
        """True if the runtime can run on the mesh: `pmap` knows one axis, others have to be of size 1."""
        return self.mode != "pmap" or len(mesh.axes) == 1 or sum(n > 1 for n in mesh.sizes) == 1

    def answers(self, questions: Sequence[Question], timeout_s: float) -> list[Answer]:
        """The answer to every question. timeout_s: see `Process.ask`. Raises FunctionError."""
        if self.backend is None:
            return [answer_in_numpy(question) for question in questions]
        n = max((question.mesh.n_devices for question in questions), default=1)
        asked = [replace(question, mode=self.mode) for question in questions]
        try:
            answers: list[Answer] = self.backend.ask(n, "worker.answers", asked, timeout_s=timeout_s)
        except XshardError as error:
            raise FunctionError(
                f"{self.name}: {error.reason}", text=error.text, span=error.span, hint=error.hint
            ) from None
        return answers

    def judge(self, question: Question, answer: Answer, expected: Answer) -> Verdict:
        """The answer against the reference; numpy, which is the reference, against the definition."""
        return audit(question, answer) if self.backend is None else judge(answer, expected)


RUNTIMES = (
    Runtime("numpy"),
    *(
        Runtime(f"{name}-{mode}" if mode else name, backend, mode)
        for name, backend in BACKENDS.items()
        for mode in backend.modes
    ),
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
