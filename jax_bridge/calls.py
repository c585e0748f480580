"""`redistribute`: blocks from one layout to another, and a call on one block as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.autodiff.function import apply, new_name
from jax_bridge.mesh.axis_types import (
    as_varying,
    axes_of_equal_blocks,
    axis_size,
    is_typed,
    varying_axes,
)
from jax_bridge.mesh.context import (
    AnyMesh,
    axis_span,
    check_block_shape,
    mesh_and_machine,
    planned_mesh_in_context,
)
from jax_bridge.replicas import apply_checked
from jax_bridge.trees import leaves_with_given_values
from jax_bridge.versions import is_constant, manual_type, unreduced_kind
from xshard import Layout, Plan, ProfileLike, planner
from xshard.arguments import lengths_of
from xshard.cost.machine import with_addends
from xshard.cost.model import FREE, Addends
from xshard.errors import DtypeError, NotationError, Span, api_boundary, located
from xshard.layout.lengths import global_shape
from xshard.notation.maps import Maps
from xshard.notation.parser import Dim, mark_errors, with_map_digests
from xshard.plans.expression import LayoutsLike, Sides, check_given, sides
from xshard.replicas import are_replicas_checked
from xshard.trees import is_shape

T = TypeVar("T")
Derivatives = Literal["linear", "custom_vjp"]

# JAX's own functions take these, and users pass them in the place of layouts.
SPECS = (PartitionSpec, NamedSharding)
JaxLayoutsLike = (
    LayoutsLike
    | PartitionSpec
    | NamedSharding
    | Mapping[Any, "JaxLayoutsLike"]
    | Sequence["JaxLayoutsLike | None"]
)


class MoveCall(NamedTuple):
    """A redistribution of one block, without the block: the arguments of `redistribute`."""

    sides: Sides
    given_plan: Plan | None
    mesh: AnyMesh | None = None
    shape: tuple[int, ...] | None = None
    profile: ProfileLike = "auto"
    check_replicated: bool | None = None
    ad: str = "linear"

    @classmethod
    def of(cls, expression: Any, *, shape: Any, ad: Derivatives, **options: Any) -> MoveCall:
        """Check the arguments of `redistribute`, and keep them.

        Args:
            expression: The layouts, or a plan.
            shape: The global shape; None to infer it.
            ad: How the call is differentiated.
            options: `mesh`, `profile` and `check_replicated`.

        Raises:
            XshardError: As `redistribute` does.
        """
        if shape is not None:
            shape = lengths_of(shape)
        given_plan = expression if isinstance(expression, Plan) else None
        return cls(sides_of(expression), given_plan, shape=shape, ad=ad, **options)

    def plan(self, x: jax.Array) -> Plan:
        """Plan the redistribution of a block, or check that the given plan fits it.

        Raises ShapeError for a block of another shape than the largest block of the global array.
        """
        text = self.sides.text
        with mark_errors(text):
            if self.given_plan is None:
                plan = self._new_plan(x)
            else:
                plan = self._given_plan_on_mesh(self.given_plan, x)
        check_block_shape(x.shape, plan.source, text, inferred=self.shape is None)
        return plan

    def _new_plan(self, x: jax.Array) -> Plan:
        """Plan the redistribution of a block."""
        src, dst, text = self.sides
        mesh, machine = mesh_and_machine(self.mesh, (src, dst), text, self.profile)
        shape = self.shape
        if shape is None:
            shape = global_shape(src, mesh, x.shape, text)
        return planner.plan(self.sides, mesh, shape, x.dtype.name, profile=machine)

    def _given_plan_on_mesh(self, given_plan: Plan, x: jax.Array) -> Plan:
        """Return the user's plan on the sub-mesh that it uses; raises if it does not fit the block."""
        mesh = planned_mesh_in_context(self.mesh, given_plan.mesh, given_plan.axes, self.sides.text)
        # Its device numbers are of the whole mesh.
        plan = replace(given_plan, mesh=mesh, devices=())
        check_given("the block is", plan, x.dtype.name, self.shape)
        return plan

    def run(self, x: Any, mesh_axes: Sequence[str] | None = None) -> jax.Array:
        """Move a block from the left layout to the right one: plan, check its type, and run.

        Args:
            x: The block.
            mesh_axes: All axes of the mesh, for a block that crosses the border of a `shard_map`:
                it must be equal (invariant) along those that the left side does not name, and
                equal sides leave it as it is. None elsewhere: only the plan's axes are checked.
        """
        text = self.sides.text
        x = as_array(x, text)
        if are_keys(x) and self.given_plan is None:
            return self._run_on_keys(x, mesh_axes)
        plan = self.plan(x)
        x = with_entry_type(x, plan, text, mesh_axes)
        if mesh_axes is not None and self.sides.src == self.sides.dst:
            return x  # nothing moves, and the padding may stay
        return execute(plan, x, text, self.check_replicated, self.ad)

    def _run_on_keys(self, keys: jax.Array, mesh_axes: Sequence[str] | None) -> jax.Array:
        """Redistribute a block of PRNG keys by the words that they consist of."""
        words = as_words(keys, self.sides)
        n_words = words.array.shape[-1]
        shape = None if self.shape is None else (*self.shape, n_words)
        call = self._replace(sides=words.sides, shape=shape)
        return words.back(call.run(words.array, mesh_axes))


