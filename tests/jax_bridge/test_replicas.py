"""`check_replicated` in JAX, eager and jitted, typed and untyped: unequal blocks raise, equal ones pass."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import in_jax
from xshard import replicas

X = np.arange(1.0, 33.0, dtype=np.float32).reshape(16, 2)
BOTH = ("dp", "tp")


def mapped(local, **options):
    """`local` on the blocks of 2 x 2 devices, four rows each."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), BOTH, kinds, devices=jax.devices()[:4])
    return jax.shard_map(local, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH), **options)


def gradient(expression: str, axis: str | None, **options):
    """Of `weight * sum(y)`: with an axis, every device along it has a weight, and so a loss, of its own."""

    def local(x):
        weight = 5.0 if axis is None else 1.0 + jax.lax.axis_index(axis)
        return jax.grad(lambda x: (weight * xj.redistribute(x, expression, **options)).sum())(x)

    return local


def raised(run, *arguments) -> str:
    """The text of the error that JAX raises when the program runs, and nobody tells beside it."""
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append
    logging.getLogger("jax").addHandler(handler)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(run(*arguments))
    finally:
        logging.getLogger("jax").removeHandler(handler)
    assert str(caught.value).count("ReplicaError") == 1 and not told
    return str(caught.value)


@pytest.mark.parametrize(
    ("axis", "devices", "jit"), [("tp", "0, 1", False), ("tp", "0, 1", True), ("dp", "0, 2", True)]
)
@in_jax
def test_the_silent_bug_is_reported(axis, devices, jit) -> None:
    wrong, right = f"n/{axis} d -> n d", f"n/{axis} d -> n d | copy({axis})"
    run = jax.jit if jit else lambda f: f
    silent = run(mapped(gradient(wrong, axis), check_vma=False))(X)
    assert not (np.asarray(silent) == 3).all()
    text = raised(run(mapped(gradient(wrong, axis, check_replicated=True), check_vma=False)), X)
    assert f"cotangents differ along '{axis}', where one value is meant in\n    '{wrong}'" in text
    assert "where the largest value is 2" in text and f"say so: copy({axis}) on the right" in text
    assert f"by 1 on devices {devices}" in text
    for expression, own, expected in ((right, axis, 3), (wrong, None, 5)):
        found = run(mapped(gradient(expression, own, check_replicated=True), check_vma=False))(X)
        assert (np.asarray(found) == expected).all()


@in_jax
def test_with_types_there_is_nothing_to_tell() -> None:
    """JAX adds what an invariant value gets from devices that use it in ways of their own."""
    for jit in (False, True):
        run = mapped(gradient("n/tp d -> n d", "tp", check_replicated=True))
        assert (np.asarray((jax.jit(run) if jit else run)(X)) == 3).all()


@in_jax
def test_which_devices_and_in_pmap() -> None:
    def odd_one(x):
        weight = (jax.lax.axis_index(BOTH) == 3).astype(np.float32)
        checked = partial(xj.redistribute, layouts="n d/tp | sum(dp) -> n d/tp", check_replicated=True)
        return jax.grad(lambda x: (weight * checked(x)).sum())(x)

    assert "along 'dp'" in (text := raised(jax.jit(mapped(odd_one, check_vma=False)), X))
    assert "by 1 on devices 1, 3, where the largest value is 1" in text
    over = gradient("n/p d -> n d", "p", check_replicated=True)
    assert "along 'p'" in raised(jax.pmap(over, "p", devices=jax.devices()[:4]), X.reshape(4, 4, 2))
    once = gradient("n/p d -> n d", None, check_replicated=True)
    assert (np.asarray(jax.pmap(once, "p", devices=jax.devices()[:4])(X.reshape(4, 4, 2))) == 5).all()


