"""`python -m jax_bridge.testing.worker TASKS OUTCOMES [--mode vma|novma|pmap]`: the tasks of `xshard.verify` in JAX.

Decides how every device gets the block that a task gives it, and measures what was moved. With
types (`vma`) a replicated axis enters and leaves as an invariant one, so that a run tests types
as well as values. With `--processes N --process I --coordinator ADDRESS` it is one of N processes, which
share the devices of every task and each write the blocks of their own.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from numpy.typing import NDArray

from jax_bridge.redistribution import redistribute
from jax_bridge.testing.hlo import received_bytes
from jax_bridge.testing.stacked import lead, local, padded, spec, stacked, unstacked
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.plans.plan import Plan
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps.base import Blocks


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the tasks, run each in the mode asked for, write the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m jax_bridge.testing.worker")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("--mode", choices=("vma", "novma", "pmap"), default="vma")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator")
    options = parser.parse_args(arguments)
    tasks: list[Task] = pickle.loads(options.tasks.read_bytes())
    configure(tasks, options.processes)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    outcomes = [run_task(task, options.mode) for task in tasks]
    options.outcomes.write_bytes(pickle.dumps(outcomes))


def configure(tasks: Sequence[Task], processes: int = 1) -> None:
    """As many host devices as the tasks need of a process, and 64-bit numbers if they have some.

    Before JAX makes its devices, which the first of its functions does.
    """
    jax.config.update("jax_platforms", "cpu")
    most = max((t.plan.mesh.n_devices for t in tasks), default=1)
    jax.config.update("jax_num_cpu_devices", -(-most // processes))
    jax.config.update("jax_enable_x64", any(jnp.dtype(t.plan.dtype).itemsize >= 8 for t in tasks))


def run_task(task: Task, mode: str) -> Outcome:
    """The task forward and backward: the blocks, and the bytes and seconds it took to make them."""
    plan, source, target = task.plan, task.plan.source, task.plan.target
    forward = Program(lambda x: redistribute(x, plan), (source,), target, mode).run(task.inputs)
    backward = Program(lambda x, g: _pulled_back(plan, x, g), (source, target), source, mode).run(
        task.inputs, task.cotangents
    )
    return Outcome(
        tuple(forward.blocks),
        tuple(backward.blocks),
        forward.received_bytes,
        # What is not linear looks at its forward pass again, which is not the gradient's traffic.
        backward.received_bytes if plan.src.is_linear else None,
        forward.seconds + backward.seconds,
    )


def _pulled_back(plan: Plan, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # JAX differentiates no whole numbers, a plan moves them too
        return redistribute(cotangent, plan.backward)
    _, pull = jax.vjp(lambda x: redistribute(x, plan), x)
    return pull(cotangent)[0]


class Measured(NamedTuple):
    """What a program made on every device, None on those of other processes, and what a second run took."""

    blocks: list[Any]
    received_bytes: int
    seconds: float


@dataclass(frozen=True)
class Program:
    """One device's function, for all devices of a mesh. Its blocks travel in one array, padded."""

    local: Callable[..., jax.Array]
    inputs: tuple[Sharding, ...]
    output: Sharding
    mode: str

    @property
    def mesh(self) -> Mesh:
        return self.output.mesh

    @property
    def devices(self) -> list[jax.Device]:
        """Of the processes in turn, so that some axis reaches from one to another."""
        found = (jax.local_devices(process) for process in range(jax.process_count()))
        return [d for turn in zip(*found, strict=True) for d in turn][: self.mesh.n_devices]

    @cached_property
    def jax_mesh(self) -> JaxMesh:
        return JaxMesh(np.array(self.devices).reshape(self.mesh.sizes), self.mesh.axes)

    def run(self, *inputs: Blocks) -> Measured:
        """Blocks per device -> blocks per device."""
        arrays = [self._stacked(blocks, s) for blocks, s in zip(inputs, self.inputs, strict=True)]
        compiled = (self._pmap() if self.mode == "pmap" else self._shard_map()).lower(*arrays).compile()
        jax.block_until_ready(compiled(*arrays))
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(*arrays))
        seconds = time.perf_counter() - start
        return Measured(
            unstacked(out, self.output.max_local_shape, self.output, self.devices),
            received_bytes(compiled.as_text(), self.mesh.n_devices),
            seconds,
        )

    def _pmap(self):
        long = [a for a, n in zip(self.mesh.axes, self.mesh.sizes, strict=True) if n > 1]
        return jax.pmap(self.local, axis_name=(*long, "alone")[0], devices=self.devices)

    def _shard_map(self):
        def one_device(*blocks: jax.Array) -> jax.Array:
            return lead(self.local(*(local(block, self.mesh) for block in blocks)), self.mesh)

        return jax.jit(
            jax.shard_map(
                one_device,
                mesh=self.jax_mesh,
                in_specs=tuple(map(spec, self.inputs)),
                out_specs=spec(self.output),
                check_vma=self.mode == "vma",
            )
        )

    def _stacked(self, blocks: Blocks, sharding: Sharding) -> NDArray | jax.Array:
        if self.mode == "pmap":
            return padded(blocks, sharding)
        return stacked(blocks, sharding, self.jax_mesh)


if __name__ == "__main__":
    main()
