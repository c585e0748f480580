"""Routes in JAX: the definition in numpy, gradients of two orders, with and without types, in integers."""

import random
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests import oracle_routes
from tests.jax_bridge.helpers import device_mesh, in_jax
from tests.jax_bridge.test_transports import stand_in
from xshard.routing import Groups

MESH = xs.Mesh(ep=4)


class Case:
    """Rows of 4 devices, their choices, weights, and matrices of their groups: whole numbers, from a seed."""

    def __init__(
        self, k: int, groups: int | list[int], capacity: int | None, seed: int = 0
    ) -> None:
        draw = random.Random(seed)
        rng = np.random.default_rng(seed)
        length = 5
        self.k = k
        self.groups = groups
        self.capacity = capacity
        n_groups = groups if isinstance(groups, int) else len(groups)
        low, high = draw.choice([(0, n_groups), (2, 3), (1, n_groups), (-2, 4)])
        self.to = rng.integers(low, high, (4, length, self.k))
        self.x = rng.integers(-3, 4, (4, length, 3)).astype(np.float32)
        self.w = rng.integers(-2, 3, self.to.shape).astype(np.float32)
        self.c = rng.integers(-2, 3, (4, length, 2)).astype(np.float32)
        self.parts = Groups.of(self.groups, 4)
        self.blocks = rng.integers(-2, 3, (4, max(self.parts.sizes), 3, 2)).astype(np.float32)

    def kept(self):
        """The choices of which a copy is sent: `[device, row, choice]`."""
        mask = np.zeros(self.to.shape, bool)
        for d, to in enumerate(self.to):
            sent = [0] * 4
            for i, row in enumerate(to):
                for part in range(4):
                    here = [j for j, g in enumerate(row) if g >= 0 and self.parts.parts[g] == part]
                    mask[d, i, here] = self.capacity is None or sent[part] < self.capacity
                    sent[part] += bool(here)
        return mask

    def on_one_device(self, x, to, w, blocks, kept):
        matrices = blocks[np.array(self.parts.parts), np.array(self.parts.numbers)]
        chosen = jnp.take_along_axis(
            jnp.einsum("dtc,gcf->dtgf", x, matrices), to.clip(0)[..., None], 2
        )
        return (chosen * (w * kept)[..., None]).sum(2), None

    def local(self, x, to, w, blocks, kept):
        there = xj.route(x[0], to[0], "ep", groups=self.groups, capacity=self.capacity)
        y = jax.lax.ragged_dot(there.rows, blocks[0], there.sizes)
        facts = there.rows, there.sizes, there.dropped
        return there.back(y, weights=w[0])[None], jax.tree.map(lambda a: a[None], facts)

    def routed(self, check_vma):
        specs = {"in_specs": (P("ep"),) * 5, "out_specs": (P("ep"), P("ep"))}
        return jax.shard_map(self.local, mesh=device_mesh(MESH), check_vma=check_vma, **specs)

    @property
    def arguments(self):
        return self.x, self.to, self.w, self.blocks, self.kept()


def values_and_gradients(run):
    """A function of rows, choices, weights and matrices -> results, facts, and gradients of two orders."""

    def loss(x, to, w, blocks, kept, c):
        return (run(x, to, w, blocks, kept)[0] * c).sum()

    def of_gradient(x, to, w, blocks, kept, c):
        return (jax.grad(loss, 2)(x, to, w, blocks, kept, c) * w).sum()

    def every(*arguments):
        first = jax.grad(loss, (0, 2, 3))
        second = jax.grad(of_gradient, (0, 3))
        return run(*arguments[:5]), first(*arguments), second(*arguments)

    return jax.jit(every)


PROGRAMS = [(1, 4, 2), (2, [3, 0, 0, 1, 1, 1], None), (3, 8, 2)]


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_routes_are_as_on_one_device(check_vma) -> None:
    for k, groups, capacity in PROGRAMS if check_vma else PROGRAMS[2:]:
        first = Case(k, groups, capacity)
        routed, whole = map(values_and_gradients, (first.routed(check_vma), first.on_one_device))
        for seed in range(30):
            case = Case(k, groups, capacity, seed)
            found = jax.tree.map(np.asarray, routed(*case.arguments, case.c))
            (y, (rows, sizes, dropped)), *gradients = found
            (want, _), *wanted = whole(*case.arguments, case.c)
            assert jax.tree.all(jax.tree.map(np.array_equal, (y, gradients), (want, wanted))), seed
            arrived, lost = oracle_routes.route([*case.x], [*case.to], case.parts, capacity)
            for d, each in enumerate(arrived):
                n = len(each.rows)
                assert np.array_equal(rows[d, :n], each.rows) and not rows[d, n:].any()
                assert (
                    sizes[d, : len(each.sizes)].tolist() == each.sizes.tolist()
                    and dropped[d] == lost[d]
                )


def columns(x, output, *tables, axis_name):
    """`stand_in` for rows: along the first dim."""
    one = lambda x, output: stand_in(x, output, *tables, axis_name=axis_name)  # noqa: E731
    return jax.vmap(one, 1, 1)(*(a.reshape(len(a), -1) for a in (x, output))).reshape(x.shape)


@in_jax
def test_without_padding_where_there_is_a_ragged_all_to_all() -> None:
    """On a stand-in, with what each platform is given."""
    case = Case(3, 8, 2, 1)
    with (
        mock.patch.object(lax, "platform_dependent", lambda x, cpu, default: default(x)),
        mock.patch.object(lax, "ragged_all_to_all", columns),
    ):
        y, _ = jax.jit(case.routed(False))(*case.arguments)
    assert np.array_equal(y, case.on_one_device(*case.arguments)[0])
    program = jax.grad(lambda x: case.routed(True)(x, *case.arguments[1:])[0].sum())
    for platform in ("cuda", "tpu", "cpu"):
        text = jax.jit(program).trace(case.x).lower(lowering_platforms=(platform,)).as_text()
        assert ("ragged_all_to_all" in text) == (platform != "cpu")


@in_jax
def test_under_names_of_mapped_axes() -> None:
    case = Case(2, 8, None, 3)
    want, _ = case.on_one_device(*case.arguments)
    arguments = [np.asarray(a)[:, None] for a in case.arguments]
    for run in (
        jax.pmap(case.local, "ep", devices=jax.devices()[:4]),
        jax.vmap(case.local, axis_name="ep"),
    ):
        assert np.array_equal(run(*arguments)[0][:, 0], want)


@in_jax
def test_what_is_refused() -> None:
    case = Case(2, 8, None, 3)
    for error, to, options in (
        ("MeshError: 'tp' is not manual here", case.to, {"axis": "tp"}),
        ("ShapeError: to has shape", case.to[:, 0, 0], {}),
        ("ShapeError: capacity=0", case.to, {"capacity": 0}),
    ):
        kind, _, words = error.partition(": ")
        options = {"axis": "ep"} | options
        with pytest.raises(getattr(xs.errors, kind), match=words):
            jax.vmap(lambda x, to: xj.route(x, to, **options).rows, axis_name="ep")(case.x, to)  # noqa: B023
