"""`check_replicated` in JAX, eager and jitted, typed and untyped: unequal blocks raise, equal ones pass."""

from functools import partial
from unittest import TestCase

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.mesh.axis_types import as_varying
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard import replicas

X = np.arange(1.0, 33.0, dtype=np.float32).reshape(16, 2)
BOTH = ("dp", "tp")


def mapped(local, **options):
    """`local` on the blocks of 2 x 2 devices, four rows each."""
    mesh = device_mesh(xs.Mesh(dp=2, tp=2))
    return jax.shard_map(local, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH), **options)


def gradient(expression: str, axis: str | None, **options):
    """Of `weight * sum(y)`: with an axis, every device along it has a weight, and so a loss, of its own."""

    def local(x):
        weight = 5.0 if axis is None else 1.0 + jax.lax.axis_index(axis)
        return jax.grad(lambda x: (weight * xj.redistribute(x, expression, **options)).sum())(x)

    return local


def raised(run, *arguments) -> str:
    """The text of the error that JAX raises when the program runs, and nobody tells beside it."""
    with (
        TestCase().assertNoLogs("jax", "WARNING"),
        pytest.raises(jax.errors.JaxRuntimeError) as caught,
    ):
        jax.block_until_ready(run(*arguments))
    assert str(caught.value).count("ReplicaError") == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("axis", "devices", "jit"), [("tp", "0, 1", False), ("tp", "0, 1", True), ("dp", "0, 2", True)]
)
@in_jax
def test_the_silent_bug_is_reported(axis, devices, jit) -> None:
    wrong = f"n/{axis} d -> n d"
    right = f"n/{axis} d -> n d | copy({axis})"
    run = jax.jit if jit else lambda f: f
    silent = run(mapped(gradient(wrong, axis), check_vma=False))(X)
    assert not (np.asarray(silent) == 3).all()
    text = raised(run(mapped(gradient(wrong, axis, check_replicated=True), check_vma=False)), X)
    assert f"cotangents differ along '{axis}', where one value is meant in\n    '{wrong}'" in text
    assert "where the largest value is 2" in text and f"say so: copy({axis}) on the right" in text
    assert f"by 1 on devices {devices}" in text
    # With types JAX adds what an invariant value gets from devices that use it in ways of their own.
    cases = (right, axis, False, 3), (wrong, None, False, 5), (wrong, axis, True, 3)
    for expression, own, typed, expected in cases:
        found = run(mapped(gradient(expression, own, check_replicated=True), check_vma=typed))(X)
        assert (np.asarray(found) == expected).all()


@in_jax
def test_devices_that_differ_are_named() -> None:
    def odd_one(x):
        weight = (jax.lax.axis_index(BOTH) == 3).astype(np.float32)
        checked = partial(
            xj.redistribute, layouts="n d/tp | sum(dp) -> n d/tp", check_replicated=True
        )
        return jax.grad(lambda x: (weight * checked(x)).sum())(x)

    assert "along 'dp'" in (text := raised(jax.jit(mapped(odd_one, check_vma=False)), X))
    assert "by 1 on devices 1, 3, where the largest value is 1" in text


@in_jax
def test_under_pmap() -> None:
    over = gradient("n/p d -> n d", "p", check_replicated=True)
    assert "along 'p'" in raised(jax.pmap(over, "p", devices=jax.devices()[:4]), X.reshape(4, 4, 2))
    once = gradient("n/p d -> n d", None, check_replicated=True)
    assert (
        np.asarray(jax.pmap(once, "p", devices=jax.devices()[:4])(X.reshape(4, 4, 2))) == 5
    ).all()


@in_jax
def test_blocks_that_differ_are_told() -> None:
    def enters(expression):
        local = partial(xj.redistribute, layouts=expression, check_replicated=True)
        return jax.jit(mapped(local, check_vma=False))

    assert "blocks differ along 'tp'" in raised(enters("n d -> n/tp d"), X)
    assert "blocks differ along 'dp'" in raised(enters("n d | copy(dp) -> n d/dp"), X)
    enters("n d -> n/tp d")(np.tile(X[:4], (4, 1)))


@in_jax
def test_cotangents_of_addends_are_told() -> None:
    addends = mapped(gradient("n d -> n d | sum(tp)", "tp", check_replicated=True), check_vma=False)
    assert "reduce sum(tp) before" in raised(jax.jit(addends), np.tile(X[:4], (4, 1)))


