"""A block of a Llama in JAX through `xj.shard_map` is the one in torch, under the same layouts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jax_bridge as xj
from tests.jax_bridge.helpers import in_jax
from tests.testing import llama
from xshard.testing import EquivalenceError, assert_equivalent

GIVEN = {"args": [llama.WEIGHTS, llama.X], "layouts": llama.LAYOUTS, "mesh": "dp=2,tp=2"}


def test_the_block_is_the_same_in_torch_and_jax() -> None:
    assert_equivalent(llama.block_torch, llama.block_jax, **GIVEN, reference=llama.block_whole)


@pytest.mark.parametrize(
    ("planted", "array", "cause", "words"),
    [
        (llama.local_positions, "output['y']", "first only right", "right where tp=0"),
        (llama.detached, "w['up']", "zero", "detach"),
        (llama.loss_not_divided, "output['loss']", "summed", "a mean's 1/n is missing"),
    ],
)
def test_a_planted_mistake_is_named(planted, array, cause, words) -> None:
    with pytest.raises(EquivalenceError) as raised:
        assert_equivalent(llama.block_torch, planted, **GIVEN, reference=llama.block_whole)
    found = {m.subject.name: m.cause for m in raised.value.mismatches if m.subject.runtime == "jax"}
    assert found[array].name == cause and words in found[array].text, raised.value


@in_jax
def test_the_same_layouts_make_it_a_function_of_global_arrays() -> None:
    """Its gradients, on global arrays, are those of examples/llama_block.py."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"))
    weights = xj.place(llama.WEIGHTS, llama.STORED, mesh)
    x = xj.place(llama.X, "b/dp s/tp d", mesh)
    found = xj.shard_map(llama.block_jax, llama.LAYOUTS, mesh)(weights, x)
    expected = jax.jit(llama.block_whole)(llama.WEIGHTS, llama.X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
