"""The drop-ins of JAX: the worked examples to the last bit; uneven blocks, dtypes, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xshard as xs
from jax_bridge.compat import credit, ksuit, nvsubquadratic, poptorch
from tests.compat.worked import WORKED
from tests.jax_bridge.helpers import in_jax

N = 4
AXIS = "a"
OWN = P(AXIS)
ONE = P()
compat = SimpleNamespace(**vars(poptorch) | vars(nvsubquadratic) | vars(ksuit) | vars(credit))


def mapped(local, in_specs=OWN, out_specs=OWN, n=N, **options):
    mesh = jax.make_mesh((n,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:n])
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def same(found, wanted) -> None:
    assert np.array_equal(np.asarray(found), np.stack(wanted))


@pytest.mark.parametrize("name", WORKED)
@in_jax
def test_worked_examples(name) -> None:
    """Inside shard_map with and without types, and inside pmap, the gradients taken inside."""
    worked = WORKED[name]

    def local(x, cotangent):
        y, pull = jax.vjp(lambda x: worked.jax(compat, x, AXIS), x[0])
        return y[None], pull(cotangent[0])[0][None]

    def alone(x, cotangent):
        return [r[0] for r in local(x[None], cotangent[None])]

    ways = (
        jax.jit(mapped(local, n=worked.n, check_vma=False)),
        jax.pmap(alone, AXIS, devices=jax.devices()[: worked.n]),
    )
    for way in ways:
        result, gradient = way(np.stack(worked.blocks), np.stack(worked.cotangents))
        same(result, worked.results)
        same(gradient, worked.gradients)
    with_types(worked)


def with_types(worked) -> None:
    """A value that is equal on all devices goes in and comes out as one value, with one cotangent."""

    def local(x, cotangent):
        x = x if worked.whole else x[0]
        y, pull = jax.vjp(lambda x: worked.jax(compat, x, AXIS), x)
        (gradient,) = pull(cotangent if worked.replicated else cotangent[0])
        return (y if worked.replicated else y[None]), (gradient if worked.whole else gradient[None])

    specs = (ONE if worked.whole else OWN, ONE if worked.replicated else OWN)
    moved = mapped(local, specs, specs[::-1], worked.n, check_vma=True)
    blocks = worked.blocks[0] if worked.whole else np.stack(worked.blocks)
    cotangents = worked.cotangents[0] if worked.replicated else np.stack(worked.cotangents)
    result, gradient = jax.jit(moved)(blocks, cotangents)
    same([result] * worked.n if worked.replicated else result, worked.results)
    if worked.whole:
        addends = worked.gradients if worked.whole == "copies" else worked.gradients[:1]
        same([gradient], [sum(addends)])
    elif not worked.replicated or len({c.tobytes() for c in worked.cotangents}) == 1:
        same(gradient, worked.gradients)


@in_jax
def test_dtypes_stay() -> None:
    def local(x):
        x = x[0]
        whole = (compat.all_gather_nograd(x, AXIS), compat.all_reduce_sum_grad(x, AXIS))
        return *whole, compat.all_reduce_mean_nograd(x, AXIS)

    for dtype in ("bfloat16", "float32", "int32", "bool"):
        x = np.array([256, 1, 0, 1]).astype(dtype)
        gathered, total, mean = mapped(local, out_specs=ONE)(jnp.asarray(x))
        assert gathered.dtype == total.dtype == dtype and np.array_equal(gathered, x)
        if dtype == "bool":
            assert total and mean and mean.dtype == "bool"
        else:
            assert total == 258 and float(mean) == 64.5


@in_jax
def test_a_sum_is_rounded_once() -> None:
    # In bfloat16 itself 256 + 1 is 256.
    summed = mapped(lambda x: compat.all_reduce_sum_grad(x[0], AXIS), out_specs=ONE)
    assert float(summed(jnp.asarray([256, 1, 1, 1], jnp.bfloat16))) == 260


@in_jax
def test_a_python_value_is_summed() -> None:
    three = mapped(lambda x: compat.all_reduce_sum_nograd(3, AXIS) + 0 * x)
    assert three(jnp.zeros(N)).tolist() == [12] * N


@in_jax
def test_samples_come_back_in_their_order() -> None:
    samples = np.arange(12)
    dealt = np.concatenate([samples[r::N] for r in range(N)])
    clipped = mapped(lambda x: compat.all_gather_nograd_clipped(x, 10, AXIS), out_specs=ONE)
    assert np.array_equal(clipped(dealt), samples[:10])


@in_jax
def test_without_an_axis_every_block_is_the_whole() -> None:
    x = jnp.asarray([1.0, 2.0])
    for name in ("grad", "grad_autograd", "grad_overwrite", "nograd"):
        gather = getattr(compat, f"all_gather_{name}")
        assert np.array_equal(gather(x, None), x) and gather(3, None).tolist() == [3]
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

    assert not np.any(mapped(local, check_vma=False)(jnp.ones(N)))


@in_jax
def test_verbs_of_domain_parallel_models() -> None:
    x = np.arange(1.0, 21, dtype=np.float32).reshape(1, 10, 2)
    batch = {"x": x[None, :, :8], "y": 3}

    def local(rows):
        mine = compat.shard_tensor(jnp.asarray(x), axis=AXIS, uneven=True)
        shared = compat.shard_batch({**batch, "x": jnp.asarray(batch["x"])}, axis=AXIS)
        assert shared["x"].shape == (1, 1, 2, 2) and shared["y"] == 3
        wide = compat.halo_exchange(mine, (2, 1), axis=AXIS, boundary="periodic", shape=x.shape)
        assert compat.halo_exchange(mine, 0) is mine
        whole = compat.gather_tensor(mine, axis=AXIS, shape=x.shape, grad="replicated")
        return compat.trim(wide, 2, 1)[None, :, :1] + rows, whole

    first, whole = mapped(local, out_specs=(OWN, ONE))(jnp.zeros((N, 1, 1, 1)))
    assert np.array_equal(whole, x)
    assert np.array_equal(first[:, 0, 0], x[0, [0, 3, 6, 9]])


REFUSED = {
    "direction": (lambda x: compat.all_to_all_single_fn(AXIS, "full", x), "XshardError",
        "is 'full', not", "'full_to_split'"),
    "dims": (lambda x: compat.all_to_all_single_fn(AXIS, "full_to_split", x[0]), "ShapeError",
        "2 dims, not 3, 4 or 5"),
    "length": (lambda x: compat.all_to_all_single_fn(AXIS, "full_to_split", x), "ShapeError",
        "the sequence length 12 is not divisible by 8", "pass shape="),
    "channels": (lambda x: compat.all_to_all_single_fn(AXIS, "split_to_full", x), "ShapeError",
        "the number of channels 6 is not divisible by 4"),
    "parts": (lambda x: compat.all_to_all_single_cross_replica(x[0], AXIS), "ShapeError",
        "6 rows cannot be split into 4 equal parts"),
    "uneven": (lambda x: compat.shard_tensor(x, dim=1, axis=AXIS), "ShapeError",
        "the length 6 is not divisible by 4", "uneven=True"),
    "axis": (lambda x: compat.all_gather_grad(x, "b"), "NotationError", "'b'"),
    "values that differ": (lambda x: compat.all_reduce_cross_replica_sum(x, AXIS, insert_in_grad_graph=True),
        "NotationError", "the block varies along 'a'", "copy(a)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@in_jax
def test_refused_while_tracing(name) -> None:
    call, kind, *parts = REFUSED[name]
    with pytest.raises(xs.XshardError) as caught:
        jax.eval_shape(mapped(call), np.ones((N * 2, 6, 12), np.float32))
    assert type(caught.value).__name__ == kind and issubclass(type(caught.value), ValueError)
    assert all(part in str(caught.value) for part in parts)
