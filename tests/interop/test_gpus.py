"""torch and JAX on one GPU: the same memory, and each inside the other.

Skipped where there is no GPU that both can use.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xshard as xs
from jax_bridge.torch_interop import from_jax, from_torch, to_jax, to_torch
from tests.interop.helpers import jax_mesh, logged, memory
from tests.interop.test_hand_over import NARROW, NOT_SHARED, WIDE, bits, random_bits
from tests.jax_bridge.helpers import on_gpu

# Tests of one device that run as well with all tensors and arrays on the GPU.
AGAIN = {
    "test_hand_over": (
        "test_a_copy_that_is_asked_for_is_one",
        "test_a_write_to_shared_memory_is_seen_unless_it_is_refused",
        "test_memory_lives_as_long_as_either_side_needs_it",
    ),
    "test_from_jax": (
        "test_gradients_and_second_derivatives_are_those_of_torch",
        "test_complex_gradients_are_torchs_conjugates",
        "test_a_graph_may_be_used_twice_if_it_is_retained",
        "test_without_gradients_nothing_is_kept",
        "test_what_is_returned_as_it_came_is_another_tensor",
        "test_trees_numbers_keys_and_whole_number_outputs",
        "test_torch_compile_calls_it_between_its_graphs",
    ),
    "test_from_torch": (
        "test_complex_gradients_are_jaxs_conjugates",
        "test_a_function_may_write_to_its_blocks",
        "test_errors_of_the_function_keep_their_message",
    ),
}


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, names in AGAIN.items() for name in names]
)
@on_gpu
def test_what_holds_on_cpus_holds_there(file, name) -> None:
    with torch.device("cuda"):
        getattr(importlib.import_module(f"tests.interop.{file}"), name).here()


@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
@on_gpu
def test_memory_is_shared_bit_by_bit(dtype) -> None:
    mesh = jax_mesh(a=1)
    with jax.enable_x64(dtype in WIDE):
        x = random_bits(dtype, 8, 16).cuda()
        array = to_jax(x, "n/a d", mesh, copy=False)
        back = to_torch(array, "n/a d", copy=False)
        assert array.devices() == {jax.devices("cuda")[0]} and back.device == x.device
        assert memory(x) == memory(array) == memory(back) and back.dtype == dtype
        assert np.asarray(array).tobytes() == bytes(bits(x.cpu()).flatten().tolist())
        copied = to_torch(to_jax(x, "n/a d", mesh, copy=True), "n/a d")
        assert memory(copied) != memory(x) and torch.equal(bits(copied), bits(x))


@pytest.mark.parametrize("why", ["strides", "conjugated", "negated"])
@on_gpu
def test_a_copy_that_cannot_be_avoided_has_a_reason(why) -> None:
    with torch.device("cuda"):
        x = NOT_SHARED[why]()
    with pytest.raises(xs.XshardError, match=why):
        to_jax(x, "...", jax_mesh(a=1), copy=False)
    with logged() as lines:
        array = to_jax(x, "...", jax_mesh(a=1))
    assert len(lines) == 1 and why in lines[0] and "is copied" in lines[0]
    assert np.array_equal(np.asarray(array), x.resolve_conj().resolve_neg().cpu().numpy())


@on_gpu
def test_a_tensor_on_the_host_stays_there() -> None:
    with pytest.raises(xs.errors.MeshError, match="the tensor is on cpu, JAX's mesh has cuda:0"):
        to_jax(torch.arange(64.0), "n/a", jax_mesh(a=1))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("a",))
    assert memory(to_jax(x := torch.arange(64.0), "n/a", mesh)) == memory(x)


@on_gpu
def test_streams_wait_for_each_other() -> None:
    """What one framework has begun is finished before the other reads it."""
    mesh = jax_mesh(a=1)
    add = jax.jit(lambda x: x + 1)
    for i in range(20):
        x = torch.zeros(2**24, device="cuda")
        for _ in range(10):
            x += i
        y = to_torch(add(to_jax(x, "n/a", mesh)), "n/a")
        assert (y * 2 == 20 * i + 2).all().item()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            z = torch.full((2**24,), float(i), device="cuda")
            found = to_jax(z, "n/a", mesh)
        assert bool((add(found) == i + 1).all())


@pytest.mark.parametrize("jitted", [False, True])
@on_gpu
def test_each_inside_the_other(jitted) -> None:
    """Values and gradients to the last bit of a product of whole numbers."""
    mesh = jax_mesh(a=1)
    jit = jax.jit if jitted else lambda f: f
    x, w = (np.random.default_rng(i).integers(-4, 5, (8, 8)).astype(np.float32) for i in range(2))
    inside = from_torch(lambda x, w: x @ w, ("n i", "i o"), "n o", mesh)
    y, pull = jax.vjp(jit(inside), jnp.array(x), jnp.array(w))
    gx, gw = pull(jnp.ones_like(y))
    leaves = [torch.from_numpy(v).cuda().requires_grad_() for v in (x, w)]
    outside = from_jax(jit(jnp.matmul), ("n i", "i o"), "n o", mesh)
    out = outside(*leaves)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert out.is_cuda and np.array_equal(y, x @ w) and np.array_equal(out.detach().cpu(), x @ w)
    ones = np.ones((8, 8), np.float32)
    for found, other, expected in zip((gx, gw), gradients, (ones @ w.T, x.T @ ones), strict=True):
        assert np.array_equal(found, expected) and np.array_equal(other.cpu(), expected)
