"""All that is used of JAX without a promise that it stays: the file to change for a release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

# `Primitive` is public in jax.extend.core, too, but that imports Pallas: 30 ms that few need.
from jax._src.core import Primitive, unsafe_get_axis_names
from jax.experimental import jet
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

OLDEST = (0, 10)
ACCELERATORS = ("cuda", "rocm", "tpu")  # platforms as `mlir.register_lowering` names them

if jax.__version_info__ < OLDEST:
    raise ImportError(
        f"jax_bridge needs jax {'.'.join(map(str, OLDEST))} or later, this is {jax.__version__}: "
        "along manual axes earlier ones know only `varying`"
    )


def named_axes() -> Collection[object]:
    """Return the axes that collectives can name here: manual ones, and those that `vmap` has bound.

    JAX has no public list of them. Without it no call could tell a missing `shard_map` from a wrong
    axis.
    """
    return unsafe_get_axis_names()


def is_constant(x: jax.Array) -> bool:
    """Return whether a traced array is computed from no argument, as `jnp.ones(3)` is.

    JAX tells nobody what a tracer depends on. Outside of `jit` tracers have no list of their
    operands: there only numbers of Python are known to be constants.
    """
    tracers: list[Any] = [x]
    for tracer in tracers:  # the list grows: what they are computed from is appended
        equation = getattr(tracer, "parent", None)
        if equation is not None:
            tracers += equation.in_tracers
        elif not hasattr(getattr(tracer, "val", None), "val"):  # no literal: an argument
            return x.weak_type  # outside of `jit`, where there are no lists, of a number of Python
    return True


# Operations under every transformation of JAX.

Operation = Callable[..., jax.Array]  # arrays, parameters by keyword -> an array


class Batch(NamedTuple):
    """A batch of `vmap`: its length, its name if it has one, and the mesh axes that shard it."""

    size: int
    name: object
    mesh_axes: tuple[str, ...]


def linear_primitive(name: str, *, transpose: Operation, **rules: Any) -> Operation:
    """Define a linear operation on one array, a primitive, for every transformation of JAX.

    Its derivative is itself, and its gradient is given by `transpose`. `jax.custom_vjp` would have
    reverse mode only; with a primitive forward mode, jet, vmap and linear_transpose work, too.

    Args:
        name: The name that jaxprs show.
        transpose: Cotangent of the result -> cotangent of the array.
        rules: Further rules:
            `run`, the operation, made of other operations;
            `on_platforms`, the same for platforms that differ, by name;
            `abstract_eval`, type of the array -> type of the result and effects; default: the same,
            none; `batch`, the operation, the array, its batch dim or None, the `Batch` -> the
            result and its batch dim; default: the same operation.

    Returns:
        The operation: array, parameters by keyword -> array.
    """
    primitive = _primitive(name, **rules)

    def transpose_rule(cotangent: jax.Array, _: Any, **params: Any) -> list[jax.Array]:
        return [transpose(cotangent, **params)]

    ad.deflinear2(primitive, transpose_rule)
    # Without this rule `jax.experimental.jet` knows no derivative of the operation.
    jet.deflinear(primitive)
    return primitive.bind


def bilinear_primitive(
    name: str,
    *,
    run: Operation,
    transposes: Sequence[Operation],
    **rules: Any,
) -> Operation:
    """Define an operation on two arrays that is linear in each, as a product, as a JAX primitive.

    Args:
        name: The name that jaxprs show.
        run: The operation, made of other operations.
        transposes: For each array: cotangent, type of the array, the other array -> its cotangent.
        rules: Further rules, as of `linear_primitive`; `batch` takes the operation, both arrays,
            then both batch dims.

    Returns:
        The operation.
    """
    primitive = _primitive(name, run=run, **rules)

    def jvp(primals: Any, tangents: Any, **params: object) -> tuple[jax.Array, Any]:
        """Differentiate a product: d(x y) = dx y + x dy, without terms known to be zero."""
        terms = []
        for i, tangent in enumerate(tangents):
            if not isinstance(tangent, ad.Zero):
                factors = list(primals)
                factors[i] = tangent
                terms.append(primitive.bind(*factors, **params))
        # The value is computed by the operations themselves, not by the primitive: policies of
        # jax.checkpoint look for `dot_general`, say, in the jaxpr.
        return run(*primals, **params), reduce(ad.add_tangents, terms)

    def transpose_first(cotangent: jax.Array, x: Any, y: jax.Array, **params: Any) -> jax.Array:
        return transposes[0](cotangent, x.aval, y, **params)

    def transpose_second(cotangent: jax.Array, x: jax.Array, y: Any, **params: Any) -> jax.Array:
        return transposes[1](cotangent, y.aval, x, **params)

    ad.defbilinear(primitive, transpose_first, transpose_second)
    # `defbilinear` has set a jvp that binds the primitive itself.
    ad.primitive_jvps[primitive] = jvp
    jet.jet_rules[primitive] = partial(jet._bilinear_taylor_rule, primitive)
    return primitive.bind


def _same_type(x: Any, **_: Any) -> tuple[Any, set[Any]]:
    """Return the type of a result that is like its argument, and no effects."""
    return x, set()


def _primitive(
    name: str,
    *,
    run: Operation,
    abstract_eval: Callable[..., Any] = _same_type,
    batch: Callable[..., tuple[jax.Array, int | None]] | None = None,
    on_platforms: Mapping[str, Operation] | None = None,
) -> Primitive:
    """Define an operation of JAX with its rules for running, types, vmap and compilation.

    Derivatives are added by the caller. The rules are as of `linear_primitive`.
    """
    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(abstract_eval)

    def batched(
        axis_data: Any, arrays: Any, dims: Any, **params: object
    ) -> tuple[jax.Array, int | None]:
        """Run the operation on arrays of which some have a batch dim: `axis_data` says which batch."""
        if batch is None:  # the operation treats all dims alike: the batch is one more
            return primitive.bind(*arrays, **params), dims[0]
        mesh_axes = axis_data.explicit_mesh_axis
        if not mesh_axes:
            mesh_axes = _spread_axes(axis_data.spmd_name)
        axis = Batch(axis_data.size, axis_data.name, mesh_axes)
        return batch(primitive.bind, *arrays, *dims, axis, **params)

    # The public `primitive_batchers` get neither the batch's name nor the axes that shard it.
    batching.fancy_primitive_batchers[primitive] = batched
    platforms: list[tuple[str | None, Operation]] = [(None, run)]  # None: those without their own
    if on_platforms is not None:
        platforms += on_platforms.items()
    for platform, run_there in platforms:
        lowering = mlir.lower_fun(run_there, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    return primitive


def _spread_axes(spmd_axis_name: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes over which `vmap(spmd_axis_name=)` spreads a batch."""
    if not spmd_axis_name:
        return ()
    context = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
    # Over Explicit axes the batch is unsharded in its type, whatever the name says.
    return tuple(axis for axis in spmd_axis_name if kinds.get(axis) != AxisType.Explicit)


