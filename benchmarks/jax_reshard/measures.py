"""A move as two programs on one sharded array: our plan, and XLA's partitioner on the shardings alone.

Their figures are exact; their times are taken by turns.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

import jax_bridge as xj
import xshard as xs
from benchmarks import by_turns
from benchmarks.cases import Case
from benchmarks.claim import Row
from benchmarks.jax_devices import configure
from benchmarks.jax_reshard.claims import HOST, MAX_DEVICES, holds_more, within
from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import ArrayMesh
from jax_bridge.lower.transports import rounds
from jax_bridge.specs import to_named_sharding
from jax_bridge.testing.stacked import collectives
from xshard import dtypes
from xshard.errors import PlanError
from xshard.steps import Exchange

COMPILES = 2  # the quicker one counts: the other was disturbed
CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
# By the kind of a step.
HLO_NAMES = {kind: kind.replace("_", "-") for kind in ("all_gather", "all_reduce", "all_to_all")}
HLO_NAMES |= {"permute": "collective-permute", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True)
class Move:
    """A case, the profile of the machine that it is planned for, and its memory limit in bytes."""

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
        mesh = ArrayMesh(self.mesh, self.mesh)
        dtype = np.dtype(self.case.dtype)
        return make_program(
            ((self.plan, self.case.shape, dtype, ""),), mesh, False, self.profile
        ).run

    def xla(self) -> Any:
        """XLA's own program: `jax.reshard` for sums, else the identity between two shardings."""
        if self.case.is_partial:
            return jax.jit(lambda x: jax.reshard(x, self.target))
        return jax.jit(lambda x: x, in_shardings=self.source, out_shardings=self.target)

    @property
    def carrier(self) -> str:
        """The dtype that XLA moves as bits: it would widen 16-bit floats, on CPUs only."""
        return (
            self.case.dtype if self.case.is_partial else CARRIERS[dtypes.itemsize(self.case.dtype)]
        )

    @property
    def counts(self) -> dict[str, int]:
        """The number of collectives in the plan, by HLO's names."""
        counts: Counter[str] = Counter()
        for step, before, _ in self.plan.stages:
            if isinstance(step, Exchange):
                counts["collective-permute"] += len(rounds(step, before).sent)
            elif step.kind in HLO_NAMES:
                counts[HLO_NAMES[step.kind]] += 1
        return dict(sorted(counts.items()))

    def array(self) -> jax.Array:
        """An array of ones, or of addends that are ones."""
        ones = np.ones(self.plan.source.max_local_shape, self.case.dtype)
        blocks = [jax.device_put(ones, device) for device in self.mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(self.case.shape, self.source, blocks)


def addable(case: Case) -> Case:
    """The case with a dtype in which XLA:CPU can add; narrower ones it widens."""
    return (
        replace(case, dtype="float32")
        if case.is_partial and dtypes.itemsize(case.dtype) < 4
        else case
    )


def compiled(moves: Sequence[Move]) -> Row:
    """A case's programs: collectives, bytes, temporary memory, seconds to compile.

    moves: the case planned for several machines; XLA's program is the same for all.
    """
    move = moves[0]
    plan = move.plan
    mesh = move.case.mesh
    row = move.case.facts() | {
        "source_elements": plan.source.max_local_size,
        "target_elements": plan.target.max_local_size,
        "ended_sums": mesh.size(
            *(a for a in plan.src.tagged("sum") if a not in plan.dst.tagged("sum"))
        ),
    }
    row["ours"] = {planned.profile: _ours(planned) for planned in moves}
    row["xla"] = _figures(move, move.xla, move.case.dtype)
    if move.carrier != move.case.dtype:  # XLA does not widen what it moves as bits
        carried = _figures(move, move.xla, move.carrier, compiles=1)
        row["xla"] |= {key: carried[key] for key in ("counts", "received_bytes")}
    for planned in moves:
        if holds_more(row["ours"][planned.profile], row["xla"]):
            row["ours"][within(planned.profile)] = _asked_to_hold(planned, row)
    return row


def _asked_to_hold(move: Move, row: Row) -> Row:
    """Our program under XLA's memory as a limit, lowered until it holds no more or there is no plan.

    A plan counts its source until the source is read, a program counts it as long as it runs.
    """
    ours = row["ours"][move.profile]
    limit = row["xla"]["held_bytes"]
    with suppress(PlanError):
        while holds_more(ours, row["xla"]):
            limited = Move(move.case, move.profile, limit)
            ours = _ours(limited)
            limit = limited.plan.peak_bytes - 1
    return ours


def _ours(move: Move) -> Row:
    return {
        "steps": [step.kind for step in move.plan.steps],
        "plan_bytes": move.plan.bytes_received,
        "plan_counts": move.counts,
        **_figures(move, move.ours, move.case.dtype),
    }


def timed(case: Case, turns: int) -> Row:
    """Both programs on the same array; to be called in a new process, which gets host devices."""
    configure(MAX_DEVICES, x64=True)
    move = Move(case, HOST)
    x = move.array()
    xla = move.xla()

    with jax.set_mesh(move.mesh):
        programs = {"ours": move.ours(), "xla": xla, "xla again": xla}
        calls = {name: lambda p=p: jax.block_until_ready(p(x)) for name, p in programs.items()}
        figures = by_turns.beside_xla(calls, turns)
    steps = [step.kind for step in move.plan.steps]
    return case.facts() | {"profile": HOST, "steps": steps, "bytes": x.nbytes} | figures


def dispatch(calls: int) -> Row:
    """Host seconds of a cached `reshard` that moves nothing, and of a plain cached `jit` of the identity."""
    mesh = jax.make_mesh(
        (2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8]
    )
    x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec("a", "b")))
    identity = jax.jit(lambda x: x)
    ways = {"reshard": lambda: xj.reshard(x, "n/a d/b -> n/a d/b"), "jit": lambda: identity(x)}
    ours, plain = by_turns.medians(ways, calls, warm_up=1, after=jax.block_until_ready).values()
    return {"reshard_s": ours, "jit_identity_s": plain, "ratio": ours / plain}


def _figures(move: Move, program: Any, dtype: str, compiles: int = COMPILES) -> Row:
    array = jax.ShapeDtypeStruct(move.case.shape, dtype, sharding=move.source)
    lower_s = []
    compile_s = []
    with jax.set_mesh(move.mesh):
        for _ in range(compiles):
            fresh = program()
            start = time.perf_counter()
            lowered = fresh.lower(array)
            between = time.perf_counter()
            executable = lowered.compile()
            lower_s.append(between - start)
            compile_s.append(time.perf_counter() - between)
    sent = tuple(collectives(executable.as_text(), move.case.mesh.n_devices))
    counts = Counter(collective.op for collective in sent)
    memory = executable.memory_analysis()
    received = sum((np.array(collective.received) for collective in sent), start=np.zeros(1, int))
    return {
        "counts": dict(sorted(counts.items())),
        "received_bytes": int(received.max()),
        "reduced_bytes": sum(max(c.received) for c in sent if c.op == "all-reduce"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "held_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes,
        "lower_s": min(lower_s),
        "compile_s": min(compile_s),
    }
