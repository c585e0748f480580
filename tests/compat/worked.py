"""Worked examples of the systems that the drop-ins replace: what goes in and comes out, device by device.

The numbers were read off the systems' own code. Each is called as torch users and as JAX users call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Blocks = tuple[np.ndarray, ...]  # one per device
Calls = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class Worked:
    """torch: (package, block) -> result; jax: (package, block, axis) -> result. Everything else is by device.

    replicated: whether results are one value, seen on every device, so that their cotangents are too.
    whole: what equal blocks are: "copies", whose gradients are addends, or "replicas", which have one.
    """

    name: str
    torch: Callable[[Any, Any], Any]
    jax: Callable[[Any, Any, str], Any]
    blocks: Blocks
    results: Blocks
    cotangents: Blocks
    gradients: Blocks
    replicated: bool = False
    whole: str = ""

    @property
    def n(self) -> int:
        return len(self.blocks)


def floats(*values: Any) -> Blocks:
    return tuple(np.asarray(value, np.float32) for value in values)


def times(factor: float, blocks: Blocks) -> Blocks:
    return floats(*(factor * b for b in blocks))


def calls(name: str, *group: Any, **options: Any) -> Calls:
    """A function of one name in both frameworks, which takes an axis in JAX where torch takes a group."""
    return (
        lambda c, x: getattr(c, name)(x, *group, **options),
        lambda c, x, axis: getattr(c, name)(x, axis, **options),
    )


def credit() -> Iterator[Worked]:
    """Halos, and parts of an array, in one domain of all processes."""

    def managed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def torch(c: Any, x: Any) -> Any:
            import torch.distributed as dist

            c.initialize_domain_parallel(dist.get_world_size(), dist.get_world_size())
            return function(c, x)

        return torch

    def halo(*options: int) -> Calls:
        jax = lambda c, x, axis: c.halo_exchange(x, *options, axis=axis)  # noqa: E731
        return managed(lambda c, x: c.HaloExchange(*options)(x)), jax

    def parts(name: str) -> Calls:
        jax = lambda c, x, axis: getattr(c, name)(x, axis=axis)  # noqa: E731
        return managed(lambda c, x: getattr(c, name)(x)), jax

    def columns(*rows: Any) -> Blocks:
        return floats(*(np.reshape(r, (-1, 1)) for r in rows))

    wide = columns([0, 0, 0, 1, 2, 3, 100, 101], [2, 3, 100, 101, 102, 103, 0, 0])
    weights = columns(range(8), range(1000, 1008))
    gradients = columns([2, 3, 1004, 1006], [1008, 1010, 1004, 1005])
    blocks = columns(range(4), range(100, 104))
    yield Worked("halo of two rows", *halo(2), blocks, wide, weights, gradients)
    for n, counts in (
        (2, ([1, 2, 2, 2], [2, 2, 2, 1])),
        (3, ([1, 2, 2, 2], [2, 3, 3, 2], [2, 2, 2, 1])),
    ):
        rows = np.pad(np.arange(4.0 * n), 3)
        blocks, wide = (
            floats(*(rows[4 * r :][part] for r in range(n))) for part in (slice(3, 7), slice(10))
        )
        name = f"halo of three rows of four, {n} ranks"
        yield Worked(name, *halo(3, 0), blocks, wide, floats(*[np.ones(10)] * n), floats(*counts))
    x = np.arange(8).reshape(1, 4, 2)
    halves = floats(x[:, :2], x[:, 2:])
    ones = np.ones((1, 2, 2))
    added = floats(np.repeat([[[1], [1], [0], [0]]], 2, 2), np.repeat([[[0], [0], [5], [5]]], 2, 2))
    shard = parts("shard_tensor")
    gather = parts("gather_tensor")
    yield Worked(
        "shard_tensor", *shard, floats(x, x), halves, floats(ones, 5 * ones), added, whole="copies"
    )
    yield Worked(
        "gather_tensor", *gather, halves, floats(x, x), floats(x, 10 * x), times(11, halves)
    )
    trimmed = floats(*[x[:, 1:]] * 2)
    kept = floats(*[x * [[[0], [1], [1], [1]]]] * 2)
    trim = lambda c, x: c.HaloExchange.trim(x, 1, 0), lambda c, x, axis: c.trim(x, 1, 0)
    yield Worked("trim", *trim, floats(x, x), trimmed, trimmed, kept)


def ksuit() -> Iterator[Worked]:
    """Gathers and reductions, in both gradient conventions."""

    def applied(name: str, function: str) -> Calls:
        """A class, whose `apply` gives a tuple; in JAX there is the function alone."""

        def torch(c: Any, x: Any) -> Any:
            import torch

            return torch.cat(tuple(getattr(c, name).apply(x)))

        return torch, calls(function)[1]

    blocks = floats([1, 2], [2, 3])
    gathered = floats(*[[1, 2, 2, 3]] * 2)
    weights = floats([10, 11, 12, 13], [20, 21, 22, 23])
    added = floats([30, 32], [34, 36])
    own = floats([10, 11], [22, 23])
    first = "AllGatherGradAutograd"
    last = "AllGatherGradOverwrite"
    yield Worked(first, *applied(first, "all_gather_grad"), blocks, gathered, weights, added)
    for name in ("all_gather_grad", "all_gather_grad_autograd"):
        yield Worked(name, *calls(name), blocks, gathered, weights, added)
    name = "all_gather_grad_overwrite"
    for each, call in ((last, applied(last, name)), (name, calls(name))):
        yield Worked(each, *call, blocks, gathered, weights, own, replicated=True)
    yield Worked(
        "only the first of the gathered is used",
        lambda c, x: c.AllGatherGradAutograd.apply(x)[0],
        lambda c, x, axis: c.all_gather_grad(x, axis)[:2],
        *(blocks, floats([1, 2], [1, 2]), floats([1, 1], [1, 1]), floats([2, 2], [0, 0])),
    )
    yield Worked(
        "gathered along another dim",
        *calls("all_gather_grad", batch_dim=1),
        floats([[1], [2]], [[2], [3]]),
        floats(*[[[1, 2], [2, 3]]] * 2),
        floats([[10, 12], [11, 13]], [[20, 22], [21, 23]]),
        floats([[30], [32]], [[34], [36]]),
    )
    scalars = floats(3, 4), floats([3, 4], [3, 4]), floats([1, 2], [10, 20]), floats(11, 22)
    yield Worked("scalars become rows", *calls("all_gather_grad"), *scalars)
    for kind, n in (("sum", 1), ("mean", 2)):
        call = calls(f"all_reduce_{kind}_grad")
        ones = floats([1, 1], [10, 10])
        name = f"all_reduce_{kind}_grad passes its gradient"
        reduced = floats(*[[3 / n, 5 / n]] * 2)
        yield Worked(name, *call, blocks, reduced, ones, times(1 / n, ones), replicated=True)


def nvsubquadratic() -> Iterator[Worked]:
    """Sequence and channels change places; the value of a row is 100 * channel + position."""

    def turned(direction: str, zigzag: bool) -> Calls:
        jax = lambda c, x, axis: c.all_to_all_single_fn(axis, direction, x, zigzag)  # noqa: E731
        return lambda c, x: c.AllToAllSingleFunction.apply(x, None, direction, zigzag), jax

    def both(
        name: str, full: Blocks, split: Blocks, weights: Blocks, moved: Blocks, zigzag: bool = True
    ) -> Iterator[Worked]:
        """There and back, each of which is the adjoint of the other."""
        there, back = (
            turned(direction, zigzag) for direction in ("full_to_split", "split_to_full")
        )
        yield Worked(f"full_to_split, {name}", *there, full, split, weights, moved)
        yield Worked(f"split_to_full, {name}", *back, split, full, moved, weights)

    def wide(blocks: Blocks, *sizes: int) -> Blocks:
        """More spatial dims behind the sequence, of different values."""
        more = np.arange(np.prod(sizes)).reshape(sizes)
        return floats(*(b.reshape(*b.shape, *(1,) * len(sizes)) * 100 + more for b in blocks))

    def mixed(there: bool) -> Calls:
        def call(c: Any, x: Any, axis: str | None = None) -> Any:
            y = c.all_to_all_single_fn(axis, "full_to_split", x, there)
            return c.all_to_all_single_fn(axis, "split_to_full", y, with_zigzag_splitting=not there)

        return call, call

    def split(n: int, *rows: list[int]) -> Blocks:
        return floats(*(np.arange(n).reshape(1, n, 1) * 100 + r for r in rows))

    full = floats(*(np.arange(8).reshape(1, 1, 8) + 100 * r for r in range(2)))
    weights = floats(*(np.arange(8).reshape(1, 2, 4) + 1000 * r for r in range(2)))
    zigzag = split(2, [0, 1, 6, 7], [2, 3, 4, 5])
    block = split(2, [0, 1, 2, 3], [4, 5, 6, 7])
    by_channel = floats(
        [[[0, 1, 1000, 1001, 1002, 1003, 2, 3]]], [[[4, 5, 1004, 1005, 1006, 1007, 6, 7]]]
    )
    contiguous = floats(
        [[[0, 1, 2, 3, 1000, 1001, 1002, 1003]]], [[[4, 5, 6, 7, 1004, 1005, 1006, 1007]]]
    )
    yield from both("zigzag", full, zigzag, weights, by_channel)
    for name, sizes in (("2-D", (2,)), ("3-D", (2, 3))):
        yield from both(name, *(wide(b, *sizes) for b in (full, zigzag, weights, by_channel)))
    yield from both("contiguous", full, block, weights, contiguous, zigzag=False)
    # The two ways to mix flags up, which differ.
    for there, rows in ((True, [0, 1, 6, 7, 2, 3, 4, 5]), (False, [0, 1, 4, 5, 6, 7, 2, 3])):
        results = floats(*([[[100 * r + row for row in rows]]] for r in range(2)))
        gradients = floats(*(f[..., np.argsort(rows)] for f in full))
        yield Worked(
            f"zigzag {there}, then {not there}", *mixed(there), full, results, full, gradients
        )
    full = floats(*(np.arange(16).reshape(1, 1, 16) + 100 * r for r in range(4)))
    zigzag = split(4, [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9])
    yield from both("four ranks", full, zigzag, zigzag, full)
    # The chunks of each of 1, 2, 3 and 4 ranks.
    for chunks in (
        [(0, 1)],
        [(0, 3), (1, 2)],
        [(0, 5), (1, 4), (2, 3)],
        [(0, 7), (1, 6), (2, 5), (3, 4)],
    ):
        n = len(chunks)
        rows = np.arange(4 * n).reshape(2 * n, 2)
        mine = floats(
            *(np.concatenate([rows[first], rows[second]])[None] for first, second in chunks)
        )
        whole = floats(*[rows.reshape(1, -1)] * n)
        places = np.zeros((n, 1, 4 * n), np.float32)
        for r, (first, second) in enumerate(chunks):
            places[r, 0, [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]] = mine[r][0]
        cut = calls("zigzag_split_across_group_ranks", None, seq_dim=1)
        yield Worked(
            f"zigzag split, {n} ranks", *cut, whole, mine, mine, floats(*places), whole="copies"
        )
        joined = calls("zigzag_gather_from_group_ranks", None, seq_dim=1)
        cotangents = floats(*((r + 1) * w for r, w in enumerate(whole)))
        gradients = floats(*(n * (n + 1) // 2 * m for m in mine))
        yield Worked(f"zigzag gather, {n} ranks", *joined, mine, whole, cotangents, gradients)


def poptorch() -> Iterator[Worked]:
    """As in the system's own tests: 32 numbers over two replicas, the loss of each the sum of squares."""

    x = np.arange(32).reshape(8, 4).T
    blocks = floats(x[:2], x[2:])
    gathered = floats(*[x.reshape(2, 2, 8)] * 2)
    total = floats(*[x[:2] + x[2:]] * 2)
    turned = floats(x[[0, 2]], x[[1, 3]])
    name = "all_gather_cross_replica"  # the gradient is of the sum of both replicas' losses
    yield Worked(name, *calls(name, 2), blocks, gathered, times(2, gathered), times(4, blocks))
    name = "all_gather_cross_replica_identical_grads_in"
    ends = times(2, gathered), times(2, blocks)
    yield Worked(name, *calls(name, 2), blocks, gathered, *ends, replicated=True)
    name = "all_reduce_cross_replica_sum"  # of one loss that both replicas see
    yield Worked(
        name, *calls(name, 2), blocks, total, times(2, total), times(2, total), replicated=True
    )
    copied = calls(name, 2, insert_in_grad_graph=True)
    ends = floats(x, x), floats(x, x), floats(x, 10 * x), floats(11 * x, 11 * x)
    yield Worked(f"{name} in the graph of gradients", *copied, *ends, whole="replicas")
    name = "all_to_all_single_cross_replica"
    yield Worked(name, *calls(name, 2), blocks, turned, times(2, turned), times(2, blocks))


SYSTEM_OF = {w.name: f.__name__ for f in (nvsubquadratic, ksuit, credit, poptorch) for w in f()}
WORKED = {w.name: w for system in (nvsubquadratic, ksuit, credit, poptorch) for w in system()}
