"""`einsum` in JAX: values and gradients of the table of contractions, exactly; traffic; transformations; errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.hlo import received_bytes
from jax_bridge.testing.stacked import lead, local, spec, stacked, unstacked
from tests.contractions.cases import CASES
from tests.jax_bridge.helpers import in_jax


class Case:
    """A contraction of whole numbers: blocks of the operands and of the result's cotangent, and what is right."""

    def __init__(self, mesh, lengths, expression) -> None:
        self.mesh, self.expression, self.lengths = xs.Mesh(mesh), expression, lengths
        self.plan = xs.plan(expression, self.mesh, sizes=lengths, dtype="float64", profile="bandwidth")
        given = self.plan.contraction
        self.operands = [self._sharding(layout) for layout in given.operands]
        self.result = self._sharding(given.result)
        draw = np.random.default_rng(len(expression))
        self.whole = [draw.integers(-4, 5, at.shape).astype(float) for at in (*self.operands, self.result)]
        self.given = [*self.operands, self.result.with_layout(given.result.dual)]
        self.made = [self.result, *(at.with_layout(at.layout.dual) for at in self.operands)]

    def _sharding(self, layout):
        return xs.Sharding(layout, self.mesh, tuple(self.lengths[name] for name in layout.names))

    def blocks(self):
        """Of the operands and the cotangent, in one array each."""
        return [xs.reference.scatter(x, at.layout, self.mesh) for x, at in zip(self.whole, self.given, strict=True)]

    def expected(self):
        """The result, and the gradients."""
        names = [at.layout.names for at in (*self.operands, self.result)]
        found = [_einsum(self.whole[:-1], names[:-1], names[-1], self.lengths)]
        for i in range(len(self.operands)):
            rest = [j for j in range(len(names)) if j != i]
            found.append(_einsum([self.whole[j] for j in rest], [names[j] for j in rest], names[i], self.lengths))
        return found

    def program(self, *blocks):
        """On one device: its blocks -> its block of the result, and of the gradients."""
        *operands, cotangent = blocks
        y, pull = jax.vjp(lambda *x: xj.einsum(self.expression, *x, sizes=self.lengths, profile="bandwidth"), *operands)
        return y, *pull(cotangent)


def _einsum(arrays, names, kept, lengths):
    numbers = {name: i for i, name in enumerate(lengths)}
    missing = [name for name in kept if not any(name in each for each in names)]
    arrays = [*arrays, *(np.ones(lengths[name]) for name in missing)]
    names = [*names, *([name] for name in missing)]
    pairs = [each for x, dims in zip(arrays, names, strict=True) for each in (x, [numbers[n] for n in dims])]
    return np.einsum(*pairs, [numbers[n] for n in kept])


def run(cases: Sequence[Case], check_vma: bool) -> list[list[list]]:
    """For every case the blocks of its result and of its gradients, from one program on one mesh."""
    axes = cases[0].mesh
    mesh = jax.make_mesh(axes.sizes, axes.axes, (AxisType.Auto,) * len(axes.axes), devices=jax.devices()[: axes.n_devices])

    def on_device(arrays):
        return [[lead(y, axes) for y in case.program(*(local(x, axes) for x in given))] for case, given in zip(cases, arrays, strict=True)]

    specs = [[spec(at) for at in case.given] for case in cases], [[spec(at) for at in case.made] for case in cases]
    with jax.enable_x64(True):
        arrays = [[stacked(b, at, mesh) for b, at in zip(case.blocks(), case.given, strict=True)] for case in cases]
        import time
        T=[time.process_time()]
        lowered = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=check_vma)).lower(arrays)
        T.append(time.process_time())
        compiled=lowered.compile()
        T.append(time.process_time())
        made=compiled(arrays)
        T.append(time.process_time())
        global INFO
        INFO=(np.diff(T).round(2), received_bytes(compiled.as_text(), axes.n_devices), sum(c.plan.bytes_received+c.plan.backward_bytes_received for c in cases))
        return [
            [unstacked(y, y.shape[len(axes.axes):], at, list(mesh.devices.flat)) for y, at in zip(each, case.made, strict=True)]
            for case, each in zip(cases, made, strict=True)
        ]


MESHES = {str(xs.Mesh(mesh)): mesh for _, mesh, _, _ in CASES}


@pytest.mark.parametrize("mesh", MESHES)
@in_jax
def test_values_and_gradients_of_the_table(mesh) -> None:
    named = {name: Case(m, lengths, text) for name, m, lengths, text in CASES if str(xs.Mesh(m)) == mesh}
    import time; out=[]
    t=time.process_time()
    for (name, case), found in zip(named.items(), run(list(named.values()), True), strict=True):
        for i, (blocks, at, expected) in enumerate(zip(found, case.made, case.expected(), strict=True)):
            got = xs.reference.gather(blocks, at.layout, case.mesh, at.shape)
            if not np.array_equal(got, expected): out.append(("WRONG", name, i, at.layout, (got/expected).ravel()[:4]))
    assert 0, (INFO, mesh, len(named), time.process_time()-t, out)
    assert 0
