"""Equations of jaxprs, to run on blocks."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_bridge.step.primitives import describe_primitive
from jax_bridge.step.tracer import body_of, is_literal, places
from tests.step import prober
from tests.step.prober import N, Run
from xshard import Op
from xshard.step.record.trace import Trace

OF_RESULT = {"shape", "new_sizes"}
OF_OPERAND = {"limit_indices", "slice_sizes"}  # lengths among parameters


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, of inner jaxprs too, the innermost only."""
    for _, eqn in places(jaxpr):
        body = body_of(eqn)
        yield from [eqn] if body is None else equations(getattr(body, "jaxpr", body))


def operation(eqn: Any) -> tuple[Op, dict[str, int]]:
    """An equation as the tracer writes it, and the lengths of its dims."""
    trace = Trace(1)
    out = eqn.outvars[0].aval.shape
    shapes = [None if is_literal(v) else v.aval.shape for v in eqn.invars]
    names = [trace.parameter(f"x{i}", shape) for i, shape in enumerate(shapes) if shape is not None]
    trace.add("y", describe_primitive(eqn.primitive.name, eqn.params, shapes, out), names, out)
    return trace.ops[0], trace.lengths


def judged(eqn: Any, op: Op, lengths: dict[str, int]) -> tuple[set[str], set[str]]:
    """The rules that can be judged: stated by the operation, and right for random numbers."""
    rng = np.random.default_rng(0)
    values = [v.val if is_literal(v) else _random(rng, v.aval) for v in eqn.invars]
    variables = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
    together = np.max if eqn.primitive.name == "reduce_max" else np.sum

    def results(runs: list[Run]) -> list[Any]:
        given = [dict(zip(variables, run.values, strict=True)) for run in runs]
        every = [[own.get(i, x) for i, x in enumerate(values)] for own in given]
        return _results(
            eqn, [run._replace(values=own) for run, own in zip(runs, every, strict=True)]
        )

    return prober.judged(op, lengths, [values[i] for i in variables], results, together)


def _results(eqn: Any, runs: list[Run]) -> list[Any]:
    """The first results of an equation: all runs in one program, as compiling it takes longest."""

    def program(given: list[list[Any]]) -> list[Any]:
        return [_result(eqn, run, arrays) for run, arrays in zip(runs, given, strict=True)]

    arrays = [
        [x for x, v in zip(run.values, eqn.invars, strict=True) if not is_literal(v)]
        for run in runs
    ]
    return list(map(np.asarray, jax.jit(program)(arrays)))


def _result(eqn: Any, run: Run, arrays: list[Any]) -> Any:
    params = {**eqn.params}
    for keys, dim, v in (
        (OF_OPERAND, run.start, eqn.invars[0]),
        (OF_RESULT, run.end, eqn.outvars[0]),
    ):
        for key in keys & params.keys():
            lengths = zip(params[key] or (), v.aval.shape, strict=False)
            params[key] = params[key] and tuple(
                n // N if i == dim and n == m else n for i, (n, m) in enumerate(lengths)
            )
    if (
        params.get("feature_group_count", 1) > 1
        and run.start == params["dimension_numbers"].lhs_spec[1]
    ):
        params["feature_group_count"] //= N
    rest = iter(arrays)
    operands = [
        x if is_literal(v) else next(rest) for x, v in zip(run.values, eqn.invars, strict=True)
    ]
    results = eqn.primitive.bind(*operands, **params)
    return results[0] if eqn.primitive.multiple_results else results


def _random(rng: np.random.Generator, aval: Any) -> Any:
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        return rng.uniform(0.5, 1.5, aval.shape).astype(aval.dtype)
    return rng.integers(0, 2, aval.shape).astype(aval.dtype)
