"""Runs equations of jaxprs on blocks: which rules over one axis are right."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_bridge.step.primitives import written
from jax_bridge.step.tracer import body_of, is_number, places
from xshard import Op
from xshard.step.op import COPY, SUM
from xshard.step.trace import Trace

N = 2  # devices on the axis
OF_RESULT, OF_OPERAND = {"shape", "new_sizes"}, {"limit_indices", "slice_sizes"}  # lengths among parameters


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, of inner jaxprs too, the innermost only."""
    for _, eqn in places(jaxpr):
        body = body_of(eqn)
        yield from [eqn] if body is None else equations(getattr(body, "jaxpr", body))


def operation(eqn: Any) -> tuple[Op, dict[str, int]]:
    """An equation as the tracer writes it, and the lengths of its dims."""
    trace, out = Trace(1), eqn.outvars[0].aval.shape
    shapes = [None if is_number(v) else v.aval.shape for v in eqn.invars]
    names = [trace.parameter(f"x{i}", shape) for i, shape in enumerate(shapes) if shape is not None]
    trace.add("y", written(eqn.primitive.name, eqn.params, shapes, out), names, out)
    return trace.ops[0], trace.lengths


def judged(eqn: Any, op: Op, lengths: dict[str, int]) -> tuple[set[str], set[str]]:
    """The rules that can be judged: stated by the operation, and right for random numbers."""
    rng = np.random.default_rng(0)
    values = [v.val if is_number(v) else _random(rng, v.aval) for v in eqn.invars]
    variables = [i for i, v in enumerate(eqn.invars) if not is_number(v)]
    runs, judged_ways = [Run(values, None, None)], list[tuple[int, ...]]()
    for ways in _candidates(op, lengths):
        *dims, end = [_dim(array, way) for array, way in zip(op.arrays, ways, strict=True)]
        operands = list(zip(variables, ways, dims, strict=False))
        if any(way == SUM and values[i].dtype.kind != "f" for i, way, _ in operands):
            continue
        noise = [rng.uniform(-1, 1, np.shape(x)).astype(np.float32) for x in values]
        judged_ways.append(ways)
        for k in range(N):
            mine = list(values)
            for i, way, dim in operands:
                if way == SUM:
                    mine[i] = values[i] - noise[i] if k else noise[i]
                elif dim is not None:
                    mine[i] = np.split(values[i], N, dim)[k]
            runs.append(Run(mine, dims[0], end))
    whole, *blocks = _results(eqn, runs)
    stated, right = {op.text_of(ways) for ways in judged_ways if ways in op.axis_rules}, set[str]()
    together = np.max if eqn.primitive.name == "reduce_max" else np.sum
    for n, ways in enumerate(judged_ways):
        own, end = blocks[n * N : (n + 1) * N], runs[1 + n * N].end
        one = np.concatenate(own, end) if end is not None else together(np.asarray(own, float), 0)
        if one.shape == whole.shape and np.allclose(one, whole, rtol=1e-5, atol=1e-6):
            right.add(op.text_of(ways))
    return stated, right


def _candidates(op: Op, lengths: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Each dim on its own, if it is the outermost part of dims of arrays; partial sums of all operands."""
    for name in dict.fromkeys(name for dims in op.dims for name in dims):
        inside = any(name in part.strip("()").split()[1:] for array in op.arrays for part in array.names)
        if lengths[name] % N == 0 and not inside:
            ways = [dims.index(name) if name in dims else COPY for dims in op.dims]
            yield (*ways[:-1], SUM if ways[-1] == COPY else ways[-1])
    yield (SUM,) * len(op.dims)


def _dim(array: Any, way: int) -> int | None:
    """The dim of an array that has a flat dim."""
    flat = [i for i, name in enumerate(array.names) for _ in name.strip("()").split()]
    return flat[way] if way >= 0 else None


class Run(NamedTuple):
    """Blocks of the operands, and which dim of the first operand and of the result is a block's."""

    values: list[Any]
    start: int | None
    end: int | None


def _results(eqn: Any, runs: list[Run]) -> list[Any]:
    """The first results of an equation: all runs in one program, as compiling it takes longest."""

    def program(given: list[list[Any]]) -> list[Any]:
        return [_result(eqn, run, arrays) for run, arrays in zip(runs, given, strict=True)]

    arrays = [[x for x, v in zip(run.values, eqn.invars, strict=True) if not is_number(v)] for run in runs]
    return list(map(np.asarray, jax.jit(program)(arrays)))


def _result(eqn: Any, run: Run, arrays: list[Any]) -> Any:
    params = {**eqn.params}
    for keys, dim, v in ((OF_OPERAND, run.start, eqn.invars[0]), (OF_RESULT, run.end, eqn.outvars[0])):
        for key in keys & params.keys():
            lengths = zip(params[key] or (), v.aval.shape, strict=False)
            params[key] = params[key] and tuple(
                n // N if i == dim and n == m else n for i, (n, m) in enumerate(lengths)
            )
    if params.get("feature_group_count", 1) > 1 and run.start == params["dimension_numbers"].lhs_spec[1]:
        params["feature_group_count"] //= N
    rest = iter(arrays)
    operands = [x if is_number(v) else next(rest) for x, v in zip(run.values, eqn.invars, strict=True)]
    results = eqn.primitive.bind(*operands, **params)
    return results[0] if eqn.primitive.multiple_results else results


def _random(rng: np.random.Generator, aval: Any) -> Any:
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        return rng.uniform(0.5, 1.5, aval.shape).astype(aval.dtype)
    return rng.integers(0, 2, aval.shape).astype(aval.dtype)
