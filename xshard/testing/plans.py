"""Questions about plans, in whole numbers: every sum is exact; the runtimes that answer, and verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xshard import reference
from xshard.contractions.plan import ContractionPlan
from xshard.dtypes import itemsize, n_bytes, numpy_dtype, precision
from xshard.errors import DtypeError, ShapeError, XshardError
from xshard.formatting import format_bytes
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.overlap import Fold
from xshard.planner import plan as make_plan
from xshard.runtimes.backends import BACKENDS, Backend, NoRuntimeError
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.steps.local import Scale
from xshard.testing.diagnosis.evidence import largest_error, settle, whole
from xshard.testing.question import OUTPUT, Answer, AnyPlan, Devices, Question, Result
from xshard.tolerances import EXACT

MOST_BYTES = 2**32  # of all devices' blocks, which one process holds


def arrays_of(plan: AnyPlan) -> tuple[Sharding, ...]:
    """The shardings of the operands, and of the result."""
    return plan.arrays if isinstance(plan, ContractionPlan) else (plan.source, plan.target)


def is_linear(plan: AnyPlan) -> bool:
    """True if no max or min ends or stays."""
    return all(source.layout.is_linear for source in arrays_of(plan)[:-1])


def backward_bytes(plan: AnyPlan) -> int | None:
    """Bytes that the busiest device receives for the gradients, by the plan; None for gradients of a max."""
    if isinstance(plan, ContractionPlan):
        return plan.backward_bytes_received
    return plan.backward.bytes_received if is_linear(plan) else None


def plan_question(plan: AnyPlan, seed: int = 0) -> Question:
    """A plan with blocks of whole numbers: contributions arbitrary, copies equal. Raises DtypeError for
    contractions of whole numbers, ShapeError for blocks of more than MOST_BYTES. Values are multiples of
    every mesh size, so that means are whole too.
    """
    if isinstance(plan, ContractionPlan) and not precision(plan.dtype):
        raise DtypeError(
            f"no gradients of a contraction in {plan.dtype}", hint="as in --dtype float64"
        )
    rng, (*sources, target) = np.random.default_rng(seed), arrays_of(plan)
    sizes = [
        n_bytes(s.max_local_shape, plan.dtype) * plan.mesh.n_devices for s in (*sources, target)
    ]
    if sum(sizes) > MOST_BYTES:
        hint = f"at most {format_bytes(MOST_BYTES)}, which one process holds: shorter dims show the same"
        raise ShapeError(
            f"the blocks of all devices have {format_bytes(sum(sizes))} together", hint=hint
        )
    unit = plan.mesh.n_devices if any(s.scale != 1 for s in (*sources, target)) else 1
    every = *sources, target.dual if target.layout.is_linear else target
    random = (random_blocks(rng, s.layout, plan.mesh, s.shape, plan.dtype, unit) for s in every)
    *inputs, cotangents = map(tuple, random)
    arrays = tuple(range(len(sources))), tuple(inputs), tuple(sources)
    results = {OUTPUT: Result(target, cotangents)}
    wide = itemsize(plan.dtype) >= 8
    return Question(plan, plan.mesh, *arrays, results, wide=wide)


def in_numpy(question: Question) -> Answer:
    """The reference's answer to a question about a plan."""
    plan = question.plan
    start = time.perf_counter()
    outputs = reference.run(plan, *question.inputs)
    if isinstance(plan, ContractionPlan):
        gradients = reference.pullback(plan, question.inputs, question.cotangents)
    else:
        gradients = [reference.pullback(plan, question.inputs[0], question.cotangents)]
    seconds = time.perf_counter() - start
    # One process holds all blocks: no bytes travel, so none are measured.
    return Answer({OUTPUT: tuple(outputs)}, dict(enumerate(map(tuple, gradients))), seconds=seconds)


@dataclass(frozen=True)
class Verdict:
    """Largest absolute error of the outputs and of the gradients; None where nothing was compared."""

    forward: float
    backward: float | None

    @property
    def agrees(self) -> bool:
        return self.forward <= EXACT and (self.backward or 0) <= EXACT


def judge(answer: Answer, expected: Answer) -> Verdict:
    """A runtime against the reference, block by block."""
    pairs = (answer.outputs, expected.outputs), (answer.gradients or {}, expected.gradients or {})
    return Verdict(*(_largest_error(got, want) for got, want in pairs))


