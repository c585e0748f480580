"""The JAX side of `xshard.testing` and `xshard calibrate`, in a process of its own, with host devices. With
types (`vma`) replicated axes enter and leave as invariant ones. Other processes' blocks are None.
"""

from __future__ import annotations

import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from jax_bridge.calls import redistribute
from jax_bridge.einsum import Choices, einsum_blocks
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


def join(address: str, processes: int, process: int, _timeout_s: float) -> None:
    """Become one of several processes, which share the devices of every question."""
    jax.distributed.initialize(address, processes, process)


def call_packed(packed: bytes, _timeout_s: float) -> Any:
    """The result of a packed function in this process. Raises FunctionError."""
    try:
        function, arguments = pickle.loads(packed)
        return function(*arguments)
    except Exception as error:
        raise FunctionError(
            f"{type(error).__name__} in JAX", hint=traceback.format_exc().strip()
        ) from None


def answers(questions: Sequence[Question], _timeout_s: float) -> list[Answer]:
    """The answer to every question, on its mesh's devices. Raises FunctionError, StructureError."""
    with jax.enable_x64(any(question.wide for question in questions)):
        return [_answer(q) if isinstance(q.function, bytes) else _answer_plan(q) for q in questions]


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """The inputs of the redistributions of such a run, and the cotangents of their results."""
    with replicas.watched(Recorder()) as recorder:
        answers([question], timeout_s)
    return recorder.seen


def apply(plan: AnyPlan, *blocks: jax.Array) -> jax.Array:
    """A plan on one device's blocks."""
    if isinstance(plan, ContractionPlan):
        return einsum_blocks(plan, blocks, None, plan.shapes, Choices(plan.profile, NEVER))
    return redistribute(blocks[0], plan)


