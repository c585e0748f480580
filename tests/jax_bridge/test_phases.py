"""Gathers and reductions over links of two speeds: a collective per speed, with the values of one."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import xshard as xs
from jax_bridge.lower.rules import run
from jax_bridge.mesh.axis_types import as_varying
from tests.jax_bridge.domains import sharded
from tests.jax_bridge.helpers import in_jax
from xshard import reference
from xshard.steps import AllReduce

MESHES = {True: xs.Mesh(c=8), False: xs.Mesh(a=2, b=4)}
CASES = {
    "n/a/b d -> n d": ("all_gather", 2),
    "n/(b,a) d -> n d": ("all_gather", 2),
    "n d | sum(a,b) -> n/a/b d": ("reduce_scatter", 2),
    "n d | sum(a,b) -> n d/b/a": ("reduce_scatter", 2),
    "n d | max(a,b) -> n/a/b d": ("all_to_all", 1),
    "n d | sum(a,b) -> n d": ("reduce_scatter", 1),
    "n/c d -> n d": ("all_gather", 2),  # nodes end half-way along this axis
    "n d | sum(c) -> n/c d": ("reduce_scatter", 2),
    "n d | sum(c) -> n d": ("reduce_scatter", 2),
}


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("expression", CASES)
@in_jax
def test_values_by_phases(expression: str, typed: bool) -> None:
    mesh = MESHES["c" in expression]
    plan = xs.plan(expression, mesh, (16, 8), profile="gloo:4")
    whole = np.arange(128.0).reshape(16, 8)
    if plan.src.tags and not plan.dst.axes:
        plan = replace(plan, steps=(AllReduce(plan.src.axes, "sum"),))
    assert len(plan.steps) == 1
    kind, times = CASES[expression]
    assert str(plan).count("  over ") == 2
    blocks = [(whole * (7 * device + 3)) % 11 for device in range(8)]
    if not plan.src.tags:
        blocks = reference.scatter(whole, plan.src, mesh)
    move = jax.jit(sharded(lambda x: as_varying(run(plan, x), mesh.axes), mesh, check_vma=typed))
    x = np.stack(blocks).astype("float32")
    assert move.lower(x).as_text().count(f'"stablehlo.{kind}"(') == times
    assert np.array_equal(np.asarray(move(x)), np.stack(reference.run(plan, blocks)))
