"""The JAX side of `xshard selfcheck`: tasks on host devices.

Decides how every device gets its block of a task, and measures what was moved. With types (`vma`) a
replicated axis enters and leaves as an invariant one, so that a run tests types as well as values. Of several
processes each returns the blocks on its own devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from numpy.typing import NDArray

from jax_bridge.einsum import Product, einsum_blocks
from jax_bridge.redistribution import redistribute
from jax_bridge.testing.hlo import received_bytes
from jax_bridge.testing.stacked import lead, local, padded, spec, stacked, unstacked
from xshard import ContractionPlan, Mesh, Plan, Sharding
from xshard.contractions.ring import NEVER
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps.base import Blocks


def run_tasks(tasks: Sequence[Task], mode: str, _timeout_s: float) -> list[Outcome]:
    """The outcome of every task. mode: "vma" or "novma" (`shard_map` with and without types), or "pmap"."""
    with jax.enable_x64(any(jnp.dtype(task.plan.dtype).itemsize >= 8 for task in tasks)):
        return [_run(task, mode) for task in tasks]


def join(address: str, processes: int, process: int, _timeout_s: float) -> None:
    """Become one of several processes, which share the devices of every task."""
    jax.distributed.initialize(address, processes, process)


def _run(task: Task, mode: str) -> Outcome:
    """The task forward and backward: the blocks, and the bytes and seconds they took."""
    plan, sources, target = task.plan, task.sources, task.target

    def run(*blocks: jax.Array) -> tuple[jax.Array]:
        if isinstance(plan, ContractionPlan):
            return (einsum_blocks(plan, blocks, None, plan.shapes, plan.profile, NEVER, Product(None, None)),)
        return (redistribute(blocks[0], plan),)

    def pulled(cotangent: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        if isinstance(plan, Plan) and not jnp.issubdtype(blocks[0].dtype, jnp.inexact):
            return (redistribute(cotangent, plan.backward),)  # JAX does not differentiate whole numbers
        return jax.vjp(run, *blocks)[1]((cotangent,))

    forward = DeviceProgram(run, sources, (target,), mode).run(*task.operands)
    backward = DeviceProgram(pulled, (target, *sources), sources, mode).run(task.cotangents, *task.operands)
    # The gradients of a max or min, and of several operands, begin with the forward pass.
    repeats = not task.is_linear or len(sources) > 1
    return Outcome(
        tuple(forward.blocks),
        tuple(backward.blocks),
        forward.received_bytes,
        None if repeats else backward.received_bytes,
        forward.seconds + backward.seconds,
    )


class Measured(NamedTuple):
    """Blocks per device (None on those of other processes), bytes if counted, and seconds of a second run."""

    blocks: list[Any]
    received_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class DeviceProgram:
    """One device's function on all devices of a mesh; the blocks of an array are one padded array."""

    local: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    mode: str

    @property
    def mesh(self) -> Mesh:
        return self.inputs[0].mesh

    @property
    def devices(self) -> list[jax.Device]:
        """Devices of the processes in turn, so that some axis connects processes."""
        found = (jax.local_devices(process) for process in range(jax.process_count()))
        return [d for turn in zip(*found, strict=True) for d in turn][: self.mesh.n_devices]

    @property
    def _is_on_host(self) -> bool:
        return self.devices[0].platform == "cpu"

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
            [block for x, end in zip(out, self.outputs, strict=True) for block in self._unstacked(x, end)],
            # Programs for GPUs have collectives in halves.
            received_bytes(compiled.as_text(), self.mesh.n_devices) if self._is_on_host else None,
            seconds,
        )

    def _pmap(self):
        long = [a for a, n in zip(self.mesh.axes, self.mesh.sizes, strict=True) if n > 1]
        return jax.pmap(self.local, axis_name=(*long, "alone")[0], devices=self.devices)

    def _shard_map(self):
        def one_device(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            results = self.local(*(local(block, self.mesh) for block in blocks))
            return tuple(lead(result, self.mesh) for result in results)

        return jax.jit(
            jax.shard_map(
                one_device,
                mesh=self.jax_mesh,
                in_specs=tuple(map(spec, self.inputs)),
                out_specs=tuple(map(spec, self.outputs)),
                check_vma=self.mode == "vma",
            )
        )

    def _unstacked(self, x: jax.Array, end: Sharding) -> list[Any]:
        return unstacked(x, end.max_local_shape, end, self.devices)

    def _stacked(self, blocks: Blocks, sharding: Sharding) -> NDArray | jax.Array:
        if self.mode == "pmap":
            return padded(blocks, sharding)
        return stacked(blocks, sharding, self.jax_mesh)
