"""Everything used of JAX that JAX does not promise to keep: the only file to change for another release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax

# Also in jax.extend.core, which imports Pallas.
from jax._src.core import Primitive, unsafe_get_axis_names
from jax.experimental import jet
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

OLDEST = (0, 10)
ACCELERATORS = ("cuda", "rocm", "tpu")

if jax.__version_info__ < OLDEST:
    raise ImportError(
        f"jax_bridge needs jax {'.'.join(map(str, OLDEST))} or later, this is {jax.__version__}: "
        "along manual axes earlier ones know only `varying`"
    )


def named_axes() -> Collection[object]:
    """The axes that collectives can name here: manual ones, and those that `vmap` has bound."""
    return unsafe_get_axis_names()


class Batch(NamedTuple):
    """A batch of `vmap`: its length, its name if it has one, and the mesh axes over which it is cut."""

    size: int
    name: object
    mesh_axes: tuple[str, ...]


def linear_primitive(
    name: str, *, transpose: Callable[..., jax.Array], **rules: Any
) -> Callable[..., jax.Array]:
    """A linear operation on one array, with parameters as keywords, under every transformation of JAX. run:
    the operation, made of other operations; on_platforms: the same for platforms that differ. abstract_eval:
    type of the array -> type of the result, and effects; default: the same, none. transpose: the cotangent's
    map. batch: the array, its batch dim or None, the batch -> the result and its batch dim; default: the same
    operation.
    """
    primitive = _primitive(name, **rules)
    ad.deflinear2(primitive, lambda cotangent, _, **params: [transpose(cotangent, **params)])
    jet.deflinear(primitive)
    return primitive.bind


def bilinear_primitive(
    name: str,
    *,
    run: Callable[..., jax.Array],
    transposes: Sequence[Callable[..., jax.Array]],
    **rules: Any,
) -> Callable[..., jax.Array]:
    """An operation on two arrays that is linear in each, with parameters as keywords, as `linear_primitive`.
    transposes: cotangent, type of one array, the other array -> cotangent of the one.
    """
    primitive = _primitive(name, run=run, **rules)

    def jvp(primals: Any, tangents: Any, **params: object) -> tuple[jax.Array, Any]:
        pairs = zip(((tangents[0], primals[1]), (primals[0], tangents[1])), tangents, strict=True)
        terms = [
            primitive.bind(*pair, **params)
            for pair, tangent in pairs
            if type(tangent) is not ad.Zero
        ]
        # Not the primitive: policies of jax.checkpoint look for the operations.
        return run(*primals, **params), reduce(ad.add_tangents, terms)

    ad.defbilinear(
        primitive,
        lambda cotangent, x, y, **params: transposes[0](cotangent, x.aval, y, **params),
        lambda cotangent, x, y, **params: transposes[1](cotangent, y.aval, x, **params),
    )
    ad.primitive_jvps[primitive] = jvp
    jet.jet_rules[primitive] = partial(jet._bilinear_taylor_rule, primitive)
    return primitive.bind


def _primitive(
    name: str,
    *,
    run: Callable[..., jax.Array],
    abstract_eval: Callable[..., Any] = lambda x, **_: (x, set()),
    batch: Callable[..., tuple[jax.Array, int | None]] | None = None,
    on_platforms: Mapping[str, Callable[..., jax.Array]] | None = None,
) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(abstract_eval)

    def batched(
        axis_data: Any, arrays: Any, dims: Any, **params: object
    ) -> tuple[jax.Array, int | None]:
        # A batch that `spmd_axis_name` spreads is unsharded in its type if the axes are Explicit.
        context = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
        spread = tuple(a for a in axis_data.spmd_name or () if kinds.get(a) != AxisType.Explicit)
        cut = axis_data.explicit_mesh_axis or spread
        if batch is None:
            return primitive.bind(*arrays, **params), dims[0]
        return batch(*arrays, *dims, Batch(axis_data.size, axis_data.name, cut), **params)

    batching.fancy_primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    for platform, there in (on_platforms or {}).items():
        mlir.register_lowering(
            primitive, mlir.lower_fun(there, multiple_results=False), platform=platform
        )
    return primitive


def types_of(
    run: Callable[..., jax.Array], static: Sequence[str]
) -> Callable[..., tuple[Any, Any]]:
    """An operation -> its `abstract_eval`. static: its parameters."""
    traced = jax.jit(run, static_argnames=static, inline=True)

    def abstract_eval(*arrays: Any, **params: Any) -> tuple[Any, Any]:
        jaxpr = traced.trace(*arrays, **params).jaxpr
        (result,) = jaxpr.out_avals
        return result, jaxpr.effects

    return abstract_eval


def batch_first(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """The array with its batch dim first; repeated along one if it has none."""
    return batching.bdim_at_front(x, dim, size)


def with_sharding(aval: Any, sharding: NamedSharding, shape: tuple[int, ...] | None = None) -> Any:
    """The aval of an array with another sharding, and shape. A type tells Explicit axes only."""
    context = jax.sharding.get_abstract_mesh()
    mesh = sharding.mesh.abstract_mesh if context.empty else context
    shape = aval.shape if shape is None else shape
    return aval.update(shape=shape, sharding=NamedSharding(mesh, sharding.spec))


def manual_type(x: Any) -> Any:
    """The type along manual axes: sets `varying`, `unreduced`, `reduced`, `vur` (all). None under `vmap`."""
    return getattr(jax.typeof(x) if isinstance(x, jax.Array) else x, "manual_axis_type", None)


def with_manual_type(aval: Any, manual: Any) -> Any:
    """The aval with another type along the manual axes."""
    return aval.update(manual_axis_type=manual)


def changed_type(manual: Any, **axes: frozenset[str]) -> Any:
    """The type along manual axes with other sets of axes: `varying`, `unreduced` and `reduced`."""
    kind = getattr(manual, "unreduced_kind", None)
    return type(manual)(**axes, **({"unreduced_kind": kind} if axes["unreduced"] and kind else {}))


def unreduced_kind(typed: Any) -> str:
    """The pending reduction of unreduced values, in a type along manual axes or a spec: before 0.12 "sum"."""
    kind = getattr(typed, "unreduced_kind", None)
    return "sum" if kind is None else str(kind.name)


def cuts_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a spec, also of one with tags, over which JAX refuses to iterate."""
    kind = {"unreduced_kind": None} if hasattr(spec, "unreduced_kind") else {}
    return tuple(spec.update(unreduced=frozenset(), reduced=frozenset(), **kind))


def cotangent_type(manual: Any) -> Any:
    """The cotangent's type along the manual axes: unreduced and reduced change places."""
    return manual.to_ct_mat()


def host_callback(function: Callable[..., None], types: Any) -> Callable[..., Any]:
    """`function(context, results, *arguments)`, called by XLA on the memory of its device."""
    # `jax.pure_callback` holds a thread while others copy: with a device per thread it deadlocks.
    return buffer_callback(function, types, vmap_method="sequential")


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many arguments of a scan are constants, and how many are carries."""
    if "ft_in" in params:  # from 0.12 on
        consts, carries, _ = params["ft_in"].unpack()
        return len(consts), len(carries)
    return params["num_consts"], params["num_carry"]
