"""Moves where JAX has changed the mesh around them (vmap, axis types, manual axes), and moves of keys."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, auto_axes, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax, placed

AUTO = "Auto"
EXPLICIT = "Explicit"
X = np.arange(4 * 8 * 4, dtype=np.float32).reshape(4, 8, 4)
W = X[0] % 5 - 2


def mesh(kind: str) -> jax.sharding.Mesh:
    return device_mesh(xs.Mesh(dp=2, cp=2), kind)


def on(kind: str, *spec, x=X) -> jax.Array:
    return placed(x, mesh(kind), *spec)


def weighted(x):
    """Of one row of the batch; half the sum of squares, each with its weight."""
    return (xj.reshard(x, "s/cp c -> s c") ** 2 * W).sum() / 2


GRAD = jax.grad(weighted)
BATCHES = {
    "vmap": (jax.vmap(lambda x: xj.reshard(x, "s/cp c -> s c/cp")), X, P("dp", None, "cp")),
    "vmap of grad": (jax.vmap(GRAD), X * W, P("dp", "cp", None)),
    "grad of vmap": (jax.grad(lambda x: jax.vmap(weighted)(x).sum()), X * W, P("dp", "cp", None)),
    "vmap of jvp of grad": (
        jax.vmap(lambda x: jax.jvp(GRAD, (x,), (x,))[1]),
        X * W,
        P("dp", "cp", None),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
@in_jax
def test_a_batch_that_is_cut_over_an_explicit_axis(name) -> None:
    run, expected, spec = BATCHES[name]
    with jax.set_mesh(mesh(EXPLICIT)):
        found = jax.jit(run)(on(EXPLICIT, "dp", "cp"))
    assert np.array_equal(found, expected) and found.sharding == NamedSharding(mesh(EXPLICIT), spec)


@in_jax
def test_what_the_axes_of_a_batch_are_used_for() -> None:
    """The plan borrows `dp` for a sum, outside of vmap; an expression cannot name it inside."""
    with jax.set_mesh(mesh(EXPLICIT)):
        x = jax.reshard(X, P("dp"))

        def added(x):
            addends = xj.reshard(x, "s c -> s c | sum(cp)")
            return xj.reshard(addends, "s c | sum(cp) -> s c", profile="bandwidth")

        assert np.array_equal(jax.jit(jax.vmap(added))(x), X)
        with pytest.raises(xs.errors.MeshError, match="mesh axis 'dp' shards the batch of vmap"):
            jax.vmap(lambda x: xj.reshard(x, "s c -> s/dp c"))(x)
    spread = jax.vmap(lambda x: xj.reshard(x, "s/cp c -> s c", mesh(AUTO)), spmd_axis_name="dp")
    moved = jax.jit(spread)(on(AUTO, "dp", "cp"))
    assert np.array_equal(moved, X) and moved.sharding.is_equivalent_to(on(AUTO, "dp").sharding, 3)


@in_jax
def test_the_context_has_other_types_of_axes() -> None:
    move = "b/dp s/cp c -> b/dp s c"
    whole = P("dp", None, None)
    x = on(EXPLICIT, "dp", "cp")

    def half_of_squares(y):
        return (y**2).sum() / 2

    def within(x):
        with use_abstract_mesh(mesh(AUTO).abstract_mesh):
            return xj.reshard(x, move)

    with jax.set_mesh(mesh(EXPLICIT)):
        for given in (None, mesh(EXPLICIT)):
            inside = auto_axes(lambda x, m=given: xj.reshard(x, move, m), out_sharding=whole)
            assert np.array_equal(jax.grad(lambda x, f=inside: half_of_squares(f(x)))(x), X)
        assert np.array_equal(auto_axes(lambda: xj.reshard(x, move), out_sharding=whole)(), X)
        gradient = jax.jit(jax.grad(lambda x: half_of_squares(jax.reshard(within(x), whole))))(x)
        assert np.array_equal(gradient, X) and gradient.sharding.is_equivalent_to(x.sharding, 3)
        with pytest.raises(xs.errors.ShapeError, match="not sharded as 'b/dp s c' says"):
            jax.jit(
                lambda x: auto_axes(
                    lambda: xj.reshard(x, "b/dp s c -> b s c"), out_sharding=whole
                )()
            )(x)
    with jax.set_mesh(mesh(AUTO)):
        moved = xj.reshard(x, move)
        assert np.array_equal(moved, X) and moved.sharding.is_equivalent_to(
            on(AUTO, "dp").sharding, 3
        )
    words = r"the array is on .*\(dp=2, cp=2\), the context has .*a=2, b=2"
    other = xs.Mesh(a=2, b=2)
    with (
        jax.set_mesh(device_mesh(other, EXPLICIT)),
        pytest.raises(xs.errors.MeshError, match=words),
    ):
        xj.reshard(x, move)


@in_jax
def test_among_manual_axes() -> None:
    def mapped(local):
        return jax.shard_map(local, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})

    with jax.set_mesh(mesh(EXPLICIT)):
        x = on(EXPLICIT, "dp", "cp")
        moved = jax.jit(mapped(lambda x: xj.reshard(x, "b s/cp c -> b s c/cp")))(x)
        assert np.array_equal(moved, X) and moved.sharding.spec == P("dp", None, "cp")
        with pytest.raises(xs.errors.MeshError, match="mesh axis 'dp' is manual here"):
            jax.eval_shape(mapped(lambda x: xj.reshard(x, "b/dp s/cp c -> b s/cp c")), x)


BESIDE_EXPLICIT = [
    ("b s/cp c -> b s c", P(None, "cp"), P()),
    ("b s c | copy(cp) -> b s/cp c", P(), P(None, "cp")),
    ("b s/cp c -> b s/cp:halo(1,0,periodic) c", P(None, "cp"), P(None, "cp")),
]


@pytest.mark.parametrize(("expression", "before", "after"), BESIDE_EXPLICIT)
@in_jax
def test_blocks_that_are_cut_over_explicit_axes_besides(expression, before, after) -> None:
    """A `shard_map` over `cp` alone, where `dp` stays Explicit and cuts the blocks: as with both manual."""

    def half(local_spec):
        def local(x):
            return xj.redistribute(x, expression)

        specs = [P(local_spec, *spec[1:]) for spec in (before, after)]
        axes = {"cp"} if local_spec is None else {"dp", "cp"}
        mapped = jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], axis_names=axes)
        return jax.value_and_grad(lambda x: (mapped(x) ** 2).sum() / 2)

    with jax.set_mesh(mesh(EXPLICIT)):
        x = on(EXPLICIT, "dp", *before[1:])
        (loss, gradient), wanted = jax.jit(half(None))(x), jax.jit(half("dp"))(x)
        assert loss == wanted[0] and np.array_equal(gradient, wanted[1])
        cut = partial(xj.redistribute, layouts="b s/cp c -> b/cp s c")
        cut = jax.shard_map(cut, in_specs=P(None, "cp"), out_specs=P("cp"), axis_names={"cp"})
        words = r"dim 'b' .* also sharded over the Explicit axis 'dp'"
        with pytest.raises(xs.errors.ShapeError, match=words):
            jax.eval_shape(cut, on(EXPLICIT, "dp", "cp"))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@in_jax
def test_keys_travel(kind) -> None:
    words = np.arange(16, dtype=np.uint32).reshape(8, 2)
    with jax.set_mesh(mesh(kind)):
        keys = jax.device_put(jax.random.wrap_key_data(words), NamedSharding(mesh(kind), P("dp")))
        moved = xj.reshard({"k": keys, "w": on(kind)}, {"k": "n/dp -> n/cp", "w": "... -> ..."})[
            "k"
        ]
        assert moved.dtype == keys.dtype and moved.sharding.spec == P("cp")
        gather = partial(xj.redistribute, layouts="n/dp -> n", shape=(8,))
        gathered = jax.jit(jax.shard_map(gather, in_specs=P("dp"), out_specs=P()))(keys)
        for found in (moved, gathered):
            assert np.array_equal(jax.random.key_data(found), words)
        for wrong in ("n/dp -> n/dp:halo(1,1)", "n | sum(dp) -> n/dp"):
            with pytest.raises(xs.errors.DtypeError, match="keys are only moved"):
                xj.reshard(keys, wrong)
        with pytest.raises(
            xs.errors.DtypeError, match="the array is key<fry>, the plan is for float32"
        ):
            xj.reshard(keys, xs.plan("n/dp -> n", xs.Mesh(dp=2, cp=2), (8,)))
        xj.reshard(keys, "n/dp -> n", donate=True)
        assert keys.is_deleted()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@in_jax
def test_a_jit_learns_the_devices_from_the_mesh(kind) -> None:
    """No argument is on the mesh; an array on other devices is an error, as beside a `shard_map`."""
    reversed_mesh = jax.sharding.Mesh(
        mesh(kind).devices[::-1], mesh(kind).axis_names, axis_types=mesh(kind).axis_types
    )

    def move(x):
        return xj.reshard(x, "b/dp s/cp c -> b/cp s/dp c", reversed_mesh)

    moved = jax.jit(move)(X)
    assert np.array_equal(moved, X)
    assert moved.sharding.device_set == set(reversed_mesh.devices.flat)
    assert [shard.device for shard in moved.addressable_shards] == list(reversed_mesh.devices.flat)
    gradient = jax.jit(jax.grad(lambda x: (move(x) ** 2).sum() / 2))(X)
    assert np.array_equal(gradient, X)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(move)(on(kind, "dp", "cp"))
