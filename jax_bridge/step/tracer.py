"""The jaxpr of a loss: read as a step, and evaluated with changed arrays at some of its places.

A *jaxpr* is a program of JAX: a list of equations, each a primitive with its operands, results and
parameters, among which may be inner jaxprs. A *place* is a name for a result in it: "dot_general.0".
Equations are operations, inner jaxprs are inlined, and scans are repeated blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from jax_bridge.step.primitives import INLINED, SLICE, STACK, Shape, describe_primitive
from jax_bridge.versions import run_equation, scan_counts
from xshard.step.record.trace import Trace

Name = str | None  # of an array; None for a literal
Names = Sequence[Name]
Change = Callable[[str, jax.Array], jax.Array]  # of the array at a place
Jaxpr = Any  # public only in jax.extend.core, which imports Pallas

CHECKPOINTS = ("checkpoint", "remat2")  # what the primitive of `jax.checkpoint` is called
CALLS = ("jit", "pjit")  # what that of `jax.jit` is called


# ---- jaxprs


def is_literal(v: Any) -> bool:
    """Return whether an operand is a literal, a number that is written in the jaxpr itself."""
    return hasattr(v, "val")


def body_of(eqn: Any) -> Any:
    """Return the jaxpr inside an equation, closed or open; None if it has none."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def places(
    jaxpr: Jaxpr, prefix: str = "", arguments: Collection[Name] = ()
) -> Iterator[tuple[str, Any]]:
    """Name the equations of a jaxpr: `dot_general.0`, `exp.0`, `dot_general.1`, ...

    A name is the primitive's, or a jitted function's, and counts from 0. A name that the user gave
    by `checkpoint_name` is taken as it is, if it occurs once and not inside another equation.

    Args:
        jaxpr: The jaxpr.
        prefix: The name of the equation that the jaxpr is inside of, and a dot; "" outside.
        arguments: The names of the jaxpr's arguments. An equation with such a name is called
            `exp.0 (result)`: a function may be called like a list of parameters.

    Yields:
        (name, equation) in order.
    """
    names = [_name_of_equation(eqn) for eqn in jaxpr.eqns]
    n_equations = Counter(names)
    n_before = Counter[str]()
    for name, eqn in zip(names, jaxpr.eqns, strict=True):
        is_user_given = eqn.primitive.name == "name"  # the primitive of `checkpoint_name`
        place = name
        if not is_user_given or prefix or n_equations[name] > 1:
            place = f"{prefix}{name}.{n_before[name]}"
        yield f"{place} (result)" if place in arguments else place, eqn
        n_before[name] += 1


def _name_of_equation(eqn: Any) -> str:
    """Return the name of an equation's parameter `name`, if it has one, or of its primitive."""
    name = eqn.params.get("name", eqn.primitive.name)
    return str(name).strip("<>")  # a lambda is called <lambda>


def _place_of_result(place: str, i: int) -> str:
    """Name result `i` of an equation: `sort.0`, `sort.0:1`, ..."""
    return f"{place}:{i}" if i else place


def _place_of_carry(place: str, i: int) -> str:
    """Name carry `i` of the scan at a place, as the scan's body gets it."""
    return f"{place}.carry.{i}"


def _opened(body: Any) -> Jaxpr:
    """Return the jaxpr of a closed one; an open one as it is."""
    return getattr(body, "jaxpr", body)


# ---- a jaxpr as a step


def _names_of(variables: Sequence[Any], name_of: Mapping[Any, Name]) -> list[Name]:
    """Return the names of operands, None for literals."""
    return [None if is_literal(v) else name_of[v] for v in variables]


