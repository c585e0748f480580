"""Both gradient conventions of every collective on a single device, as one table.

A convention is a loss. If a collective's result is n copies, every device has a loss of its own, and
the loss is their sum; if it is one replicated value, there is one loss. `devices` writes the collective
down for the blocks of all devices on one, so that autograd there says what its gradient is. Ours must be
that, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

N = 4
ROWS = 8
COLUMNS = 3
WHOLE = (ROWS, COLUMNS)
PART = (ROWS // N, COLUMNS)

Concatenate = Callable[[Sequence[Any]], Any]


def own_loss(x: Any, y: Any, device: Any) -> Any:
    """Of a result, for every device another; whole where the result is."""
    return (device + 1) * (y * y).sum() + (device * device * y).sum()


def contrastive_loss(x: Any, y: Any, device: Any) -> Any:
    """A device's own rows against all rows: uses the gathered rows, and the block itself."""
    return (device + 1) * ((x @ y.T) ** 2).sum()


class Case(NamedTuple):
    """A collective under one convention.

    op, options: its name in both bridges; axis and mesh are added. expression: its meaning.
    shape: a device's block. given: the devices' blocks are their "own", equal "copies", or "one" value.
    devices: the blocks (of "one" value a single one), and what concatenates rows -> the results: one for
    each device, or a single one where it is replicated.
    loss: (a device's block, its result, its number) -> what it adds to the loss.
    """

    op: str
    options: dict[str, Any]
    expression: str
    shape: tuple[int, int]
    given: str
    devices: Callable[[list[Any], Concatenate], list[Any]]
    loss: Callable[[Any, Any, Any], Any] = own_loss

    def blocks(self) -> list[np.ndarray]:
        """Whole numbers, one block for each device."""
        count = np.arange(np.prod(self.shape)).reshape(self.shape) * 3
        return [(count + 5 * d * (self.given == "own")) % 11 - 4.0 for d in range(N)]

    def leaves(self, blocks: list[Any]) -> list[Any]:
        """The blocks that a single device has."""
        return blocks[:1] if self.given == "one" else blocks

    def total(self, leaves: list[Any], cat: Concatenate) -> Any:
        """The loss, on a single device."""
        results = self.devices(leaves, cat)
        return sum(self.loss(leaves[d % len(leaves)], y, d) for d, y in enumerate(results))

    def is_replicated(self) -> bool:
        """True if the result is one value; every device computes the loss of device 0."""
        return len(self.devices(self.leaves(self.blocks()), np.concatenate)) == 1


def _part(x: Any, device: int) -> Any:
    rows = ROWS // N
    return x[rows * device : rows * (device + 1)]


SUM = {"grad": "sum"}
REPLICATED = {"grad": "replicated"}
DIM = {"dim": 0}

# fmt: off
CASES = {
    "all_gather, sum": Case("all_gather", DIM | SUM, "n/a d -> n d | copy(a)", PART, "own", lambda x,
        cat: [cat(x)] * N),
    "all_gather, replicated": Case("all_gather", DIM | REPLICATED, "n/a d -> n d", PART, "own", lambda x,
        cat: [cat(x)]),
    "gather then loss, sum": Case("all_gather", DIM | SUM, "n/a d -> n d | copy(a)", PART, "own", lambda x,
        cat: [cat(x)] * N, contrastive_loss),
    "gather then loss, replicated": Case("all_gather", DIM | REPLICATED, "n/a d -> n d", PART, "own",
        lambda x, cat: [cat(x)], lambda x, y, device: contrastive_loss(y, y, device)),
    "all_reduce, sum": Case("all_reduce", SUM, "n d | sum(a) -> n d | copy(a)", WHOLE, "own", lambda x,
        cat: [sum(x)] * N),
    "all_reduce, replicated": Case("all_reduce", REPLICATED, "n d | sum(a) -> n d", WHOLE, "own", lambda x,
        cat: [sum(x)]),
    "mean, sum": Case("all_reduce", {"op": "mean"} | SUM, "n d | mean(a) -> n d | copy(a)", WHOLE, "own",
        lambda x, cat: [sum(x) / N] * N),
    "mean, replicated": Case("all_reduce", {"op": "mean"} | REPLICATED, "n d | mean(a) -> n d", WHOLE, "own",
        lambda x, cat: [sum(x) / N]),
    "reduce_scatter": Case("reduce_scatter", DIM, "n d | sum(a) -> n/a d", WHOLE, "own", lambda x,
        cat: [_part(sum(x), d) for d in range(N)]),
    "slice, sum": Case("shard", DIM | SUM, "n d | copy(a) -> n/a d", WHOLE, "copies", lambda x,
        cat: [_part(x[d], d) for d in range(N)]),
    "slice, replicated": Case("shard", DIM | REPLICATED, "n d -> n/a d", WHOLE, "one", lambda x,
        cat: [_part(x[0], d) for d in range(N)]),
    "copy_to": Case("copy_to", {}, "n d -> n d | copy(a)", WHOLE, "one", lambda x, cat: x * N),
    "all_to_all": Case("all_to_all", {"split_dim": 1, "concat_dim": 0}, "n/a d -> n d/a", (ROWS // N, N),
        "own", lambda x, cat: [cat([block[:, d : d + 1] for block in x]) for d in range(N)]),
}
# fmt: on
