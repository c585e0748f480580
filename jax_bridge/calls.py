"""`redistribute`: blocks on one device from one layout to another; a call on one block as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.autodiff.function import MODES, apply
from jax_bridge.mesh.axis_types import as_varying, axis_size, is_typed, varying_axes
from jax_bridge.mesh.context import (
    AnyMesh,
    axis_span,
    check_block_here,
    machine_here,
    planned_mesh_here,
)
from jax_bridge.replicas import apply_checked
from jax_bridge.trees import leaves_of
from jax_bridge.versions import manual_type, unreduced_kind
from xshard import Layout, Plan, ProfileLike, XshardError, planner
from xshard.arguments import lengths_of, whole_numbers
from xshard.errors import DtypeError, NotationError, Span, located
from xshard.layout.lengths import global_shape
from xshard.notation.maps import Maps
from xshard.notation.parser import Dim, mark_errors, with_maps
from xshard.plans.expression import Sides, check_given, sides
from xshard.replicas import are_checked

T = TypeVar("T")
Derivatives = Literal["linear", "custom_vjp"]
SPECS = (
    PartitionSpec,
    NamedSharding,
)  # JAX's own functions take these, and users pass them as layouts


class BlockCall(NamedTuple):
    """A redistribution of one block, without the block: the arguments of `redistribute`."""

    sides: Sides
    plan_given: Plan | None
    mesh: AnyMesh | None = None
    shape: tuple[int, ...] | None = None
    profile: ProfileLike = "auto"
    check_replicated: bool | None = None
    ad: str = "linear"

    @classmethod
    def of(
        cls, expression: Any, mesh: AnyMesh | None, shape: Any, ad: Derivatives, **options: Any
    ) -> BlockCall:
        """The call with the arguments of `redistribute`. Raises as `redistribute` does."""
        if ad not in MODES:
            raise XshardError(
                f"unknown derivatives ad={ad!r}", hint=f"they are: {', '.join(MODES)}"
            )
        plan = expression if isinstance(expression, Plan) else None
        lengths = None if shape is None else lengths_of(shape)
        return cls(sides_of(expression), plan, mesh, lengths, ad=ad, **options)

    def plan(self, x: jax.Array) -> Plan:
        """The plan for a block: a new one, or the given one after a check."""
        src, dst, text = self.sides
        with mark_errors(text):
            if self.plan_given is not None:
                here = planned_mesh_here(
                    self.mesh, self.plan_given.mesh, self.plan_given.axes, text
                )
                plan = replace(self.plan_given, mesh=here, devices=())
                check_given("the block is", plan, x.dtype.name, self.shape)
            else:
                here, machine = machine_here(self.mesh, (src, dst), text, self.profile)
                shape = global_shape(src, here, x.shape, text) if self.shape is None else self.shape
                plan = planner.plan(self.sides, here, shape, x.dtype.name, profile=machine)
        check_block_here(x.shape, plan.source, text, inferred=self.shape is None)
        return plan

    def run(self, x: Any, mesh_axes: Sequence[str] | None = None) -> jax.Array:
        """The block under the left layout -> the block under the right one."""
        # mesh_axes: at the border of a `shard_map` all axes of the mesh: the block must be invariant along
        # those that the left side does not name, and equal sides leave it as it is. Default: the plan's.
        text = self.sides.text
        x = as_array(x, text)
        if are_keys(x) and self.plan_given is None:
            words, wider, keys_of = as_words(x, self.sides)
            shape = None if self.shape is None else (*self.shape, words.shape[-1])
            return keys_of(self._replace(sides=wider, shape=shape).run(words, mesh_axes))
        plan = self.plan(x)
        x = with_entry_type(x, plan, text, mesh_axes)
        stays = mesh_axes is not None and self.sides.src == self.sides.dst
        return x if stays else execute(plan, x, text, self.check_replicated, self.ad)


def execute(
    plan: Plan, x: jax.Array, text: str, check_replicated: bool | None = None, ad: str = "linear"
) -> jax.Array:
    """A block of the type that `with_entry_type` gives it, under `plan.src` -> the block under `plan.dst`."""
    return apply_checked(plan, x, text, ad) if are_checked(check_replicated) else apply(plan, x, ad)


def sides_of(expression: Any) -> Sides:
    """The sides of an expression. Raises NotationError for a spec of JAX, too."""
    if isinstance(expression, jax.Array | np.ndarray):
        raise NotationError("an array in place of the layouts", hint="the array comes first")
    for layout in expression if isinstance(expression, tuple) else (expression,):
        if isinstance(layout, SPECS):
            hint = "write both sides, as in 's/cp c -> s c'; from_partition_spec(spec, ndim) is a layout"
            raise NotationError(f"a {type(layout).__name__} in place of a layout", hint=hint)
    return sides(expression)


def as_array(x: Any, text: str) -> jax.Array:
    """A block or array, maybe of numpy, as an array of JAX, which DtypeError says that it cannot hold."""
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, str | Layout | Plan):
        raise NotationError("an expression in place of the array", hint="the array comes first")
    if isinstance(x, np.ndarray | np.generic):
        check_dtype(x.dtype, text)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        what = f"JAX cannot make an array of a {type(x).__name__}"
        raise DtypeError(what, text=text, hint="pass an array") from None


def check_dtype(dtype: np.dtype, text: str) -> None:
    """Raise DtypeError if JAX would narrow the dtype, or lacks such numbers."""
    if dtype.kind in "OSUMm":
        raise DtypeError(f"JAX cannot hold {dtype}", text=text, hint="pass an array of numbers")
    if (narrowed := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        what = f"the block is {dtype.name}, which JAX would make {narrowed.name}"
        raise DtypeError(
            what, text=text, hint='jax.config.update("jax_enable_x64", True), or convert it'
        )


def with_entry_type(
    x: jax.Array,
    plan: Plan,
    text: str,
    axes: Sequence[str] | None = None,
    layout: Span | None = None,
) -> jax.Array:
    """The block, declared as `apply` needs it: varying along the source's axes, invariant along others, by
    default the plan's. layout: the part of the text that errors mark.
    """
    block_type = manual_type(x)
    kind = unreduced_kind(block_type)
    for axis in plan.axes if axes is None else axes:
        what = hint = ""
        if kind != "sum" and axis in block_type.unreduced and axis not in plan.src.tagged(kind):
            what = f"the block is unreduced along {axis!r}: its {kind} is pending"
            hint = f"write it on the left: {kind}({axis})"
        elif axis not in plan.src.axes and is_typed(axis) and axis in varying_axes(x):
            what = f"the block varies along {axis!r}, where the source holds one value"
            hint = f"write what it is on the left: sum({axis}), mean({axis}), or copy({axis}) for copies"
            if axis_size(axis) == 1:  # over one device a sum changes the type only
                x = lax.psum(x, axis)
                what = ""
        if what:
            raise NotationError(what, text=text, span=axis_span(axis, text, layout), hint=hint)
    return as_varying(x, plan.src.axes)


def are_keys(x: jax.Array) -> bool:
    """True for an array of PRNG keys (`jax.random.key`)."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def as_words(
    keys: jax.Array, parsed: Sides
) -> tuple[jax.Array, Sides, Callable[[jax.Array], jax.Array]]:
    """PRNG keys -> their words, `[..., words]`, the expression with that dim, the function back to keys."""
    src, dst = (_with_words(layout.resolved(keys.ndim), parsed.text) for layout in parsed[:2])
    keys_of = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(keys))
    return jax.random.key_data(keys), Sides(src, dst, parsed.text), keys_of


