"""The gradient of every collective under both conventions, against autograd on a single device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
from tests.conventions import CASES, Case, N
from tests.jax_bridge.helpers import in_jax

MODES = ("vma", "novma", "pmap")


def on_devices(local, case: Case, mode: str):
    """`local` on every device's block; the results stacked. With types one value is invariant."""
    blocks = jnp.asarray(np.stack(case.blocks()), np.float32)
    if mode == "pmap":
        return jax.pmap(local, "a", devices=jax.devices()[:N])(blocks)
    invariant = mode == "vma" and case.given == "one"
    mapped = jax.shard_map(
        lambda x: local(x if invariant else x[0])[None],
        mesh=jax.make_mesh((N,), ("a",), (AxisType.Auto,), devices=jax.devices()[:N]),
        in_specs=P() if invariant else P("a"),
        out_specs=P("a"),
        check_vma=mode == "vma",
    )
    return jax.jit(mapped)(blocks[0] if invariant else blocks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@in_jax
def test_the_gradient_is_that_of_a_single_device(name, mode) -> None:
    case = CASES[name]
    leaves = [jnp.asarray(block, np.float32) for block in case.leaves(case.blocks())]
    expected = jax.grad(lambda leaves: case.total(leaves, jnp.concatenate))(leaves)
    for move in (
        partial(xj.redistribute, layouts=case.expression),
        partial(getattr(xj.ops, case.op), axis="a", **case.options),
    ):

        def gradient(x, move=move):
            device = 0 if case.is_replicated() else jax.lax.axis_index("a").astype(np.float32)
            return jax.grad(lambda x: case.loss(x, move(x), device))(x)

        found = np.asarray(on_devices(gradient, case, mode))
        assert np.abs(found).sum() > 0
        for device in range(N):
            assert np.array_equal(found[device], expected[device % len(expected)])
