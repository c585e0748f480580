"""Worked examples of CREDIT: halos, and parts of an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.compat.worked import Worked, floats


def _managed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """In one domain of all processes."""

    def torch(c: Any, x: Any) -> Any:
        import torch.distributed as dist

        c.initialize_domain_parallel(dist.get_world_size(), dist.get_world_size())
        return function(c, x)

    return torch


def worked() -> Iterator[Worked]:
    blocks = floats(*(np.arange(4).reshape(4, 1) + 100 * r for r in range(2)))
    yield Worked(
        "halo of two rows",
        _managed(lambda c, x: c.HaloExchange(2)(x)),
        lambda c, x, axis: c.halo_exchange(x, 2, axis=axis),
        blocks,
        floats(
            *(np.reshape(r, (8, 1)) for r in ([0, 0, 0, 1, 2, 3, 100, 101], [2, 3, 100, 101, 102, 103, 0, 0]))
        ),
        floats(*(np.arange(8).reshape(8, 1) + 1000 * r for r in range(2))),
        floats(*(np.reshape(r, (4, 1)) for r in ([2, 3, 1004, 1006], [1008, 1010, 1004, 1005]))),
    )
    for n, counts in ((2, ([1, 2, 2, 2], [2, 2, 2, 1])), (3, ([1, 2, 2, 2], [2, 3, 3, 2], [2, 2, 2, 1]))):
        rows = np.pad(np.arange(4.0 * n), 3)
        yield Worked(
            f"halo of three rows of four, {n} ranks",
            _managed(lambda c, x: c.HaloExchange(3, dim=0)(x)),
            lambda c, x, axis: c.halo_exchange(x, 3, 0, axis),
            floats(*(np.arange(4) + 4 * r for r in range(n))),
            floats(*(rows[4 * r : 4 * r + 10] for r in range(n))),
            floats(*[np.ones(10)] * n),
            floats(*counts),
        )
    x = np.arange(8).reshape(1, 4, 2)
    yield Worked(
        "shard_tensor",
        _managed(lambda c, x: c.shard_tensor(x)),
        lambda c, x, axis: c.shard_tensor(x, axis=axis),
        floats(x, x),
        floats(x[:, :2], x[:, 2:]),
        floats(np.ones((1, 2, 2)), np.full((1, 2, 2), 5)),
        floats(np.repeat([[[1], [1], [0], [0]]], 2, 2), np.repeat([[[0], [0], [5], [5]]], 2, 2)),
        whole="copies",
    )
    yield Worked(
        "gather_tensor",
        _managed(lambda c, x: c.gather_tensor(x)),
        lambda c, x, axis: c.gather_tensor(x, axis=axis),
        floats(x[:, :2], x[:, 2:]),
        floats(x, x),
        floats(x, 10 * x),
        floats(11 * x[:, :2], 11 * x[:, 2:]),
    )
    yield Worked(
        "trim",
        lambda c, x: c.HaloExchange.trim(x, 1, 0),
        lambda c, x, axis: c.trim(x, 1, 0),
        floats(*[x] * 2),
        floats(*[x[:, 1:]] * 2),
        floats(*[x[:, 1:]] * 2),
        floats(*[x * [[[0], [1], [1], [1]]]] * 2),
    )
