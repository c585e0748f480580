"""Worked examples of poptorch_experimental_addons: collectives across replicas."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.compat.worked import Worked, floats


def worked() -> Iterator[Worked]:
    """As in the system's own tests: 32 numbers over two replicas, the loss of each the sum of squares."""
    x = np.arange(32).reshape(8, 4).T
    blocks = floats(x[:2], x[2:])
    gathered = floats(*[x.reshape(2, 2, 8)] * 2)
    total = floats(*[x[:2] + x[2:]] * 2)
    turned = floats(x[[0, 2]], x[[1, 3]])
    yield Worked(
        "all_gather_cross_replica",
        lambda c, x: c.all_gather_cross_replica(x, 2),
        lambda c, x, axis: c.all_gather_cross_replica(x, axis),
        blocks,
        gathered,
        floats(*(2 * y for y in gathered)),
        floats(*(4 * b for b in blocks)),  # of the sum of both replicas' losses
    )
    yield Worked(
        "all_gather_cross_replica_identical_grads_in",
        lambda c, x: c.all_gather_cross_replica_identical_grads_in(x, 2),
        lambda c, x, axis: c.all_gather_cross_replica_identical_grads_in(x, axis),
        blocks,
        gathered,
        floats(*(2 * y for y in gathered)),
        floats(*(2 * b for b in blocks)),
        replicated=True,
    )
    yield Worked(
        "all_reduce_cross_replica_sum",
        lambda c, x: c.all_reduce_cross_replica_sum(x, 2),
        lambda c, x, axis: c.all_reduce_cross_replica_sum(x, axis),
        blocks,
        total,
        floats(*(2 * y for y in total)),
        floats(*(2 * y for y in total)),  # of one loss that both replicas see
        replicated=True,
    )
    yield Worked(
        "all_reduce_cross_replica_sum in the graph of gradients",
        lambda c, x: c.all_reduce_cross_replica_sum(x, 2, insert_in_grad_graph=True),
        lambda c, x, axis: c.all_reduce_cross_replica_sum(x, axis, insert_in_grad_graph=True),
        floats(x, x),
        floats(x, x),
        floats(x, 10 * x),
        floats(11 * x, 11 * x),
        whole="replicas",
    )
    yield Worked(
        "all_to_all_single_cross_replica",
        lambda c, x: c.all_to_all_single_cross_replica(x, 2),
        lambda c, x, axis: c.all_to_all_single_cross_replica(x, axis),
        blocks,
        turned,
        floats(*(2 * y for y in turned)),
        floats(*(2 * b for b in blocks)),
    )
