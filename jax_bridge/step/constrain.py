"""A loss evaluated equation by equation, with a function on the array at every place of its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jax_bridge.step.tracer import Jaxpr, body_of, is_number, places

Change = Callable[[str, jax.Array], jax.Array]


def evaluate(
    change: Change, jaxpr: Jaxpr, consts: Sequence[Any], names: Sequence[str], *args: Any
) -> list[Any]:
    """The results, with `change` of arguments that have a name, of the results of equations and of carries."""
    return _evaluated(change, jaxpr, consts, "", names, *args)


def _evaluated(
    change: Change, jaxpr: Jaxpr, consts: Sequence[Any], prefix: str, names: Sequence[str], *args: Any
) -> list[Any]:
    changed = [change(name, x) if name else x for name, x in zip(names, args, strict=True)]
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *changed), strict=True))
    named = dict(zip(jaxpr.invars, names, strict=True))
    for place, eqn in places(jaxpr, prefix):
        params, kind, body = eqn.params, eqn.primitive.name, body_of(eqn)
        own = ["" if is_number(v) else named.get(v, "") for v in eqn.invars]
        values = [jax.numpy.asarray(v.val, v.aval.dtype) if is_number(v) else known[v] for v in eqn.invars]
        run = partial(
            _evaluated, change, getattr(body, "jaxpr", body), getattr(body, "consts", ()), f"{place}."
        )
        if kind == "scan":
            results = _scan(run, params, place, own, values)
        elif kind in ("checkpoint", "remat2"):
            how = {"policy": params["policy"], "prevent_cse": params["prevent_cse"]}
            results = jax.checkpoint(partial(run, own), **how)(*values)
        elif kind in ("jit", "pjit"):
            results = run(own, *values)
        else:
            variables = [v for v in eqn.invars if not is_number(v)]
            alone = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn])
            results = jax.core.eval_jaxpr(alone, (), *(known[v] for v in variables))
        for i, (v, x) in enumerate(zip(eqn.outvars, results, strict=True)):
            known[v] = change(f"{place}:{i}" if i else place, x)
    return [v.val if is_number(v) else known[v] for v in jaxpr.outvars]


def _scan(
    run: Callable[..., list[Any]], params: Any, place: str, own: Sequence[str], values: Sequence[Any]
) -> list[Any]:
    n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
    names = [*own[:n], *(f"{place}.carry.{i}" for i in range(m - n)), *own[m:]]

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = run(names, *values[:n], *carry, *xs)
        return results[: m - n], results[m - n :]

    how = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacks = jax.lax.scan(step, list(values[n:m]), list(values[m:]), **how)
    return [*carry, *stacks]
