"""The drop-ins of JAX beyond the worked numbers: uneven blocks, dtypes, derivatives, what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xshard as xs
from tests.compat.test_jax_worked import compat
from tests.jax_bridge.helpers import in_jax

N = 4
AXIS = "a"


OWN = P(AXIS)


def mapped(local, in_specs=OWN, out_specs=OWN, **options):
    mesh = jax.make_mesh((N,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:N])
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def numbers(*shape) -> np.ndarray:
    return np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@in_jax
def test_dtypes_and_python_values() -> None:
    def local(x):
        x = x[0]
        whole = (compat.all_gather_nograd(x, AXIS), compat.all_reduce_sum_grad(x, AXIS))
        return *whole, compat.all_reduce_mean_nograd(x, AXIS)

    for dtype in ("bfloat16", "float32", "int32", "bool"):
        x = np.array([256, 1, 0, 1]).astype(dtype)
        gathered, total, mean = mapped(local, out_specs=P())(jnp.asarray(x))
        assert gathered.dtype == total.dtype == dtype
        assert np.array_equal(gathered, x)
        if dtype == "bool":
            assert total and mean and mean.dtype == "bool"
        else:
            assert total == 258 and float(mean) == 64.5
    # In bfloat16 itself 256 + 1 is 256.
    summed = mapped(lambda x: compat.all_reduce_sum_grad(x[0], AXIS), out_specs=P())
    assert float(summed(jnp.asarray([256, 1, 1, 1], jnp.bfloat16))) == 260
    three = mapped(lambda x: compat.all_reduce_sum_nograd(3, AXIS) + 0 * x, out_specs=P(AXIS))
    assert three(jnp.zeros(N)).tolist() == [12] * N


@in_jax
def test_samples_come_back_in_their_order() -> None:
    samples = np.arange(12)
    dealt = np.concatenate([samples[r::N] for r in range(N)])
    clipped = mapped(lambda x: compat.all_gather_nograd_clipped(x, 10, AXIS), out_specs=P())
    assert np.array_equal(clipped(dealt), samples[:10])


@in_jax
def test_without_an_axis_every_block_is_the_whole() -> None:
    x = jnp.asarray([1.0, 2.0])
    for name in (
        "all_gather_grad",
        "all_gather_grad_autograd",
        "all_gather_grad_overwrite",
        "all_gather_nograd",
    ):
        assert np.array_equal(getattr(compat, name)(x, None), x)
        assert getattr(compat, name)(3, None).tolist() == [3]
    assert np.array_equal(compat.all_gather_nograd_clipped(x, 1, None), x)
    for name in ("sum_grad", "sum_nograd", "mean_grad", "mean_nograd"):
        reduce = getattr(compat, f"all_reduce_{name}")
        assert np.array_equal(reduce(x, None), x)
        gradient = jax.grad(lambda x, reduce=reduce: reduce(x, None).sum())(x)
        assert gradient.tolist() == ([1, 1] if name.endswith("_grad") else [0, 0])


@in_jax
def test_no_gradient_where_the_name_says_so() -> None:
    def local(x):
        calls = (
            lambda x: compat.all_gather_nograd(x, AXIS),
            lambda x: compat.all_gather_nograd_clipped(x, 3, AXIS),
            lambda x: compat.all_reduce_sum_nograd(x, AXIS),
            lambda x: compat.all_reduce_mean_nograd(x, AXIS),
        )
        return [jax.grad(lambda x, call=call: call(x).sum())(x) for call in calls]

    for gradient in mapped(local, check_vma=False)(jnp.ones(N)):
        assert not np.any(gradient)


@in_jax
def test_parts_and_halos() -> None:
    x = numbers(1, 10, 2)
    batch = {"x": x[None, :, :8], "y": 3}

    def local(rows):
        mine = compat.shard_tensor(jnp.asarray(x), axis=AXIS, uneven=True)
        shared = compat.shard_batch({**batch, "x": jnp.asarray(batch["x"])}, axis=AXIS)
        assert shared["x"].shape == (1, 1, 2, 2) and shared["y"] == 3
        wide = compat.halo_exchange(mine, (2, 1), axis=AXIS, boundary="periodic", shape=x.shape)
        assert compat.halo_exchange(mine, 0) is mine
        whole = compat.gather_tensor(mine, axis=AXIS, shape=x.shape, grad="replicated")
        return compat.trim(wide, 2, 1)[None, :, :1] + rows, whole

    first, whole = mapped(local, out_specs=(P(AXIS), P()))(jnp.zeros((N, 1, 1, 1)))
    assert np.array_equal(whole, x)
    assert np.array_equal(first[:, 0, 0], x[0, [0, 3, 6, 9]])


REFUSED = {
    "direction": (
        lambda x: compat.all_to_all_single_fn(AXIS, "full", x),
        "XshardError",
        ("unknown direction 'full'", "'full_to_split'"),
    ),
    "dims": (
        lambda x: compat.all_to_all_single_fn(AXIS, "full_to_split", x[0]),
        "ShapeError",
        ("2 dims, not 3, 4 or 5",),
    ),
    "length": (
        lambda x: compat.all_to_all_single_fn(AXIS, "full_to_split", x),
        "ShapeError",
        ("the sequence length 12 is not divisible by 8", "pass shape="),
    ),
    "channels": (
        lambda x: compat.all_to_all_single_fn(AXIS, "split_to_full", x),
        "ShapeError",
        ("the number of channels 6 is not divisible by 4",),
    ),
    "parts": (
        lambda x: compat.all_to_all_single_cross_replica(x[0], AXIS),
        "ShapeError",
        ("6 rows cannot be split into 4 equal parts",),
    ),
    "uneven": (
        lambda x: compat.shard_tensor(x, dim=1, axis=AXIS),
        "ShapeError",
        ("the length 6 is not divisible by 4", "uneven=True"),
    ),
    "axis": (lambda x: compat.all_gather_grad(x, "b"), "NotationError", ("'b'",)),
    "values that differ": (
        lambda x: compat.all_reduce_cross_replica_sum(x, AXIS, insert_in_grad_graph=True),
        "NotationError",
        ("the block varies along 'a'", "copy(a)"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@in_jax
def test_refused_while_tracing(name) -> None:
    call, kind, parts = REFUSED[name]
    with pytest.raises(xs.XshardError) as caught:
        jax.eval_shape(mapped(call), np.ones((N * 2, 6, 12), np.float32))
    assert type(caught.value).__name__ == kind and issubclass(type(caught.value), ValueError)
    for part in parts:
        assert part in str(caught.value)
