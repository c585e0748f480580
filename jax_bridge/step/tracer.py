"""The jaxpr of a loss: read as a step, and evaluated with a change of the arrays at its places.

Equations are operations, inner jaxprs are inlined, and scans are repeated blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from jax_bridge.step.primitives import INLINED, SLICE, STACK, Shape, written
from jax_bridge.versions import scan_counts
from xshard.step.record.trace import Trace

Name = str | None  # of an array; None for a number
Names = Sequence[Name]
Change = Callable[[str, jax.Array], jax.Array]
Jaxpr = Any  # public only in jax.extend.core, which imports Pallas


def is_number(v: Any) -> bool:
    """Whether an operand is written in the jaxpr itself, as a literal."""
    return hasattr(v, "val")


def body_of(eqn: Any) -> Any:
    """The jaxpr inside an equation, closed or open; None if it has none."""
    return next(
        (eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None
    )


def places(jaxpr: Jaxpr, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The name and the equation of each place: its primitive and a number, or a `checkpoint_name`."""
    names = [str(eqn.params.get("name", eqn.primitive.name)).strip("<>") for eqn in jaxpr.eqns]
    several = Counter(names)
    count = Counter[str]()
    for name, eqn in zip(names, jaxpr.eqns, strict=True):
        alone = eqn.primitive.name == "name" and several[name] == 1 and not prefix
        yield name if alone else f"{prefix}{name}.{count[name]}", eqn
        count[name] += 1


@dataclass
class Tracer:
    """Collects the operations of a jaxpr in a `Trace`.

    stacked: how many slices a parameter has that a scan takes one by one. shared: arrays with several uses.
    recomputes: some of it is in `jax.checkpoint`.
    """

    trace: Trace
    stacked: dict[str, int] = field(default_factory=dict)
    shared: set[Name] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    recomputes: bool = False

    def walk(self, jaxpr: Jaxpr, args: Names, prefix: str = "", times: int = 1) -> list[Name]:
        """The names of the results."""
        arrays: dict[Any, Name] = dict(zip(jaxpr.invars, args, strict=True))
        uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not is_number(v))
        self.shared |= {arrays[v] for v in jaxpr.invars if uses[v] > 1}
        for i, var in enumerate(jaxpr.constvars):
            arrays[var] = self._add(f"{prefix}const.{i}", "iota", (), var.aval.shape, times)
        for name, eqn in places(jaxpr, prefix):
            operands = [None if is_number(v) else arrays[v] for v in eqn.invars]
            kind = eqn.primitive.name
            body = body_of(eqn)
            self.recomputes |= kind in ("checkpoint", "remat2")
            if kind == "scan":
                results = self._scan(name, eqn, operands, times)
            elif kind in INLINED and body is not None:
                results = self.walk(getattr(body, "jaxpr", body), operands, f"{name}.", times)
                self.aliases |= {name: results[0]} if results[0] else {}
            else:
                outs = (
                    (f"{name}:{i}" if i else name, v.aval.shape) for i, v in enumerate(eqn.outvars)
                )
                results = [
                    self._add(out, kind, operands, shape, times, eqn.params) for out, shape in outs
                ]
            arrays |= dict(zip(eqn.outvars, results, strict=True))
        return [None if is_number(v) else arrays[v] for v in jaxpr.outvars]

    def _add(
        self, name: str, kind: str, operands: Names, shape: Shape, times: int, how: Any = None
    ) -> Name:
        """The operation of a primitive; None for a number that is computed from numbers."""
        arrays = [o for o in operands if o is not None]
        if not arrays and not shape:
            return None
        op = written(
            kind, how, [None if o is None else self.trace.shapes[o] for o in operands], shape
        )
        return self.trace.add(name, op, arrays, shape, times=times)

    def _scan(self, name: str, eqn: Any, operands: Names, times: int) -> list[Name]:
        """A block that runs `length` times: carries, and slices of what is stacked."""
        trace = self.trace
        body = eqn.params["jaxpr"].jaxpr
        length = eqn.params["length"]
        n, n_carries = scan_counts(eqn.params)
        m = n + n_carries
        inner = times * length
        args = list(operands)
        carries = dict[int, int]()  # numbers of results -> places of operations
        for i, operand in enumerate(operands):
            if operand is None or (n <= i < m and body.outvars[i - n] is body.invars[i]):
                continue
            shape = trace.shapes[operand]
            if i < n:  # a parameter of all rounds is one parameter, not one of each
                args[i] = self._add(f"{name}.const.{i}", "copy", [operand], shape, times)
            elif i < m:
                carries[i - n] = len(trace.ops)
                args[i] = self._add(f"{name}.carry.{i - n}", "copy", [operand], shape, inner)
            elif operand in trace.dims or operand in self.shared:
                args[i] = self._add(f"{name}.xs.{i - m}", SLICE, [operand], shape[1:], inner)
            else:  # a parameter, stacked over the layers
                self.stacked[operand] = length
                trace.parameter(operand, shape[1:])
        results = self.walk(body, args, f"{name}.", inner)
        for i, place in carries.items():
            if again := results[i]:
                trace.ops[place] = replace(trace.ops[place], kind="carry", again=again)
        for i, result in enumerate(results[n_carries:]):
            shape = (length, *trace.shapes.get(result or "", ()))
            results[n_carries + i] = self._add(f"{name}.ys.{i}", STACK, [result], shape, times)
        return results