def _answer_plan(question: Question) -> Answer:
    """A plan forward and backward: the blocks, and the bytes and seconds they took."""
    plan = question.plan
    sources = question.shardings
    target = arrays_of(question.plan)[-1]

    def run(*blocks: jax.Array) -> tuple[jax.Array]:
        return (apply(plan, *blocks),)

    def pulled(cotangent: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        if isinstance(plan, Plan) and not jnp.issubdtype(blocks[0].dtype, jnp.inexact):
            return (
                redistribute(cotangent, plan.backward),
            )  # JAX does not differentiate whole numbers
        return jax.vjp(run, *blocks)[1]((cotangent,))

    operands = list(zip(question.inputs, sources, strict=True))
    cotangents = question.cotangents, target
    forward = DeviceProgram(run, plan.mesh, operands, [target], question.mode, np.nan)
    (output,), forward_s = _measured(forward)
    backward = DeviceProgram(
        pulled, plan.mesh, [cotangents, *operands], sources, question.mode, np.nan
    )
    gradients, backward_s = _measured(backward)
    # The gradients of a max or min, and of several operands, begin with the forward pass.
    backward_bytes = None if not is_linear(plan) or len(sources) > 1 else backward.received_bytes
    n_bytes: Any = {"forward_bytes": forward.received_bytes, "backward_bytes": backward_bytes}
    return Answer(
        {OUTPUT: output}, dict(enumerate(gradients)), **n_bytes, seconds=forward_s + backward_s
    )


def _measured(program: DeviceProgram) -> tuple[list[Devices], float]:
    """The blocks of every output, and the seconds of a second run."""
    program()
    start = time.perf_counter()
    results = program()
    return program.blocks(results), time.perf_counter() - start


def _answer(question: Question) -> Answer:
    """A user's function."""
    try:
        return _answer_reference(question) if question.results is None else _answer_blocks(question)
    except StructureError:
        raise
    except Exception as error:
        where = (
            f" on {question.mesh}, where all devices run one program" if question.mesh.axes else ""
        )
        text = str(error) if isinstance(error, XshardError) else traceback.format_exc().strip()
        raise FunctionError(
            f"the JAX function failed{where}: {type(error).__name__}", hint=text
        ) from None


def _answer_reference(question: Question) -> Answer:
    """On one device: unsharded arrays, or blocks on a mesh of ones. Cotangents are drawn here."""
    program = _UserProgram(question)
    inputs = [jnp.asarray(blocks[0]) for blocks in question.inputs]
    drawn: list[Any] = []

    def cotangents_of(outputs: Arrays) -> list[Any]:
        kinds = [jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs]
        drawn[:] = [draw(i, y.shape, y.dtype) if kinds[i] else None for i, y in enumerate(outputs)]
        return drawn

    parts = jax.jit(_on_one(question, lambda *inputs: program.results(inputs, cotangents_of)))(
        *inputs
    )
    answer = program.answer([[(np.asarray(x),) for x in part] for part in parts])
    cotangents = {name: (c,) for name, c in zip(program.names, drawn, strict=True) if c is not None}
    answer = replace(answer, cotangents=cotangents)
    return (
        replace(answer, derivatives=_derivatives(question, answer))
        if question.differences
        else answer
    )


def _on_one(question: Question, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the one device of a mesh of ones: axes have names, but nothing varies."""
    mesh = question.mesh
    if not mesh.axes:
        return function
    one = JaxMesh(np.array(jax.devices()[:1]).reshape(mesh.sizes), mesh.axes)
    return jax.shard_map(function, mesh=one, in_specs=P(), out_specs=P(), check_vma=False)


def _derivatives(question: Question, answer: Answer) -> Slopes:
    program = _UserProgram(question)

    def loss(*inputs: jax.Array) -> jax.Array:
        outputs = dict(zip(answer.outputs, program.outputs(*inputs), strict=True))
        parts = (jnp.vdot(c, outputs[name]).real for name, (c,) in answer.cotangents.items())
        return sum(parts, jnp.zeros(()))

    with jax.enable_x64(True):
        run = jax.jit(_on_one(question, loss))
        values = [block for (block,) in question.inputs]
        gradients = answer.gradients or {}
        return derivatives(lambda blocks: float(run(*map(jnp.asarray, blocks))), values, gradients)


def _answer_blocks(question: Question) -> Answer:
    """On the devices of a mesh, each with its own blocks."""
    assert question.results is not None
    results = list(question.results.values())
    n = len(question.inputs)
    inputs = list(zip(question.inputs, question.shardings, strict=True))
    inputs += [(r.cotangents, r.sharding) for r in results if r.cotangents is not None]
    numbers = question.differentiable, question.update.arrays if question.update else ()
    kinds = [
        [r.sharding for r in results],
        *([question.shardings[i] for i in some] for some in numbers),
    ]
    for fits, kept in ((True, kinds), (False, (kinds[0], [], []))):
        program = _UserProgram(question)

        def one_device(
            *blocks: jax.Array, fits: bool = fits, program: _UserProgram = program
        ) -> Arrays:
            rest = iter(blocks[n:])
            cotangents = [None if r.cotangents is None else next(rest) for r in results]
            return [*chain(*program.results(blocks[:n], (lambda _: cotangents) if fits else None))]

        try:
            outputs = [sharding for kind in kept for sharding in kind]
            compiled = DeviceProgram(one_device, question.mesh, inputs, outputs, question.mode)
        except _MisshapenError:
            continue
        blocks = iter(compiled.blocks(compiled()))
        return program.answer([[next(blocks) for _ in kind] for kind in kept], has_gradients=fits)
    raise AssertionError("the outputs alone always fit")


class _UserProgram:
    """The user's function, as functions of arrays alone: no names, since JAX would sort them."""

    def __init__(self, question: Question) -> None:
        assert isinstance(question.function, bytes)
        self.question = question
        self.function: Callable[..., Any] = pickle.loads(question.function)[0]
        self.names: tuple[str, ...] = ()
        self.tree: Tree = None

    def outputs(self, *inputs: jax.Array) -> Arrays:
        arguments = mapped(inputs.__getitem__, self.question.arguments)
        results = self.question.results
        returned = called(self.function, arguments, self.question.mesh)
        named = named_outputs(returned, results, "JAX")
        self.names, self.tree = tuple(named), numbered(returned)
        arrays = {name: jnp.asarray(y) for name, y in named.items()}
        if results is None:
            return list(arrays.values())
        return [_typed(y, results[name].sharding, name) for name, y in arrays.items()]

    def results(
        self, inputs: Sequence[jax.Array], cotangents_of: Callable[[Arrays], Sequence[Any]] | None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Outputs, gradients of the inputs that have some, updated values; or outputs alone."""
        if cotangents_of is None:
            return self.outputs(*inputs), [], []
        cotangents: list[Any] = []

        def forward(varied: Arrays) -> tuple[Arrays, Arrays]:
            arguments = list(inputs)
            for i, x in zip(self.question.differentiable, varied, strict=True):
                arguments[i] = x
            outputs = self.outputs(*arguments)
            cotangents[:] = cotangents_of(outputs)
            if any(
                c is not None and y.shape != c.shape
                for y, c in zip(outputs, cotangents, strict=True)
            ):
                raise _MisshapenError
            return [y for y, c in zip(outputs, cotangents, strict=True) if c is not None], outputs

        varied = [inputs[i] for i in self.question.differentiable]
        pulled, pull, outputs = jax.vjp(forward, varied, has_aux=True)
        # For complex numbers torch takes the conjugate of JAX's: both for cotangents and for gradients.
        used = zip(pulled, (c for c in cotangents if c is not None), strict=True)
        (gradients,) = pull([jnp.conj(jnp.asarray(c, y.dtype)) for y, c in used])
        gradients = [jnp.conj(g) for g in gradients]
        return outputs, gradients, self._updated(inputs, gradients)

    def _updated(self, inputs: Sequence[jax.Array], gradients: Arrays) -> Arrays:
        question = self.question
        if question.update is None:
            return []
        by_input = dict(zip(question.differentiable, gradients, strict=True))
        numbers = tuple(question.arguments[p] for p in question.update.positions)
        values = mapped(inputs.__getitem__, numbers)
        pulled = mapped(by_input.__getitem__, numbers)
        named = leaves(pickle.loads(question.update.function)[0](values, pulled), "parameters")
        if list(named) != (due := list(leaves(numbers, "parameters"))):
            hint = f"(values, gradients) -> values, of {', '.join(due)}"
            raise StructureError(f"the JAX update returns {', '.join(named)}", hint=hint)
        pairs = zip(question.update.arrays, named.items(), strict=True)
        return [_typed(y, question.shardings[i], name) for i, (name, y) in pairs]

    def answer(self, parts: Sequence[Sequence[Devices]], has_gradients: bool = True) -> Answer:
        """Blocks of outputs, gradients and updated values, by name and number."""
        outputs, gradients, updated = parts
        numbers = self.question.update.arrays if self.question.update and updated else ()
        pulled = (
            dict(zip(self.question.differentiable, gradients, strict=True))
            if has_gradients
            else None
        )
        stepped = dict(zip(numbers, updated, strict=True))
        return Answer(dict(zip(self.names, outputs, strict=True)), pulled, stepped, tree=self.tree)


def _typed(y: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """The output, varying along its layout's axes. Raises StructureError if it varies along others."""
    axes = varying_axes(y) - set(sharding.layout.axes) if sharding.mesh.axes else ()
    for axis in filter(is_typed, axes):
        if sharding.mesh.size(axis) > 1:
            why = f"{name} of the JAX function varies along {axis!r}, where its layout holds one value"
            hint = f"redistribute it to its layout, or say in layouts= what it is: sum({axis}), copy({axis})"
            hint += "; check_vma=False takes its word"
            raise StructureError(why, text=str(sharding.layout), hint=hint)
        y = lax.psum(y, axis)  # over one device: only its type changes
    return as_varying(y, sharding.layout.axes)


TARGET_S = 0.02  # seconds of a program, about; the number of calls follows from it
MOST_CALLS = 100


def seconds_of_plans(plans: Sequence[AnyPlan], rounds: int, _timeout_s: float) -> list[float]:
    """The median time of every plan over some rounds."""
    timers = [Timer(plan) for plan in plans]
    # All are measured once before any is measured again: a slow spell of the machine falls on all.
    by_round = [[timer.seconds() for timer in timers] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*by_round, strict=True)]


def seconds_of_products(
    n: int, rows: int, dtypes: Sequence[str], rounds: int, _: float
) -> list[float]:
    """The median time per dtype of a product of square matrices, on all `n` devices at once."""
    mesh = jax.make_mesh((n,), ("all",))
    medians = []
    multiply = jax.jit(
        jax.shard_map(jnp.matmul, mesh=mesh, in_specs=jax.P("all"), out_specs=jax.P("all"))
    )
    with jax.enable_x64(True):
        for dtype in dtypes:
            ones = jnp.ones((n, rows, rows), dtype)
            times = []
            x = jax.device_put(ones, jax.NamedSharding(mesh, jax.P("all")))
            for _ in range(1 + rounds):
                start = time.perf_counter()
                jax.block_until_ready(multiply(x, x))
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times[1:]))  # the first compiles
    return medians