def _with_words(layout: Layout, text: str) -> Layout:
    if any(dim.overlap for dim in layout.dims) or any(kind != "copy" for kind, _ in layout.tags):
        hint = "keys are only moved: use copy alone, and no overlap"
        raise DtypeError(f"PRNG keys under '{layout}'", text=text, hint=hint)
    name = next(
        f"words{i}" for i in range(len(layout.names) + 1) if f"words{i}" not in layout.names
    )
    return replace(layout, dims=(*layout.dims, Dim(name)))


def redistribute(
    x: T,
    layouts: Any,
    mesh: AnyMesh | None = None,
    *,
    shape: Any = None,
    profile: ProfileLike = "auto",
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
    maps: Maps | None = None,
) -> T:
    """This device's block under the left layout -> its block under the right one, differentiable.

    x: a block, or a pytree of blocks. layouts: `"layout -> layout"`, a pair of layouts, or a plan; for a
    pytree one for all, `xshard.Rules` over the names of leaves, or a pytree prefix of these. mesh: default:
    the mesh of the context. shape: the global shape, or a tree of shapes. Default: the numbers of the layout,
    as in `n/sizes(dp,2,3)`, else all blocks are taken to be equal. An uneven block has the shape of the
    largest: its padding may hold anything on the way in and is zero on the way out.
    profile: the machine to plan for. check_replicated: for debugging, compare replicas and copies, forward
    and backward. Default: the environment variable XSHARD_CHECK_REPLICATED.
    ad: "linear" supports every mode of differentiation; "custom_vjp" reverse mode only, and jaxprs show the
    collectives of `jax.lax`. maps: the `Owners` and `Needs` that layouts name.
    Blocks may differ along axes that the layouts do not name. With `check_vma=True` the result is invariant
    along an axis that only the left side names. Blocks of PRNG keys are only moved: no sums, no overlaps.

    Raises while tracing: NotationError, MeshError, ShapeError, DtypeError, PlanError; LinearityError for an
    undefined gradient; XshardError for layouts that do not fit the pytree. While running: JAX's error with
    the text of a ReplicaError.

    >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
    >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
    (1, 4, 2)
    """
    options: Any = {"profile": profile, "check_replicated": check_replicated}
    layouts = with_maps(layouts, maps)
    if jax.tree_util.all_leaves([x]):
        moved: Any = BlockCall.of(layouts, mesh, shape, ad, **options).run(x)
        return moved
    results = []
    for leaf, sized in zip(
        leaves_of(layouts, x, is_expression), leaves_of(shape, x, _is_shape), strict=True
    ):
        with located(leaf.place):
            results.append(BlockCall.of(leaf.given, mesh, sized.given, ad, **options).run(leaf.x))
    return jax.tree.unflatten(jax.tree.structure(x), results)


def is_expression(value: Any) -> bool:
    """True for a pair of layouts; False for a pair of expressions, which is a pytree."""
    if not isinstance(value, tuple) or len(value) != 2:
        return isinstance(value, (str, Plan, Sides, *SPECS))
    return all(
        isinstance(v, (Layout, *SPECS)) or (isinstance(v, str) and "->" not in v) for v in value
    )


def _is_shape(value: Any) -> bool:
    lengths = whole_numbers(value)
    return value is None or (lengths is not None and all(isinstance(n, int) for n in lengths))
