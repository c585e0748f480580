"""Questions about plans in whole numbers, where sums are exact; runtimes that answer, and verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xshard import reference
from xshard.contractions.plan import ContractionPlan
from xshard.dtypes import itemsize, n_bytes, numpy_dtype, precision
from xshard.errors import DtypeError, ShapeError, XshardError
from xshard.formatting import format_bytes
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.overlap import Halo, Reads, Window
from xshard.planner import plan as make_plan
from xshard.runtimes.backends import BACKENDS, Backend, NoRuntimeError
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.steps.local import Scale
from xshard.testing.diagnosis.evidence import largest_error, settle, whole, without_overlaps
from xshard.testing.question import OUTPUT, Answer, AnyPlan, Devices, Question, Result
from xshard.tolerances import EXACT

MAX_BYTES = 2**32  # of all devices' blocks, which one process holds


def arrays_of(plan: AnyPlan) -> tuple[Sharding, ...]:
    """Return the shardings of the operands, and then of the result."""
    return plan.arrays if isinstance(plan, ContractionPlan) else (plan.source, plan.target)


def is_linear(plan: AnyPlan) -> bool:
    """Tell whether a plan takes no max or min: only then it has one backward plan."""
    return all(source.layout.is_linear for source in arrays_of(plan)[:-1])


def backward_bytes(plan: AnyPlan) -> int | None:
    """Return the bytes that the busiest device receives for the gradients, as planned.

    None for gradients of a max: they are more than one plan.
    """
    if isinstance(plan, ContractionPlan):
        return plan.backward_bytes_received
    return plan.backward.bytes_received if is_linear(plan) else None


def plan_question(plan: AnyPlan, seed: int = 0) -> Question:
    """Draw random input blocks and output gradients to test a plan with, on any runtime.

    All values are whole numbers, so that results can be compared exactly. Under means, they are
    multiples of the number of devices, so that means are whole, too. Replicas are equal; addends of
    a sum are arbitrary.

    Args:
        plan: A plan, or a contraction's plan.
        seed: The seed of the random numbers.

    Raises:
        DtypeError: It is a contraction of whole numbers, which has no gradients.
        ShapeError: The blocks of all devices have more than MAX_BYTES.
    """
    if isinstance(plan, ContractionPlan) and not precision(plan.dtype):
        raise DtypeError(
            f"no gradients of a contraction in {plan.dtype}", hint="as in --dtype float64"
        )
    arrays = arrays_of(plan)
    _check_size(arrays, plan)

    *sources, target = arrays
    # A scale other than 1 is a mean over some devices: values are then multiples of their number.
    has_mean = any(array.scale != 1 for array in arrays)
    multiple_of = plan.mesh.n_devices if has_mean else 1
    # The gradient of a result has the dual layout: the tags sum and copy change places. A
    # result that keeps a max has none, and its own layout is used.
    cotangent = target.dual if target.layout.is_linear else target
    rng = np.random.default_rng(seed)
    blocks: list[Devices] = []
    for array in (*sources, cotangent):
        drawn = random_blocks(
            rng, array.layout, plan.mesh, array.shape, plan.dtype, multiple_of=multiple_of
        )
        blocks.append(tuple(drawn))
    return Question(
        function=plan,
        mesh=plan.mesh,
        arguments=tuple(range(len(sources))),
        inputs=tuple(blocks[:-1]),
        shardings=tuple(sources),
        results={OUTPUT: Result(target, cotangents=blocks[-1])},
        wide=itemsize(plan.dtype) >= 8,
    )


def _check_size(arrays: Sequence[Sharding], plan: AnyPlan) -> None:
    """Raise ShapeError if the blocks of all devices are more than one process can hold."""
    total_bytes = 0
    for array in arrays:
        total_bytes += n_bytes(array.max_local_shape, plan.dtype) * plan.mesh.n_devices
    if total_bytes > MAX_BYTES:
        raise ShapeError(
            f"the blocks of all devices have {format_bytes(total_bytes)} together",
            hint=f"at most {format_bytes(MAX_BYTES)}, which one process holds: "
            "shorter dims show the same",
        )


def in_numpy(question: Question) -> Answer:
    """Answer a question about a plan by the numpy reference."""
    plan = question.plan
    # Both passes, as for the runtimes; drawing the blocks is not counted.
    start = time.perf_counter()
    outputs = reference.run(plan, *question.inputs)
    if isinstance(plan, ContractionPlan):
        gradients = reference.pullback(plan, question.inputs, question.cotangents)
    else:
        gradients = [reference.pullback(plan, question.inputs[0], question.cotangents)]
    seconds = time.perf_counter() - start
    gradients_by_input = dict(enumerate(map(tuple, gradients)))
    # One process holds all blocks: no bytes travel, so none are measured.
    return Answer({OUTPUT: tuple(outputs)}, gradients_by_input, seconds=seconds)


class Verdict(NamedTuple):
    """How far an answer is from the right one.

    Attributes:
        forward: Largest absolute error of the outputs.
        backward: Largest absolute error of the gradients; None if they were not compared.
    """

    forward: float
    backward: float | None

    @property
    def agrees(self) -> bool:
        """True if both are exact, as whole numbers have to be."""
        backward_is_exact = self.backward is None or self.backward <= EXACT
        return self.forward <= EXACT and backward_is_exact


def judge(answer: Answer, expected: Answer) -> Verdict:
    """Compare a runtime's answer with the reference's, block by block."""
    return Verdict(
        forward=_largest_error(answer.outputs, expected.outputs),
        backward=_largest_error(answer.gradients_if_any, expected.gradients_if_any),
    )


def _largest_error(got: Mapping[Any, Devices], want: Mapping[Any, Devices]) -> float:
    """Return the largest error over arrays by name; infinite if the names differ."""
    if got.keys() != want.keys():
        return float("inf")
    return max((largest_error(got[key], want[key]) for key in want), default=0.0)


class _NamedArray(NamedTuple):
    """A whole array with one dim per name, as the one device of `reference.contract` holds it."""

    names: tuple[str, ...]
    blocks: list[Block]


def audit(question: Question, answer: Answer) -> Verdict:
    """Compare what a runtime computed for a plan with numpy's einsum of the whole arrays.

    A plan that only moves an array is an einsum too, of one operand: "n/dp -> n" is "n -> n". The
    steps of the plan are not used, so that mistakes in them are found. Returns the largest error of
    the results and that of the gradients, or None for gradients of a max, which go to the elements
    that are largest and which an einsum does not give.
    """
    plan = question.plan
    # Each array has two shardings: with the dims that the user wrote, under which the blocks come,
    # and with one dim for each name of the einsum, under which they are compared. They differ where
    # an expression repeats a name, or groups several in one dim, as (h w).
    *written_sources, written_target = arrays_of(plan)
    sources = written_sources
    target = written_target
    if isinstance(plan, ContractionPlan):
        sources = [move.source for move in plan.moves]
        target = plan.result.target
    operands: list[_NamedArray] = []
    for blocks, written, source in zip(question.inputs, written_sources, sources, strict=True):
        by_name = reference.blocks_by_name(blocks, written, source)
        operands.append(_NamedArray(source.layout.names, [whole(by_name, source)]))

    [result] = reference.contract(operands, target.layout.names)
    got = reference.blocks_by_name(answer.outputs[OUTPUT], written_target, target)
    forward = _error_in_array(got, result, target)
    if not is_linear(plan):
        return Verdict(forward, None)

    # Gradients have the dual sharding, in which sum and copy change places.
    cotangents = reference.blocks_by_name(question.cotangents, written_target, target)
    cotangent = _NamedArray(target.layout.names, [whole(cotangents, target.dual)])
    backward = 0.0
    for i, source in enumerate(sources):
        got = reference.blocks_by_name(answer.gradients_if_any[i], written_sources[i], source)
        gradient = _gradient_by_definition(operands, i, cotangent)
        scale = source.scale / target.scale  # a mean is a sum times 1/n
        if scale != 1:
            [gradient] = Scale(scale).run([gradient], source)
        backward = max(backward, _error_in_array(got, gradient, source.dual))
    return Verdict(forward, backward)


def _gradient_by_definition(
    operands: Sequence[_NamedArray], i: int, cotangent: _NamedArray
) -> Block:
    """Return the gradient of operand i of an einsum, as a whole array.

    For c = a b, the gradient of a is the gradient of c (`cotangent`) contracted with b.
    """
    others = [cotangent, *operands[:i], *operands[i + 1 :]]
    [gradient] = reference.contract_gradient(others, operands[i].names, operands[i].blocks)
    return gradient


def _error_in_array(blocks: Iterable[Block], array: Block, sharding: Sharding) -> float:
    """Return the largest error of blocks where the array determines them; of addends only the sum counts."""
    want = reference.scatter(array, sharding.layout, sharding.mesh)
    return largest_error(settle(tuple(blocks), sharding), settle(want, sharding))


def random_blocks(
    rng: np.random.Generator,
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    *,
    multiple_of: int = 1,
) -> list[Block]:
    """Draw random blocks of whole numbers for a layout, one per device: [local shape] each.

    Rows that several devices hold, as replicas or in halos, are equal. Addends of a sum are not.
    The values are small, so that sums of them are exact in `dtype`; they are multiples of
    `multiple_of`, so that means over so many devices are exact, too.
    """
    plain = without_overlaps(layout, Halo, Window, Reads)
    if plain != layout:
        # Halos are rows of the neighbours: blocks are drawn without them, then widened by a plan.
        plan = make_plan((plain, layout), mesh, shape, dtype)
        plain_blocks = random_blocks(rng, plain, mesh, shape, dtype, multiple_of=multiple_of)
        return reference.run(plan, plain_blocks)

    sharding = Sharding(layout, mesh, shape)
    # Along these axes blocks are equal: the layout does not name them, or calls them copies.
    equal_axes = [a for a in mesh.axes if a not in layout.axes or a in layout.tagged("copy")]
    lowest, end = _range_of_values(dtype)
    blocks: list[Block] = []
    for device in range(mesh.n_devices):
        first_device = mesh.group(device, equal_axes)[0]
        # The first device of a group of replicas draws; the others, which come later, copy.
        if first_device < device:
            blocks.append(blocks[first_device].copy())
        else:
            values = rng.integers(lowest, end, sharding.local_shape(device))
            blocks.append((values * multiple_of).astype(numpy_dtype(dtype)))
    return blocks


def _range_of_values(dtype: str) -> tuple[int, int]:
    """Return the lowest of the values to draw, and the end: small, so that sums stay exact."""
    if dtype == "bool":
        return 0, 2
    if dtype.startswith("uint"):
        return 0, 5
    return -4, 5


class Runtime(NamedTuple):
    """A way to run plans.

    Attributes:
        name: "numpy", or the framework and the mode: "jax-vma".
        backend: The framework; None for numpy, which is the reference.
        mode: One of the backend's.
    """

    name: str
    backend: Backend | None = None
    mode: str = ""

    def takes(self, mesh: Mesh) -> bool:
        """Tell whether it can run on a mesh: `pmap` knows one axis, others have to be of size 1."""
        return self.mode != "pmap" or len(mesh.axes) == 1 or len(mesh.long_axes) == 1

    def answers(self, questions: Sequence[Question], timeout_s: float) -> list[Answer]:
        """Run each question's plan forward and backward, and return the results in the same order.

        Args:
            questions: The plans, with their input blocks.
            timeout_s: The longest time without progress.

        Raises:
            FunctionError: A run failed.
        """
        if self.backend is None:  # numpy, which runs in this process
            return [in_numpy(question) for question in questions]
        # One process, with as many devices as the largest question needs, answers all.
        n_devices = max((question.mesh.n_devices for question in questions), default=1)
        asked = [replace(question, mode=self.mode) for question in questions]
        try:
            answers: list[Answer] = self.backend.ask(
                n_devices, "worker.answers", asked, timeout_s=timeout_s
            )
        except XshardError as error:
            raise FunctionError(
                f"{self.name}: {error.reason}", text=error.text, span=error.span, hint=error.hint
            ) from None
        return answers

    def judge(self, question: Question, answer: Answer, expected: Answer) -> Verdict:
        """Compare the answer with the reference; numpy's, which is the reference, with the definition."""
        return audit(question, answer) if self.backend is None else judge(answer, expected)


