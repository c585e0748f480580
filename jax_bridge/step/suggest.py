"""`suggest`: where the parameters, inputs and activations of a loss live, as rules and as PartitionSpecs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.mesh.context import AnyMesh, xshard_mesh
from jax_bridge.specs import to_partition_spec
from jax_bridge.step.tracer import Tracer, evaluate
from jax_bridge.trees import is_array, leaves_of
from xshard import Layout, Rules, Suggestion, TrainingStep
from xshard import suggest as suggest_step
from xshard.errors import PlanError
from xshard.notation.parser import ARROW
from xshard.step.record.fuse import fused
from xshard.step.record.repeat import repeated
from xshard.step.record.trace import Trace

MAKERS = ("attention", "carry", "contraction", "lookup")  # XLA is told the layouts of their results


class Loss:
    """A loss as a function of the arrays among its arguments.

    names, arrays: all arrays, the first argument's, which are parameters, without its name.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any]) -> None:
        self.f, self.args = f, tuple(args)
        (first, tree), *others = inspect.signature(f).bind(*args).arguments.items()
        parameters = [leaf for leaf in leaves_of(None, tree) if is_array(leaf.x)]
        each = (leaf for name, tree in others for leaf in leaves_of(None, {name: tree}))
        inputs = [leaf for leaf in each if is_array(leaf.x)]
        self.arrays = [leaf.x for leaf in (*parameters, *inputs)]
        self.names, self.n_parameters = [leaf.name or first for leaf in parameters], len(parameters)
        self.names += [leaf.name + " (input)" * (leaf.name in self.names) for leaf in inputs]

    def filled(
        self, values: Sequence[Any], other: Callable[[Any], Any] = lambda x: x
    ) -> tuple[Any, ...]:
        """The arguments with other values in place of arrays."""
        new = iter(values)
        return jax.tree.map(lambda x: next(new) if is_array(x) else other(x), self.args)

    def run(self, *arrays: Any) -> Any:
        return self.f(*self.filled(arrays))


@dataclass(eq=False)
class JaxSuggestion(Suggestion):
    """A suggestion for a loss, with what `jit` takes. names: places of the jaxpr -> arrays of the step."""

    loss: Loss
    tracer: Tracer
    names: Mapping[str, str]
    on: AnyMesh

    @property
    def specs(self) -> tuple[Any, ...]:
        """The arguments with a PartitionSpec in place of each array, and None for other leaves."""
        return self.loss.filled([self._spec(name) for name in self.loss.names], lambda _: None)

    def constrain(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The function with `jax.lax.with_sharding_constraint` on parameters in use and on activations.

        The batch may have another length. Axes are Auto; for a mesh without devices `jax.set_mesh` has them.
        """

        def constrained(*args: Any) -> Any:
            loss = Loss(f, args)
            closed, out = jax.make_jaxpr(loss.run, return_shape=True)(*loss.arrays)
            once = Rules({self.once: "..."})
            parameters = loss.names[: loss.n_parameters]
            late = {name for name in parameters if not once.pattern_for(name)}
            results = evaluate(
                self._placed, late, "", closed.jaxpr, closed.consts, loss.names, *loss.arrays
            )
            return jax.tree.unflatten(jax.tree.structure(out), results)

        return constrained

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tracer.stacked:  # a stacked parameter has a dim before the dims of one layer
            rules = self.parameters.items()
            self.parameters = Rules(
                {name: f"... {text}".replace(ARROW, f"{ARROW} ...") for name, text in rules}
            )

    def _spec(self, name: str) -> PartitionSpec:
        """How an argument is stored."""
        stored, _ = self.layouts.get(self.names.get(name, name), (Layout(()), None))
        spec = to_partition_spec(Layout(stored.dims))
        return PartitionSpec(None, *spec) if name in self.tracer.stacked else spec

    def _placed(self, name: str, x: jax.Array) -> jax.Array:
        """An array with the layout in which it is used, if XLA has to be told."""
        name = self.names.get(name, name)
        start, used = self.layouts.get(name, (None, None))
        op = self.search.problem.step.by_name.get(name)
        is_kept = op is not None and op.kind not in MAKERS and start == used
        if used is None or used.tagged("sum") or len(used.dims) != x.ndim or is_kept:
            return x
        spec = to_partition_spec(Layout(used.dims))
        where = NamedSharding(self.on, spec) if isinstance(self.on, JaxMesh) else spec
        return jax.lax.with_sharding_constraint(x, where)


def suggest(
    f: Callable[..., Any], args: Sequence[Any], mesh: AnyMesh, **options: Any
) -> JaxSuggestion:
    """The layouts of the parameters, inputs and activations of a loss that make a training step fastest.

    f: a loss of (parameters, batch, ...), which are pytrees, also modules of flax nnx and equinox. args: its
    arguments, arrays or `jax.ShapeDtypeStruct`s; nothing is allocated. Gradients and the optimizer are
    part of every suggestion. options: as for `xshard.suggest`; `recompute` is by default True for a
    function with parts under `jax.checkpoint`.
    Raises PlanError for a function that returns something else than one number, and as `xshard.suggest` does.

    >>> from xshard import Mesh
    >>> p, x = (jax.ShapeDtypeStruct((n, 8192), "bfloat16") for n in (8192, 4096))
    >>> plan = suggest(
    ...     lambda p, x: (x @ p["up"]).sum(), ({"up": p}, x), Mesh(dp=4), micro_batches=1
    ... )
    >>> plan.parameters["up"], plan.specs
    ('o i/dp', ({'up': P(None, 'dp')}, P(None, None)))
    """
    loss = Loss(f, args)
    step, tracer, names = traced(loss)
    options.setdefault("recompute", True if tracer.recomputes else None)
    plan = suggest_step(step, xshard_mesh(mesh), **options)
    return JaxSuggestion(
        plan.search, plan.assignment, plan.bound, plan.by_hand, loss, tracer, names, mesh
    )


def traced(loss: Loss) -> tuple[TrainingStep, Tracer, dict[str, str]]:
    """The step of a loss, and the names that places of its jaxpr have there."""
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in loss.arrays]
    closed = jax.make_jaxpr(loss.run)(*structs)
    if [out.shape for out in closed.out_avals] != [()]:
        returned = ", ".join(out.str_short() for out in closed.out_avals) or "nothing"
        hint = "pass the loss, which returns one number; gradients and the optimizer are always counted"
        raise PlanError(f"the function returns {returned}", hint=hint)
    parameters = structs[: loss.n_parameters]
    inputs = structs[loss.n_parameters :]
    largest = max(
        parameters, key=lambda x: math.prod(x.shape), default=jax.ShapeDtypeStruct((), "bfloat16")
    )
    trace = Trace(next((x.shape[0] for x in inputs if x.shape), 1), str(largest.dtype))
    for i, (name, x) in enumerate(zip(loss.names, structs, strict=True)):
        (trace.parameter if i < loss.n_parameters else trace.input)(name, x.shape)
    tracer = Tracer(trace)
    (last,) = tracer.walk(closed.jaxpr, loss.names)
    step, names = repeated(trace.step(last or "", moves_anywhere=True))
    names |= {place: names.get(name, name) for place, name in tracer.aliases.items()}
    return fused(step), tracer, names
