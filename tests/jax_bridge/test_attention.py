"""Attention over a cut sequence in JAX, beside that of one device: orders, ways, masks; transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import padded
from tests.attention import MASKS, ORDERS, ROW, Case, Mask, one_device, problem
from tests.jax_bridge.domains import difference, sharded
from tests.jax_bridge.helpers import in_jax

ROWS = [
    ("zigzag, fewer heads of keys than devices", "ring", "vma", 2),
    ("zigzag of documents, any width of scores", "ring", "pmap", 3),
    ("blocks of any length, one of none", "gather", "vma", 2),
    ("no batch", "ulysses", "novma", 4),
    ("heads cut too, unequally", "ring", "novma", 1),
]


@pytest.mark.parametrize(("order", "how", "mode", "mask"), ROWS)
@in_jax
def test_every_order_way_and_mask_is_that_of_one_device(order, how, mode, mask) -> None:
    """Values and the gradients of queries, keys and values; what is in the padding does not count."""
    with jax.enable_x64(True):
        assert error(ORDERS[order], MASKS[mask], how, mode) < 1e-12


def error(case: Case, mask: Mask, how: str, mode: str, dtype: type = np.float64) -> float:
    given = problem(case, mask)
    x = [padded_blocks(case, x.astype(dtype), i in (1, 2), np.nan) for i, x in enumerate(given[:4])]
    if given.documents is not None:
        x.append(padded_blocks(case, given.documents, dims="bs"))

    def both(q, k, v, cotangent, *documents):
        y, pull = jax.vjp(lambda *x: attended(case, mask, how, *x, *documents), q, k, v)
        return y, *pull(cotangent)

    if mode == "pmap":
        found = jax.pmap(both, case.mesh.axes[0])(*x)
    else:
        found = jax.jit(sharded(both, case.mesh, check_vma=mode == "vma"))(*x)
    assert all(y.dtype == dtype for y in found)
    wanted = [padded_blocks(case, whole, i > 1) for i, whole in enumerate(one_device(given, mask))]
    return difference(found, wanted)


def attended(case: Case, mask: Mask, how: str, q, k, v, documents=None):
    options = {"kv_layout": case.kv_layout, "shape": case.shape, "kv_heads": case.heads[1], "how": how}
    asked = {"causal": mask.causal, "window": mask.window, "documents": documents}
    return nn.attention(q, k, v, case.layout, **options, **asked)


def padded_blocks(case: Case, x, of_keys: bool = False, fill: float = 0.0, dims: str = "bshk") -> np.ndarray:
    layout = case.block_layout(dims, of_keys)
    shape = [x.shape[dims.index(name)] for name in layout.names]
    return padded(case.blocks(x, dims, of_keys), xs.Sharding(layout, case.mesh, tuple(shape)), fill=fill)


@in_jax
def test_a_ring_and_others_under_transformations() -> None:
    """Layers in a scan, each computed again, under vmap; in float32, where JAX's own attention is used."""
    case, mask = Case(ROW, "b s/zigzag(cp) h k", (4, 4)), Mask(True)
    given = problem(case, mask)
    x = np.stack([padded_blocks(case, y) for y in (given.q, given.k)], 1)

    def model(how, x):
        layer = jax.checkpoint(lambda x, _: (x + attended(case, mask, how, x, 2 * x, x), None))
        return jax.lax.scan(layer, x, jnp.arange(2))[0]

    def gradients(how):
        loss = jax.value_and_grad(lambda x: jnp.cos(model(how, x)).sum())
        return jax.jit(sharded(jax.vmap(loss), ROW))(x)

    with jax.enable_x64(True):
        (y, found), (wanted_y, wanted) = gradients("ring"), gradients("gather")
    assert np.allclose(y, wanted_y, rtol=1e-12) and np.allclose(found, wanted, atol=1e-12)
    assert error(case, mask, "auto", "vma", np.float32) < 1e-5
    q = jnp.ones((2, 19, 3, 6))
    with pytest.raises(xs.errors.ShapeError, match="3 heads of queries, 2 of keys"):
        attended(Case(ROW, "b s h k", (3, 2)), mask, "ring", q, q[:, :, :2], q[:, :, :2])
