"""The JAX side of `xshard.testing` and `xshard calibrate`, in a process of its own, with host devices.

With types (`vma`) replicated axes enter and leave as invariant ones. Other processes' blocks are
None.
"""

from __future__ import annotations

import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from jax_bridge.calls import redistribute
from jax_bridge.einsum import EinsumOptions, einsum_blocks
from jax_bridge.mesh.axis_types import as_varying, is_typed, varying_axes
from jax_bridge.testing.stacked import DeviceProgram
from xshard import ContractionPlan, Layout, Plan, Sharding, XshardError, replicas
from xshard.contractions.ring import NEVER
from xshard.dtypes import numpy_dtype
from xshard.runtimes.processes import FunctionError
from xshard.testing.functions import (
    called,
    derivatives,
    draw,
    leaves,
    mapped,
    named_outputs,
    numbered,
)
from xshard.testing.moves import Recorder, Seen
from xshard.testing.plans import arrays_of, is_linear
from xshard.testing.question import (
    OUTPUT,
    Answer,
    AnyPlan,
    Devices,
    Question,
    Slopes,
    StructureError,
    Tree,
)

Arrays = list[jax.Array]


class _MisshapenError(Exception):
    """The shapes of outputs do not fit their cotangents; then no gradients are computed."""


# ---- what the parent process calls, by name


def join(address: str, processes: int, process: int, _timeout_s: float) -> None:
    """Become one of several processes, which share the devices of every question."""
    jax.distributed.initialize(address, processes, process)


def call_packed(packed: bytes, _timeout_s: float) -> Any:
    """Call a packed function in this process. Raises FunctionError."""
    try:
        function, arguments = pickle.loads(packed)
        return function(*arguments)
    except Exception as error:  # any error of a user's function
        where = traceback.format_exc().strip()
        raise FunctionError(f"{type(error).__name__} in JAX", hint=where) from None


def answers(questions: Sequence[Question], _timeout_s: float) -> list[Answer]:
    """Answer every question, on its mesh's devices. Raises FunctionError, StructureError."""
    with jax.enable_x64(any(question.wide for question in questions)):
        return [_answer(question) for question in questions]


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """Record the inputs of a run's redistributions, and the cotangents of their results."""
    with replicas.watch_checks(Recorder()) as recorder:
        answers([question], timeout_s)
    return recorder.seen


def _answer(question: Question) -> Answer:
    """Run one test case, of a plan or of a user's function, and return its results.

    Raises:
        FunctionError: The user's function failed, with its traceback.
        StructureError: It returns other arrays than expected.
    """
    if not isinstance(question.function, bytes):
        return _answer_plan(question)
    try:
        if question.results is None:
            return _answer_reference(question)
        return _answer_blocks(question)
    except StructureError:
        raise
    except Exception as error:  # any error of a user's function
        where = ""
        if question.mesh.axes:
            where = f" on {question.mesh}, where all devices run one program"
        is_ours = isinstance(error, XshardError)
        text = str(error) if is_ours else traceback.format_exc().strip()
        reason = f"the JAX function failed{where}: {type(error).__name__}"
        raise FunctionError(reason, hint=text) from None


# ---- plans


def apply(plan: AnyPlan, *blocks: jax.Array) -> jax.Array:
    """Run a plan on one device's blocks."""
    if isinstance(plan, ContractionPlan):
        return einsum_blocks(plan, blocks, None, plan.shapes, EinsumOptions(plan.profile, NEVER))
    return redistribute(blocks[0], plan)


