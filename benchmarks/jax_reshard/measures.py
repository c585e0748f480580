"""What is measured of a move: exact figures of both compiled programs, and both timed by turns."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_bridge as xj
from jax_bridge.testing.hlo import collectives
from resharding.programs import Move
from xshard import PlanError

Row = dict[str, Any]
# What plans are for: received bytes and memory are compared where bytes are planned for, run time where it is
# measured, all else as users get it.
FEWEST_BYTES, DEFAULT, HOST = "bandwidth", "h100", "host"
# Of temporary memory: tables of indices, and 64 bytes per buffer that XLA rounds up to.
SLACK_BYTES = 4096
COMPILES = 2  # of which the quicker counts: the other one was disturbed
CALLS = 2000


def compiled(moves: Sequence[Move]) -> Row:
    """A case's programs: collectives, bytes, temporary memory, seconds to compile.

    moves: the case as planned for several machines, for all of which XLA's program is the same.
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
    if move.carrier != move.case.dtype:  # moved as bits, what XLA sends is not widened
        carried = _figures(move, move.xla, move.carrier, compiles=1)
        row["xla"] |= {key: carried[key] for key in ("counts", "received_bytes")}
    for planned in moves:
        if holds_more(row["ours"][planned.profile], row["xla"]):
            row["ours"][within(planned.profile)] = _asked_to_hold(planned, row)
    return row


def _asked_to_hold(move: Move, row: Row) -> Row:
    """Our program, asked to hold what XLA's does, and less as long as it holds more and there is a plan.

    A plan counts its source until it is read, a program as long as it runs.
    """
    ours, limit = row["ours"][move.profile], row["xla"]["held_bytes"]
    with suppress(PlanError):
        while holds_more(ours, row["xla"]):
            limited = Move(move.case, move.profile, limit)
            ours = _ours(limited)
            limit = limited.plan.peak_bytes - 1
    return ours


def within(profile: str) -> str:
    """The name of what is planned for a profile and asked to hold no more than XLA."""
    return f"{profile}, holding no more than XLA"


def _ours(move: Move) -> Row:
    return {
        "steps": [step.kind for step in move.plan.steps],
        "plan_bytes": move.plan.bytes_received,
        "plan_counts": move.counts,
        **_figures(move, move.ours, move.case.dtype),
    }


def holds_more(ours: Row, xla: Row) -> bool:
    """Whether our program takes more temporary memory than XLA's."""
    return ours["temporary_bytes"] > xla["temporary_bytes"] + SLACK_BYTES


def timed(move: Move, rounds: int) -> Row:
    """Both programs on the same array, one after the other in every round; the median ratio of a round.

    noise: the same of XLA's program and XLA's program again.
    """
    x = move.array(move.case.dtype)
    xla = move.xla()
    programs = move.ours(), xla, xla
    seconds: tuple[list[float], ...] = tuple([] for _ in programs)
    with jax.set_mesh(move.mesh):
        for program in programs:
            jax.block_until_ready(program(x))
        for turn in range(rounds):
            for i in range(len(programs)):
                which = (turn + i) % len(programs)
                start = time.perf_counter()
                jax.block_until_ready(programs[which](x))
                seconds[which].append(time.perf_counter() - start)
    ours, theirs, again = seconds
    return _named(move) | {
        "bytes": x.nbytes,
        "ours_s": statistics.median(ours),
        "xla_s": statistics.median(theirs),
        "faster": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "noise": statistics.median(b / a for a, b in zip(again, theirs, strict=True)),
    }


def dispatch() -> Row:
    """Host seconds of a cached `reshard` that moves nothing, and of a plain cached `jit` of the identity."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec("a", "b")))
    identity = jax.jit(lambda x: x)
    calls = (lambda: xj.reshard(x, "n/a d/b -> n/a d/b")), (lambda: identity(x))
    seconds: tuple[list[float], list[float]] = ([], [])
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(CALLS):
        for which in (0, 1):
            start = time.perf_counter()
            result = calls[which]()
            seconds[which].append(time.perf_counter() - start)
            jax.block_until_ready(result)
    ours, plain = map(statistics.median, seconds)
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
    found = tuple(collectives(executable.as_text(), move.case.mesh.n_devices))
    counts, memory = Counter(collective.op for collective in found), executable.memory_analysis()
    received = sum((np.array(collective.received) for collective in found), start=np.zeros(1, int))
    return {
        "counts": dict(sorted(counts.items())),
        "received_bytes": int(received.max()),
        "reduced_bytes": sum(max(c.received) for c in found if c.op == "all-reduce"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "held_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        "lower_s": min(lower_s),
        "compile_s": min(compile_s),
    }
