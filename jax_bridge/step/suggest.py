"""`suggest`: where the parameters, inputs and activations of a loss live, as rules and as PartitionSpecs."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.mesh.context import AnyMesh, xshard_mesh
from jax_bridge.specs import to_partition_spec
from jax_bridge.step.constrain import evaluate
from jax_bridge.step.tracer import Tracer
from jax_bridge.trees import is_array, leaves_of
from xshard import Layout, Rules, Suggestion
from xshard import suggest as suggest_step
from xshard.arguments import shown
from xshard.errors import PlanError
from xshard.step.rules import StepRules
from xshard.step.trace import Trace

MAKERS = ("attention", "carry", "contraction", "lookup")  # their results have layouts that XLA is told


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss as a function of the arrays among its arguments. names: of these; tree, leaves: of arguments."""

    f: Callable[..., Any]
    tree: Any
    leaves: Sequence[Any]
    names: Sequence[str]
    places: Sequence[int]
    n_parameters: int

    @classmethod
    def of(cls, f: Callable[..., Any], args: Sequence[Any]) -> Loss:
        leaves, tree = jax.tree.flatten(tuple(args))
        arguments = inspect.signature(f).bind(*args).arguments
        first, *rest = ([(leaf.name, leaf.x) for leaf in leaves_of(None, x)] for x in arguments.values())
        named = [
            *first,
            *(
                (".".join(filter(None, (name, leaf))), x)
                for name, pairs in zip(list(arguments)[1:], rest, strict=True)
                for leaf, x in pairs
            ),
        ]
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        return cls(
            f, tree, leaves, [named[i][0] for i in places], places, sum(i < len(first) for i in places)
        )

    @property
    def arrays(self) -> list[Any]:
        return [self.leaves[i] for i in self.places]

    def filled(self, values: Sequence[Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        """The arguments with other values in place of arrays."""
        by_place = dict(zip(self.places, values, strict=True))
        return jax.tree.unflatten(
            self.tree, [by_place[i] if i in by_place else other(leaf) for i, leaf in enumerate(self.leaves)]
        )

    def __call__(self, *arrays: Any) -> Any:
        return self.f(*self.filled(arrays))


@dataclass(frozen=True, eq=False)
class JaxSuggestion(Suggestion):
    """A suggestion for a loss, with what `jit` takes. names: arrays of the jaxpr -> those of the step."""

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

        Also for other lengths of the batch. On a mesh without devices `jax.set_mesh` says where.
        """

        def constrained(*args: Any) -> Any:
            loss = Loss.of(f, args)
            closed, out = jax.make_jaxpr(loss, return_shape=True)(*loss.arrays)
            results = evaluate(self._placed, closed.jaxpr, closed.consts, loss.names, *loss.arrays)
            return jax.tree.unflatten(jax.tree.structure(out), results)

        return constrained

    @cached_property
    def rules(self) -> StepRules:
        found = super().rules
        if not self.tracer.stacked:
            return found
        return found._replace(
            parameters=Rules(
                {
                    pattern: " -> ".join(f"... {side}" for side in text.split(" -> "))
                    for pattern, text in found.parameters.items()
                }
            )
        )

    def _spec(self, name: str) -> PartitionSpec:
        """How an argument is stored."""
        stored, _ = self.layouts.get(self._name(name), (Layout(()), None))
        spec = to_partition_spec(Layout(stored.dims))
        return PartitionSpec(None, *spec) if name in self.tracer.stacked else spec

    def _placed(self, name: str, x: jax.Array) -> jax.Array:
        """An array where it is used; unchanged where nothing is to be said."""
        step, name = self.problem.step, self._name(name)
        made, used = self.layouts.get(name, (None, None))
        op = step.by_name.get(name)
        if (
            used is None
            or used.tagged("sum")
            or len(used.dims) != x.ndim
            or (op and op.kind not in MAKERS and made == used)
        ):
            return x
        spec = to_partition_spec(Layout(used.dims))
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.on, spec) if isinstance(self.on, JaxMesh) else spec
        )

    def _name(self, name: str) -> str:
        name = self.tracer.aliases.get(name, name)
        return self.names.get(name, name)

    def __str__(self) -> str:
        opaque = (
            f"{primitive} has no rule, every device computes it: {', '.join(names)}"
            for primitive, names in self.tracer.opaque.items()
        )
        return "\n".join([super().__str__(), *opaque])


def suggest(f: Callable[..., Any], args: Sequence[Any], mesh: AnyMesh, **options: Any) -> JaxSuggestion:
    """The layouts of the parameters, inputs and activations of a loss that make a training step fastest.

    f: a loss of (parameters, batch, ...), pytrees that may be modules of flax nnx or equinox. args: its
    arguments, arrays or `jax.ShapeDtypeStruct`s; nothing is allocated. The gradients and the optimizer are
    part of every suggestion. options: those of `xshard.suggest`. recompute: by default what the function does
    under `jax.checkpoint`, else what is best.
    Raises PlanError for a function that returns something else than one number, and as `xshard.suggest` does.

    >>> shapes = {"up": jax.ShapeDtypeStruct((8192, 8192), "bfloat16")}
    >>> x = jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
    >>> found = suggest(lambda p, x: (x @ p["up"]).sum(), (shapes, x), Mesh(dp=4), micro_batches=1)
    >>> found.specs
    """
    loss = Loss.of(f, args)
    closed = jax.make_jaxpr(loss)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in loss.arrays))
    if [out.shape for out in closed.out_avals] != [()]:
        returned = (
            f"{len(closed.out_avals)} arrays, the first {shown(closed.out_avals[0])}"
            if closed.out_avals
            else "nothing"
        )
        hint = (
            "pass the loss, which returns one number; gradients and the optimizer are part of the suggestion"
        )
        raise PlanError(f"the function returns {returned}", hint=hint)
    parameters, inputs = loss.arrays[: loss.n_parameters], loss.arrays[loss.n_parameters :]
    batch = next((x.shape[0] for x in inputs if x.shape), 1)
    dtypes = Counter({str(x.dtype): 0 for x in inputs})
    for x in parameters:
        dtypes[str(x.dtype)] += math.prod(x.shape)
    trace = Trace(batch, dtype=dtypes.most_common(1)[0][0])
    for i, (name, x) in enumerate(zip(loss.names, loss.arrays, strict=True)):
        (trace.parameter if i < loss.n_parameters else trace.input)(name, x.shape)
    tracer = Tracer(trace)
    (last,) = tracer.walk(closed.jaxpr, loss.names)
    step, names = trace.step(last, moves_anywhere=True), {}
    options.setdefault("recompute", True if tracer.recomputes else None)
    found = suggest_step(step, xshard_mesh(mesh), **options)
    own = {field.name: getattr(found, field.name) for field in fields(Suggestion)}
    return JaxSuggestion(**own, loss=loss, tracer=tracer, names=names, on=mesh)
