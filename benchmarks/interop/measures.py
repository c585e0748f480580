"""Times of shared arrays and of JAX called from torch, by turns with their peers; bytes copied.

A block is copied if it begins elsewhere than before.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks import by_turns
from benchmarks.claim import Row
from jax_bridge.torch_interop import from_jax, to_jax, to_torch

DEVICES = 4
COPIED_ROUNDS = 11


def hand_over(size: int, rounds: int) -> Row:
    """A block of `size` bytes per device, there and back: seconds shared and copied, and bytes copied."""
    mesh = jax.make_mesh((DEVICES,), ("dp",))
    blocks = [torch.ones(size // 4) for _ in range(DEVICES)]
    array = to_jax(blocks, "n/dp", mesh)
    seconds = by_turns.medians(
        {
            "to_jax": lambda: to_jax(blocks, "n/dp", mesh, copy=False),
            "to_torch": lambda: to_torch(array, "n/dp", copy=False),
            "jax.dlpack.from_dlpack, one block": lambda: jax.dlpack.from_dlpack(blocks[0]),
            "torch.from_dlpack, one block": lambda: torch.from_dlpack(
                array.addressable_shards[0].data
            ),
        },
        rounds,
        warm_up=1,
    )
    # Copies come last: memory that comes and goes slows down the calls beside it.
    seconds |= by_turns.medians(
        {
            "to_jax, copied": lambda: to_jax(blocks, "n/dp", mesh, copy=True),
            "to_torch, copied": lambda: to_torch(array, "n/dp", copy=True),
        },
        COPIED_ROUNDS,
        warm_up=1,
    )
    before = [block.data_ptr() for block in blocks]
    shared, copied = (to_jax(blocks, "n/dp", mesh, copy=copy) for copy in (None, True))
    back = [block.data_ptr() for block in to_torch(shared, "n/dp")]
    bytes_copied = {
        "to_jax": size * _moved(before, _pointers(shared)),
        "to_jax, copied": size * _moved(before, _pointers(copied)),
        "to_torch": size * _moved(_pointers(shared), back),
    }
    return {"block_bytes": size, "seconds": seconds, "bytes_copied": bytes_copied}


def _pointers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _moved(before: Sequence[int], after: Sequence[int]) -> int:
    """The number of blocks that begin elsewhere than before."""
    return sum(a != b for a, b in zip(before, after, strict=True))


def call(width: int, rounds: int) -> Row:
    """tanh(x @ w) of square matrices: seconds of a call from torch, and of the same under jit."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    mesh = jax.make_mesh((1,), ("dp",))
    f = from_jax(layer, "...", "...", mesh)
    x = torch.randn(width, width)
    w = torch.randn(width, width) / width
    leaf = w.clone().requires_grad_()
    cotangent = torch.ones(width, width)
    whole = jax.NamedSharding(mesh, jax.P())
    a, b, c = (jax.device_put(v.numpy(), whole) for v in (x, w, cotangent))
    plain = jax.jit(layer)
    forward = jax.jit(lambda x, w: jax.vjp(lambda w: layer(x, w), w))
    pull = jax.jit(lambda pull, c: pull(c))

    def both() -> Any:
        y, pullback = forward(a, b)
        jax.block_until_ready(y)
        return jax.block_until_ready(pull(pullback, c))

    seconds = by_turns.medians(
        {
            "forward, from torch": lambda: f(x, w),
            "forward, jit": lambda: jax.block_until_ready(plain(a, b)),
            "forward and backward, from torch": lambda: torch.autograd.grad(
                f(x, leaf), leaf, cotangent
            ),
            "forward and backward, jit": both,
        },
        rounds,
        warm_up=1,
    )
    return {"width": width, "seconds": seconds}