@lru_cache(maxsize=256)
def devices_in_program(mesh: JaxMesh | AbstractMesh) -> object:
    """Return a jaxpr that names the devices of a mesh: as a parameter it tells them to `jax.jit`.

    JAX finds the devices of a program in its arguments and in operations that it knows, also in those
    of a jaxpr that is a parameter. It cannot look into a primitive of ours: without this parameter a
    program would run on the devices of its arguments alone, whatever mesh it names.

    Args:
        mesh: The mesh; one without devices has nothing to name: None.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    # Arrays on Explicit axes take no constraint. The types of axes make no difference to devices.
    auto_types = (AxisType.Auto,) * len(mesh.axis_names)
    auto_mesh = JaxMesh(mesh.devices, mesh.axis_names, axis_types=auto_types)
    whole = NamedSharding(auto_mesh, PartitionSpec())
    # A context may have other types of axes, which the constraint would have to fit.
    with jax.sharding.use_abstract_mesh(auto_mesh.abstract_mesh):
        on_devices = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, whole))
        return on_devices(jax.ShapeDtypeStruct((), np.float32))


def types_of(run: Operation, static: Sequence[str]) -> Callable[..., tuple[Any, Any]]:
    """Return an operation's rule for types (`abstract_eval`), which traces the operation.

    Args:
        run: The operation.
        static: The names of its parameters.

    Returns:
        A function: types of the arrays, parameters -> type of the result and effects.
    """
    traced = jax.jit(run, static_argnames=static, inline=True)  # jit caches the traces

    def abstract_eval(*arrays: Any, **params: Any) -> tuple[Any, Any]:
        jaxpr = traced.trace(*arrays, **params).jaxpr
        (result,) = jaxpr.out_avals
        return result, jaxpr.effects

    return abstract_eval


def batch_first(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """Return the array with its batch dim first; repeated along one if it has none.

    JAX keeps this function for its own batching rules.
    """
    return batching.bdim_at_front(x, dim, size)


# Types of arrays.


def with_sharding(aval: Any, sharding: NamedSharding, shape: tuple[int, ...] | None = None) -> Any:
    """Return the type of an array (`jax.typeof`) with another sharding, and another shape if given.

    A type has the Explicit axes of a sharding only. JAX documents no way to build one; `reshard`
    needs it to tell the type of a result before it runs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = sharding.mesh.abstract_mesh
    if shape is None:
        shape = aval.shape
    return aval.update(shape=shape, sharding=NamedSharding(mesh, sharding.spec))