def execute(
    plan: Plan, x: jax.Array, text: str, check_replicated: bool | None = None, ad: str = "linear"
) -> jax.Array:
    """Run a plan on a block, differentiably, and compare replicas first if that is asked for.

    Args:
        plan: The plan.
        x: The block under `plan.src`, with the JAX type that `with_entry_type` gives it.
        text: The expression, for errors.
        check_replicated: Whether to compare blocks that should be equal on several devices; None:
            as the environment variable XSHARD_CHECK_REPLICATED says.
        ad: How the plan is differentiated.

    Returns:
        The block under `plan.dst`.
    """
    if are_replicas_checked(check_replicated):
        return apply_checked(plan, x, text, ad)
    return apply(plan, x, ad)


def sides_of(expression: Any) -> Sides:
    """Parse both sides of an expression. Raises NotationError for a spec of JAX, too."""
    if isinstance(expression, jax.Array | np.ndarray):
        raise NotationError("an array in place of the layouts", hint="the array comes first")
    for layout in expression if isinstance(expression, tuple) else (expression,):
        if isinstance(layout, SPECS):
            hint = (
                "write both sides, as in 's/cp c -> s c'; "
                "from_partition_spec(spec, ndim) is a layout"
            )
            raise NotationError(f"a {type(layout).__name__} in place of a layout", hint=hint)
    return sides(expression)


# Arrays that users pass.


def as_array(x: Any, text: str) -> jax.Array:
    """Convert an argument to a `jax.Array`: numpy arrays, numbers, lists, arrays of others.

    Raises DtypeError for numbers that JAX cannot hold or would narrow, as float64 without x64, and
    NotationError for a layout in place of the array. `text` is the expression, for errors.
    """
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, str | Layout | Plan):
        raise NotationError("an expression in place of the array", hint="the array comes first")
    if isinstance(x, np.ndarray | np.generic):
        check_dtype(x.dtype, text)
    try:
        return jnp.asarray(x)  # numbers, lists, arrays of other frameworks
    except (TypeError, ValueError):
        reason = f"JAX cannot make an array of a {type(x).__name__}"
        hint = "pass an array; a mesh is passed by its name: mesh=mesh"
        raise DtypeError(reason, text=text, hint=hint) from None


def check_dtype(dtype: np.dtype, text: str) -> None:
    """Raise DtypeError if JAX would narrow the dtype, or lacks such numbers."""
    if not dtype.isnative:
        reason = f"JAX cannot hold {dtype.str}: its bytes are swapped"
        raise DtypeError(reason, text=text, hint='x.astype(x.dtype.newbyteorder("="))')
    is_no_number = dtype.kind in "OSUMm"  # objects, bytes, text, dates and durations
    is_record = dtype.names is not None
    is_longer = dtype.type in (np.longdouble, np.clongdouble)
    if is_no_number or is_record or is_longer:
        raise DtypeError(f"JAX cannot hold {dtype}", text=text, hint="pass an array of numbers")
    narrowed = jax.dtypes.canonicalize_dtype(dtype)
    if narrowed != dtype:
        reason = f"the block is {dtype.name}, which JAX would make {narrowed.name}"
        raise DtypeError(
            reason, text=text, hint='jax.config.update("jax_enable_x64", True), or convert it'
        )


