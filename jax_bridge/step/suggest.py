"""`suggest` for losses of JAX: trace a loss without data, search layouts, say them as specs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.mesh.context import AnyMesh, xshard_mesh
from jax_bridge.specs import to_partition_spec
from jax_bridge.step.tracer import Evaluator, Tracer
from jax_bridge.trees import is_array, leaves_with_given_values
from xshard import Layout, Rules, Suggestion, TrainingStep
from xshard import suggest as suggest_step
from xshard.errors import PlanError, XshardError, api_boundary
from xshard.notation.parser import ARROW
from xshard.signatures import short_repr
from xshard.step.record.fuse import fuse_operations
from xshard.step.record.repeat import find_repeated
from xshard.step.record.trace import Trace, input_name
from xshard.step.suggest import SuggestKeywords
from xshard.trees import Leaf, named_once

# Operations that decide the layouts of their results; XLA is told these layouts.
MAKERS = ("attention", "carry", "contraction", "lookup")


def _arrays_in(tree: Any) -> list[Leaf]:
    """List the arrays of a pytree by name; numbers and functions are left out."""
    return [leaf for leaf in leaves_with_given_values(None, tree) if is_array(leaf.x)]


class Loss:
    """A loss as a function of the arrays among its arguments.

    Args:
        f: The loss.
        args: Its arguments; the first has the parameters.

    Attributes:
        arrays: All arrays: parameters, then inputs.
        names: Their names; the first argument's, which are parameters, without its own name.
        n_parameters: How many are parameters.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any]) -> None:
        self.f = f
        self.args = tuple(args)
        try:
            arguments = inspect.signature(f).bind(*args).arguments
        except TypeError as error:
            raise XshardError(f"args: {error}", hint="a tuple of all arguments of f") from None
        (first_name, first), *others = arguments.items()
        parameters = _arrays_in(first)
        if not parameters:
            what = f"args[0] is {short_repr(first)}, without arrays"
            raise XshardError(what, hint="the first argument has the parameters")
        # A first argument that is one array has no names inside.
        self.names = [leaf.name if leaf.name else first_name for leaf in parameters]
        self.n_parameters = len(parameters)
        self.arrays = [leaf.x for leaf in parameters]
        for name, argument in others:
            for leaf in _arrays_in({name: argument}):
                self.names.append(input_name(leaf.name, self.names[: self.n_parameters]))
                self.arrays.append(leaf.x)
        named_once(zip(self.names, self.arrays, strict=True))  # raises for two of one name

    def filled(self, values: Sequence[Any], *, keeps_others: bool = True) -> tuple[Any, ...]:
        """Return the arguments of the loss with each array replaced by a value.

        Args:
            values: One for each array, in the order of `arrays`.
            keeps_others: Leaves that are not arrays stay; otherwise they become None.
        """
        next_value = iter(values)

        def fill(x: Any) -> Any:
            if is_array(x):
                return next(next_value)
            return x if keeps_others else None

        return jax.tree.map(fill, self.args)

    def run(self, *arrays: Any) -> Any:
        """Return the loss for these arrays."""
        return self.f(*self.filled(arrays))