class Timer:
    """A plan in a compiled loop, warmed up, and how often the loop goes round."""

    def __init__(self, plan: AnyPlan) -> None:
        (*sources, target), dtype, n = arrays_of(plan), numpy_dtype(plan.dtype), plan.mesh.n_devices
        inputs = [([np.ones(s.max_local_shape, dtype)] * n, s) for s in sources]
        calls = [np.ones((), np.int32)] * n, Sharding(Layout(()), plan.mesh, ())
        self.program = DeviceProgram(
            partial(_loop, plan), plan.mesh, [calls, *inputs], [target], "novma"
        )
        self.calls = 3
        self.seconds()
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / self.seconds())))

    def seconds(self) -> float:
        """Seconds per call; a program ends when its busiest device does."""
        self.program.arrays[0] = jnp.full_like(self.program.arrays[0], self.calls)
        start = time.perf_counter()
        self.program()
        return (time.perf_counter() - start) / self.calls


def _loop(plan: AnyPlan, calls: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The plan on one device's blocks, `calls` times, each waiting for the one before."""

    def again(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        blocks, _ = state
        y = apply(plan, *blocks)
        # The whole result is kept: if one element is all that is read, XLA computes that element alone.
        return tuple(x.at[(0,) * x.ndim].set(y[(0,) * y.ndim]) for x in blocks), y

    result = jnp.zeros(arrays_of(plan)[-1].max_local_shape, operands[0].dtype)
    return [lax.fori_loop(0, calls, again, (operands, result))[1]]