@in_jax
def test_blocks_that_go_in_and_cotangents_of_addends() -> None:
    def enters(expression):
        return jax.jit(
            mapped(lambda x: xj.redistribute(x, expression, check_replicated=True), check_vma=False)
        )

    assert "blocks differ along 'tp'" in raised(enters("n d -> n/tp d"), X)
    assert "blocks differ along 'dp'" in raised(enters("n d | copy(dp) -> n d/dp"), X)
    enters("n d -> n/tp d")(np.tile(X[:4], (4, 1)))
    addends = mapped(gradient("n d -> n d | sum(tp)", "tp", check_replicated=True), check_vma=False)
    assert "reduce sum(tp) before" in raised(jax.jit(addends), np.tile(X[:4], (4, 1)))


ODD = [
    (np.float32, [1.0, 1.0 + 1e-6], True),
    (np.float32, [1.0, 1.001], False),
    (np.float32, [np.nan, np.nan], True),
    (np.float32, [np.nan, 1.0], False),
    (np.float32, [np.inf, 1.0], False),
    (jnp.bfloat16, [1.0, 1.0078125], True),
    (jnp.bfloat16, [1.0, 1.25], False),
    (np.complex64, [1j, 2j], False),
    (np.int32, [2**30, 2**30 + 1], False),
    (np.int32, [-(2**31), 0], False),
    (np.uint8, [255, 0], False),
    (np.bool_, [True, False], False),
    (np.bool_, [True, True], True),
]


@pytest.mark.parametrize("case", range(len(ODD)), ids=str)
@in_jax
def test_what_counts_as_equal(case) -> None:
    dtype, values, equal = ODD[case]

    def halved(x):
        return xj.redistribute(jnp.stack([x, x]), "n -> n/p", check_replicated=True)

    move, x = jax.pmap(halved, "p", devices=jax.devices()[:2]), jnp.asarray(values, dtype)
    if equal:
        jax.block_until_ready(move(x))
    else:
        assert "blocks differ along 'p'" in raised(move, x)


@in_jax
def test_padding_is_not_compared() -> None:
    """7 rows over 2 devices; what stands behind the last row differs along `dp`, and means nothing."""

    def local(x):
        garbage = 100.0 * jax.lax.axis_index("dp") * jnp.ones((1, 2))
        block = jnp.where(jax.lax.axis_index("tp") == 1, x.at[3].set(garbage[0]), x)
        move = partial(
            xj.redistribute, layouts="n/tp d | copy(dp) -> n/dp d/tp", shape=(7, 2), check_replicated=True
        )
        batch = jnp.stack([block, 2 * block], axis=1)
        return move(block) + jax.vmap(move, in_axes=1)(batch)[1]

    jax.block_until_ready(jax.jit(mapped(local, check_vma=False))(np.tile(X[:4], (4, 1))))


EVERY = ["n/tp d -> n d", "n d | sum(tp) -> n d | copy(tp)", "n d | copy(tp) -> n/tp d", "n/dp d -> n d/dp"]


@pytest.mark.parametrize(("expression", "check_vma"), [(e, i % 2 == 0) for i, e in enumerate(EVERY)])
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
            return jnp.stack([jax.lax.pcast(f, a, to="varying") if (a := _lacking(f)) else f for f in found])

        return np.asarray(jax.jit(mapped(local, check_vma=check_vma))(np.tile(X[:4], (4, 1))))

    assert np.array_equal(all_of(True), all_of(False))


def _lacking(x) -> tuple[str, ...]:
    """Axes along which a value inside a typed shard_map is invariant."""
    if not jax.typeof(jax.lax.axis_index("dp")).manual_axis_type.varying:
        return ()
    return tuple(a for a in BOTH if a not in jax.typeof(x).manual_axis_type.varying)


@in_jax
def test_the_environment_switches_it_and_a_vmapped_axis_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ALWAYS", True)  # as the environment variable XSHARD_CHECK_REPLICATED does
        sliced = partial(xj.ops.shard, dim=0, axis="tp", grad="replicated")
        assert "blocks differ" in raised(jax.jit(mapped(sliced, check_vma=False)), X)
        with pytest.raises(xs.XshardError, match="a batch of vmap") as caught:
            jax.vmap(sliced, axis_name="tp")(X.reshape(4, 4, 2))
        assert "use jax.shard_map or jax.pmap" in str(caught.value)
