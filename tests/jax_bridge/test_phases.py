"""Gathers and reductions over links of two speeds: a collective per speed, with the values of one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xshard as xs
from jax_bridge.lower.rules import run
from tests.jax_bridge.helpers import in_jax
from xshard import reference
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(a=2, b=4)
CASES = {
    "n/a/b d -> n d": ("all_gather", 2),
    "n/(b,a) d -> n d": ("all_gather", 2),
    "n d | sum(a,b) -> n/a/b d": ("reduce_scatter", 2),
    "n d | sum(a,b) -> n d/b/a": ("reduce_scatter", 2),
    "n d | max(a,b) -> n/a/b d": ("all_to_all", 1),
}


@pytest.mark.parametrize("expression", CASES)
@in_jax
def test_values_by_phases(expression: str) -> None:
    src, _ = parse_expression(expression)
    plan, whole = xs.plan(expression, MESH, (16, 8), profile="gloo:4"), np.arange(128.0).reshape(16, 8)
    assert len(plan.steps) == 1
    blocks = [(whole * (7 * device + 3)) % 11 for device in range(8)]
    if not src.tags:
        blocks = reference.scatter(whole, src, MESH)
    mesh = jax.make_mesh(MESH.sizes, MESH.axes, (AxisType.Auto,) * 2, devices=jax.devices()[:8])
    everywhere = P(MESH.axes)
    move = jax.shard_map(
        lambda x: run(plan, x[0])[None], mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    x = np.stack(blocks).astype("float32")
    kind, times = CASES[expression]
    assert jax.jit(move).lower(x).as_text().count(f'"stablehlo.{kind}"(') == times
    assert np.array_equal(np.asarray(jax.jit(move)(x)), np.stack(reference.run(plan, blocks)))