@dataclass(eq=False)
class JaxSuggestion(Suggestion):
    """A suggestion for a loss, with what `jit` takes.

    Attributes:
        loss: The loss.
        tracer: What is known of its jaxpr.
        names: Names of places in the jaxpr -> names of arrays of the step, where they differ.
        on: The mesh.
    """

    loss: Loss
    tracer: Tracer
    names: Mapping[str, str]
    on: AnyMesh

    @property
    def specs(self) -> tuple[Any, ...]:
        """The arguments with a PartitionSpec in place of each array, and None for other leaves."""
        specs = [self._spec(name) for name in self.loss.names]
        return self.loss.filled(specs, keeps_others=False)

    @api_boundary
    def constrain(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with sharding constraints inside, which tell XLA the layouts.

            step = jax.jit(jax.value_and_grad(plan.constrain(loss)), in_shardings=...)

        `jax.lax.with_sharding_constraint` is put on each parameter where it is used, and on the
        activations. The batch may be longer or shorter than the one given to `suggest`. Inside, axes
        of type Explicit are Auto, so that the loss may not name shardings itself; outside of `jit`
        such a mesh has to be set by `jax.set_mesh`. If `suggest` was given a mesh without devices,
        the mesh is the one that `jax.set_mesh` sets.

        Args:
            f: The loss.

        Returns:
            The function with the same results.
        """
        # Parameters that match this pattern are gathered once per step, others for each use.
        gathered_once = Rules({self.once: "..."})

        def constrained(*args: Any) -> Any:
            loss = Loss(f, args)
            parameters = loss.names[: loss.n_parameters]
            # Inside a `jax.checkpoint` the backward pass gathers these once more, instead of
            # keeping them whole since the forward pass.
            for_each_use = {name for name in parameters if not gathered_once.pattern_for(name)}
            evaluator = Evaluator(self._constrained, late=for_each_use)

            def run(*arrays: Any) -> Any:
                closed, out = jax.make_jaxpr(loss.run, return_shape=True)(*arrays)
                results = evaluator.run("", closed.jaxpr, closed.consts, loss.names, *arrays)
                return jax.tree.unflatten(jax.tree.structure(out), results)

            # Constraints are for Auto axes: inside, those of type Explicit are Auto.
            whole: Any = PartitionSpec()
            if isinstance(self.on, JaxMesh):
                whole = NamedSharding(self.on, whole)
            return jax.sharding.auto_axes(run, out_sharding=whole)(*loss.arrays)

        return constrained

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tracer.stacked:
            # A stacked parameter has a dim before the dims of one layer.
            rules = {}
            for pattern, text in self.parameters.items():
                rules[pattern] = f"... {text}".replace(ARROW, f"{ARROW} ...")
            self.parameters = Rules(rules)

    def _spec(self, name: str) -> PartitionSpec:
        """Return the spec under which an argument is stored; unsharded if the step lacks it."""
        name_in_step = self.names.get(name, name)
        stored, _ = self.layouts.get(name_in_step, (Layout(()), None))
        spec = to_partition_spec(Layout(stored.dims))
        return PartitionSpec(None, *spec) if name in self.tracer.stacked else spec

    def _constrained(self, place: str, x: jax.Array) -> jax.Array:
        """Put a sharding constraint on an array, if XLA would not find its sharding itself.

        `self.layouts` has two layouts for each array's name in the step: where it is stored or
        made, and where it is first used. The constraint is the second: with "i o/dp" where it is
        stored and "i o" where it is used, XLA gathers a parameter.

        Args:
            place: The name of an argument or of an equation's result in the jaxpr: "dot_general.0".
            x: The array.
        """
        name = self.names.get(place, place)
        if name not in self.layouts:
            return x  # the step does without it
        stored, used = self.layouts[name]
        if used.tagged("sum"):
            return x  # addends that devices have yet to sum up: no spec can say that
        if len(used.dims) != x.ndim:
            return x  # a parameter stacked over layers: the step has one layer of it
        op = self.search.problem.step.by_name.get(name)
        is_elementwise = op is not None and op.kind not in MAKERS
        if is_elementwise and stored == used:
            return x  # XLA infers the sharding of the result from the operands
        sharding: Any = to_partition_spec(Layout(used.dims))
        if isinstance(self.on, JaxMesh):
            sharding = NamedSharding(JaxMesh(self.on.devices, self.on.axis_names), sharding)
        return jax.lax.with_sharding_constraint(x, sharding)


@api_boundary
def suggest(
    f: Callable[..., Any], args: Sequence[Any], mesh: AnyMesh, **options: Unpack[SuggestKeywords]
) -> JaxSuggestion:
    """Find the shardings of a loss's parameters, inputs and activations for the fastest step.

        plan = xj.suggest(loss, (parameters, batch), Mesh(dp=4, tp=2), memory="80GiB")
        print(plan.parameters)     # patterns of names -> layouts
        jax.jit(loss, in_shardings=plan.specs)

    Gradients and the optimizer are part of every suggestion.

    Args:
        f: A loss of (parameters, batch, ...), which are pytrees, also modules of flax nnx and
            equinox.
        args: Its arguments: arrays or `jax.ShapeDtypeStruct`s. Nothing is allocated.
        mesh: The devices: a mesh of JAX, or an `xshard.Mesh`.
        **options: As for `xshard.suggest`; `recompute` is by default True for a function with parts
            under `jax.checkpoint`.

    Returns:
        The rules of the fastest plan, its specs for `jit`, and its seconds and bytes.

    Raises:
        PlanError: The function returns something else than one number.
        XshardError: As for `xshard.suggest`.

    Examples:
        >>> from xshard import Mesh
        >>> p, x = (jax.ShapeDtypeStruct((n, 8192), "bfloat16") for n in (8192, 4096))
        >>> loss = lambda p, x: (x @ p["up"]).sum()
        >>> plan = suggest(loss, ({"up": p}, x), Mesh(dp=4), micro_batches=1)
        >>> plan.parameters["up"], plan.specs
        ('o i/dp', ({'up': P(None, 'dp')}, P(None, None)))
    """
    loss = Loss(f, args)
    step, tracer, names = traced(loss)
    if tracer.recomputes:
        options.setdefault("recompute", True)
    plan = suggest_step(step, xshard_mesh(mesh), **options)
    return JaxSuggestion(
        search=plan.search,
        assignment=plan.assignment,
        bound=plan.bound,
        by_hand=plan.by_hand,
        loss=loss,
        tracer=tracer,
        names=names,
        on=mesh,
    )


class Traced(NamedTuple):
    """A loss as a training step."""

    step: TrainingStep
    tracer: Tracer
    names: dict[str, str]  # places in the jaxpr -> names in the step; those that differ


def traced(loss: Loss) -> Traced:
    """Trace a loss, and translate its jaxpr into a training step that the planner understands.

    Nothing is computed. Raises PlanError if the loss returns anything but one number, or a number
    that its arguments have no part in.
    """
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in loss.arrays]
    closed_jaxpr = jax.make_jaxpr(loss.run)(*structs)
    _check_is_number(closed_jaxpr.out_avals)
    tracer = Tracer(_begun_trace(loss, structs))
    (name_of_loss,) = tracer.walk(closed_jaxpr.jaxpr, loss.names)
    # Equal layers become one block that repeats. names: name in the trace -> name in that block.
    step, names = find_repeated(_step_up_to(name_of_loss, tracer))
    # The step has the result of an inlined call, "jit.0", under the name of the operation inside
    # that makes it, "jit.0.tanh.0".
    for call, operation in tracer.aliases.items():
        names[call] = names.get(operation, operation)
    return Traced(fuse_operations(step), tracer, names)


def _step_up_to(name_of_loss: str | None, tracer: Tracer) -> TrainingStep:
    """Return the recorded operations that a loss needs; None: it is a number whatever the arrays.

    Raises PlanError if none of them reads a parameter or an input.
    """
    if name_of_loss is not None:
        step = tracer.trace.step(name_of_loss, moves_anywhere=True)
        if step.ops and (step.inputs or step.parameters):
            return step
    hint = "return a number that is computed from the parameters"
    raise PlanError("the loss computes nothing from the arrays of its arguments", hint=hint)


def _begun_trace(loss: Loss, structs: Sequence[jax.ShapeDtypeStruct]) -> Trace:
    """Begin the trace of a loss with its parameters and inputs, given the shapes of its arrays."""
    parameters = structs[: loss.n_parameters]
    inputs = structs[loss.n_parameters :]
    trace = Trace(_batch_length(inputs), _dtype_of_step(parameters))
    for i, (name, x) in enumerate(zip(loss.names, structs, strict=True)):
        if i < loss.n_parameters:
            trace.parameter(name, x.shape)
        else:
            trace.input(name, x.shape)
    return trace


def _check_is_number(results: Sequence[Any]) -> None:
    """Raise PlanError unless a loss returns one number, given the types of its results."""
    if [out.shape for out in results] != [()]:
        types = [out.str_short() for out in results]
        returned = ", ".join(types) if types else "nothing"
        hint = "pass the loss, which returns one number; gradients and the optimizer are always counted"
        raise PlanError(f"the function returns {returned}", hint=hint)


def _batch_length(inputs: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Return the length of the first dim of the first input that has dims; 1 without any."""
    for x in inputs:
        if x.shape:
            return x.shape[0]
    return 1


def _dtype_of_step(parameters: Sequence[jax.ShapeDtypeStruct]) -> str:
    """Return the dtype of the largest parameter, which the step is priced for."""
    if not parameters:
        return "bfloat16"
    largest = max(parameters, key=lambda x: math.prod(x.shape))
    return str(largest.dtype)
