"""The jaxpr of a loss: read as a step, and evaluated with changed arrays at some of its places.

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
from jax_bridge.versions import run_equation, scan_counts
from xshard.step.record.trace import Trace

Name = str | None  # of an array; None for a number
Names = Sequence[Name]
Change = Callable[[str, jax.Array], jax.Array]
Jaxpr = Any  # public only in jax.extend.core, which imports Pallas

CHECKPOINTS = ("checkpoint", "remat2")  # the primitive of `jax.checkpoint` in releases of JAX
CALLS = ("jit", "pjit")  # that of `jax.jit`


# ---- jaxprs


def is_number(v: Any) -> bool:
    """Return whether an operand is written in the jaxpr itself, as a literal."""
    return hasattr(v, "val")


def body_of(eqn: Any) -> Any:
    """Return the jaxpr inside an equation, closed or open; None if it has none."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def places(jaxpr: Jaxpr, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name the equations of a jaxpr: `dot_general.0`, `exp.0`, `dot_general.1`, ...

    A name is the primitive's, or a jitted function's, and counts from 0. A name that the user gave
    by `checkpoint_name` is taken as it is, if it occurs once and not inside another equation.

    Args:
        jaxpr: The jaxpr.
        prefix: The name of the equation that the jaxpr is inside of, and a dot; "" outside.

    Yields:
        (name, equation) in order.
    """
    names = [str(eqn.params.get("name", eqn.primitive.name)).strip("<>") for eqn in jaxpr.eqns]
    n_equations = Counter(names)
    n_before = Counter[str]()
    for name, eqn in zip(names, jaxpr.eqns, strict=True):
        is_unique = n_equations[name] == 1 and not prefix
        if is_unique and eqn.primitive.name == "name":
            yield name, eqn
        else:
            yield f"{prefix}{name}.{n_before[name]}", eqn
        n_before[name] += 1


def _place_of_result(place: str, i: int) -> str:
    """Name result `i` of an equation: `sort.0`, `sort.0:1`, ..."""
    return f"{place}:{i}" if i else place


def _opened(body: Any) -> Jaxpr:
    """Return the jaxpr of a closed one; an open one as it is."""
    return getattr(body, "jaxpr", body)


# ---- a jaxpr as a step


def _names_of(variables: Sequence[Any], name_of: Mapping[Any, Name]) -> list[Name]:
    """Return the names of variables, None for numbers."""
    return [None if is_number(v) else name_of[v] for v in variables]


@dataclass
class Tracer:
    """Collects the operations of a jaxpr in a `Trace`.

    Attributes:
        trace: The operations.
        stacked: How many slices a parameter has that a scan takes one by one.
        shared: Arrays with several uses.
        aliases: Places of inlined jaxprs -> the place inside that makes their first result.
        recomputes: Some of it is in `jax.checkpoint`.
    """

    trace: Trace
    stacked: dict[str, int] = field(default_factory=dict)
    shared: set[Name] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    recomputes: bool = False

    def walk(self, jaxpr: Jaxpr, args: Names, prefix: str = "", times: int = 1) -> list[Name]:
        """Record all equations of a jaxpr as operations, and return the names of its results.

        Args:
            jaxpr: The jaxpr.
            args: The names of its arguments; None for a number.
            prefix: The beginning of the names of its operations, as "scan.0."; "" outside.
            times: How often it runs in a step: the length of the scan around it.
        """
        name_of: dict[Any, Name] = dict(zip(jaxpr.invars, args, strict=True))
        n_uses: Counter[Any] = Counter()
        for eqn in jaxpr.eqns:
            n_uses.update(v for v in eqn.invars if not is_number(v))
        self.shared |= {name_of[v] for v in jaxpr.invars if n_uses[v] > 1}
        for i, v in enumerate(jaxpr.constvars):
            # An array that the function closes over costs nothing to make, like an `iota`.
            name_of[v] = self._add(f"{prefix}const.{i}", "iota", (), v.aval.shape, times)
        for place, eqn in places(jaxpr, prefix):
            operands = _names_of(eqn.invars, name_of)
            results = self._results(place, eqn, operands, times)
            name_of.update(zip(eqn.outvars, results, strict=True))
        return _names_of(jaxpr.outvars, name_of)

    def _results(self, place: str, eqn: Any, operands: Names, times: int) -> list[Name]:
        """Record one equation, and return the names of its results.

        A scan becomes a repeated block; jitted and checkpointed functions are inlined; any other
        primitive is one operation per result.
        """
        primitive = eqn.primitive.name
        if primitive in CHECKPOINTS:
            self.recomputes = True
        if primitive == "scan":
            return self._scan(place, eqn, operands, times)
        body = body_of(eqn)
        if primitive in INLINED and body is not None:
            results = self.walk(_opened(body), operands, f"{place}.", times)
            if results[0] is not None:
                self.aliases[place] = results[0]
            return results
        results = []
        for i, v in enumerate(eqn.outvars):
            name = _place_of_result(place, i)
            result = self._add(name, primitive, operands, v.aval.shape, times, eqn.params)
            results.append(result)
        return results

    def _add(
        self,
        name: str,
        primitive: str,
        operands: Names,
        shape: Shape,
        times: int,
        params: Any = None,
    ) -> Name:
        """Record an operation with one result, and return its name.

        None if it is a number that is computed from numbers alone: such a result has no layout.

        Args:
            name: The name of the result.
            primitive: The primitive, which says how dims of operands and result belong together.
            operands: The names of its operands; None for a number.
            shape: The result's shape.
            times: How often it runs in a step.
            params: The primitive's parameters.
        """
        arrays = [operand for operand in operands if operand is not None]
        if not arrays and not shape:
            return None
        shapes = []
        for operand in operands:
            shapes.append(None if operand is None else self.trace.shapes[operand])
        op = written(primitive, params, shapes, shape)
        return self.trace.add(name, op, arrays, shape, times=times)

    def _scan(self, place: str, eqn: Any, operands: Names, times: int) -> list[Name]:
        """Record a scan, as over the layers of a model: its body once, to run `length` times.

        `scan(f, init, xs)` has three kinds of operands, in this order: constants that `f` closes
        over, the carry `init`, and `xs`, [length, ...], of which every round takes a slice. Results
        are the last carry, and `ys`, [length, ...], with a slice of every round.
        """
        trace = self.trace
        body = eqn.params["jaxpr"].jaxpr
        length = eqn.params["length"]
        n_consts, n_carries = scan_counts(eqn.params)
        first_slice = n_consts + n_carries
        times_inside = times * length
        args = list(operands)
        op_of_carry: dict[int, int] = {}  # number of a carry -> index of its operation in trace.ops
        for i, operand in enumerate(operands):
            if operand is None:
                continue
            shape = trace.shapes[operand]
            if i < n_consts:
                # All rounds use the same array. A copy that is made once says so; else it would
                # count as an array of each round.
                args[i] = self._add(f"{place}.const.{i}", "copy", [operand], shape, times)
            elif i < first_slice:
                carry = i - n_consts
                if body.outvars[carry] is body.invars[i]:
                    continue  # no round changes it
                op_of_carry[carry] = len(trace.ops)
                name = f"{place}.carry.{carry}"
                args[i] = self._add(name, "copy", [operand], shape, times_inside)
            elif operand in trace.dims or operand in self.shared:  # used elsewhere, too
                name = f"{place}.xs.{i - first_slice}"
                args[i] = self._add(name, SLICE, [operand], shape[1:], times_inside)
            else:
                # A parameter that only this scan uses, stacked over the layers: [layers, ...].
                # The step has the parameter of one layer.
                self.stacked[operand] = length
                trace.parameter(operand, shape[1:])
        results = self.walk(body, args, f"{place}.", times_inside)
        for carry, op_number in op_of_carry.items():
            again = results[carry]
            if again is not None:
                # The result is the next round's input: `again` makes both have one layout.
                carried = replace(trace.ops[op_number], kind="carry", again=again)
                trace.ops[op_number] = carried
        slices = self._stack(place, results[n_carries:], length, times)
        return [*results[:n_carries], *slices]

    def _stack(self, place: str, results: Names, length: int, times: int) -> list[Name]:
        """Add the operations that stack the slices of all rounds of a scan: [...] -> [length, ...]."""
        stacked = []
        for i, result in enumerate(results):
            slice_shape = () if result is None else self.trace.shapes[result]
            shape = (length, *slice_shape)
            stacked.append(self._add(f"{place}.ys.{i}", STACK, [result], shape, times))
        return stacked


# ---- a jaxpr with changes


def evaluate(
    closed: Any, arrays: Sequence[Any], names: Sequence[str], change: Change, late: Collection[str]
) -> list[Any]:
    """Evaluate a jaxpr and pass its arrays through a function, as to add sharding constraints.

    Changed are arguments, results of equations, and carries of scans, also inside other equations.

    Args:
        closed: The jaxpr.
        arrays: Its arguments.
        names: Their names.
        change: (name, array) -> the array to go on with; names are those of `places`.
        late: Arguments that a `jax.checkpoint` takes unchanged, and changes inside: it does so
            again when the backward pass runs it again, instead of saving the changed array.
    """
    return _Evaluator(change, late).run("", closed.jaxpr, closed.consts, names, *arrays)


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates jaxprs with changes, also those inside equations. Fields are as of `evaluate`."""

    change: Change
    late: Collection[str]

    def run(
        self, prefix: str, jaxpr: Jaxpr, consts: Any, names: Sequence[str], *args: Any
    ) -> list[Any]:
        """Evaluate a jaxpr with changes, and return its results.

        Args:
            prefix: The beginning of the names of its places.
            jaxpr: The jaxpr.
            consts: Its constants.
            names: The names of its arguments, "" for those that stay as they are.
            *args: The arguments.
        """
        arrays = dict(zip(jaxpr.constvars, consts, strict=True))
        not_changed_yet = {}
        for v, name, x in zip(jaxpr.invars, names, args, strict=True):
            arrays[v] = self.change(name, x) if name else x
            if name in self.late:
                not_changed_yet[v] = x
        name_of = dict(zip(jaxpr.invars, names, strict=True))
        for place, eqn in places(jaxpr, prefix):
            primitive = eqn.primitive.name
            operand_names = ["" if is_number(v) else name_of.get(v, "") for v in eqn.invars]
            if primitive in CALLS:
                # Inlined, because an older partitioner of XLA (GSPMD) does not pass shardings
                # through calls.
                body = eqn.params["jaxpr"]
                values = [_value(v, arrays) for v in eqn.invars]
                results = self.run(f"{place}.", body.jaxpr, body.consts, operand_names, *values)
            elif primitive in CHECKPOINTS:
                changed = self._changed_inside(place, eqn, operand_names)
                results = run_equation(jaxpr, changed, arrays | not_changed_yet)
            elif primitive == "scan":
                n_consts, n_carries = scan_counts(eqn.params)
                carries = [f"{place}.carry.{i}" for i in range(n_carries)]
                operand_names[n_consts : n_consts + n_carries] = carries
                changed = self._changed_inside(place, eqn, operand_names)
                results = run_equation(jaxpr, changed, arrays)
            else:
                results = run_equation(jaxpr, eqn, arrays)
            for i, (v, x) in enumerate(zip(eqn.outvars, results, strict=True)):
                arrays[v] = self.change(_place_of_result(place, i), x)
        return [_value(v, arrays) for v in jaxpr.outvars]

    def _changed_inside(self, place: str, eqn: Any, names: Sequence[str]) -> Any:
        """Rewrite the jaxpr inside an equation so that it makes the changes itself.

        Args:
            place: The equation's place.
            eqn: The equation.
            names: The names of its operands, as the jaxpr's arguments have them.
        """
        body = eqn.params["jaxpr"]
        jaxpr = _opened(body)
        consts = getattr(body, "consts", ())
        run = partial(self.run, f"{place}.", jaxpr, consts, names)
        closed = jax.make_jaxpr(run)(*[v.aval for v in jaxpr.invars])
        # `scan` has a closed jaxpr, `checkpoint` an open one.
        new_body = closed.jaxpr if jaxpr is body else closed
        return eqn.replace(params={**eqn.params, "jaxpr": new_body})


def _value(v: Any, arrays: Mapping[Any, Any]) -> Any:
    """Return the value of a variable or a literal."""
    return jax.numpy.asarray(v.val, v.aval.dtype) if is_number(v) else arrays[v]
