"""Suggested steps of JAX beside what XLA's partitioner makes of the same arguments without constraints.

    python -m benchmarks.suggest.gspmd          # five steps on 8 host devices
    python -m benchmarks.suggest.gspmd --quick  # one of them, small, few turns

A step is a loss with its gradients, compiled as suggested; for the same shardings of arguments and gradients,
XLA choosing all activations; for FSDP; and, for transformers with stacked layers, for tensor parallelism.
JAX's partitioner, Shardy, makes all of them, and its predecessor GSPMD the first two. Shardy's are timed by
turns where the plan is for host devices. Each has to give the value and the gradients of one device. Prints
a line for each program, and the claims, and writes a JSON file. Exit status 1 if a claim fails.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_bridge as xj
from benchmarks import by_turns, record
from benchmarks.claim import Claim, Row, finish, mean, none_of, worst
from benchmarks.einsum.xla import is_sliced
from benchmarks.jax_devices import configure
from jax_bridge.specs import to_partition_spec
from jax_bridge.testing.stacked import collectives
from tests.jax_bridge import losses
from xshard import Layout, Profile, Rules, load_profile

AXES = {"dp": 4, "tp": 2}
SUGGESTED = "suggested"
FREE = "no constraints"
FSDP = "FSDP"
TENSOR = "tensor parallel"
SIZES = {"sequence": 32, "c": 256, "heads": 8, "words": 512}
LONG = {**SIZES, "batch": 4, "sequence": 256}  # fewer sequences than devices
WIDE = Rules(  # how tensor parallelism stores what it shards
    {
        "layers.{q,k,v,up}": "n i o/tp",
        "layers.{o,down}": "n o/tp i",
        "embed": "v/tp c",
        "head": "c v/tp",
    }
)
WRONG = "programs with other values or gradients than one device"
TOLERANCE = 1e-3  # of values and gradients
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)")
KINDS = {"collective-permute": "permute"}  # as profiles name them


def equinox(**sizes: int) -> losses.Loss:
    """A loss of the arrays of a module: `jit` with shardings takes nothing else."""
    import equinox as eqx

    loss, (net, *batch) = losses.of_equinox(**sizes)
    arrays, others = eqx.partition(net, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return lambda own, x, y, key: loss(eqx.combine(own, others), x, y, key), (arrays, *batch)


scan = partial(losses.transformer, True)
CASES: dict[
    str, tuple[str, Callable[[], losses.Loss]]
] = {  # the machine that a step is planned for
    "scan over layers": ("host", partial(scan, batch=32, n=2, **SIZES)),
    "4 long sequences": ("host", partial(scan, n=2, **LONG)),
    "4 long, for h100": ("h100", partial(scan, n=2, **LONG)),
    "flax nnx": ("host", partial(losses.of_nnx, batch=32, **SIZES)),
    "equinox": ("host", partial(equinox, batch=256, width=512)),
}
QUICK: dict[str, tuple[str, Callable[[], losses.Loss]]] = {
    "scan": ("host", partial(scan, batch=16, c=64))
}


def filled(args: Any) -> Any:
    """Arrays of these shapes; numbers of words and classes are small."""
    rng = np.random.default_rng(0)

    def array(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        drawn = (
            rng.normal(0, 0.1, x.shape) if x.dtype == jnp.float32 else rng.integers(0, 6, x.shape)
        )
        return jnp.asarray(drawn, x.dtype)

    return jax.tree.map(array, args)


def by_hand(loss: Any, way: str) -> Any:
    """The specs of arguments in a way that people write: FSDP shards each parameter's longest dim."""

    def spec(name: str, sizes: Sequence[int], is_parameter: bool) -> PartitionSpec:
        if is_parameter and way == TENSOR:
            layout = WIDE.find(name)
            return to_partition_spec(Layout.parse(layout)) if layout else PartitionSpec()
        longest = sizes.index(max(sizes)) if sizes and is_parameter else 0
        fitting = (axes for axes in (("dp", "tp"), ("dp",)) if way == FSDP or axes == ("dp",))
        cuts = [
            axes
            for axes in fitting
            if sizes and sizes[longest] % math.prod(AXES[a] for a in axes) == 0
        ]
        return PartitionSpec(*[None] * longest, *cuts[:1])

    parts = enumerate(zip(loss.names, loss.arrays, strict=True))
    return loss.filled([spec(name, x.shape, i < loss.n_parameters) for i, (name, x) in parts])


