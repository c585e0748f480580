"""The mixers of examples/context on four devices, against plain ones on one: forward and backward, float64.

The two sides add in different orders, and an FFT is compared with sums written out. They differ by rounding,
which stays below 1e-12 of the largest value.
"""

from __future__ import annotations

import doctest
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
MESH = xs.Mesh(cp=4)
LENGTH = 24
WIDTH = 6
CUTS = ("s/zigzag(cp)", "s/cp", "s/zigzag(cp,8,16)", "s/cyclic(cp)")
# Heads of queries, of keys: groups; groups on two devices; fewer than devices; one for all.
HEADS = ((8, 4), (6, 2), (3, 3), (5, 1))
CHANNELS = (8, 5)
TOLERANCE = 1e-12


def expected_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)


def expected_convolution(x: Tensor, filters: Tensor) -> Tensor:
    """Sum by sum: y[t] = sum over j of filter[j] * x[t - j]."""
    return torch.stack(
        [(x[:, : t + 1].flip(1) * filters[:, : t + 1].T).sum(1) for t in range(x.shape[1])], dim=1
    )


def inputs(mixer: str, sizes: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """Whole arrays of a mixer's arguments, and the cotangent of its result, the same for every framework."""
    rng = np.random.default_rng(0)
    if mixer == "long_convolution":
        x = rng.normal(size=(2, LENGTH, *sizes))
        return [x, rng.normal(size=(*sizes, LENGTH))], rng.normal(size=x.shape)
    n_heads, n_kv = sizes
    shapes = [(2, LENGTH, n, WIDTH) for n in (n_heads, n_kv, n_kv)]
    return [rng.normal(size=shape) for shape in shapes], rng.normal(size=shapes[0])


CASES = [
    *(("ulysses_attention", heads, CUTS[0]) for heads in HEADS),
    ("ulysses_attention", HEADS[1], CUTS[1]),
    *(("gathered_attention", heads, cut) for heads, cut in zip(HEADS, CUTS, strict=True)),
    *(
        ("long_convolution", (channels,), cut)
        for channels, cut in zip(CHANNELS, CUTS, strict=False)
    ),
]


def on_one_device(mixer: str, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """The result and the gradients of the arguments."""
    arrays, weight = inputs(mixer, sizes)
    leaves = [torch.tensor(array, requires_grad=True) for array in arrays]
    y = (expected_convolution if mixer == "long_convolution" else expected_attention)(*leaves)
    (y * torch.tensor(weight)).sum().backward()
    return [y.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def is_close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max())


def layout_of(array: np.ndarray, cut: str) -> str:
    """Filters are one value on all devices, all else is cut along the sequence."""
    return "c s" if array.ndim == 2 else f"b {cut} ..."


def _in_torch() -> list[list[np.ndarray]]:
    sys.path.insert(0, str(EXAMPLES))
    from context import mixers_torch

    found = []
    rank = dist.get_rank()
    for mixer, sizes, cut in CASES:
        arrays, weight = inputs(mixer, sizes)

        def move(block: Tensor, expression: str, shape: tuple[int, ...]) -> Tensor:
            return xt.redistribute(block, expression, MESH, shape=shape)

        context = mixers_torch.Context(MESH, cut, LENGTH, rank, move)
        leaves = [
            torch.tensor(xs.reference.scatter(a, layout_of(a, cut), MESH)[rank], requires_grad=True)
            for a in arrays
        ]
        y = getattr(mixers_torch, mixer)(*leaves, context)
        y.backward(torch.tensor(xs.reference.scatter(weight, layout_of(weight, cut), MESH)[rank]))
        found.append([y.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)])
    return found


@pytest.fixture(scope="module")
def torch_blocks() -> list[list[list[np.ndarray]]]:
    return on_ranks(4, _in_torch)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_in_torch(case: int, torch_blocks: list[list[list[np.ndarray]]]) -> None:
    mixer, sizes, cut = CASES[case]
    for at, expected in enumerate(on_one_device(mixer, sizes)):
        blocks = [rank[case][at] for rank in torch_blocks]
        assert is_close(
            xs.reference.gather(blocks, layout_of(expected, cut), MESH, expected.shape), expected
        )


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
@in_jax
def test_in_jax(case: int) -> None:
    import jax
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import jax_bridge as xj

    sys.path.insert(0, str(EXAMPLES))
    from context import mixers_jax

    mixer, sizes, cut = CASES[case]
    arrays, weight = inputs(mixer, sizes)
    mesh = jax.make_mesh((4,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:4])
    order = np.asarray(xj.positions(cut, mesh, shape=(LENGTH,), dim=0))

    def stored(array: np.ndarray) -> np.ndarray:
        return array if array.ndim == 2 else array[:, order]

    specs = tuple(P() if array.ndim == 2 else P(None, "cp") for array in arrays)

    def local(*blocks):
        return getattr(mixers_jax, mixer)(*blocks, cut, LENGTH)

    with jax.enable_x64(True):
        mixed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "cp"))
        y, pull = jax.vjp(jax.jit(mixed), *map(stored, arrays))
        found = [y, *pull(stored(weight))]
    for ours, expected in zip(found, on_one_device(mixer, sizes), strict=True):
        assert ours.dtype == np.float64 and is_close(np.asarray(ours), stored(expected))


@pytest.fixture(scope="module")
def layouts() -> Iterator[object]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from context import layouts

        yield layouts
    finally:
        sys.path.remove(str(EXAMPLES))


def test_a_head_of_keys_is_sent_to_those_who_read_it(layouts) -> None:
    """6 heads in groups of 3: devices 0 and 1 read the first head of keys, devices 1, 2 and 3 the second."""
    shared = layouts.heads(6, 2, 4)
    reads = [
        xs.Layout.parse(str(shared.source)).positions(MESH, (2,), 0, d).tolist() for d in range(4)
    ]
    assert reads == [[0], [0, 1], [1], [1]]
    tried = doctest.testmod(layouts)
    assert tried.attempted and not tried.failed
