"""Runs operations on blocks: which rules over one axis are right."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard import Op
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY, SUM

N = 2  # devices on the axis


class Run(NamedTuple):
    """Blocks of the operands, and which dim of the first operand and of the result is a block's."""

    values: Sequence[Any]
    start: int | None
    end: int | None


def judged(
    op: Op,
    lengths: Mapping[str, int],
    values: Sequence[Any],
    results: Callable[[list[Run]], list[Any]],
    together: Any = np.sum,
) -> tuple[set[str], set[str]]:
    """The rules that can be judged: stated by the operation, and right for these values of its operands."""
    rng = np.random.default_rng(0)
    runs = [Run(values, None, None)]
    judged_ways: list[tuple[int, ...]] = []
    for ways in _candidates(op, lengths):
        *dims, end = [_dim(array, way) for array, way in zip(op.arrays, ways, strict=True)]
        if any(way == SUM and x.dtype.kind != "f" for x, way in zip(values, ways, strict=False)):
            continue
        noise = [rng.uniform(-1, 1, np.shape(x)).astype(x.dtype) for x in values]
        judged_ways.append(ways)
        for k in range(N):
            mine = list(values)
            for i, (way, dim) in enumerate(zip(ways, dims, strict=False)):
                if way == SUM:
                    mine[i] = values[i] - noise[i] if k else noise[i]
                elif dim is not None:
                    mine[i] = np.split(values[i], N, dim)[k]
            runs.append(Run(mine, dims[0], end))
    whole, *blocks = results(runs)
    stated = {op.text_of(ways) for ways in judged_ways if ways in op.axis_rules}
    right: set[str] = set()
    for n, ways in enumerate(judged_ways):
        own = blocks[n * N : (n + 1) * N]
        end = runs[1 + n * N].end
        one = np.concatenate(own, end) if end is not None else together(np.asarray(own, float), 0)
        if one.shape == whole.shape and np.allclose(one, whole, rtol=1e-5, atol=1e-6):
            right.add(op.text_of(ways))
    return stated, right


def numbers(like: Any) -> Any:
    """Random numbers of the shape and dtype of an array: 0 and 1 where it is not of floats."""
    rng = np.random.default_rng(0)
    values = (
        rng.uniform(0.5, 1.5, like.shape)
        if like.dtype.kind == "f"
        else rng.integers(0, 2, like.shape)
    )
    return values.astype(like.dtype)


def disagreeing(op: Op, stated: set[str], right: set[str]) -> tuple[set[str], set[str]]:
    """Rules that are stated and wrong, and rules that are right and missing.

    Rows of a table by number are not judged: a device has to mask the rows of others.
    """
    sums = {rule for rule in stated if op.kind == "lookup" and "sum(x)" in rule}
    missed = {rule for rule in right - stated if "sum(x) ->" not in rule and "sum(x)," not in rule}
    return stated - sums - right, missed


def _candidates(op: Op, lengths: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Each dim on its own, if it is the outermost part of dims of arrays; partial sums of all operands."""
    for name in dict.fromkeys(name for dims in op.dims for name in dims):
        inside = any(name in names_of_dim(dim)[1:] for array in op.arrays for dim in array.dims)
        if lengths[name] % N == 0 and not inside:
            ways = [dims.index(name) if name in dims else COPY for dims in op.dims]
            yield (*ways[:-1], SUM if ways[-1] == COPY else ways[-1])
    yield (SUM,) * len(op.dims)


def _dim(array: Any, way: int) -> int | None:
    """The dim of an array that has a flat dim."""
    flat = [i for i, dim in enumerate(array.dims) for _ in names_of_dim(dim)]
    return flat[way] if way >= 0 else None
