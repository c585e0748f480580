"""The JAX side of `xshard.testing` and `xshard calibrate`, in a process of its own, with host devices.

With types (`vma`) replicated axes enter and leave as invariant ones. Other processes' blocks are
None.
"""

from __future__ import annotations

import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
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
from jax_bridge.contractions import EinsumOptions, einsum_blocks
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.testing.stacked import DeviceProgram
from xshard import ContractionPlan, Layout, Plan, Sharding, XshardError, replicas
from xshard.contractions.ring import NEVER
from xshard.dtypes import numpy_dtype
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.testing.functions import (
    called,
    draw,
    leaves,
    mapped,
    measure_slopes,
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
    Result,
    Slopes,
    StructureError,
    Tree,
)

Arrays = list[jax.Array]
Cotangents = dict[int, Any]  # by number of the output; outputs of whole numbers have none


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
        trace = traceback.format_exc().strip()
        raise FunctionError(f"{type(error).__name__} in JAX", hint=trace) from None


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
    except StructureError:  # our own verdict on what the function returned
        raise
    except Exception as error:  # any error of a user's function
        on_mesh = ""
        if question.mesh.axes:
            on_mesh = f" on {question.mesh}, where all devices run one program"
        is_ours = isinstance(error, XshardError)
        details = str(error) if is_ours else traceback.format_exc().strip()
        reason = f"the JAX function failed{on_mesh}: {type(error).__name__}"
        raise FunctionError(reason, hint=details) from None


# ---- plans


def apply(plan: AnyPlan, *blocks: jax.Array) -> jax.Array:
    """Run a plan on one device's blocks."""
    if isinstance(plan, ContractionPlan):
        options = EinsumOptions(plan.profile, NEVER, blocks[0].dtype)
        return einsum_blocks(plan, blocks, mesh=None, shapes=plan.shapes, options=options)
    return redistribute(blocks[0], plan)


def _answer_plan(question: Question) -> Answer:
    """Run a plan forward and backward on its mesh.

    Returns:
        The blocks of the result and of the gradients, and the bytes and seconds that both took.
    """
    plan = question.plan
    sources = question.shardings
    target = arrays_of(plan)[-1]
    operands = list(zip(question.inputs, sources, strict=True))
    forward = _measure(question, partial(apply, plan), operands, target)
    with_cotangent = [(question.cotangents, target), *operands]
    backward = _measure(question, partial(_pull_back, plan), with_cotangent, sources)

    backward_bytes = None
    if is_linear(plan) and len(sources) == 1:
        # Gradients of a max or min, and of several operands, begin with the forward pass.
        backward_bytes = backward.program.received_bytes
    return Answer(
        {OUTPUT: forward.blocks},
        dict(enumerate(backward.blocks)),
        forward_bytes=forward.program.received_bytes,
        backward_bytes=backward_bytes,
        seconds=forward.seconds + backward.seconds,
    )