def _all_runtimes() -> tuple[Runtime, ...]:
    """List numpy, and every mode of every framework."""
    runtimes = [Runtime("numpy")]
    for framework, backend in BACKENDS.items():
        for mode in backend.modes:
            name = f"{framework}-{mode}" if mode else framework
            runtimes.append(Runtime(name, backend, mode))
    return tuple(runtimes)


# All of them, also those that are not installed: `choose` says how to get one.
RUNTIMES = _all_runtimes()


def choose(names: Sequence[str], meshes: Sequence[Mesh]) -> tuple[Runtime, ...]:
    """Choose the runtimes (numpy, torch, JAX, ...) that are to run, by name.

    Without names, these are all that can run on at least one of the meshes.

    Raises:
        NoRuntimeError: A name is unknown, its package is not installed, or it can take no mesh.
    """
    by_name = {runtime.name: runtime for runtime in RUNTIMES}
    able = [runtime for runtime in RUNTIMES if any(map(runtime.takes, meshes))]
    for name in names:
        if name not in by_name:
            raise NoRuntimeError(f"no runtime {name!r}", hint=f"runtimes are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in dict.fromkeys(names)] if names else able
    for runtime in chosen:
        if runtime not in able:
            raise NoRuntimeError(
                f"{runtime.name} cannot run on {meshes[0]!r}",
                hint="it knows one axis: others have size 1",
            )
        if runtime.backend is not None:
            runtime.backend.check_installed(f", or leave {runtime.name} out with --runtime")
    return tuple(chosen)
