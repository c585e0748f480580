"""A global array at rest: its layout, its mesh, how JAX shards it, and the order of its rows.

JAX knows contiguous blocks only. An array under "s/zigzag(cp)" is for it the concatenation of the devices'
blocks, whose rows are in storage order: 0 1 6 7 2 3 4 5 of 8 rows on 2 devices. A move records that order on
the array; results of JAX's own functions, and tracers, have no record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import Sharding as JaxSharding
from numpy.typing import NDArray

from jax_bridge.mesh.context import AnyJaxMesh, AnyMesh, axis_span, free_axes, jax_mesh, xshard_mesh
from jax_bridge.specs import from_partition_spec, storage_layout, storage_sharding
from jax_bridge.versions import unreduced_kind, with_sharding
from xshard import ContractionPlan, Layout, Mesh, Plan, Sharding, XshardError
from xshard.arguments import is_on as is_set
from xshard.errors import MeshError, ShapeError, api_boundary
from xshard.layout.runs import row_numbers
from xshard.layout.sub_axes import root_of
from xshard.notation.maps import Maps
from xshard.notation.parser import SPREAD, Dim, Shard, mark_errors

STRICT = is_set("XSHARD_DEBUG")  # unknown orders are refused, too
_RECORD = "_xshard_order"  # the attribute of an array with the order of its rows

# The order of an array's rows.


@api_boundary
def stored_as(
    array: jax.Array, layout: Layout | str, mesh: AnyMesh | None = None, *, maps: Maps | None = None
) -> jax.Array:
    """Record on an array in which order its rows are stored.

        x = stored_as(x, "s/zigzag(cp)")     # 8 rows, cp=2: x has the rows 0 1 6 7 2 3 4 5

    JAX knows contiguous blocks only: such an array is for it a plain [s] over cp. With the record
    `reshard` refuses to read it in another order. Nothing moves.

    Args:
        array: The array; a tracer is returned as it is.
        layout: An order such as `s/zigzag(cp)`, or none, as in `s/cp`.
        mesh: The mesh; by default the array's own.
        maps: The `Owners` that the layout names.

    Returns:
        The same array.

    Raises:
        NotationError: The layout's text is wrong.
        ShapeError: The layout does not fit the array.
        MeshError: The array lacks a mesh, or the mesh an axis.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("cp",))
        >>> stored_as(jax.numpy.arange(4), "s/zigzag(cp)", mesh).tolist()
        [0, 1, 2, 3]
    """
    if isinstance(array, Tracer):
        return array
    if mesh is None:
        mesh = _mesh_of_array(array)
    if mesh is None:
        raise MeshError(
            "the array lacks a mesh", text=str(layout), hint="stored_as(array, layout, mesh)"
        )
    return record_order(array, Sharding(Layout.parse(layout, maps), xshard_mesh(mesh), array.shape))


def record_order(array: Any, stored: Sharding) -> Any:
    """Note on an array in which order its rows are stored, as an attribute, and return the array.

    Args:
        array: The array. A tracer is returned as it is.
        stored: Its sharding. For PRNG keys that of their words, which have one dim more.
    """
    if isinstance(array, Tracer):
        return array  # a note on a tracer would not reach the array that it stands for
    if len(stored.shape) > array.ndim:  # of the words of PRNG keys
        layout = replace(stored.layout, dims=stored.layout.dims[:-1])
        stored = Sharding(layout, stored.mesh, array.shape)
    setattr(array, _RECORD, stored)
    return array


def recorded_order(array: Any) -> Sharding | None:
    """Return the recorded order of the rows, if any."""
    return None if isinstance(array, Tracer) else getattr(array, _RECORD, None)


def check_order(array: Any, source: Sharding, text: str) -> None:
    """Check that an array's rows are stored in the order that a layout says, such as zigzag.

    Args:
        array: The array; on its way out of `reshard` or `shard_map` its order is recorded on it.
        source: The array as the user's layout describes it.
        text: The user's expression, for errors.

    Raises:
        ShapeError: The recorded order is another one; under XSHARD_DEBUG also if none is recorded.
    """
    if isinstance(array, Tracer):
        return
    recorded = recorded_order(array)
    if recorded is not None:
        if _orders(recorded) == _orders(source):
            return
        reason = f"the rows of the array are stored as '{recorded.layout}'"
    else:
        # Results of JAX have no record, and are believed, unless XSHARD_DEBUG is on.
        if not STRICT or not _orders(source):
            return
        reason = f"nothing says that the rows of the array are stored as '{source.layout}'"
    hint = f"write their order on the left, or say what it is: stored_as(array, '{source.layout}')"
    raise ShapeError(reason, text=text, hint=hint)


def stored_rows(array: Sharding, dim: int) -> NDArray[np.int64] | None:
    """Return the global row numbers of a dim in the order in which devices store them.

    None stands for 0, 1, 2, ..., so that nothing has to be permuted.

    8 rows in zigzag order over 2 devices -> [0, 1, 6, 7, 2, 3, 4, 5]
    """
    rows = np.concatenate([row_numbers(owned) for owned in array.owned_by_position(dim)])
    if np.array_equal(rows, np.arange(array.shape[dim])):
        return None
    return rows


@lru_cache(maxsize=4096)
def _orders(stored: Sharding) -> tuple[object, ...]:
    """Return what tells the storage order of an array's rows, to compare it; () if it is 0, 1, 2, ...

    For each shard of a dim in another order: the dim, the shard, and the sizes of its axes.
    """
    orders = []
    for i, dim in enumerate(stored.normal_layout.dims):
        if any(shard.order != "block" for shard in dim.shards):
            for shard in dim.shards:
                orders.append((i, shard, stored.mesh.sizes_of(shard.axes)))
    return tuple(orders)


# Meshes and arrays of a call.


class ArrayMesh(NamedTuple):
    """The mesh of a call's arrays, and the same with the axis types of the context.

    Inside a `shard_map` over some axes these are Manual in the context, and not on the arrays.
    """

    of_arrays: AnyJaxMesh
    in_context: AnyJaxMesh

    @classmethod
    def of(
        cls, arrays: Sequence[jax.Array], texts: Sequence[str], mesh: object = None
    ) -> ArrayMesh:
        """Find the mesh of a call: the user's, else that of the arrays, else of the context.

        Raises MeshError if the context, as set by `jax.set_mesh` or `shard_map`, has other axes.

        Args:
            arrays: The arrays.
            texts: Their expressions, for errors.
            mesh: The mesh that the user passed, if any.
        """
        array_mesh = mesh_of(arrays, texts) if mesh is None else jax_mesh(mesh)
        context = jax.sharding.get_abstract_mesh()
        if context.empty or array_mesh.abstract_mesh == context:
            return cls(array_mesh, array_mesh)  # with the same axis types
        # Axes of the context may have other types, but not other names or sizes.
        if tuple(array_mesh.shape.items()) != tuple(context.shape.items()):
            reason = f"the array is on {xshard_mesh(array_mesh)!r}, the context has {xshard_mesh(context)!r}"
            hint = "leave the context, or let jax.reshard take the array to its mesh first"
            raise MeshError(reason, text=texts[0] if texts else None, hint=hint)
        return cls(array_mesh, context)

    def free(self, axes: Sequence[str], text: str) -> Mesh:
        """Return the axes that may shard global arrays: those that no `shard_map` made manual.

        Args:
            axes: The axes that an expression names.
            text: The expression, for errors.

        Raises:
            MeshError: One of `axes` is manual.
        """
        free_mesh = Mesh(free_axes(self.in_context))
        # An axis that the mesh lacks is refused later, when layouts are put on the mesh.
        for axis in axes:
            if axis in self.in_context.shape and axis not in free_mesh.axes:
                reason = f"mesh axis {axis!r} is manual here"
                span = axis_span(axis, text)
                hint = (
                    "reshard moves an array along other axes, "
                    "redistribute its blocks along this one"
                )
                raise MeshError(reason, text=text, span=span, hint=hint)
        return free_mesh

    def check_plan(self, plan: Plan | ContractionPlan, text: str) -> None:
        """Raise MeshError unless a plan that the user passed is for axes that are free here."""
        free = self.free(plan.axes, text)
        for axis in plan.axes:
            if axis not in free.axes or free.size(axis) != plan.mesh.size(axis):
                reason = f"the plan is for {plan.mesh!r}, the array is on {free!r}"
                raise MeshError(reason, text=text)


class StoredArray(NamedTuple):
    """A global array at rest, and how JAX shards it: in storage order."""

    array: Sharding
    mesh: ArrayMesh
    sharding: NamedSharding
    text: str  # the expression, for errors
    path: str = ""  # the array's name, for errors

    @classmethod
    def of(cls, array: Sharding, mesh: ArrayMesh, text: str, path: str = "") -> StoredArray:
        """Put an array on a mesh.

        Raises ShapeError for uneven blocks, and as `to_named_sharding` does.
        """
        check_even(array, text)
        with mark_errors(text):  # errors show the user's text, not the storage layout's
            sharding = storage_sharding(array.layout, mesh.in_context)
        return cls(array=array, mesh=mesh, sharding=sharding, text=text, path=path)

    @property
    def sharding_on_devices(self) -> NamedSharding | None:
        """The sharding; None on a mesh without devices: an outer jit, which knows them, decides."""
        return None if isinstance(self.mesh.in_context, AbstractMesh) else self.sharding

    def check(self, x: jax.Array, donate: bool = False) -> None:
        """Raise ShapeError for an array that is known to be sharded otherwise.

        With `donate` also XshardError for a tracer.
        """
        if donate and isinstance(x, Tracer):
            hint = "donate it to the jit that is being traced: jax.jit(f, donate_argnums=...)"
            raise XshardError("a traced array cannot be donated", text=self.text, hint=hint)
        actual = self.differing_sharding(x)
        if actual is not None:
            reason = f"the array is not sharded as '{self.array.layout}' says"
            raise ShapeError(reason, text=self.text, hint=f"it has {actual}")

    def differing_sharding(self, x: jax.Array) -> JaxSharding | None:
        """Return an array's actual sharding if JAX knows that it differs from the expected one.

        None if the array has the expected sharding, or may have it: JAX does not know the sharding
        of a tracer on Auto axes, nor of an array that is not committed to devices yet.

        Raises MeshError for an array on devices if the user passed a mesh without devices.
        """
        spec = self.sharding.spec
        if isinstance(x, Tracer):
            # Only along Explicit axes the sharding is part of the type.
            actual = jax.typeof(x).sharding
            mesh = actual.mesh
            if mesh.empty or any(axis_type != AxisType.Explicit for axis_type in mesh.axis_types):
                return None
            expected = NamedSharding(mesh, spec, memory_kind=actual.memory_kind)
        elif not x.committed:
            return None  # XLA may put it anywhere
        elif isinstance(self.mesh.of_arrays, AbstractMesh):
            reason = "the array is on devices, the mesh passed lacks them"
            raise MeshError(reason, text=self.text, hint="pass the jax.Mesh, or nothing")
        else:
            actual = x.sharding
            expected = NamedSharding(self.mesh.of_arrays, spec)
        return None if are_same_shardings(actual, expected, x.ndim) else actual

    def with_expected_type(self, x: jax.Array) -> jax.Array:
        """Give an array the mesh and the axis types that the program expects.

        Most arrays have them, and are returned as they are. Others are an array that is on no
        devices yet, which a mesh of Explicit axes refuses, and an array from outside of a
        `shard_map`, inside of which the same axes have other types (Manual).
        """
        is_traced = isinstance(x, Tracer)
        has_context_types = self.mesh.in_context is self.mesh.of_arrays
        if not is_traced and x.committed and has_context_types:
            return x  # most arrays, at the cost of this test alone
        mesh = jax.typeof(x).sharding.mesh  # empty if JAX knows none
        target = self.sharding.mesh
        is_on_devices = not mesh.empty if is_traced else x.committed
        if is_on_devices:
            is_accepted = has_context_types or mesh.empty or mesh == target
        else:
            # With Auto axes XLA places it when the program runs.
            is_accepted = AxisType.Explicit not in target.axis_types
        if is_accepted:
            return x
        typed = with_sharding(jax.typeof(x), self.sharding)
        spec = typed.sharding.spec  # without Auto axes, which are no part of a type
        return jax.reshard(x, NamedSharding(target, spec))


def is_on_mesh(x: jax.Array, mesh: AnyJaxMesh) -> bool:
    """Return whether an array is sharded over the mesh."""
    array_mesh = _mesh_of_array(x)
    return array_mesh is not None and _are_same_mesh(array_mesh, mesh)


def known_layout(x: jax.Array, sharding: JaxSharding | None, default: Sharding) -> Layout:
    """Return the layout that an array has: as recorded, else by its sharding, else the default.

    An array with the spec P("tp", None) and a default "i o/tp" has the layout "i/tp o".

    Args:
        x: The array, perhaps with a recorded order.
        sharding: Its sharding; None if it is sharded as `default` says, as far as JAX knows.
        default: Gives the names of dims, and the layout if nothing else is known.
    """
    recorded = recorded_order(x)
    names = default.layout.names
    if recorded is not None:
        return recorded.layout.with_names(names)
    if isinstance(sharding, NamedSharding):
        return from_partition_spec(sharding.spec, x.ndim, names)
    return storage_layout(default.layout)


def check_even(array: Sharding, text: str) -> None:
    """Raise ShapeError unless all devices have blocks of one size, and share no units."""
    if array.mesh != root_of(array.mesh):
        reason = "a jax.Array cannot have units that devices share"
        hint = "it has them whole; blocks have their units, at shard_map's border or inside of it"
        raise ShapeError(reason, text=text, hint=hint)
    if not array.is_even:
        reason = (
            "a jax.Array cannot have uneven blocks: "
            f"{array.shape} does not divide by '{array.layout}'"
        )
        hint = (
            "pad it, or move it at shard_map's border, as in 's -> s/zigzag(cp)', which pads blocks"
        )
        raise ShapeError(reason, text=text, hint=hint)


def stored_sharding(layout: Layout, mesh: Mesh, shape: tuple[int, ...], text: str) -> Sharding:
    """Simplify a layout of blocks to one that a `jax.Array` can have.

    Dropped are tags (`| sum(tp)`: each device has an addend), overlaps (`:halo(...)`: rows of the
    neighbours), and axes that would leave blocks of different sizes, or let devices share units.

    "h/sp:halo(1,1,zero) | sum(tp)" -> "h/sp"

    Args:
        layout: A layout of blocks.
        mesh: The mesh.
        shape: The global shape.
        text: The expression, for errors.

    Raises:
        ShapeError: Blocks would be uneven in an order other than the rows' own.
    """
    with mark_errors(text):
        lengths = zip(layout.resolved(len(shape)).dims, shape, strict=True)
        dims = tuple(_even_dim(dim, mesh, length, text) for dim, length in lengths)
        return Sharding(Layout(dims), mesh, shape)


def _even_dim(dim: Dim, mesh: Mesh, length: int, text: str) -> Dim:
    """Drop mesh axes from a dim, from the last on, until its blocks are equal.

    6 rows of n/(a,b) with a=2, b=2 do not divide by 4, but by 2 -> n/a

    Raises ShapeError if the dim is in an order such as zigzag, in which axes cannot be dropped.
    """
    without_overlap = replace(dim, overlap=None)
    array_of_dim = Sharding(Layout((without_overlap,)), mesh, (length,))
    # The axis of `spread` is split: devices share units. No array of JAX can be sharded so: it is
    # replicated along that axis and those after it.
    if array_of_dim.mesh != mesh:
        orders = [shard.order for shard in dim.shards]
        shards_before_spread = replace(without_overlap, shards=dim.shards[: orders.index(SPREAD)])
        return _even_dim(shards_before_spread, mesh, length, text)
    if array_of_dim.is_even:
        return without_overlap
    if stored_rows(array_of_dim, 0) is not None:
        reason = f"a jax.Array cannot have uneven blocks in the order of '{without_overlap}', {length} long"
        raise ShapeError(
            reason,
            text=text,
            hint=f"a pair in layouts= may reorder: '{dim.name} -> {without_overlap}'",
        )
    # Devices along the axes that are dropped, from the last on, hold copies.
    axes = dim.axes
    while length % math.prod(map(mesh.size, axes)):
        axes = axes[:-1]
    return Dim(dim.name, (Shard(axes),) if axes else ())


def are_same_shardings(a: JaxSharding, b: NamedSharding, ndim: int) -> bool:
    """Return whether every device has the same part of the array, and under the same tags.

    JAX's own `is_equivalent_to` ignores tags.
    """
    return a == b or (_tags(a) == _tags(b) and a.is_equivalent_to(b, ndim))


def _tags(sharding: JaxSharding) -> tuple[object, ...]:
    """Return what a sharding says beside the dims, to compare it.

    Axes of addends, how these add up, and axes of copies.
    """
    if not isinstance(sharding, NamedSharding):
        return frozenset(), "sum", frozenset()
    spec = sharding.spec
    return frozenset(spec.unreduced), unreduced_kind(spec), frozenset(spec.reduced)


def mesh_of(arrays: Sequence[jax.Array], texts: Sequence[str]) -> AnyJaxMesh:
    """Return the one mesh of the arrays, or else of the context (`jax.set_mesh`).

    Args:
        arrays: The arrays.
        texts: Their expressions, for errors.

    Raises:
        MeshError: The arrays are on several meshes, or nothing says on which.
    """
    common: AnyJaxMesh | None = None
    for array, text in zip(arrays, texts, strict=True):
        mesh = _mesh_of_array(array)
        if mesh is None:
            continue
        if common is not None and not _are_same_mesh(mesh, common):
            reason = f"the arrays are on several meshes: {common} and {mesh}"
            raise MeshError(reason, text=text, hint="one call moves the arrays of one mesh")
        # JAX knows the mesh of a tracer without its devices: another array may tell them.
        if common is None or isinstance(common, AbstractMesh):
            common = mesh
    if common is not None:
        return common
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        reason = "JAX does not say on which mesh the array is"
        raise MeshError(reason, text=texts[0] if texts else None, hint="pass mesh=")
    return context


def _mesh_of_array(x: jax.Array) -> AnyJaxMesh | None:
    """Return the mesh that JAX knows of an array; None if it knows none."""
    if isinstance(x, Tracer):
        mesh = jax.typeof(x).sharding.mesh
        return None if mesh.empty else mesh
    if isinstance(x.sharding, NamedSharding):
        return x.sharding.mesh
    return None


def _are_same_mesh(a: AnyJaxMesh, b: AnyJaxMesh) -> bool:
    """Return whether meshes are equal; of a traced array JAX knows the mesh without its devices."""
    if a == b:
        return True
    lacks_devices = isinstance(a, AbstractMesh) or isinstance(b, AbstractMesh)
    return lacks_devices and a.abstract_mesh == b.abstract_mesh