def with_entry_type(
    x: jax.Array,
    plan: Plan,
    text: str,
    axes: Sequence[str] | None = None,
    layout: Span | None = None,
) -> jax.Array:
    """Check that a block's type fits the left layout, and give it the type that plans expect.

    JAX types a block along each axis of `shard_map`: equal on all devices (invariant), different
    (varying), or addends of a sum (unreduced). A block under "n/dp" may vary along dp alone: one
    that varies along tp is an error, an invariant one is declared varying along dp. An invariant
    block under "n | sum(tp)" is an error, too: its sum would be as many times too large as there
    are devices. Under "n | mean(tp)" it is most likely a gradient that JAX has summed, and would stay
    a sum.

    Args:
        x: The block.
        plan: The plan that will run on it.
        text: The expression, for errors.
        axes: The axes to check; by default the plan's.
        layout: The part of the text that errors mark; None for the whole.

    Returns:
        The block: varying along the source's axes, invariant along the others.

    Raises:
        NotationError: The block varies, or is unreduced, along an axis of which the source says
            otherwise.
    """
    src = plan.src
    source = plan.source
    src_axes = set(map(source.mesh.origin, source.layout.axes))
    block_type = manual_type(x)
    equal_axes = axes_of_equal_blocks(x, [*src.tagged("sum"), *src.tagged("mean")])
    # The first axis along which the type does not fit is the error.
    for axis in plan.axes if axes is None else axes:
        # Addends that are constants may be equal, as this device's number of rows.
        are_equal_addends = axis in equal_axes and not is_constant(x)
        misfit = _unreduced_misfit(block_type, axis, src)
        if misfit is None and are_equal_addends:
            misfit = _equal_addends_misfit(axis)
        elif misfit is None and axis not in src_axes and is_typed(axis) and axis in varying_axes(x):
            if axis_size(axis) == 1:
                # "Varying" over a single device is one value: `psum` over it changes only the type.
                x = lax.psum(x, axis)
            else:
                misfit = _varying_misfit(axis)
        if misfit is not None:
            span = axis_span(axis, text, layout)
            raise NotationError(misfit.reason, text=text, span=span, hint=misfit.hint)
    return as_varying(x, src_axes)


class _Misfit(NamedTuple):
    """How the type of a block contradicts a layout along an axis, and what to write instead."""

    reason: str
    hint: str


def _unreduced_misfit(block_type: Any, axis: str, src: Layout) -> _Misfit | None:
    """Return the misfit of a block whose pending reduction along an axis the layout does not name."""
    kind = unreduced_kind(block_type)  # of unreduced axes: "sum", "max", ...
    if kind == "sum" or axis not in block_type.unreduced or axis in src.tagged(kind):
        return None
    reason = f"the block is unreduced along {axis!r}: its {kind} is pending"
    return _Misfit(reason, f"write it on the left: {kind}({axis})")


def _equal_addends_misfit(axis: str) -> _Misfit:
    """Return the misfit of a block that is equal on all devices where the layout has addends."""
    n_devices = axis_size(axis)
    reason = (
        f"the block is equal on all {n_devices} devices of {axis!r}, where the source holds addends"
    )
    hint = (
        "leave the axis out. A gradient of a whole argument has been summed by JAX: divide it by"
        f" {n_devices} for the mean; any other equal value is its own mean."
        f" jax.lax.pcast(x, {axis!r}, to='varying') declares equal addends"
    )
    return _Misfit(reason, hint)


def _varying_misfit(axis: str) -> _Misfit:
    """Return the misfit of a block that varies along an axis where the layout has one value."""
    tags = f"sum({axis}), mean({axis}), or copy({axis}) for copies"
    reason = f"the block varies along {axis!r}, where the source holds one value"
    return _Misfit(reason, f"write what it is on the left: {tags}")


# PRNG keys.


