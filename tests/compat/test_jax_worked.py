"""The worked examples in JAX: inside shard_map with and without types, and inside pmap, to the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_bridge.compat import credit, ksuit, nvsubquadratic, poptorch
from tests.compat.table import WORKED
from tests.jax_bridge.helpers import in_jax

AXIS = "a"
compat = SimpleNamespace(**vars(poptorch) | vars(nvsubquadratic) | vars(ksuit) | vars(credit))


def _ran(worked, mapped):
    """Results and gradients by device, the gradients taken inside."""

    def local(x, cotangent):
        y, pull = jax.vjp(lambda x: worked.jax(compat, x, AXIS), x[0])
        return y[None], pull(cotangent[0])[0][None]

    return mapped(local)(np.stack(worked.blocks), np.stack(worked.cotangents))


def _same(found, wanted) -> None:
    assert np.array_equal(np.asarray(found), np.stack(wanted))


@pytest.mark.parametrize("name", WORKED)
@in_jax
def test_worked_examples(name) -> None:
    worked = WORKED[name]
    mesh = jax.make_mesh((worked.n,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[: worked.n])
    untyped = {"mesh": mesh, "in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": False}
    ways = (
        lambda f: jax.jit(jax.shard_map(f, **untyped)),
        lambda f: jax.pmap(
            lambda x, c: [r[0] for r in f(x[None], c[None])], AXIS, devices=jax.devices()[: worked.n]
        ),
    )
    for way in ways:
        result, gradient = _ran(worked, way)
        _same(result, worked.results)
        _same(gradient, worked.gradients)
    _with_types(worked, mesh)


def _with_types(worked, mesh) -> None:
    """A value that is equal on all devices goes in and comes out as one value, with one cotangent."""

    def local(x, cotangent):
        x = x if worked.whole else x[0]
        y, pull = jax.vjp(lambda x: worked.jax(compat, x, AXIS), x)
        (gradient,) = pull(cotangent if worked.replicated else cotangent[0])
        return (y if worked.replicated else y[None]), (gradient if worked.whole else gradient[None])

    own, one = P(AXIS), P()
    specs = (one if worked.whole else own, one if worked.replicated else own)
    moved = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[1], specs[0]), check_vma=True)
    blocks = worked.blocks[0] if worked.whole else np.stack(worked.blocks)
    same = len({c.tobytes() for c in worked.cotangents}) == 1
    cotangents = worked.cotangents[0] if worked.replicated else np.stack(worked.cotangents)
    result, gradient = jax.jit(moved)(blocks, cotangents)
    _same([result] * worked.n if worked.replicated else result, worked.results)
    if worked.whole:
        addends = worked.gradients if worked.whole == "copies" else worked.gradients[:1]
        _same([gradient], [sum(addends)])
    elif same or not worked.replicated:
        _same(gradient, worked.gradients)
