"""A loss evaluated equation by equation, with a function on the array at every place of its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax

from jax_bridge.step.tracer import Jaxpr, body_of, is_number, places
from jax_bridge.versions import scan_counts

Change = Callable[[str, jax.Array], jax.Array]


def evaluate(
    change: Change, late: Collection[str], prefix: str, jaxpr: Jaxpr, consts: Any, names: Any, *args: Any
) -> list[Any]:
    """The results, with `change` of arguments that have a name, of the results of equations and of carries.

    late: arguments that `jax.checkpoint` keeps as they are, to change them in both passes. prefix: the
    beginning of all names of places.
    """
    changed = [change(name, x) if name else x for name, x in zip(names, args, strict=True)]
    arrays = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *changed), strict=True))
    named, before = (dict(zip(jaxpr.invars, each, strict=True)) for each in (names, args))
    for place, eqn in places(jaxpr, prefix):
        params, kind, body = eqn.params, eqn.primitive.name, body_of(eqn)
        inputs = ["" if is_number(v) else named.get(v, "") for v in eqn.invars]
        values = [jax.numpy.asarray(v.val, v.aval.dtype) if is_number(v) else arrays[v] for v in eqn.invars]
        inner = getattr(body, "jaxpr", body), getattr(body, "consts", ())
        run = partial(evaluate, change, late, f"{place}.", *inner)
        if kind == "scan":
            results = _scan(run, params, place, inputs, values)
        elif kind in ("checkpoint", "remat2"):
            how = {"policy": params["policy"], "prevent_cse": params["prevent_cse"]}
            kept = [before[v] if x in late else y for v, x, y in zip(eqn.invars, inputs, values, strict=True)]
            results = jax.checkpoint(partial(run, inputs), **how)(*kept)
        elif kind in ("jit", "pjit"):
            results = run(inputs, *values)
        else:
            variables = [v for v in eqn.invars if not is_number(v)]
            alone = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn])
            results = jax.core.eval_jaxpr(alone, (), *(arrays[v] for v in variables))
        for i, (v, x) in enumerate(zip(eqn.outvars, results, strict=True)):
            arrays[v] = change(f"{place}:{i}" if i else place, x)
    return [v.val if is_number(v) else arrays[v] for v in jaxpr.outvars]


def _scan(
    run: Callable[..., list[Any]], params: Any, place: str, inputs: Sequence[str], values: Sequence[Any]
) -> list[Any]:
    n, n_carries = scan_counts(params)
    m = n + n_carries
    names = [*inputs[:n], *(f"{place}.carry.{i}" for i in range(n_carries)), *inputs[m:]]

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = run(names, *values[:n], *carry, *xs)
        return results[:n_carries], results[n_carries:]

    how = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacks = jax.lax.scan(step, list(values[n:m]), list(values[m:]), **how)
    return [*carry, *stacks]
