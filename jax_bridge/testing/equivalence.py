"""The JAX side of `xshard.testing`: functions of users in `shard_map` on host devices.

Runs in a process of its own, since JAX makes its devices once. Decides how blocks become the arguments of
one device's function, and what types its outputs must have.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from jax_bridge.mesh.axis_types import as_varying, is_typed, varying_axes
from jax_bridge.testing.stacked import lead, local, spec, stacked, unstacked
from xshard import Sharding, XshardError, replicas
from xshard.runtimes.processes import FunctionError
from xshard.testing.differences import Derivatives, derivatives
from xshard.testing.moves import Recorder, Seen
from xshard.testing.question import Answer, Question, called, draw, named_outputs
from xshard.testing.trees import StructureError, Tree, leaves, mapped, numbered

Arrays = list[jax.Array]
Made = tuple[Arrays, Arrays, Arrays]  # outputs, gradients, updated values


class _MisshapenError(Exception):
    """The shapes of outputs do not fit their cotangents; then no gradients are computed."""


def call_packed(packed: bytes, _timeout_s: float) -> Any:
    """The result of a packed function in this process. Raises FunctionError."""
    try:
        function, arguments = pickle.loads(packed)
        return function(*arguments)
    except Exception as error:
        raise FunctionError(f"{type(error).__name__} in JAX", hint=traceback.format_exc().strip()) from None


def answer(question: Question, _timeout_s: float) -> Answer:
    """The function on as many host devices as its mesh has. Raises FunctionError, StructureError."""
    try:
        with jax.enable_x64(question.wide):
            return _answer_whole(question) if question.results is None else _answer_blocks(question)
    except StructureError:
        raise
    except Exception as error:
        where = f" on {question.mesh}, where all devices run one program" if question.mesh.axes else ""
        text = str(error) if isinstance(error, XshardError) else traceback.format_exc().strip()
        raise FunctionError(f"the JAX function failed{where}: {type(error).__name__}", hint=text) from None


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """What the redistributions of such a run were given, and the cotangents of what they made."""
    replicas.WATCH = recorder = Recorder()
    try:
        answer(question, timeout_s)
    finally:
        replicas.WATCH = None
    return recorder.seen


def _answer_whole(question: Question) -> Answer:
    """On one device: of whole arrays, or of blocks on a mesh of ones."""
    program, inputs = _UserProgram(question), [jnp.asarray(blocks[0]) for blocks in question.inputs]
    shapes = jax.eval_shape(_on_one(question, program.outputs), *inputs)
    cotangents = [
        draw(i, y.shape, y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else None
        for i, y in enumerate(shapes)
    ]
    made = jax.jit(_on_one(question, lambda *inputs: program.made(inputs, cotangents)))(*inputs)
    blocks = [[(np.asarray(x),) for x in part] for part in made]
    found = program.assembled(*blocks, cotangents=cotangents)
    return replace(found, derivatives=_derivatives(question, found)) if question.differences else found


def _on_one(question: Question, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the one device of a mesh of ones, where axes have names but nothing varies."""
    mesh = question.mesh
    if not mesh.axes:
        return function
    one = JaxMesh(np.array(jax.devices()[:1]).reshape(mesh.sizes), mesh.axes)
    return jax.shard_map(function, mesh=one, in_specs=P(), out_specs=P(), check_vma=False)


def _derivatives(question: Question, found: Answer) -> Derivatives:
    program = _UserProgram(question)

    def loss(*inputs: jax.Array) -> jax.Array:
        outputs = dict(zip(found.outputs, program.outputs(*inputs), strict=True))
        parts = (jnp.vdot(c, outputs[name]).real for name, (c,) in found.cotangents.items())
        return sum(parts, jnp.zeros(()))

    with jax.enable_x64(True):
        run = jax.jit(_on_one(question, loss))
        values = [block for (block,) in question.inputs]
        return derivatives(
            lambda blocks: float(run(*map(jnp.asarray, blocks))), values, found.gradients or {}
        )


def _answer_blocks(question: Question) -> Answer:
    """On the devices of a mesh, each with its own blocks."""
    assert question.results is not None
    program, n = _UserProgram(question), question.mesh.n_devices
    devices = jax.devices()[:n]
    mesh = JaxMesh(np.array(devices).reshape(question.mesh.sizes), question.mesh.axes)
    results = list(question.results.values())
    taken = list(zip(question.inputs, question.shardings, strict=True))
    given = [(r.cotangents, r.sharding) for r in results if r.cotangents is not None]
    arrays = [stacked(blocks, sharding, mesh) for blocks, sharding in (*taken, *given)]
    shardings = [sharding for _, sharding in (*taken, *given)]
    came = (
        [result.sharding for result in results],
        [question.shardings[i] for i in question.differentiable],
        [question.shardings[i] for i in (question.update.arrays if question.update else ())],
    )

    def on_devices(with_gradients: bool) -> Made:
        def one_device(*blocks: jax.Array) -> Made:
            inputs = [local(block, question.mesh) for block in blocks]
            rest = iter(inputs[len(taken) :])
            cotangents = [None if r.cotangents is None else next(rest) for r in results]
            made = program.made(inputs[: len(taken)], cotangents if with_gradients else None)
            outputs, gradients, updated = ([lead(x, question.mesh) for x in part] for part in made)
            return outputs, gradients, updated

        out_specs = tuple([spec(s) for s in part] for part in (came if with_gradients else (came[0], (), ())))
        each = jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=tuple(map(spec, shardings)),
            out_specs=out_specs,
            check_vma=question.typed,
        )
        return jax.jit(each)(*arrays)

    try:
        made, fits = on_devices(True), True
    except _MisshapenError:
        made, fits = on_devices(False), False

    def blocks(part: Arrays, shardings: Sequence[Sharding]) -> list[tuple]:
        axes = len(question.mesh.axes)
        return [tuple(unstacked(x, x.shape[axes:], s, devices)) for x, s in zip(part, shardings, strict=True)]

    return program.assembled(*map(blocks, made, came if fits else (came[0], (), ())), has_gradients=fits)