@dataclass
class Tracer:
    """Collects the operations of a jaxpr in a `Trace`.

    Attributes:
        trace: The operations.
        stacked: Parameters with one slice per layer, of which a scan takes one after the other ->
            the number of slices.
        shared: Arrays with several uses in one jaxpr.
        aliases: Places of inlined functions -> the operation inside that makes the first result.
        recomputes: Some of it is in `jax.checkpoint`.
    """

    trace: Trace
    stacked: dict[str, int] = field(default_factory=dict)
    shared: set[Name] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    recomputes: bool = False

    def walk(self, jaxpr: Jaxpr, args: Names, prefix: str = "", times: int = 1) -> list[Name]:
        """Record all equations of a jaxpr as operations, and return the names of its results.

        tanh(x @ w) adds the operations "dot_general.0" and "tanh.0" to `self.trace`; the name of
        its result is "tanh.0".

        Args:
            jaxpr: The jaxpr.
            args: The names of its arguments; None for a number.
            prefix: The beginning of the names of its operations, as "scan.0."; "" outside.
            times: How often it runs in a step: the length of the scan around it.
        """
        name_of = dict(zip(jaxpr.invars, args, strict=True))
        # A parameter with one use, by a scan, becomes the parameter of one layer (see `_slice_of`);
        # those with more uses are noted in `self.shared`.
        n_uses: Counter[Any] = Counter()
        for eqn in jaxpr.eqns:
            n_uses.update(v for v in eqn.invars if not is_literal(v))
        for argument, name in name_of.items():
            if n_uses[argument] > 1:
                self.shared.add(name)
        for i, v in enumerate(jaxpr.constvars):
            # An array that the function closes over costs nothing to make, like an `iota`.
            name_of[v] = self._add_op(f"{prefix}const.{i}", "iota", (), v.aval.shape, times)
        for place, eqn in places(jaxpr, prefix, args):
            operands = _names_of(eqn.invars, name_of)
            results = self._record_equation(place, eqn, operands, times)
            name_of.update(zip(eqn.outvars, results, strict=True))
        return _names_of(jaxpr.outvars, name_of)

    def _record_equation(self, place: str, eqn: Any, operands: Names, times: int) -> list[Name]:
        """Record one equation in `self.trace`, and return the names of its results.

        A scan becomes a repeated block; jitted and checkpointed functions are inlined; any other
        primitive is one operation per result: "sort.0" and "sort.0:1" for two.

        Args:
            place: The equation's name, as `places` gives it: "dot_general.0".
            eqn: The equation.
            operands: The names of its operands; None for a number.
            times: How often it runs in a step.
        """
        primitive = eqn.primitive.name
        if primitive in CHECKPOINTS:
            self.recomputes = True
        if primitive == "scan":
            return self._record_scan(place, eqn, operands, times)
        body = body_of(eqn)
        if primitive in INLINED and body is not None:
            results = self.walk(_opened(body), operands, f"{place}.", times)
            if results and results[0] is not None:
                # `Evaluator` also meets the call's first result, under the name of the call. It has
                # the layout of the operation inside that makes it.
                self.aliases[place] = results[0]
            return results
        results = []
        for i, v in enumerate(eqn.outvars):
            name = _place_of_result(place, i)
            shape = v.aval.shape
            results.append(self._add_op(name, primitive, operands, shape, times, eqn.params))
        return results

    def _add_op(
        self,
        name: str,
        primitive: str,
        operands: Names,
        shape: Shape,
        times: int,
        params: Any = None,
    ) -> Name:
        """Record an operation with one result, and return the name of the result.

        A number that is computed from numbers alone has no layout: it is not recorded, and None is
        returned.

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
        op = describe_primitive(primitive, params, shapes, shape)
        return self.trace.add(name, op, arrays, shape, times=times)

    def _record_scan(self, place: str, eqn: Any, operands: Names, times: int) -> list[Name]:
        """Record a scan, as over the layers of a model: its body once, to run `length` times.

        `scan(f, init, xs)` has three kinds of operands, in this order: constants that `f` closes
        over, the carry `init`, and `xs`, [length, ...], of which every round takes a slice. Results
        are the last carry, and `ys`, [length, ...], with a slice of every round.

        What the body is given is recorded as operations that copy or slice the scan's operands:
        "scan.0.const.0", "scan.0.carry.0", "scan.0.xs.0". A carry that no round changes is given as
        it is.
        """
        body = eqn.params["jaxpr"].jaxpr
        length = max(eqn.params["length"], 1)  # one without rounds is planned as one round
        args = self._args_of_body(place, eqn, operands, n_scans=times, length=length)
        results = self.walk(body, args, f"{place}.", times * length)
        _, n_carries = scan_counts(eqn.params)
        last_carries = results[:n_carries]
        self._close_carries(place, last_carries, times)
        stacks = []
        for i, result in enumerate(results[n_carries:]):
            shape = (length, *self._shape_of(result))
            stacks.append(self._add_op(f"{place}.ys.{i}", STACK, [result], shape, times))
        return [*last_carries, *stacks]

    def _args_of_body(
        self, place: str, eqn: Any, operands: Names, *, n_scans: int, length: int
    ) -> list[Name]:
        """Record what a round of a scan is given, and return the names: constants, carries, slices.

        Args:
            place: The scan's name.
            eqn: The scan.
            operands: The names of its operands; None for a number.
            n_scans: How often the scan runs in a step.
            length: The number of its rounds, each time.
        """
        body = eqn.params["jaxpr"].jaxpr
        n_consts, n_carries = scan_counts(eqn.params)
        n_before_xs = n_consts + n_carries
        n_rounds = n_scans * length  # in a step
        args: list[Name] = []
        for i, const in enumerate(operands[:n_consts]):
            # All rounds of a scan use the same array: it is copied `n_scans` times, not `n_rounds`.
            # Without this operation it would count as another array in each round.
            shape = self._shape_of(const)
            name = f"{place}.const.{i}"
            args.append(self._add_op(name, "copy", [const], shape, times=n_scans))
        for i, carry in enumerate(operands[n_consts:n_before_xs]):
            # The body gives out carry i as its result i. A body that gives out the variable that it
            # was given, `lambda c, x: (c, ...)`, leaves it as it is.
            carry_before = body.invars[n_consts + i]
            carry_after = body.outvars[i]
            if carry_after is not carry_before:
                name = _place_of_carry(place, i)
                shape = self._shape_of(carry)
                carry = self._add_op(name, "copy", [carry], shape, times=n_rounds)
            args.append(carry)
        for i, xs in enumerate(operands[n_before_xs:]):
            args.append(self._slice_of(f"{place}.xs.{i}", xs, length=length, times=n_rounds))
        return args

    def _shape_of(self, name: Name) -> Shape:
        """Return the shape of an array; () for a number."""
        return () if name is None else self.trace.shapes[name]

    def _slice_of(self, name: str, stack: Name, length: int, times: int) -> Name:
        """Return the name of the slice of an array [length, ...] that a round of a scan takes.

        A parameter [length, ...] that nothing else uses is recorded anew under its own name as the
        parameter of one layer, [...], and noted in `self.stacked`. A slice of any other array is
        an operation, called `name`.
        """
        if stack is None:  # a number
            return None
        slice_shape = self.trace.shapes[stack][1:]
        # A parameter's dims get names at its first use. Here are left those that this scan is the
        # first and only one to use.
        if stack in self.trace.dims or stack in self.shared:
            return self._add_op(name, SLICE, [stack], slice_shape, times)
        self.stacked[stack] = length
        return self.trace.parameter(stack, slice_shape)

    def _close_carries(self, place: str, results: Names, starts: int) -> None:
        """Say of each carry of a scan which result of the body is its value in the next round.

        The operations that copy carries into the body, already in the trace, get the kind "carry"
        and that result as `again`: the planner then gives both one layout. starts: how often the
        scan begins.
        """
        again_of_carry = {_place_of_carry(place, i): result for i, result in enumerate(results)}
        for i, op in enumerate(self.trace.ops):
            again = again_of_carry.get(op.name)
            if again is not None:
                self.trace.ops[i] = replace(op, kind="carry", again=again, starts=starts)


# ---- a jaxpr with changes


@dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs and passes their arrays through a function, as to add sharding constraints.

    Changed are arguments, results of equations, and carries of scans, also inside other equations.

    Attributes:
        change: (name, array) -> the array to go on with; names are those of `places`.
        late: Names of arguments that a `jax.checkpoint` takes unchanged, and changes inside. The
            backward pass then runs the change again, and the changed array need not be saved.
    """

    change: Change
    late: Collection[str]

    def run(
        self, prefix: str, jaxpr: Jaxpr, consts: Any, names: Sequence[str], *args: Any
    ) -> list[Any]:
        """Evaluate a jaxpr, with its arguments and all results passed through `self.change`.

        For tanh(x @ w) these are x, w, then the results "dot_general.0" and "tanh.0". Equations run
        one by one. A jaxpr inside an equation is rewritten first, so that it makes the changes to
        its own results.

        Args:
            prefix: The beginning of the names of its equations, as "scan.0."; "" outside of others.
            jaxpr: The jaxpr.
            consts: Its constants.
            names: The names of its arguments; "" for those that are not to be changed.
            *args: The arguments.
        """
        name_of = dict(zip(jaxpr.invars, names, strict=True))
        unchanged = dict(zip(jaxpr.invars, args, strict=True))
        # A `jax.checkpoint` takes them as they are, and changes them inside.
        late_arguments = {v: x for v, x in unchanged.items() if name_of[v] in self.late}
        arrays = dict(zip(jaxpr.constvars, consts, strict=True))  # the value of each variable
        for v, x in unchanged.items():
            name = name_of[v]
            arrays[v] = self.change(name, x) if name else x

        for place, eqn in places(jaxpr, prefix, names):
            is_checkpoint = eqn.primitive.name in CHECKPOINTS
            operands = arrays | late_arguments if is_checkpoint else arrays
            operand_names = _names_of_operands(eqn, name_of)
            results = self._results_of(place, jaxpr, eqn, operand_names, operands)
            for i, (v, x) in enumerate(zip(eqn.outvars, results, strict=True)):
                arrays[v] = self.change(_place_of_result(place, i), x)
        return [_value(v, arrays) for v in jaxpr.outvars]

    def _results_of(
        self,
        place: str,
        jaxpr: Jaxpr,
        eqn: Any,
        operand_names: Sequence[str],
        arrays: Mapping[Any, Any],
    ) -> Sequence[Any]:
        """Evaluate one equation; a jaxpr inside it makes the changes to its own results.

        Args:
            place: The equation's place.
            jaxpr: The jaxpr that it is in.
            eqn: The equation.
            operand_names: The names of its operands; "" for those that are not to be changed.
            arrays: The value of each variable.
        """
        if eqn.primitive.name in CALLS:
            # Inlined, because an older partitioner of XLA (GSPMD) does not pass shardings through
            # calls.
            body = eqn.params["jaxpr"]
            values = [_value(v, arrays) for v in eqn.invars]
            return self.run(f"{place}.", body.jaxpr, body.consts, operand_names, *values)
        changed = self._with_changes_inside(place, eqn, operand_names)
        return run_equation(jaxpr, changed, arrays)

    def _with_changes_inside(self, place: str, eqn: Any, operand_names: Sequence[str]) -> Any:
        """Rewrite the jaxpr inside a checkpoint or a scan so that it makes the changes itself.

        Other equations are returned as they are.

        Args:
            place: The equation's place.
            eqn: The equation.
            operand_names: The names of its operands, which are those of the inner jaxpr's arguments.
        """
        names = operand_names
        if eqn.primitive.name == "scan":
            names = _with_carry_names(operand_names, place, eqn)
        elif eqn.primitive.name not in CHECKPOINTS:
            return eqn
        body = eqn.params["jaxpr"]
        jaxpr = _opened(body)
        consts = getattr(body, "consts", ())
        run = partial(self.run, f"{place}.", jaxpr, consts, names)
        types = [v.aval for v in jaxpr.invars]
        closed = jax.make_jaxpr(run)(*types)
        # `scan` has a closed jaxpr, `checkpoint` an open one.
        new_body = closed.jaxpr if jaxpr is body else closed
        return eqn.replace(params={**eqn.params, "jaxpr": new_body})


def _with_carry_names(operand_names: Sequence[str], place: str, eqn: Any) -> list[str]:
    """Give the carries of a scan names of their own, among the names of its operands.

    Every round has another value of a carry: it is not the array that the scan begins with.
    """
    names = list(operand_names)
    n_consts, n_carries = scan_counts(eqn.params)
    for i in range(n_carries):
        names[n_consts + i] = _place_of_carry(place, i)
    return names


def _names_of_operands(eqn: Any, name_of: Mapping[Any, str]) -> list[str]:
    """Return the names under which the operands of an equation are changed inside of it again.

    Arguments of the jaxpr keep their names there. Results of equations have "": they were changed
    where they were made.
    """
    return ["" if is_literal(v) else name_of.get(v, "") for v in eqn.invars]


def _value(v: Any, arrays: Mapping[Any, Any]) -> Any:
    """Return the value of a variable or a literal."""
    if is_literal(v):
        return jax.numpy.asarray(v.val, v.aval.dtype)
    return arrays[v]
