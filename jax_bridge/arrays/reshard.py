"""`reshard`: global arrays from one sharding to another, outside `shard_map` or under `jit`.

A dim in zigzag or cyclic order is in storage order: `s -> s/zigzag(cp)` permutes the rows to the
order in which the devices store them. A global array has one gradient, so `copy` and `sum` need
Explicit axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from jax_bridge.arrays import stored
from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import (
    ArrayMesh,
    StoredArray,
    check_order,
    is_on_mesh,
    known_layout,
    recorded_order,
)
from jax_bridge.calls import (
    JaxLayoutsLike,
    are_keys,
    as_array,
    as_words,
    check_dtype,
    is_expression,
    sides_of,
)
from jax_bridge.mesh.context import AnyJaxMesh, jax_mesh, machine_profile
from jax_bridge.specs import storage_layout
from jax_bridge.trees import array_leaves, is_array, leaves_with_given_values
from xshard import Layout, Plan, ProfileLike, Rules
from xshard.errors import DtypeError, MeshError, api_boundary, located
from xshard.notation.maps import Maps
from xshard.notation.parser import with_map_digests
from xshard.plans.expression import Sides, sides_or_one
from xshard.trees import Leaf

T = TypeVar("T")


@api_boundary
def reshard(
    arrays: T,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh | None = None,
    *,
    profile: ProfileLike = "auto",
    donate: bool = False,
    maps: Maps | None = None,
) -> T:
    """Move global arrays from one layout to another, differentiably, outside `shard_map`.

        y = reshard(x, "s/cp c -> s c/cp")     # [s, c] sharded by rows -> by columns

    It also works under `jit`. A committed array must be sharded by its left layout; XLA first
    brings others (a tracer on Auto axes, a numpy array) there. An array that is known to be stored
    in another order is refused. Results of JAX are believed, unless XSHARD_DEBUG is on. Compiled
    once per expression, mesh, shape and dtype; the log "xshard.reshard" reports it.

    Args:
        arrays: An array, or a pytree of arrays, which one program moves.
        layouts: `"layout -> layout"`, a pair of layouts, or a plan. For a pytree one for all,
            `xshard.Rules` over the names of leaves, or a pytree prefix of these.
        mesh: The mesh; by default the arrays' own.
        profile: The machine to plan for.
        donate: Results may reuse the arrays' memory, and the arrays are deleted.
        maps: The `Owners` and `Needs` that layouts name.

    Returns:
        The arrays under the right layout.

    Raises:
        NotationError: The text is wrong, marked with a caret. All errors come before anything is
            sent.
        MeshError: The arrays are on several meshes or on another one, or an axis is manual here.
        DtypeError: JAX cannot hold the numbers, or keys would be added up.
        PlanError: No plan leads from the left layout to the right one, or the given plan does not
            fit.
        ShapeError: Dims do not divide, or an array has another sharding or order.
        XshardError: The layouts do not fit the pytree.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("cp",))
        >>> x = jax.device_put(jax.numpy.ones((4, 2)), jax.NamedSharding(mesh, jax.P("cp")))
        >>> reshard(x, "s/cp c -> s c/cp").sharding.spec
        P(None, 'cp')
        >>> moved = reshard({"w": x, "b": x}, {"w": "s/cp c -> s c/cp", "b": "s/cp c -> s c"})
        >>> moved["b"].sharding.spec
        P(None, None)
    """
    # A call like an earlier one does no more than this: `make_program` is cached.
    layouts = with_map_digests(layouts, maps)
    leaves = leaves_with_given_values(layouts, arrays, is_expression)
    if not leaves:
        return arrays
    calls = list(map(_array_call, leaves))
    moves = tuple((call.expression, call.x.shape, call.x.dtype, call.place) for call in calls)
    texts = [sides_of(call.expression).text for call in calls]
    array_mesh = ArrayMesh.of([call.x for call in calls], texts, mesh)
    # "auto" is looked up outside the cache: it stands for the machine of these devices.
    on_machine = machine_profile(profile, array_mesh.in_context)
    program = make_program(moves, array_mesh, donate, on_machine)

    xs = _sources_of(leaves, calls, program.sources, donate)
    if any(isinstance(x, Tracer) for x in xs):
        moved = program.traced(*xs)  # transformations see each move as it is
    else:
        moved = program.run(*xs)  # a program of its own: arrays have memory to donate
    if donate:
        _delete(xs)

    results = []
    for y, call, plan in zip(moved, calls, program.plans, strict=True):
        # Integers become PRNG keys again.
        result = y if call.back is None else call.back(y)
        results.append(stored.record_order(result, plan.target))
    return jax.tree.unflatten(jax.tree.structure(arrays), results)


def _sources_of(
    leaves: Sequence[Leaf],
    calls: Sequence[ArrayCall],
    sources: Sequence[StoredArray],
    donate: bool,
) -> list[jax.Array]:
    """Return the arrays as the program takes them. Raises if one is not sharded by its left layout.

    All are checked before the first is brought there: an error leaves nothing half done.
    """
    for leaf, call, source in zip(leaves, calls, sources, strict=True):
        with located(call.place):
            source.check(call.x, donate)
            check_order(leaf.x, source.array, source.text)
    return [source.with_expected_type(call.x) for call, source in zip(calls, sources, strict=True)]


class ArrayCall(NamedTuple):
    """One array of a call.

    Attributes:
        place: The leaf's name, as errors say it.
        x: The array; of PRNG keys the integers that they consist of.
        expression: Its layouts or plan.
        back: For PRNG keys, makes keys of the integers again.
    """

    place: str
    x: jax.Array
    expression: Sides | Plan
    back: Callable[[jax.Array], jax.Array] | None = None


def _array_call(leaf: Leaf) -> ArrayCall:
    """Check one array and parse its expression.

    PRNG keys become the integers that they consist of, [...] -> [..., words], since collectives
    move integers only.
    """
    with located(leaf.place):
        parsed = sides_of(leaf.value)
        x = as_array(leaf.x, parsed.text)
        if isinstance(leaf.value, Plan):
            return ArrayCall(leaf.place, x, leaf.value)
        if are_keys(x):
            words = as_words(x, parsed)
            return ArrayCall(leaf.place, words.array, words.sides, words.back)
        return ArrayCall(leaf.place, x, parsed)


def _delete(donated: Sequence[jax.Array]) -> None:
    """Delete those of the donated arrays whose memory no result could reuse: JAX keeps them."""
    for x in donated:
        if not x.is_deleted():
            x.delete()


def move_if_needed(x: jax.Array, target: StoredArray) -> jax.Array:
    """Make an argument of `shard_map` sharded as its layout says: move it if it is not.

    Args:
        x: The array.
        target: How it has to be sharded.

    Raises:
        ShapeError: Its rows are known to be in another order.
        MeshError: It is on another mesh.
    """
    with located(target.path):
        check_order(x, target.array, target.text)
        actual = target.differing_sharding(x)
        if actual is None:
            return target.with_expected_type(x)
        mesh = target.mesh.of_arrays
        if not is_on_mesh(x, mesh):
            reason = f"the array is not on the mesh: {actual}"
            raise MeshError(reason, text=target.text, hint="place puts it there")
        layout = target.array.layout
        if recorded_order(x) is None:
            # Nothing says in which order its rows are, as zigzag. They keep their order; only the
            # axes change.
            layout = storage_layout(layout)
        moved = reshard(x, (known_layout(x, actual, target.array), layout), mesh)
        return target.with_expected_type(moved)


@overload
def place(
    tree: np.ndarray,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh,
    *,
    profile: ProfileLike = "auto",
    maps: Maps | None = None,
) -> jax.Array: ...


@overload
def place(
    tree: T,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh,
    *,
    profile: ProfileLike = "auto",
    maps: Maps | None = None,
) -> T: ...


@api_boundary
def place(
    tree: Any,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh,
    *,
    profile: ProfileLike = "auto",
    maps: Maps | None = None,
) -> Any:
    """Put a tree of arrays on a mesh, each as a global `jax.Array` under its layout.

        model = place(model, {"**.kernel": "i o/tp", "**": "..."}, mesh)     # [i, o] by columns

    An array that is on the mesh already is resharded; of a numpy array, or one elsewhere, each
    device receives its part. What an array cannot have, as halos, is left out of the layout.

    Args:
        tree: Arrays of numpy or JAX in dicts, lists, `flax.nnx` modules and states, variables of
            `flax.linen`, `equinox` modules. Other leaves stay as they are, and take no rule.
        layouts: `xshard.Rules`, or a dict like it, from patterns of leaf names
            (`"layers.*.kernel"`) to layouts, as for `shard_map`; or one layout for all. Of `"layout
            -> layout"` the left side counts.
        mesh: The mesh.
        profile: The machine to plan for.
        maps: The `Owners` and `Needs` that layouts name.

    Returns:
        The same tree of placed arrays.

    Raises:
        NotationError: The text is wrong. All errors name the leaf, and come before anything is
            sent.
        ShapeError: Dims do not divide in an order, or an array is known to be in another order.
        MeshError: It is not a mesh, or lacks an axis.
        DtypeError: JAX would narrow the array.
        XshardError: A leaf lacks a rule, or a rule lacks leaves.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> model = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
        >>> place(model, {"**.kernel": "i o/tp", "**": "..."}, mesh)["up"]["kernel"].sharding.spec
        P(None, 'tp')
    """
    array_mesh = ArrayMesh(jax_mesh(mesh), mesh)
    layouts = with_map_digests(layouts, maps)
    leaves = array_leaves(Rules(layouts) if isinstance(layouts, Mapping) else layouts, tree)
    # All targets first: an error leaves nothing half placed.
    targets = {}
    for i, leaf in enumerate(leaves):
        if is_array(leaf.x):
            with located(leaf.place):
                targets[i] = _target(leaf.x, leaf.value, array_mesh)
    placed = [leaf.x for leaf in leaves]
    for i, target in targets.items():
        with located(leaves[i].place):
            placed[i] = _place_array(leaves[i].x, target, profile)
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def _target(x: Any, given: Any, mesh: ArrayMesh) -> StoredArray:
    """Return how an array will be held under a given layout. Raises as `place` does."""
    layout, _, text = sides_or_one(given)
    target = stored.stored_sharding(layout, mesh.free(layout.axes, text), tuple(x.shape), text)
    if isinstance(x, np.ma.MaskedArray):
        reason = "a masked array, whose mask JAX cannot hold"
        raise DtypeError(reason, text=text, hint="x.filled(0) is an array without a mask")
    if not isinstance(x, jax.Array):
        check_dtype(np.asarray(x).dtype, text)
    return StoredArray.of(target, mesh, text)


def _place_array(x: Any, target: StoredArray, profile: ProfileLike) -> jax.Array:
    """Put one array on the mesh: move it if it is there already, else copy it from the host."""
    array = target.array
    mesh = target.mesh.of_arrays
    if isinstance(x, jax.Array) and (isinstance(x, Tracer) or are_keys(x) or is_on_mesh(x, mesh)):
        src = known_layout(x, target.differing_sharding(x), array)
        return reshard(x, (src, array.layout), mesh, profile=profile)
    # An array from elsewhere has to have its rows in their own order: one that is recorded to be in
    # zigzag order, for instance, is refused.
    check_order(x, array.with_layout(Layout.parse("...")), target.text)
    return stored.record_order(_from_host(np.asarray(x), target), array)


def _from_host(host: NDArray, target: StoredArray) -> jax.Array:
    """Copy an array of the host to devices, each its part, with rows in the order of the layout.

    Rows 0-7 under "n/zigzag(cp)" with cp=2: device 0 gets 0, 1, 6, 7, device 1 gets 2, 3, 4, 5.

    Args:
        host: The global array, rows in their own order.
        target: How JAX will hold it.
    """
    rows_of_dims = [stored.stored_rows(target.array, dim) for dim in range(host.ndim)]

    def part(index: Any) -> NDArray:
        """Return the part that JAX asks for.

        Args:
            index: A slice of storage positions for each dim.
        """
        block = host
        for dim, (rows, storage_rows) in enumerate(zip(rows_of_dims, index, strict=True)):
            wanted = storage_rows if rows is None else rows[storage_rows]
            # One dim after the other: numpy would pair arrays of indices in one expression.
            block = block[(*[slice(None)] * dim, wanted)]
        return block

    return jax.make_array_from_callback(host.shape, target.sharding, part, dtype=host.dtype)
