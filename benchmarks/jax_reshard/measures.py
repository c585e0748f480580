"""Exact figures of both compiled programs of a move, and the times of both, by turns."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_bridge as xj
from benchmarks import by_turns
from benchmarks.cases import Case
from benchmarks.claim import Row
from benchmarks.jax_reshard.claims import HOST, holds_more, within
from benchmarks.jax_reshard.programs import Move
from jax_bridge.testing.stacked import collectives
from xshard.errors import PlanError

COMPILES = 2  # the quicker one counts: the other was disturbed


def configure(devices: int) -> None:
    """Make host devices; before JAX starts any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)  # some cases have dtype float64


def compiled(moves: Sequence[Move]) -> Row:
    """A case's programs: collectives, bytes, temporary memory, seconds to compile.

    moves: the case planned for several machines; XLA's program is the same for all.
    """
    move = moves[0]
    row = {key: value for key, value in _named(move).items() if key not in ("profile", "steps")}
    plan, mesh = move.plan, move.case.mesh
    row |= {
        "source_elements": plan.source.max_local_size,
        "target_elements": plan.target.max_local_size,
        "ended_sums": mesh.size(*(a for a in plan.src.tagged("sum") if a not in plan.dst.tagged("sum"))),
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
    ours, limit = row["ours"][move.profile], row["xla"]["held_bytes"]
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


def timed(case: Case, rounds: int) -> Row:
    """Both programs on the same array, by turns; the median ratio of a round.

    noise: the same ratio between XLA's program and itself.
    """
    move = Move(case, HOST)
    x, xla = move.array(case.dtype), move.xla()

    def call(program: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(program(x))

    with jax.set_mesh(move.mesh):
        calls = {"ours": call(move.ours()), "xla": call(xla), "xla again": call(xla)}
        ours, theirs, again = by_turns.seconds(calls, rounds, warm_up=1).values()
    return _named(move) | {
        "bytes": x.nbytes,
        "ours_s": statistics.median(ours),
        "xla_s": statistics.median(theirs),
        "faster": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "noise": statistics.median(b / a for a, b in zip(again, theirs, strict=True)),
    }


def dispatch(calls: int) -> Row:
    """Host seconds of a cached `reshard` that moves nothing, and of a plain cached `jit` of the identity."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec("a", "b")))
    identity = jax.jit(lambda x: x)
    ways = {"reshard": lambda: xj.reshard(x, "n/a d/b -> n/a d/b"), "jit": lambda: identity(x)}
    ours, plain = by_turns.medians(ways, calls, warm_up=1, after=jax.block_until_ready).values()
    return {"reshard_s": ours, "jit_identity_s": plain, "ratio": ours / plain}


def _named(move: Move) -> Row:
    case = move.case
    return {
        "case": case.name,
        "expression": f"{case.src} -> {case.dst}",
        "mesh": dict(zip(case.mesh.axes, case.mesh.sizes, strict=True)),
        "shape": case.shape,
        "dtype": case.dtype,
        "profile": move.profile,
        "steps": [step.kind for step in move.plan.steps],
    }


def _figures(move: Move, program: Any, dtype: str, compiles: int = COMPILES) -> Row:
    array = jax.ShapeDtypeStruct(move.case.shape, dtype, sharding=move.source)
    lower_s, compile_s = [], []
    with jax.set_mesh(move.mesh):
        for _ in range(compiles):
            fresh = program()
            start = time.perf_counter()
            lowered = fresh.lower(array)
            lower_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            executable = lowered.compile()
            compile_s.append(time.perf_counter() - start)
    sent = tuple(collectives(executable.as_text(), move.case.mesh.n_devices))
    counts, memory = Counter(collective.op for collective in sent), executable.memory_analysis()
    received = sum((np.array(collective.received) for collective in sent), start=np.zeros(1, int))
    return {
        "counts": dict(sorted(counts.items())),
        "received_bytes": int(received.max()),
        "reduced_bytes": sum(max(c.received) for c in sent if c.op == "all-reduce"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "held_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        "lower_s": min(lower_s),
        "compile_s": min(compile_s),
    }
