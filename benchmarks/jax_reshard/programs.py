"""A move as two programs on one sharded array: our plan, and XLA's partitioner on the shardings alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh

import xshard as xs
from benchmarks.cases import Case
from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import ArrayMesh
from jax_bridge.lower.schedule import rounds
from jax_bridge.specs import to_named_sharding
from xshard import dtypes
from xshard.steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter

CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
HLO_NAMES = {
    AllGather: "all-gather",
    AllReduce: "all-reduce",
    AllToAll: "all-to-all",
    Permute: "collective-permute",
    ReduceScatter: "reduce-scatter",
}


@dataclass(frozen=True)
class Move:
    """A case, the machine that it is planned for, and its memory limit in bytes."""

    case: Case
    profile: str
    memory_limit: int | None = None

    @cached_property
    def plan(self) -> xs.Plan:
        return self.case.plan(xs.load_profile(self.profile), self.memory_limit)

    @cached_property
    def mesh(self) -> JaxMesh:
        """The mesh; sums need Explicit axes."""
        devices = np.array(jax.devices()[: self.case.mesh.n_devices]).reshape(self.case.mesh.sizes)
        kind = AxisType.Explicit if self.case.is_partial else AxisType.Auto
        return JaxMesh(devices, self.case.mesh.axes, axis_types=(kind,) * len(self.case.mesh.axes))

    @cached_property
    def source(self) -> NamedSharding:
        return to_named_sharding(self.case.src, self.mesh)

    @cached_property
    def target(self) -> NamedSharding:
        return to_named_sharding(self.case.dst, self.mesh)

    def ours(self) -> Any:
        """Our program, jitted and not yet traced."""
        jax.clear_caches()
        make_program.cache_clear()
        mesh, dtype = ArrayMesh(self.mesh, self.mesh), np.dtype(self.case.dtype)
        return make_program((self.plan,), mesh, (self.case.shape,), (dtype,), False, self.profile).run

    def xla(self) -> Any:
        """XLA's own program: `jax.reshard` for sums, else the identity between two shardings."""
        if self.case.is_partial:
            return jax.jit(lambda x: jax.reshard(x, self.target))
        return jax.jit(lambda x: x, in_shardings=self.source, out_shardings=self.target)

    @property
    def carrier(self) -> str:
        """The dtype that XLA moves as bits: it would widen 16-bit floats, on CPUs only."""
        return self.case.dtype if self.case.is_partial else CARRIERS[dtypes.itemsize(self.case.dtype)]

    @property
    def counts(self) -> dict[str, int]:
        """The number of collectives in the plan, by HLO's names."""
        counts: Counter[str] = Counter()
        for step, before, _ in self.plan.stages:
            if isinstance(step, Exchange):
                counts["collective-permute"] += len(rounds(step, before).sent)
            elif type(step) in HLO_NAMES:
                counts[HLO_NAMES[type(step)]] += 1
        return dict(sorted(counts.items()))

    def array(self, dtype: str) -> jax.Array:
        """An array of ones, or of addends that are ones."""
        shape = self.plan.source.max_local_shape
        blocks = [jax.device_put(np.ones(shape, dtype), device) for device in self.mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(self.case.shape, self.source, blocks)


def addable(case: Case) -> Case:
    """The case with a dtype in which XLA:CPU can add; narrower ones it widens."""
    return replace(case, dtype="float32") if case.is_partial and dtypes.itemsize(case.dtype) < 4 else case