class _UserProgram:
    """The user's function, as functions of arrays alone: no names, since JAX would sort them."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.function: Callable[..., Any] = pickle.loads(question.function)[0]
        self.names: tuple[str, ...] = ()
        self.tree: Tree = None

    def outputs(self, *inputs: jax.Array) -> Arrays:
        returned = called(
            self.function, mapped(lambda i: inputs[i], self.question.arguments), self.question.mesh
        )
        named = named_outputs(returned, self.question.results, "JAX")
        self.names, self.tree = tuple(named), numbered(returned)
        arrays = {name: jnp.asarray(y) for name, y in named.items()}
        if self.question.results is None:
            return list(arrays.values())
        return [_typed(y, self.question.results[name].sharding, name) for name, y in arrays.items()]

    def made(self, inputs: Sequence[jax.Array], cotangents: Sequence[Any] | None) -> Made:
        """Outputs, gradients of the inputs that have some, updated values; without cotangents, outputs."""
        if cotangents is None:
            return self.outputs(*inputs), [], []
        pulled = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]

        def forward(varied: Arrays) -> tuple[Arrays, Arrays]:
            given = list(inputs)
            for i, x in zip(self.question.differentiable, varied, strict=True):
                given[i] = x
            outputs = self.outputs(*given)
            if any(outputs[i].shape != cotangents[i].shape for i in pulled):
                raise _MisshapenError
            return [outputs[i] for i in pulled], outputs

        _, pull, outputs = jax.vjp(forward, [inputs[i] for i in self.question.differentiable], has_aux=True)
        # For complex numbers torch takes the conjugate of JAX's: both for cotangents and for gradients.
        (gradients,) = pull([jnp.conj(jnp.asarray(cotangents[i], outputs[i].dtype)) for i in pulled])
        gradients = [jnp.conj(g) for g in gradients]
        return outputs, gradients, self._updated(inputs, gradients)

    def _updated(self, inputs: Sequence[jax.Array], gradients: Arrays) -> Arrays:
        question = self.question
        if question.update is None:
            return []
        by_input = dict(zip(question.differentiable, gradients, strict=True))
        numbers = tuple(question.arguments[p] for p in question.update.positions)
        values, pulled = mapped(inputs.__getitem__, numbers), mapped(by_input.__getitem__, numbers)
        named = leaves(pickle.loads(question.update.function)[0](values, pulled), "parameters")
        if list(named) != list(leaves(numbers, "parameters")):
            raise StructureError(
                f"the JAX update returns {', '.join(named)}",
                hint=f"(values, gradients) -> values, of {', '.join(leaves(numbers, 'parameters'))}",
            )
        return [
            _typed(y, question.shardings[i], name)
            for i, (name, y) in zip(question.update.arrays, named.items(), strict=True)
        ]

    def assembled(
        self, *parts: list[tuple], cotangents: Sequence[Any] = (), has_gradients: bool = True
    ) -> Answer:
        """Blocks of outputs, gradients and updated values, by name and number."""
        outputs, gradients, updated = parts
        return Answer(
            dict(zip(self.names, outputs, strict=True)),
            dict(zip(self.question.differentiable, gradients, strict=True)) if has_gradients else None,
            dict(zip(self.question.update.arrays, updated, strict=True))
            if self.question.update and updated
            else {},
            {
                name: (cotangent,)
                for name, cotangent in zip(self.names, cotangents, strict=False)
                if cotangent is not None
            },
            self.tree,
        )


def _typed(y: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """The output, varying along the axes that its layout names.

    Raises StructureError where it varies along others.
    """
    for axis in varying_axes(y) - set(sharding.layout.axes) if sharding.mesh.axes else ():
        if not is_typed(axis):
            continue
        if sharding.mesh.size(axis) > 1:
            raise StructureError(
                f"{name} of the JAX function varies along {axis!r}, where its layout holds one value",
                text=str(sharding.layout),
                hint=f"redistribute it to its layout, or say in layouts= what it is: sum({axis}), "
                f"copy({axis}); check_vma=False takes its word",
            )
        y = lax.psum(y, axis)  # over one device: only its type changes
    return as_varying(y, sharding.layout.axes)