def executed(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a program, and how often each runs: bodies of loops as often as XLA says."""
    parts = {
        m[2]: m for m in re.finditer(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$([\s\S]*?)^\}", text, re.M)
    }

    def lines(part: re.Match[str], times: int) -> Iterator[tuple[int, str]]:
        for line in part[3].splitlines():
            yield times, line
            rounds = TRIPS.search(line) if " while(" in line else None
            if " while(" in line and rounds is None:
                raise ValueError(f"cannot tell how often this loop runs: {line.strip()}")
            for name in CALLED.findall(line):
                yield from lines(parts[name], times * int(rounds[1] if rounds else 1))

    yield from lines(next(part for part in parts.values() if part[1]), 1)


def scattered(text: str, line: str) -> float:
    """The share of an all-reduce's elements that are read in parts alone: XLA:CPU has no reduce-scatter."""
    if " all-reduce(" not in line:
        return 0.0
    name, _, shape = line.removeprefix("  ROOT").strip().partition(" = ")
    reads = rf".* = (\S+) get-tuple-element\({re.escape(name)}\).*"
    parts = [(m[0], m[1]) for m in re.finditer(reads, text)] or [(line, shape)]
    dims = [re.findall(r"\d+", each.partition("[")[2].partition("]")[0]) for _, each in parts]
    sizes = [math.prod(map(int, each)) for each in dims]
    return sum(n for n, (read, _) in zip(sizes, parts, strict=True) if is_sliced(text, read)) / sum(
        sizes
    )


def figures(compiled: Any, profile: Profile) -> Row:
    """What a device receives in a step, and the seconds of its products and collectives by the profile."""
    text = compiled.as_text()
    counts = Counter[str]()
    link = profile.default
    received = 0.0
    as_compiled = 0
    for times, line in executed(text):
        for one in collectives(line, math.prod(AXES.values())):
            counts[one.op] += times
            as_compiled += times * max(one.received)
            received += times * max(one.received) * (1 - scattered(text, line) / 2)
    flops = compiled.cost_analysis()["flops"]
    starts = sum(
        n * profile.launch(KINDS.get(op, op).replace("-", "_")) for op, n in counts.items()
    )
    moving = starts + counts.total() * link.latency_s + received / link.bytes_per_s
    return {
        "received_bytes": int(received), "as_compiled_bytes": as_compiled, "collectives": dict(counts),
        "flops": flops, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "priced_s": flops / profile.flops("float32") + moving,
    }  # fmt: skip


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two trees, as a share of an array, or of a thousandth of the largest."""
    ours, theirs = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (ours, theirs))
    least = 1e-3 * max(np.abs(x).max() for x in theirs)
    pairs = zip(ours, theirs, strict=True)
    return float(max(np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in pairs))


def rows_of(case: str, machine: str, made: losses.Loss, rounds: int) -> list[Row]:
    """A row for each program."""
    (loss, args), profile, axes = made, load_profile(machine), tuple(AXES)
    devices = jax.devices()[: math.prod(AXES.values())]
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(AXES.values()), axes, kinds, devices=devices)
    plan = xj.suggest(loss, args, mesh, profile=profile, micro_batches=1, overlap=0.0)
    hand = (FSDP, TENSOR) if plan.tracer.stacked else (FSDP,)
    ways = {SUGGESTED: (plan.constrain(loss), plan.specs), FREE: (loss, plan.specs)}
    ways |= {way: (loss, by_hand(plan.loss, way)) for way in hand}
    arrays = filled(args)
    expected = jax.jit(jax.value_and_grad(loss))(*arrays)
    rows: list[Row] = []
    calls: dict[str, Callable[[], Any]] = {}
    for way, (f, specs) in ways.items():
        on = jax.tree.map(
            partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        placed = jax.device_put(arrays, on)
        for partitioner in (
            ("Shardy",) if way in hand else ("GSPMD", "Shardy")
        ):  # the last one stays
            jax.config.update("jax_use_shardy_partitioner", partitioner == "Shardy")
            step = jax.jit(jax.value_and_grad(f), in_shardings=on, out_shardings=(None, on[0]))
            compiled = step.lower(*args).compile()
            calls[way] = partial(
                lambda run, own: jax.block_until_ready(run(*own)), compiled, placed
            )
            row = {"case": case, "machine": machine, "way": way, "partitioner": partitioner}
            rows.append(
                row | figures(compiled, profile) | {"error": difference(calls[way](), expected)}
            )
    seconds = by_turns.medians(calls, rounds, warm_up=1) if machine == "host" else {}
    for row in rows:
        row |= {"planned_s": plan.seconds} if row["way"] == SUGGESTED else {}
        row |= (
            {"measured_s": seconds[row["way"]]}
            if seconds and row["partitioner"] == "Shardy"
            else {}
        )
    return rows


def judge(rows: Sequence[Row]) -> list[Claim]:
    """The claims, of each case and partitioner."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['case']}, {row['partitioner']}", {})[row["way"]] = row

    def ratios(key: str) -> list[tuple[str, float]]:
        pairs = [(case, ways[SUGGESTED], ways[FREE]) for case, ways in cases.items()]
        return [(case, ours[key] / theirs[key]) for case, ours, theirs in pairs if key in ours]

    received = ratios("received_bytes")
    wrong = [
        f"{r['case']}, {r['way']}, {r['partitioner']}" for r in rows if not r["error"] < TOLERANCE
    ]
    return [
        none_of(WRONG, wrong, len(rows)),
        mean("received bytes, suggested / without constraints: geometric mean", received, 0.5),
        worst("received bytes, suggested / without constraints: worst", received, 1.0),
        worst("priced seconds, suggested / without constraints: worst", ratios("priced_s"), 1.0),
        worst(
            "measured seconds, suggested / without constraints: worst", ratios("measured_s"), 1.0
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("suggest.gspmd", __doc__, quick="a small one alone").parse_args(
        arguments
    )
    configure(math.prod(AXES.values()))
    rows: list[Row] = []
    for case, (machine, make) in (QUICK if options.quick else CASES).items():
        rows += (own := rows_of(case, machine, make(), 1 if options.quick else 5))
        print("\n".join(map(in_a_line, own)), flush=True)
    return finish(options, "Steps of JAX", judge(rows), "jax", rows={"steps": rows})


def in_a_line(row: Row) -> str:
    received, compiled, held = (
        row[f"{key}_bytes"] / 2**20 for key in ("received", "as_compiled", "temporary")
    )
    took = f", measured {row['measured_s']:.3f} s" if "measured_s" in row else ""
    n = sum(row["collectives"].values())
    return (
        f"{row['case']:16} {row['partitioner']:6} {row['way']:15} {received:5.1f} MiB received, "
        f"{compiled:.1f} as compiled, in {n} collectives, {row['flops'] / 1e9:.2f} GFLOP, "
        f"{held:.1f} MiB temporary, priced {1e3 * row['priced_s']:.2f} ms{took}"
    )


if __name__ == "__main__":
    sys.exit(main())