def _answer_plan(question: Question) -> Answer:
    """Run a plan forward and backward on its mesh.

    Returns:
        The blocks of the result and of the gradients, and the bytes and seconds that both took.
    """
    plan = question.plan
    sources = question.shardings
    target = arrays_of(plan)[-1]

    def run(*blocks: jax.Array) -> tuple[jax.Array]:
        return (apply(plan, *blocks),)

    def pull_back(cotangent: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        is_inexact = jnp.issubdtype(blocks[0].dtype, jnp.inexact)
        if isinstance(plan, Plan) and not is_inexact:
            # JAX does not differentiate whole numbers, but tests use them since sums are exact: the
            # plan of the gradient is run directly.
            return (redistribute(cotangent, plan.backward),)
        _, pull = jax.vjp(run, *blocks)
        return pull((cotangent,))

    # Blocks are padded with NaN: if a plan reads padding, results become NaN.
    operands = list(zip(question.inputs, sources, strict=True))
    forward = DeviceProgram(run, plan.mesh, operands, [target], question.mode, np.nan)
    output_blocks = _measured(forward)
    arguments = [(question.cotangents, target), *operands]
    backward = DeviceProgram(pull_back, plan.mesh, arguments, sources, question.mode, np.nan)
    gradient_blocks = _measured(backward)

    backward_bytes = None
    if is_linear(plan) and len(sources) == 1:
        # Gradients of a max or min, and of several operands, begin with the forward pass.
        backward_bytes = backward.received_bytes
    (output,) = output_blocks.of_outputs
    return Answer(
        {OUTPUT: output},
        dict(enumerate(gradient_blocks.of_outputs)),
        forward_bytes=forward.received_bytes,
        backward_bytes=backward_bytes,
        seconds=output_blocks.seconds + gradient_blocks.seconds,
    )


class _Measured(NamedTuple):
    """The blocks of every output of a program, and the seconds of a run."""

    of_outputs: list[Devices]
    seconds: float


def _measured(program: DeviceProgram) -> _Measured:
    """Run a program twice, and measure the second run."""
    program()
    start = time.perf_counter()
    results = program()
    seconds = time.perf_counter() - start
    return _Measured(program.blocks(results), seconds)


# ---- users' functions


class _Parts(NamedTuple):
    """What a user's function gives: arrays, or the blocks of each."""

    outputs: list[Any]
    gradients: list[Any]  # of the inputs that have some
    updated: list[Any]  # the parameters after a step of the optimiser


def _answer_reference(question: Question) -> Answer:
    """Run the reference of a test: the function on one device, with whole arrays.

    Its cotangents are drawn at random here, and returned for the runs on many devices. If the
    question asks for it, gradients are also compared with finite differences.
    """
    program = _UserProgram(question)
    drawn: list[Any] = []

    def draw_cotangents(outputs: Arrays) -> list[Any]:
        drawn.clear()  # JAX may trace this twice
        for i, y in enumerate(outputs):
            is_inexact = jnp.issubdtype(y.dtype, jnp.inexact)
            drawn.append(draw(i, y.shape, y.dtype) if is_inexact else None)
        return drawn

    def run(*inputs: jax.Array) -> _Parts:
        return program.results(inputs, draw_cotangents)

    inputs = [jnp.asarray(blocks[0]) for blocks in question.inputs]
    parts = jax.jit(_on_one_device(question, run))(*inputs)
    blocks = _Parts(
        _one_block(parts.outputs), _one_block(parts.gradients), _one_block(parts.updated)
    )
    answer = program.answer(blocks)
    cotangents = {}
    for name, cotangent in zip(program.names, drawn, strict=True):
        if cotangent is not None:
            cotangents[name] = (cotangent,)
    answer = replace(answer, cotangents=cotangents)
    if question.differences:
        answer = replace(answer, derivatives=_derivatives(question, answer))
    return answer


def _one_block(arrays: Arrays) -> list[Devices]:
    """Return each array as the block of the one device."""
    return [(np.asarray(x),) for x in arrays]


def _on_one_device(question: Question, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a `shard_map` over one device, so that it can name the mesh's axes.

    Every axis has length 1. Without axes the function is returned as it is.
    """
    mesh = question.mesh
    if not mesh.axes:
        return function
    devices = np.array(jax.devices()[:1]).reshape(mesh.sizes)
    return jax.shard_map(
        function,
        mesh=JaxMesh(devices, mesh.axes),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )


def _derivatives(question: Question, answer: Answer) -> Slopes:
    """Compare the gradients of a reference with finite differences of its function.

    The function that is differenced is the sum of cotangent * output over all outputs, in float64.
    """
    program = _UserProgram(question)

    def loss(*inputs: jax.Array) -> jax.Array:
        outputs = dict(zip(answer.outputs, program.outputs(*inputs), strict=True))
        total = jnp.zeros(())
        for name, (cotangent,) in answer.cotangents.items():
            total = total + jnp.vdot(cotangent, outputs[name]).real
        return total

    gradients = {} if answer.gradients is None else answer.gradients
    values = [block for (block,) in question.inputs]
    with jax.enable_x64(True):
        run = jax.jit(_on_one_device(question, loss))

        def loss_of(blocks: Sequence[Any]) -> float:
            return float(run(*map(jnp.asarray, blocks)))

        return derivatives(loss_of, values, gradients)


def _answer_blocks(question: Question) -> Answer:
    """Run a function on the devices of a mesh, each with its own blocks."""
    try:
        return _run_on_devices(question, has_gradients=True)
    except _MisshapenError:
        # The outputs alone, which say what is wrong with their shapes.
        return _run_on_devices(question, has_gradients=False)


def _run_on_devices(question: Question, *, has_gradients: bool) -> Answer:
    """Run a user's function on all devices of a mesh, each with its own blocks.

    Args:
        question: The test: the function, its inputs, and the cotangents of its outputs.
        has_gradients: Whether to compute gradients and an optimiser step, too.

    Raises:
        _MisshapenError: Outputs do not fit their cotangents.
    """
    assert question.results is not None
    program = _UserProgram(question)
    results = list(question.results.values())
    n_inputs = len(question.inputs)
    inputs = list(zip(question.inputs, question.shardings, strict=True))
    for result in results:
        if result.cotangents is not None:
            inputs.append((result.cotangents, result.sharding))

    def one_device(*blocks: jax.Array) -> Arrays:
        def given_cotangents(_: Arrays) -> list[Any]:
            given = iter(blocks[n_inputs:])
            return [None if result.cotangents is None else next(given) for result in results]

        cotangents_of = given_cotangents if has_gradients else None
        parts = program.results(blocks[:n_inputs], cotangents_of)
        return [*parts.outputs, *parts.gradients, *parts.updated]

    output_shardings = [result.sharding for result in results]
    gradient_shardings: list[Sharding] = []
    updated_shardings: list[Sharding] = []
    if has_gradients:
        gradient_shardings = [question.shardings[i] for i in question.differentiable]
        if question.update is not None:
            updated_shardings = [question.shardings[i] for i in question.update.arrays]
    shardings = [*output_shardings, *gradient_shardings, *updated_shardings]
    compiled = DeviceProgram(one_device, question.mesh, inputs, shardings, question.mode)
    blocks = compiled.blocks(compiled())
    n_outputs = len(output_shardings)
    n_with_gradients = n_outputs + len(gradient_shardings)
    parts = _Parts(
        blocks[:n_outputs], blocks[n_outputs:n_with_gradients], blocks[n_with_gradients:]
    )
    return program.answer(parts, has_gradients=has_gradients)


class _UserProgram:
    """The user's function, as functions of arrays alone: no names, since JAX would sort them."""

    def __init__(self, question: Question) -> None:
        assert isinstance(question.function, bytes)
        self.question = question
        self.function: Callable[..., Any] = pickle.loads(question.function)[0]
        # Known after the first call.
        self.names: tuple[str, ...] = ()
        self.tree: Tree = None

    def outputs(self, *inputs: jax.Array) -> Arrays:
        """Return the outputs of one call; each varies as its layout says."""
        results = self.question.results
        arguments = mapped(inputs.__getitem__, self.question.arguments)
        returned = called(self.function, arguments, self.question.mesh)
        named = named_outputs(returned, results, "JAX")
        self.names = tuple(named)
        self.tree = numbered(returned)
        arrays = {name: jnp.asarray(y) for name, y in named.items()}
        if results is None:
            return list(arrays.values())
        return [_typed(y, results[name].sharding, name) for name, y in arrays.items()]

    def results(
        self, inputs: Sequence[jax.Array], cotangents_of: Callable[[Arrays], Sequence[Any]] | None
    ) -> _Parts:
        """Run the user's function: outputs, gradients, and parameters after an optimiser step.

        Args:
            inputs: The inputs.
            cotangents_of: Outputs -> the cotangent of each, None for one without. None: outputs
                alone.

        Raises:
            _MisshapenError: An output does not fit its cotangent.
        """
        if cotangents_of is None:
            return _Parts(self.outputs(*inputs), [], [])
        cotangents: list[Any] = []

        def forward(varied: Arrays) -> tuple[Arrays, Arrays]:
            arguments = list(inputs)
            for i, x in zip(self.question.differentiable, varied, strict=True):
                arguments[i] = x
            outputs = self.outputs(*arguments)
            cotangents[:] = cotangents_of(outputs)
            return _with_cotangents(outputs, cotangents), outputs

        varied = [inputs[i] for i in self.question.differentiable]
        with_cotangents, pull, outputs = jax.vjp(forward, varied, has_aux=True)
        # For complex numbers torch takes the conjugate of JAX's: both for cotangents and for gradients.
        given = [c for c in cotangents if c is not None]
        pairs = zip(with_cotangents, given, strict=True)
        (gradients,) = pull([jnp.conj(jnp.asarray(c, y.dtype)) for y, c in pairs])
        gradients = [jnp.conj(gradient) for gradient in gradients]
        return _Parts(outputs, gradients, self._updated(inputs, gradients))

    def _updated(self, inputs: Sequence[jax.Array], gradients: Arrays) -> Arrays:
        """Return the parameters after a step of the user's optimiser; [] if there is none.

        Args:
            inputs: All arguments of the function, parameters among them.
            gradients: The gradients of those that have one.

        Raises:
            StructureError: It returns other parameters than it got.
        """
        question = self.question
        if question.update is None:
            return []
        gradient_of = dict(zip(question.differentiable, gradients, strict=True))
        numbers = tuple(question.arguments[position] for position in question.update.positions)
        values = mapped(inputs.__getitem__, numbers)
        gradients_of_values = mapped(gradient_of.__getitem__, numbers)
        update = pickle.loads(question.update.function)[0]
        returned = leaves(update(values, gradients_of_values), "parameters")
        expected = list(leaves(numbers, "parameters"))
        if list(returned) != expected:
            reason = f"the JAX update returns {', '.join(returned)}"
            hint = f"(values, gradients) -> values, of {', '.join(expected)}"
            raise StructureError(reason, hint=hint)
        updated = []
        for i, (name, y) in zip(question.update.arrays, returned.items(), strict=True):
            updated.append(_typed(y, question.shardings[i], name))
        return updated

    def answer(self, blocks: _Parts, has_gradients: bool = True) -> Answer:
        """Pack blocks into an answer: outputs by name, gradients and new parameters by number.

        Args:
            blocks: The blocks of all results.
            has_gradients: False if only outputs were computed.
        """
        question = self.question
        gradients = None
        if has_gradients:
            gradients = dict(zip(question.differentiable, blocks.gradients, strict=True))
        updated = {}
        if question.update is not None and blocks.updated:
            updated = dict(zip(question.update.arrays, blocks.updated, strict=True))
        outputs = dict(zip(self.names, blocks.outputs, strict=True))
        return Answer(outputs, gradients, updated, tree=self.tree)


def _with_cotangents(outputs: Arrays, cotangents: Sequence[Any]) -> Arrays:
    """Return the outputs that have a cotangent. Raises _MisshapenError if shapes differ."""
    chosen = []
    for y, cotangent in zip(outputs, cotangents, strict=True):
        if cotangent is None:
            continue
        if y.shape != cotangent.shape:
            raise _MisshapenError
        chosen.append(y)
    return chosen


def _typed(y: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """Check that an output differs between devices along its layout's axes only (JAX's type).

    Raises:
        StructureError: It may differ along others, where the layout says one value.
    """
    layout_axes = sharding.layout.axes
    other_axes = varying_axes(y) - set(layout_axes) if sharding.mesh.axes else ()
    for axis in other_axes:
        if not is_typed(axis):
            continue
        if sharding.mesh.size(axis) > 1:
            output = f"{name} of the JAX function"
            reason = f"{output} varies along {axis!r}, where its layout holds one value"
            hint = f"redistribute it to its layout, or say in layouts= what it is: sum({axis}), copy({axis})"
            hint += "; check_vma=False takes its word"
            raise StructureError(reason, text=str(sharding.layout), hint=hint)
        y = lax.psum(y, axis)  # over one device: only its type changes
    return as_varying(y, layout_axes)


# ---- measurements

TARGET_S = 0.02  # seconds of a program, about; the number of calls follows from it
MOST_CALLS = 100


def seconds_of_plans(plans: Sequence[AnyPlan], rounds: int, _timeout_s: float) -> list[float]:
    """Measure the median time of every plan over some rounds."""
    timers = [Timer(plan) for plan in plans]
    # Each round measures every plan once: if the machine is slow for a while, all are affected.
    seconds = np.empty((rounds, len(plans)))
    for i in range(rounds):
        for j, timer in enumerate(timers):
            seconds[i, j] = timer.seconds()
    return [statistics.median(times.tolist()) for times in seconds.T]


def seconds_of_products(
    n: int, rows: int, dtypes: Sequence[str], rounds: int, _timeout_s: float
) -> list[float]:
    """Measure the median seconds of a product of square matrices, for each dtype.

    Args:
        n: The number of devices, which all compute one at once.
        rows: The rows and columns of a matrix.
        dtypes: The dtypes.
        rounds: How often to measure.
    """
    mesh = jax.make_mesh((n,), ("all",))
    by_device = jax.P("all")
    multiply = jax.jit(
        jax.shard_map(jnp.matmul, mesh=mesh, in_specs=by_device, out_specs=by_device)
    )
    medians = []
    with jax.enable_x64(True):
        for dtype in dtypes:
            ones = jnp.ones((n, rows, rows), dtype)
            x = jax.device_put(ones, jax.NamedSharding(mesh, by_device))
            jax.block_until_ready(multiply(x, x))  # the first compiles
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                jax.block_until_ready(multiply(x, x))
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times))
    return medians


class Timer:
    """A plan in a compiled loop, warmed up, and how often the loop goes round."""

    def __init__(self, plan: AnyPlan) -> None:
        *sources, target = arrays_of(plan)
        n_devices = plan.mesh.n_devices
        dtype = numpy_dtype(plan.dtype)
        # The number of calls is an argument, on every device, so that one program serves for all.
        n_calls = [np.ones((), np.int32)] * n_devices
        inputs = [(n_calls, Sharding(Layout(()), plan.mesh, ()))]
        for source in sources:
            block = np.ones(source.max_local_shape, dtype)
            inputs.append(([block] * n_devices, source))
        loop = partial(_loop, plan)
        self.program = DeviceProgram(loop, plan.mesh, inputs, [target], "novma")
        self.calls = 3
        self.seconds()  # the first run is slower
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / self.seconds())))

    def seconds(self) -> float:
        """Measure the seconds per call; a program ends when its busiest device does."""
        self.program.arrays[0] = jnp.full_like(self.program.arrays[0], self.calls)
        start = time.perf_counter()
        self.program()
        return (time.perf_counter() - start) / self.calls


def _loop(plan: AnyPlan, n_calls: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """Run a plan `n_calls` times in a compiled loop, to measure its time.

    Each call waits for the one before, since its operands get an element of that one's result.
    """

    def call_again(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        blocks, _ = state
        y = apply(plan, *blocks)
        # One element of the result is written into every operand, so that the next call has to wait
        # for this one.
        first = y[(0,) * y.ndim]
        next_blocks = tuple(x.at[(0,) * x.ndim].set(first) for x in blocks)
        # The whole result is carried along: otherwise XLA might compute that one element only.
        return next_blocks, y

    result = jnp.zeros(arrays_of(plan)[-1].max_local_shape, operands[0].dtype)
    _, result = lax.fori_loop(0, n_calls, call_again, (operands, result))
    return [result]