def manual_type(x: Any) -> Any:
    """Return what JAX knows of a value along manual axes, those of `shard_map`; None under `vmap`.

    It has sets of axes: `varying`, `unreduced`, `reduced`, and `vur` with all of them. JAX
    documents no way to ask for it. Without it a missing `sum(...)` on the left of an expression
    would go unnoticed.
    """
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(aval, "manual_axis_type", None)


def with_manual_type(aval: Any, manual: Any) -> Any:
    """Return the type of an array with another type along the manual axes.

    Without it a block could not be declared invariant: `jax.lax.pcast` has no such direction.
    """
    return aval.update(manual_axis_type=manual)


def changed_type(manual: Any, **axes: frozenset[str]) -> Any:
    """Return the type along manual axes with other sets `varying`, `unreduced`, `reduced`."""
    # From 0.12 on a type with unreduced axes needs the kind of their reduction; others have none.
    kind = getattr(manual, "unreduced_kind", None)
    if kind and axes["unreduced"]:
        return type(manual)(**axes, unreduced_kind=kind)
    return type(manual)(**axes)


def unreduced_kind(typed: Any) -> str:
    """Return the pending reduction of unreduced values: "sum", "max" or "min"; before 0.12 "sum".

    Args:
        typed: A type along manual axes, or a spec.
    """
    kind = getattr(typed, "unreduced_kind", None)
    return "sum" if kind is None else str(kind.name)


def cuts_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the entries of a spec, also of one with tags, over which JAX refuses to iterate."""
    untagged: dict[str, Any] = {"unreduced": frozenset(), "reduced": frozenset()}
    if hasattr(spec, "unreduced_kind"):  # from 0.12 on; a spec without unreduced axes has none
        untagged["unreduced_kind"] = None
    return tuple(spec.update(**untagged))


def cotangent_type(manual: Any) -> Any:
    """Return the cotangent's type along the manual axes: unreduced and reduced change places."""
    return manual.to_ct_mat()


# Programs.


def host_callback(function: Callable[..., None], types: Any) -> Callable[..., Any]:
    """Return an operation that calls a function on the host.

    The function takes `(context, results, *arguments)`, on the memory of its device.

    `jax.pure_callback` holds a thread while others copy: with a device per thread it deadlocks.
    """
    return buffer_callback(function, types, vmap_method="sequential")


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many arguments of a scan are constants, and how many are carries.

    The parameters of the primitive in a jaxpr tell it; JAX 0.12 has other names for them.
    """
    if "ft_in" in params:  # from 0.12 on
        consts, carries, _ = params["ft_in"].unpack()
        return len(consts), len(carries)
    return params["num_consts"], params["num_carry"]


def run_equation(jaxpr: Any, eqn: Any, arrays: Mapping[Any, Any]) -> list[Any]:
    """Run one equation of a jaxpr and return its results.

    `primitive.bind` would lose the equation's name scope, source line and context. JAX's own
    `eval_jaxpr` keeps them, so it is given a jaxpr of this one equation.

    Args:
        jaxpr: The jaxpr.
        eqn: The equation; maybe not of the jaxpr itself, but with the same variables.
        arrays: The value of each variable of the jaxpr so far.
    """
    # Literals hold their value themselves.
    variables = [v for v in eqn.invars if not hasattr(v, "val")]
    alone = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn])
    return jax.core.eval_jaxpr(alone, (), *[arrays[v] for v in variables])