def are_keys(x: jax.Array) -> bool:
    """Return whether x is an array of PRNG keys (`jax.random.key`)."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


class KeyWords(NamedTuple):
    """PRNG keys as the words (integers) that they consist of, `[..., words]`.

    Attributes:
        array: The words; their type if only the type of the keys is known.
        sides: The expression with a dim for the words.
        back: Makes keys of words again.
    """

    array: Any
    sides: Sides
    back: Callable[[jax.Array], jax.Array]


def as_words(keys: jax.Array | jax.ShapeDtypeStruct, parsed: Sides) -> KeyWords:
    """Take PRNG keys apart into the integers that they consist of, which collectives can send.

    Keys [n] under "n/dp -> n" become words [n, 2] under "n/dp words0 -> n words0".

    Raises DtypeError for layouts with sums or overlaps.
    """
    src = _with_words(parsed.src.resolved(keys.ndim), parsed.text)
    dst = _with_words(parsed.dst.resolved(keys.ndim), parsed.text)
    if isinstance(keys, jax.ShapeDtypeStruct):
        # A process without the keys has their type alone. JAX tells the generator of an array only:
        # an empty one of this dtype does.
        words = jax.eval_shape(jax.random.key_data, keys)
        keys = jnp.empty(0, keys.dtype)
    else:
        words = jax.random.key_data(keys)
    # The generator is no part of the words: it is remembered for the way back.
    keys_of = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(keys))
    return KeyWords(words, Sides(src, dst, parsed.text), keys_of)


def _with_words(layout: Layout, text: str) -> Layout:
    """Add a dim for the words of keys to a layout: "n/dp" -> "n/dp words0"."""
    has_overlap = any(dim.overlap for dim in layout.dims)
    if has_overlap or any(kind != "copy" for kind, _ in layout.tags):
        hint = "keys are only moved: use copy alone, and no overlap"
        raise DtypeError(f"PRNG keys under '{layout}'", text=text, hint=hint)
    return replace(layout, dims=(*layout.dims, Dim(new_name("words", layout.names))))


# The verb.


@api_boundary
def redistribute(  # noqa: PLR0913  one verb for all moves; torch_bridge has the same
    x: T,
    layouts: JaxLayoutsLike,
    mesh: AnyMesh | None = None,
    *,
    shape: Any = None,
    profile: ProfileLike = "auto",
    addends: Addends = FREE,
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
    maps: Maps | None = None,
) -> T:
    """Move this device's block from one layout to another, differentiably, inside `jax.shard_map`.

        y = redistribute(x, "s/cp c -> s c/cp")     # [s/4, c] -> [s, c/4] on 4 devices

    Blocks may differ along axes that the layouts do not name. With `check_vma=True` the result is
    invariant along an axis that only the left side names. Blocks of PRNG keys are only moved: no
    sums, no overlaps.

    Args:
        x: A block, or a pytree of blocks.
        layouts: `"layout -> layout"`, a pair of layouts, or a plan. For a pytree one for all,
            `xshard.Rules` over the names of leaves, or a pytree prefix of these.
        mesh: The mesh; by default the mesh of the context.
        shape: The global shape, or a tree of shapes. By default the numbers of the layout, as in
            `n/sizes(dp,2,3)`, else all blocks are taken to be equal. An uneven block has the shape
            of the largest: its padding may hold anything on the way in and is zero on the way out.
        profile: The machine to plan for.
        addends: "ranks" adds in the order of the mesh's devices, forward and backward: every path
            gives equal bits. By default, "free", XLA adds in an order of its own.
        check_replicated: For debugging, compare replicas and copies, forward and backward. By
            default as the environment variable XSHARD_CHECK_REPLICATED says.
        ad: "linear" supports every mode of differentiation. "custom_vjp" has reverse mode only, and
            jaxprs show the collectives of `jax.lax`.
        maps: The `Owners` and `Needs` that layouts name.

    Returns:
        This device's block under the right layout, or the tree of blocks.

    Raises:
        NotationError: The text is wrong, marked with a caret. All errors but ReplicaError come
            while tracing.
        MeshError: An axis is not manual here, or the mesh lacks it.
        ShapeError: The block does not have the shape of the largest block.
        DtypeError: JAX cannot hold the numbers, or keys would be added up.
        PlanError: No plan leads from the left layout to the right one, or the given plan does not
            fit.
        LinearityError: The gradient is undefined.
        XshardError: The layouts do not fit the pytree.
        ReplicaError: Replicas differ: while running, as JAX's error with the text of this one.

    Examples:
        >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
        >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
        (1, 4, 2)
    """
    layouts = with_map_digests(layouts, maps)
    profile = with_addends(profile, addends, layouts)
    call_of = partial(
        MoveCall.of, mesh=mesh, ad=ad, profile=profile, check_replicated=check_replicated
    )
    if jax.tree_util.all_leaves([x]):  # most calls: one block, without a walk over trees
        moved: Any = call_of(layouts, shape=shape).run(x)
        return moved

    results = []
    layout_leaves = leaves_with_given_values(layouts, x, is_expression)
    shape_leaves = leaves_with_given_values(shape, x, is_shape)
    for leaf, shape_leaf in zip(layout_leaves, shape_leaves, strict=True):
        with located(leaf.place):
            call = call_of(leaf.value, shape=shape_leaf.value)
            results.append(call.run(leaf.x))
    return jax.tree.unflatten(jax.tree.structure(x), results)


def is_expression(value: Any) -> bool:
    """Return whether a value is one expression or pair of layouts.

    A pair of expressions is a pytree.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        return isinstance(value, (str, Plan, Sides, *SPECS))
    return all(map(_is_one_layout, value))


def _is_one_layout(value: Any) -> bool:
    if isinstance(value, str):
        return "->" not in value
    return isinstance(value, (Layout, *SPECS))
