"""Shardy's reshard pass, as it ships in jaxlib; it runs without devices."""

import re
import time
from collections.abc import Sequence

import xshard as xs
from benchmarks.cases import Case
from benchmarks.planner.peers.base import (
    NotConvertibleError,
    PeerPlan,
    Spot,
    SubAxis,
    names_of,
    refined,
)

PASS = "builtin.module(func.func(sdy-reshard-to-collectives))"
KINDS = {
    "all_gather": "all_gather",
    "all_slice": "slice",
    "all_to_all": "all_to_all",
    "collective_permute": "permute",
}

Subs = tuple[tuple[SubAxis, ...], ...]  # per dim, the sub-axes that cut it


def find_plan(case: Case) -> PeerPlan | None:
    """Shardy's plan; None for partial sums, which the pass does not handle. Raises NotConvertibleError."""
    if case.is_partial:
        return None
    text, plan_s = _run_pass(_module(case))
    src = [tuple(map(_whole(case.mesh), dim.axes)) for dim in case.src.dims]
    operations = []
    for line in text.splitlines():
        if operation := re.search(r"= sdy\.(\w+)", line):
            operations.append((operation.group(1), _sharding(line, case.mesh)))
    steps: list[Subs] = [tuple(src), *(subs for _, subs in operations)]
    mesh, parts = refined(case.mesh, [s for subs in steps for dim in subs for s in dim])
    spots = tuple(
        Spot(tuple(tuple(n for s in dim for n in names_of(s, parts)) for dim in subs))
        for subs in steps
    )
    return PeerPlan(mesh, spots, tuple(_kind(name) for name, _ in operations), plan_s)


def _kind(name: str) -> str:
    if name not in KINDS:
        raise NotConvertibleError(f"sdy.{name} does not communicate")
    return KINDS[name]


def _run_pass(module: str) -> tuple[str, float]:
    """MLIR text -> the text after the pass, and the seconds of the pass."""
    from jax._src.interpreters import mlir as jax_mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    context = jax_mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        parsed = ir.Module.parse(module)
        passes = PassManager.parse(PASS)
        start = time.perf_counter()
        passes.run(parsed.operation)
        return str(parsed), time.perf_counter() - start


def _module(case: Case) -> str:
    mesh = ", ".join(f'"{a}"={n}' for a, n in zip(case.mesh.axes, case.mesh.sizes, strict=True))
    array = f"tensor<{'x'.join(map(str, case.shape))}xf32>"
    src, dst = (_written([dim.axes for dim in end.dims]) for end in (case.src, case.dst))
    return f"""sdy.mesh @m = <[{mesh}]>
func.func @f(%arg0 : {array} {{sdy.sharding = #sdy.sharding<@m, {src}>}}) -> {array} {{
  %0 = sdy.reshard %arg0 <@m, {dst}> : {array}
  return %0 : {array}
}}"""


def _written(cuts: Sequence[Sequence[str]]) -> str:
    return "[" + ", ".join("{" + ", ".join(f'"{a}"' for a in axes) + "}" for axes in cuts) + "]"


def _sharding(line: str, mesh: xs.Mesh) -> Subs:
    """The sharding after an operation, from its text: `[{"x", "y":(2)4}, {}]`."""
    text = re.search(r"out_sharding=<@m, \[(.*?)\](?:, [a-z].*?)?> :", line)
    if text is None:
        raise NotConvertibleError(f"no sharding in {line.strip()}")
    dims = re.findall(r"\{(.*?)\}", text.group(1))
    whole = _whole(mesh)
    return tuple(
        tuple(
            SubAxis(axis, int(outer), int(size)) if outer else whole(axis)
            for axis, outer, size in re.findall(r'"(\w+)"(?::\((\d+)\)(\d+))?', dim)
        )
        for dim in dims
    )


def _whole(mesh: xs.Mesh):
    return lambda axis: SubAxis(axis, 1, mesh.size(axis))