EQUAL = [
    (np.float32, [1.0, 1.0 + 1e-6]),
    (np.float32, [np.nan, np.nan]),
    (jnp.bfloat16, [1.0, 1.0078125]),
    (np.bool_, [True, True]),
]
UNEQUAL = [
    (np.float32, [1.0, 1.001]),
    (np.float32, [np.nan, 1.0]),
    (np.float32, [np.inf, 1.0]),
    (jnp.bfloat16, [1.0, 1.25]),
    (np.complex64, [1j, 2j]),
    (np.int32, [2**30, 2**30 + 1]),
    (np.int32, [-(2**31), 0]),
    (np.uint8, [255, 0]),
    (np.bool_, [True, False]),
]


@in_jax
def test_what_counts_as_equal() -> None:
    def halved(x):
        return xj.redistribute(jnp.stack([x, x]), "n -> n/p", check_replicated=True)

    move = jax.pmap(halved, "p", devices=jax.devices()[:2])
    for dtype, values in EQUAL:
        jax.block_until_ready(move(jnp.asarray(values, dtype)))
    for dtype, values in UNEQUAL:
        assert "blocks differ along 'p'" in raised(move, jnp.asarray(values, dtype))


@in_jax
def test_types_do_not_know_who_shares_a_unit() -> None:
    """Devices differ along tp by their types, so that types leave what the check finds."""
    mesh = device_mesh(xs.Mesh(tp=4))

    def loss(x, layout, check):
        expression = f"h d -> {layout}"
        unit = xj.redistribute(x, expression, shape=(2, 3), check_replicated=check)
        return (unit * (1.0 + jax.lax.axis_index("tp"))).sum()[None]

    def gradients(layout, check=True):
        local = partial(loss, layout=layout, check=check)
        losses = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("tp"))
        return jax.grad(lambda x: losses(x).sum())(np.ones((2, 3), np.float32))

    assert gradients("h/spread(tp) d | copy(tp)").tolist() == [[3.0] * 3, [7.0] * 3]
    assert gradients("h/spread(tp) d", check=False).tolist() != [[3.0] * 3, [7.0] * 3]
    assert "cotangents differ along 'tp'" in raised(gradients, "h/spread(tp) d")


@in_jax
def test_padding_is_not_compared() -> None:
    """7 rows over 2 devices; what stands behind the last row differs along `dp`, and means nothing."""

    def local(x):
        garbage = 100.0 * jax.lax.axis_index("dp") * jnp.ones((1, 2))
        block = jnp.where(jax.lax.axis_index("tp") == 1, x.at[3].set(garbage[0]), x)
        options = {"shape": (7, 2), "check_replicated": True}
        move = partial(xj.redistribute, layouts="n/tp d | copy(dp) -> n/dp d/tp", **options)
        batch = jnp.stack([block, 2 * block], axis=1)
        return move(block) + jax.vmap(move, in_axes=1)(batch)[1]

    jax.block_until_ready(jax.jit(mapped(local, check_vma=False))(np.tile(X[:4], (4, 1))))


EVERY = [
    "n/tp d -> n d",
    "n d | sum(tp) -> n d | copy(tp)",
    "n d | copy(tp) -> n/tp d",
    "n/dp d -> n d/dp",
]


@pytest.mark.parametrize(
    ("expression", "check_vma"), [(e, i % 2 == 0) for i, e in enumerate(EVERY)]
)
@in_jax
def test_nothing_else_changes(expression, check_vma) -> None:
    """The same values and derivatives, of every mode."""

    def all_of(check):
        def local(x):
            move = partial(xj.redistribute, layouts=expression, check_replicated=check)

            def loss(x):
                return (move(x) ** 2).sum()

            y, dy = jax.jvp(move, (x,), (2 * x,))
            batch = jax.vmap(jax.grad(loss))(jnp.stack([x, 3 * x]))
            found = [y.sum(), dy.sum(), *(jnp.stack([jax.grad(loss)(x), *batch]).sum((1, 2)))]
            return jnp.stack([as_varying(f, BOTH) for f in found])

        return np.asarray(jax.jit(mapped(local, check_vma=check_vma))(np.tile(X[:4], (4, 1))))

    assert np.array_equal(all_of(True), all_of(False))


@in_jax
def test_the_environment_switches_it_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            replicas, "ALWAYS", True
        )  # as the environment variable XSHARD_CHECK_REPLICATED does
        sliced = partial(xj.ops.shard, dim=0, axis="tp", grad="replicated")
        assert "blocks differ" in raised(jax.jit(mapped(sliced, check_vma=False)), X)


@in_jax
def test_an_axis_of_vmap_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ALWAYS", True)
        sliced = partial(xj.ops.shard, dim=0, axis="tp", grad="replicated")
        with pytest.raises(xs.XshardError, match="a batch of vmap") as caught:
            jax.vmap(sliced, axis_name="tp")(X.reshape(4, 4, 2))
        assert "use jax.shard_map or jax.pmap" in str(caught.value)