def _pull_back(plan: AnyPlan, cotangent: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients of one device's blocks, given the cotangent of a plan's result."""
    if isinstance(plan, Plan) and not jnp.issubdtype(blocks[0].dtype, jnp.inexact):
        # JAX does not differentiate whole numbers, but tests use them since sums are exact: the
        # plan of the gradient is run directly.
        return (redistribute(cotangent, plan.backward),)
    _, pull = jax.vjp(partial(apply, plan), *blocks)
    return pull(cotangent)


class _Measured(NamedTuple):
    """A program, the blocks of its outputs as `DeviceProgram.blocks` has them, and seconds of a run."""

    program: DeviceProgram
    blocks: Any
    seconds: float


def _measure(
    question: Question,
    function: Callable[..., Any],
    inputs: Sequence[tuple[Devices, Sharding]],
    outputs: Any,
) -> _Measured:
    """Compile a function of one device's blocks, run it twice, and time the second run."""
    # Blocks are padded with NaN: if a plan reads padding, results become NaN.
    program = DeviceProgram(
        function=function,
        mesh=question.plan.mesh,
        inputs=inputs,
        outputs=outputs,
        mode=question.mode,
        fill=np.nan,
    )
    results = program()
    return _Measured(program, program.blocks(results), _seconds(program))


# ---- users' functions


class _Results(NamedTuple):
    """What a user's function gives: arrays while JAX traces it, the blocks of each array after it.

    Shardings of these arrays come in the same form, since it is a pytree.
    """

    outputs: list[Any]
    gradients: dict[int, Any] | None  # by number of the input; None: only outputs were computed
    updated: dict[int, Any]  # parameters after a step of the optimiser, by number of the input


def _answer_reference(question: Question) -> Answer:
    """Run the reference of a test: the function on one device, with whole arrays.

    Its cotangents are drawn at random here, and returned for the runs on many devices. If the
    question asks for it, gradients are also compared with finite differences.
    """
    program = _UserProgram(question)

    def run(*inputs: jax.Array) -> tuple[_Results, Cotangents]:
        return program.differentiate(inputs, _draw_cotangents)

    inputs = [jnp.asarray(blocks[0]) for blocks in question.inputs]
    compiled = jax.jit(_on_one_device(question, run))
    arrays, cotangents = jax.device_get(compiled(*inputs))
    answer = program.answer(jax.tree.map(_one_block, arrays))
    slopes: Slopes = {}
    if question.differences:
        slopes = _slopes(program, cotangents, answer.gradients_if_any)
    blocks = {program.names[i]: _one_block(x) for i, x in cotangents.items()}
    return replace(answer, cotangents=blocks, derivatives=slopes)


def _draw_cotangents(outputs: Arrays) -> Cotangents:
    """Draw a random cotangent for each output but those of whole numbers."""
    cotangents = {}
    for i, y in enumerate(outputs):
        if jnp.issubdtype(y.dtype, jnp.inexact):
            cotangents[i] = draw(i, y.shape, y.dtype)
    return cotangents


def _one_block(x: Block) -> Devices:
    """Return an array of one device as the blocks of all devices."""
    return (x,)


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


def _slopes(
    program: _UserProgram, cotangents: Cotangents, gradients: Mapping[int, Devices]
) -> Slopes:
    """Compare the gradients of a reference with finite differences of its function.

    The function that is differenced is the sum of cotangent * output over all outputs, in float64.

    Args:
        program: The function.
        cotangents: The cotangents of its outputs.
        gradients: By number of the input.
    """
    question = program.question

    def weighted_sum(*inputs: jax.Array) -> jax.Array:
        outputs = program.outputs(*inputs)
        weighted = jnp.zeros(())
        for i, cotangent in cotangents.items():
            weighted = weighted + jnp.vdot(cotangent, outputs[i]).real
        return weighted

    values = [block for (block,) in question.inputs]
    with jax.enable_x64(True):
        run_compiled = jax.jit(_on_one_device(question, weighted_sum))

        def loss(blocks: Sequence[Any]) -> float:
            return float(run_compiled(*map(jnp.asarray, blocks)))

        return measure_slopes(loss, values, gradients)


def _answer_blocks(question: Question) -> Answer:
    """Run a function on the devices of a mesh, each with its own blocks."""
    assert question.results is not None
    program = _UserProgram(question)
    results = list(question.results.values())
    try:
        return _differentiate_on_devices(program, results)
    except _MisshapenError:
        # The outputs alone, which say what is wrong with their shapes.
        return _compute_on_devices(program, results)


def _differentiate_on_devices(program: _UserProgram, results: Sequence[Result]) -> Answer:
    """Compute outputs, gradients and an optimiser step on all devices.

    The program of one device takes its blocks of the inputs, then those of the cotangents.

    Raises:
        _MisshapenError: Outputs do not fit their cotangents.
    """
    question = program.question
    n_inputs = len(question.inputs)
    inputs = list(zip(question.inputs, question.shardings, strict=True))
    differentiated = []  # numbers of the outputs that have a cotangent
    for i, result in enumerate(results):
        if result.cotangents is not None:
            differentiated.append(i)
            inputs.append((result.cotangents, result.sharding))

    def one_device(*blocks: jax.Array) -> _Results:
        cotangents = dict(zip(differentiated, blocks[n_inputs:], strict=True))
        device_results, _ = program.differentiate(blocks[:n_inputs], lambda _outputs: cotangents)
        return device_results

    updated = () if question.update is None else question.update.arrays
    shardings = _Results(
        [result.sharding for result in results],
        {i: question.shardings[i] for i in question.differentiable},
        {i: question.shardings[i] for i in updated},
    )
    compiled = DeviceProgram(
        function=one_device,
        mesh=question.mesh,
        inputs=inputs,
        outputs=shardings,
        mode=question.mode,
    )
    return program.answer(compiled.blocks(compiled()))


def _compute_on_devices(program: _UserProgram, results: Sequence[Result]) -> Answer:
    """Compute the outputs alone on all devices."""
    question = program.question
    inputs = list(zip(question.inputs, question.shardings, strict=True))
    shardings = [result.sharding for result in results]
    compiled = DeviceProgram(
        function=program.outputs,
        mesh=question.mesh,
        inputs=inputs,
        outputs=shardings,
        mode=question.mode,
    )
    outputs = compiled.blocks(compiled())
    return program.answer(_Results(outputs, gradients=None, updated={}))


class _UserProgram:
    """The user's function, as functions of arrays alone: no names, since JAX would sort them."""

    def __init__(self, question: Question) -> None:
        assert isinstance(question.function, bytes)
        self.question = question
        self.function: Callable[..., Any] = _unpickle(question.function)
        # How the function returns its outputs, set by `outputs`: their names, and a tree with the
        # number of an output in place of each.
        self.names: tuple[str, ...] = ()
        self.tree: Tree = None

    def outputs(self, *inputs: jax.Array) -> Arrays:
        """Call the user's function with arrays, and return the arrays that it returns.

        With layouts in the question their JAX types vary along the axes of these. The call also
        sets `self.names` and `self.tree`, which say how the function returned them.
        """
        results = self.question.results
        arguments = mapped(inputs.__getitem__, self.question.arguments)
        returned = called(self.function, arguments, self.question.mesh)
        named = named_outputs(returned, results, "JAX")
        self.names = tuple(named)
        self.tree = numbered(returned)
        outputs = []
        for name, y in named.items():
            array = jnp.asarray(y)
            if results is not None:
                array = _with_type_of(results[name].sharding, array, name)
            outputs.append(array)
        return outputs

    def differentiate(
        self, inputs: Sequence[jax.Array], cotangents_of: Callable[[Arrays], Cotangents]
    ) -> tuple[_Results, Cotangents]:
        """Run the user's function, and pull the cotangents of its outputs back to its inputs.

        Cotangents are a dict by the number of the output, gradients by that of the input, both from
        0. Outputs and inputs of whole numbers have no entry.

        Args:
            inputs: All arguments of the function.
            cotangents_of: Returns the cotangents, given the outputs.

        Returns:
            The outputs, gradients and updated parameters; and what `cotangents_of` returned.

        Raises:
            _MisshapenError: An output does not fit its cotangent; `_jax_cotangent` raises it.
        """

        def of_differentiable(values: dict[int, jax.Array]) -> Arrays:
            # Inputs that have no gradient are constants.
            return self.outputs(*[values.get(i, x) for i, x in enumerate(inputs)])

        differentiable = {i: inputs[i] for i in self.question.differentiable}
        outputs, pull = jax.vjp(of_differentiable, differentiable)
        cotangents = cotangents_of(outputs)
        (gradients,) = pull([_jax_cotangent(y, cotangents.get(i)) for i, y in enumerate(outputs)])
        # For complex numbers torch takes the conjugates of JAX's gradients, and of its cotangents.
        gradients = jax.tree.map(jnp.conj, gradients)
        return _Results(outputs, gradients, self._update_parameters(inputs, gradients)), cotangents

    def _update_parameters(
        self, inputs: Sequence[jax.Array], gradients: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """Return the parameters after a step of the user's optimiser; {} if there is none.

        Args:
            inputs: All arguments of the function, parameters among them.
            gradients: The gradients of those inputs that have one, by number.

        Raises:
            StructureError: The optimiser returns other parameters than it got.
        """
        question = self.question
        if question.update is None:
            return {}
        # A tree for each updated argument, with the number of an input in place of each array:
        # ({"w": 0, "b": 1},).
        parameters = tuple(question.arguments[position] for position in question.update.positions)
        values = mapped(inputs.__getitem__, parameters)
        update = _unpickle(question.update.function)
        new_values = update(values, mapped(gradients.__getitem__, parameters))

        returned = leaves(new_values, "parameters")
        numbers = leaves(parameters, "parameters")
        if list(returned) != list(numbers):
            reason = f"the JAX update returns {', '.join(returned)}"
            hint = f"(values, gradients) -> values, of {', '.join(numbers)}"
            raise StructureError(reason, hint=hint)
        return {
            i: _with_type_of(question.shardings[i], returned[name], name)
            for name, i in numbers.items()
        }

    def answer(self, blocks: _Results) -> Answer:
        """Return the blocks of all results as an answer, in which outputs have names."""
        outputs = dict(zip(self.names, blocks.outputs, strict=True))
        return Answer(outputs, blocks.gradients, blocks.updated, tree=self.tree)


def _unpickle(function: bytes) -> Callable[..., Any]:
    """Unpickle a function of the user, which was packed without arguments."""
    return pickle.loads(function)[0]


def _jax_cotangent(y: jax.Array, cotangent: Any) -> Any:
    """Return the cotangent that JAX's pullback takes for an output; None counts as zero.

    Raises:
        _MisshapenError: It has another shape than the output.
    """
    if cotangent is not None:
        if y.shape != cotangent.shape:
            raise _MisshapenError
        return jnp.conj(jnp.asarray(cotangent, y.dtype))
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.zeros_like(y)
    return np.zeros(y.shape, jax.dtypes.float0)  # JAX's type for outputs of whole numbers


def _with_type_of(sharding: Sharding, y: jax.Array, name: str) -> jax.Array:
    """Return an output with the type that its sharding says, after a check that it may have it.

    JAX's type of a value says along which mesh axes it may differ between devices (`check_vma`): an
    output may differ along its layout's axes only.

    Args:
        sharding: The sharding of the output.
        y: This device's block of it.
        name: Its name, for the message.

    Returns:
        The block, with a type that varies along all of the layout's axes.

    Raises:
        StructureError: It may differ along others, where the layout says one value.
    """
    layout_axes = sharding.layout.axes
    for axis in varying_axes(y).difference(layout_axes):
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
    return np.median(seconds, axis=0).tolist()


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
            _seconds(multiply, x, x)  # the first call compiles
            medians.append(statistics.median(_seconds(multiply, x, x) for _ in range(rounds)))
    return medians


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Measure the seconds until the results of a call are there."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


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
        self.program = DeviceProgram(
            function=loop, mesh=plan.mesh, inputs=inputs, outputs=target, mode="novma"
        )
        self.calls = 3
        self.seconds()  # the first run is slower
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / self.seconds())))

    def seconds(self) -> float:
        """Measure the seconds per call; a program ends when its busiest device does."""
        self.program.arrays[0] = jnp.full_like(self.program.arrays[0], self.calls)
        return _seconds(self.program) / self.calls


def _loop(plan: AnyPlan, n_calls: jax.Array, *operands: jax.Array) -> jax.Array:
    """Run a plan `n_calls` times in a compiled loop, to measure its time.

    Each call waits for the one before, since its operands get an element of that one's result. The
    number of calls is an argument, so that the program is compiled once.
    """

    def call_again(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        """Run the plan once more: the operands and the last result -> the next ones."""
        blocks, _ = state
        y = apply(plan, *blocks)
        # One element of the result is written into every operand, so that the next call has to wait
        # for this one.
        first_element = y[(0,) * y.ndim]
        next_blocks = tuple(x.at[(0,) * x.ndim].set(first_element) for x in blocks)
        # The whole result is carried along: otherwise XLA might compute that one element only.
        return next_blocks, y

    target = arrays_of(plan)[-1]
    no_result = jnp.zeros(target.max_local_shape, operands[0].dtype)
    _, result = lax.fori_loop(0, n_calls, call_again, (operands, no_result))
    return result