def evaluate(
    change: Change,
    late: Collection[str],
    prefix: str,
    jaxpr: Jaxpr,
    consts: Any,
    names: Any,
    *args: Any,
) -> list[Any]:
    """The results, with `change` of arguments that have a name, of the results of equations and of carries.

    late: arguments that `jax.checkpoint` keeps as they are, to change them in both passes. prefix: the
    beginning of all names of places.
    """
    changed = [change(name, x) if name else x for name, x in zip(names, args, strict=True)]
    arrays = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *changed), strict=True))
    named = dict(zip(jaxpr.invars, names, strict=True))
    kept = {v: x for v, name, x in zip(jaxpr.invars, names, args, strict=True) if name in late}
    for place, eqn in places(jaxpr, prefix):
        variables = [v for v in eqn.invars if not is_number(v)]
        inputs = ["" if is_number(v) else named.get(v, "") for v in eqn.invars]
        kind = eqn.primitive.name
        run = partial(evaluate, change, late, f"{place}.")
        if kind in ("jit", "pjit"):  # inlined: an older partitioner does not look into calls
            body = eqn.params["jaxpr"]
            values = (_value(v, arrays) for v in eqn.invars)
            results = run(body.jaxpr, body.consts, inputs, *values)
        else:
            if kind == "scan":
                n, n_carries = scan_counts(eqn.params)
                inputs[n : n + n_carries] = [f"{place}.carry.{i}" for i in range(n_carries)]
            there = arrays | kept if kind in ("checkpoint", "remat2") else arrays
            own = _changed(eqn, run, inputs) if kind in ("scan", "checkpoint", "remat2") else eqn
            alone = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[own])
            results = jax.core.eval_jaxpr(alone, (), *(there[v] for v in variables))
        for i, (v, x) in enumerate(zip(eqn.outvars, results, strict=True)):
            arrays[v] = change(f"{place}:{i}" if i else place, x)
    return [_value(v, arrays) for v in jaxpr.outvars]


def _value(v: Any, arrays: Mapping[Any, Any]) -> Any:
    return jax.numpy.asarray(v.val, v.aval.dtype) if is_number(v) else arrays[v]


def _changed(eqn: Any, run: Callable[..., list[Any]], names: Names) -> Any:
    """An equation with another jaxpr inside it: the same one, as it runs with the changes."""
    body = eqn.params["jaxpr"]
    jaxpr = getattr(body, "jaxpr", body)
    consts = getattr(body, "consts", ())
    new = jax.make_jaxpr(partial(run, jaxpr, consts, names))(*(v.aval for v in jaxpr.invars))
    return eqn.replace(params={**eqn.params, "jaxpr": new.jaxpr if jaxpr is body else new})