def audit(question: Question, answer: Answer) -> Verdict:
    """An answer against the definition, numpy's einsum of the global arrays, without the steps of the plan.
    Gradients are right but for the scales of means; a max has winners, so they are not compared.
    """
    plan = question.plan
    shardings = question.shardings
    end = arrays_of(question.plan)[-1]
    sources = shardings
    target = end
    if isinstance(plan, ContractionPlan):
        sources = tuple(move.source for move in plan.moves)
        target = plan.result.target
    inputs = map(reference.by_name, question.inputs, shardings, sources)
    arrays = [
        (source.layout.names, [whole(x, source)]) for x, source in zip(inputs, sources, strict=True)
    ]
    [result] = reference.contract(arrays, target.layout.names)
    forward = _error_in_array(
        reference.by_name(answer.outputs[OUTPUT], end, target), result, target
    )
    if not is_linear(plan):
        return Verdict(forward, None)
    cotangents = reference.by_name(question.cotangents, end, target)
    errors = [0.0]
    cotangent = target.layout.names, [whole(cotangents, target.dual)]
    for i, source in enumerate(sources):
        others = [cotangent, *(x for j, x in enumerate(arrays) if j != i)]
        [gradient] = reference.contract_gradient(others, source.layout.names, arrays[i][1])
        if (scale := source.scale / target.scale) != 1:
            [gradient] = Scale(scale).run([gradient], source)
        own = reference.by_name((answer.gradients or {})[i], shardings[i], source)
        errors.append(_error_in_array(own, gradient, source.dual))
    return Verdict(forward, max(errors))


def _largest_error(got: Mapping[Any, Devices], want: Mapping[Any, Devices]) -> float:
    if got.keys() != want.keys():
        return float("inf")
    return max((largest_error(got[key], want[key]) for key in want), default=0.0)


def _error_in_array(blocks: Iterable[Block], array: Block, sharding: Sharding) -> float:
    """Largest error of the blocks where the array determines them; of addends only the sum counts."""
    want = reference.scatter(array, sharding.layout, sharding.mesh)
    return largest_error(settle(tuple(blocks), sharding), settle(want, sharding))


def random_blocks(
    rng: np.random.Generator,
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    unit: int = 1,
) -> list[Block]:
    """Blocks of small multiples of `unit`: contributions are arbitrary, all copies of a row are equal."""
    dims = tuple(
        d if isinstance(d.overlap, Fold) else replace(d, overlap=None) for d in layout.dims
    )
    if dims != layout.dims:  # rows that several blocks hold are equal: drawn once, then sent to all
        plain = replace(layout, dims=dims)
        plan = make_plan((plain, layout), mesh, shape, dtype)
        return reference.run(plan, random_blocks(rng, plain, mesh, shape, dtype, unit))
    sharding = Sharding(layout, mesh, shape)
    equal = [a for a in mesh.axes if a not in layout.axes or a in layout.tagged("copy")]
    least, beyond = (0, 2) if dtype == "bool" else (0 if dtype.startswith("uint") else -4, 5)
    blocks: list[Block] = []
    for device in range(mesh.n_devices):
        first = mesh.group(device, equal)[0]
        if first < device:
            blocks.append(blocks[first].copy())
        else:
            values = rng.integers(least, beyond, sharding.local_shape(device))
            blocks.append((values * unit).astype(numpy_dtype(dtype)))
    return blocks


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
            return [in_numpy(question) for question in questions]
        n = max((question.mesh.n_devices for question in questions), default=1)
        asked = [replace(question, mode=self.mode) for question in questions]
        try:
            answers: list[Answer] = self.backend.ask(
                n, "worker.answers", asked, timeout_s=timeout_s
            )
        except XshardError as error:
            about: Any = {"text": error.text, "span": error.span, "hint": error.hint}
            raise FunctionError(f"{self.name}: {error.reason}", **about) from None
        return answers

    def judge(self, question: Question, answer: Answer, expected: Answer) -> Verdict:
        """The answer against the reference; numpy, which is the reference, against the definition."""
        return audit(question, answer) if self.backend is None else judge(answer, expected)


_MODES = [(name, backend, mode) for name, backend in BACKENDS.items() for mode in backend.modes]
RUNTIMES = (
    Runtime("numpy"),
    *(Runtime(f"{n}-{mode}" if mode else n, b, mode) for n, b, mode in _MODES),
)


def choose(names: Sequence[str], meshes: Sequence[Mesh]) -> tuple[Runtime, ...]:
    """The runtimes of these names, by default all that can take one of the meshes. Raises NoRuntimeError."""
    known = {runtime.name: runtime for runtime in RUNTIMES}
    for name in names:
        if name not in known:
            raise NoRuntimeError(f"no runtime {name!r}", hint=f"runtimes are: {', '.join(known)}")
    takes = [runtime for runtime in RUNTIMES if any(map(runtime.takes, meshes))]
    chosen = tuple(known[name] for name in dict.fromkeys(names)) if names else tuple(takes)
    for runtime in chosen:
        if runtime not in takes:
            why = f"{runtime.name} cannot run on {meshes[0]!r}"
            raise NoRuntimeError(why, hint="it knows one axis: others have size 1")
        if runtime.backend is not None:
            runtime.backend.check_installed(f", or leave {runtime.name} out with --runtime")
    return chosen
