"""The JAX side of `xshard.testing`: functions of users in `shard_map` on host devices.

Runs in a process of its own, for JAX makes its devices once. Decides how blocks become the arguments of
one device's function, and what types its outputs must have.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh

from jax_bridge.mesh.axis_types import as_varying, is_typed, varying_axes
from jax_bridge.testing.stacked import lead, local, spec, stacked, unstacked
from xshard.errors import XshardError
from xshard.layout.sharding import Sharding
from xshard.runtimes.processes import FunctionError
from xshard.testing.task import Answer, Task, called, draw, named_outputs
from xshard.testing.trees import StructureError, Tree, leaves, mapped, numbered

Arrays = list[jax.Array]
Made = tuple[Arrays, Arrays, Arrays]  # outputs, gradients, updated values


class _MisshapenError(Exception):
    """Outputs that no cotangent fits: they are shown as they are."""


def call(packed: bytes, _timeout_s: float) -> Any:
    """The result of a packed function in this process. Raises FunctionError."""
    try:
        function, arguments = pickle.loads(packed)
        return function(*arguments)
    except Exception as error:
        raise FunctionError(f"{type(error).__name__} in JAX", hint=traceback.format_exc().strip()) from None


def run(task: Task, _timeout_s: float) -> Answer:
    """The task on as many host devices as its mesh has. Raises FunctionError, StructureError."""
    try:
        with jax.enable_x64(task.wide):
            return _run_reference(task) if task.results is None else _run_blocks(task)
    except StructureError:
        raise
    except Exception as error:
        where = f" on {task.mesh}, of which all devices run one program" if task.mesh.axes else ""
        told = str(error) if isinstance(error, XshardError) else traceback.format_exc().strip()
        raise FunctionError(f"the JAX function failed{where}: {type(error).__name__}", hint=told) from None


def _run_reference(task: Task) -> Answer:
    """On whole arrays."""
    program, inputs = _Program(task), [jnp.asarray(blocks[0]) for blocks in task.inputs]
    shapes = jax.eval_shape(program.outputs, *inputs)
    cotangents = [
        draw(i, y.shape, y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else None
        for i, y in enumerate(shapes)
    ]
    made = jax.jit(lambda *inputs: program.made(inputs, cotangents))(*inputs)
    return program.answer(*([(np.asarray(x),) for x in part] for part in made), cotangents=cotangents)


def _run_blocks(task: Task) -> Answer:
    """On the devices of a mesh, of which each gets its blocks."""
    assert task.results is not None
    program, n = _Program(task), task.mesh.n_devices
    devices = jax.devices()[:n]
    mesh = JaxMesh(np.array(devices).reshape(task.mesh.sizes), task.mesh.axes)
    results = list(task.results.values())
    taken = list(zip(task.inputs, task.shardings, strict=True))
    given = [(r.cotangents, r.sharding) for r in results if r.cotangents is not None]
    arrays = [stacked(blocks, sharding, mesh) for blocks, sharding in (*taken, *given)]
    shardings = [sharding for _, sharding in (*taken, *given)]
    came = (
        [result.sharding for result in results],
        [task.shardings[i] for i in task.differentiable],
        [task.shardings[i] for i in (task.update.arrays if task.update else ())],
    )

    def on_devices(with_gradients: bool) -> Made:
        def one_device(*blocks: jax.Array) -> Made:
            inputs = [local(block, task.mesh) for block in blocks]
            rest = iter(inputs[len(taken) :])
            cotangents = [None if r.cotangents is None else next(rest) for r in results]
            made = program.made(inputs[: len(taken)], cotangents if with_gradients else None)
            outputs, gradients, updated = ([lead(x, task.mesh) for x in part] for part in made)
            return outputs, gradients, updated

        out_specs = tuple([spec(s) for s in part] for part in (came if with_gradients else (came[0], (), ())))
        each = jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=tuple(map(spec, shardings)),
            out_specs=out_specs,
            check_vma=task.typed,
        )
        return jax.jit(each)(*arrays)

    try:
        made, fits = on_devices(True), True
    except _MisshapenError:
        made, fits = on_devices(False), False

    def blocks(part: Arrays, shardings: Sequence[Sharding]) -> list[tuple]:
        axes = len(task.mesh.axes)
        return [tuple(unstacked(x, x.shape[axes:], s, devices)) for x, s in zip(part, shardings, strict=True)]

    return program.answer(*map(blocks, made, came if fits else (came[0], (), ())), has_gradients=fits)


class _Program:
    """A task's function, as functions of arrays alone: no names, for JAX would sort them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.function: Callable[..., Any] = pickle.loads(task.function)[0]
        self.names: tuple[str, ...] = ()
        self.tree: Tree = None

    def outputs(self, *inputs: jax.Array) -> Arrays:
        returned = called(self.function, mapped(lambda i: inputs[i], self.task.arguments), self.task.mesh)
        named = named_outputs(returned, self.task.results, "JAX")
        self.names, self.tree = tuple(named), numbered(returned)
        arrays = {name: jnp.asarray(y) for name, y in named.items()}
        if self.task.results is None:
            return list(arrays.values())
        return [_typed(y, self.task.results[name].sharding, name) for name, y in arrays.items()]

    def made(self, inputs: Sequence[jax.Array], cotangents: Sequence[Any] | None) -> Made:
        """Outputs, gradients of the inputs that have some, updated values; without cotangents, outputs."""
        if cotangents is None:
            return self.outputs(*inputs), [], []
        pulled = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]

        def forward(varied: Arrays) -> tuple[Arrays, Arrays]:
            given = list(inputs)
            for i, x in zip(self.task.differentiable, varied, strict=True):
                given[i] = x
            outputs = self.outputs(*given)
            if any(outputs[i].shape != cotangents[i].shape for i in pulled):
                raise _MisshapenError
            return [outputs[i] for i in pulled], outputs

        _, pull, outputs = jax.vjp(forward, [inputs[i] for i in self.task.differentiable], has_aux=True)
        # Of complex numbers torch means the conjugate of what JAX does: cotangents and gradients of both.
        (gradients,) = pull([jnp.conj(jnp.asarray(cotangents[i], outputs[i].dtype)) for i in pulled])
        gradients = [jnp.conj(g) for g in gradients]
        return outputs, gradients, self._updated(inputs, gradients)

    def _updated(self, inputs: Sequence[jax.Array], gradients: Arrays) -> Arrays:
        task = self.task
        if task.update is None:
            return []
        by_input = dict(zip(task.differentiable, gradients, strict=True))
        numbers = tuple(task.arguments[p] for p in task.update.positions)
        values, pulled = mapped(inputs.__getitem__, numbers), mapped(by_input.__getitem__, numbers)
        named = leaves(pickle.loads(task.update.function)[0](values, pulled), "parameters")
        if list(named) != list(leaves(numbers, "parameters")):
            raise StructureError(
                f"the JAX update returns {', '.join(named)}",
                hint=f"(values, gradients) -> values, of {', '.join(leaves(numbers, 'parameters'))}",
            )
        return [
            _typed(y, task.shardings[i], name)
            for i, (name, y) in zip(task.update.arrays, named.items(), strict=True)
        ]

    def answer(
        self, *parts: list[tuple], cotangents: Sequence[Any] = (), has_gradients: bool = True
    ) -> Answer:
        """Blocks of outputs, gradients and updated values, by name and number."""
        outputs, gradients, updated = parts
        return Answer(
            dict(zip(self.names, outputs, strict=True)),
            dict(zip(self.task.differentiable, gradients, strict=True)) if has_gradients else None,
            dict(zip(self.task.update.arrays, updated, strict=True)) if self.task.update and updated else {},
            {
                name: (cotangent,)
                for name, cotangent in zip(self.names, cotangents, strict=False)
                if cotangent is not None
            },
            self.tree,
        )


def _typed(y: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """The output, varying along the axes that its layout names. Raises StructureError where it varies along
    others."""
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
        y = lax.psum(y, axis)  # over one device: it makes the type say so
    return as_varying(y, sharding.layout.axes)
