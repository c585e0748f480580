"""`reshard`: global arrays from one sharding to another, outside `shard_map` or under `jit`. A dim in zigzag
or cyclic order is in storage order: `s -> s/zigzag(cp)` permutes the rows to the order in which the devices
store them. A global array has one gradient, so `copy` and `sum` need Explicit axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh
from numpy.typing import NDArray

from jax_bridge.arrays import stored
from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import (
    ArrayMesh,
    StoredArray,
    check_order,
    is_on,
    known_layout,
    order_of,
)
from jax_bridge.calls import are_keys, as_array, as_words, check_dtype, is_expression, sides_of
from jax_bridge.mesh.context import jax_mesh, machine
from jax_bridge.specs import storage_layout
from jax_bridge.trees import array_leaves, is_array, leaves_of
from xshard import Layout, Plan, ProfileLike, Rules
from xshard.errors import MeshError, located
from xshard.notation.maps import Maps
from xshard.notation.parser import with_maps
from xshard.plans.expression import Sides, sides_or_one


def reshard(
    arrays: Any,
    layouts: Any,
    mesh: JaxMesh | AbstractMesh | None = None,
    *,
    profile: ProfileLike = "auto",
    donate: bool = False,
    maps: Maps | None = None,
) -> Any:
    """Global arrays under the left layout -> the same arrays under the right one, differentiable.

    arrays: an array, or a pytree of arrays, which one program moves. layouts: `"layout -> layout"`, a pair of
    layouts, or a plan; for a pytree one for all, `xshard.Rules` over the names of leaves, or a pytree prefix
    of these. mesh: default: the arrays' own. profile: the machine to plan for. A committed array must be
    sharded by its left layout; XLA first brings others (a tracer on Auto axes, a numpy array) there. An array
    that is known to be stored in another order is refused; results of JAX are believed, unless XSHARD_DEBUG
    is on. donate: results may reuse the arrays' memory, and the arrays are deleted.
    maps: the `Owners` and `Needs` that layouts name.
    Compiled once per expression, mesh, shape and dtype; the log "xshard.reshard" reports it.

    Raises, before anything is sent, NotationError, MeshError, DtypeError, PlanError; ShapeError for dims that
    do not divide and for another sharding or order; XshardError for layouts that do not fit the pytree.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> x = jax.device_put(jax.numpy.ones((4, 2)), jax.NamedSharding(mesh, jax.P("cp")))
    >>> reshard(x, "s/cp c -> s c/cp").sharding.spec
    P(None, 'cp')
    >>> moved = reshard({"w": x, "b": x}, {"w": "s/cp c -> s c/cp", "b": "s/cp c -> s c"})
    >>> moved["b"].sharding.spec
    P(None, None)
    """
    layouts = with_maps(layouts, maps)
    leaves = leaves_of(layouts, arrays, is_expression)
    if not leaves:
        return arrays
    moves = []
    for leaf in leaves:
        with located(leaf.place):
            moves.append(_array_call(leaf.x, leaf.given))
    array_mesh = ArrayMesh.of([call.x for call in moves], [call.sides.text for call in moves], mesh)
    named = zip(moves, leaves, strict=True)
    wanted = tuple((c.expression, c.x.shape, c.x.dtype, leaf.place) for c, leaf in named)
    program = make_program(wanted, array_mesh, donate, machine(profile, array_mesh.here))
    for leaf, call, source in zip(leaves, moves, program.sources, strict=True):
        with located(leaf.place):
            source.check(call.x, donate)
            check_order(leaf.x, source.array, source.text)
    xs = [source.bring(call.x) for call, source in zip(moves, program.sources, strict=True)]
    # Transformations see each move as it is. A program of its own is for arrays, which have memory to donate.
    ys = (program.traced if any(isinstance(x, Tracer) for x in xs) else program.run)(*xs)
    for x in xs:  # those with memory that no result could reuse
        if donate and not x.is_deleted():
            x.delete()
    moved = zip(ys, moves, program.plans, strict=True)
    results = [
        stored.remember(call.back(y) if call.back else y, plan.target) for y, call, plan in moved
    ]
    return jax.tree.unflatten(jax.tree.structure(arrays), results)


class ArrayCall(NamedTuple):
    """One array of a call, its expression, and for PRNG keys the function back to keys."""

    x: jax.Array
    sides: Sides
    expression: Sides | Plan
    back: Callable[[jax.Array], jax.Array] | None = None


def _array_call(x: Any, expression: Any) -> ArrayCall:
    parsed = sides_of(expression)
    x = as_array(x, parsed.text)
    back = None
    if isinstance(expression, Plan):
        return ArrayCall(x, parsed, expression)
    if are_keys(x):
        x, parsed, back = as_words(x, parsed)
    return ArrayCall(x, parsed, parsed, back)


def arrive(x: jax.Array, target: StoredArray) -> jax.Array:
    """The array at rest as `target`: moved by a plan if it is known to be sharded differently."""
    with located(target.path):
        check_order(x, target.array, target.text)
        if (sharding := target.other_sharding(x)) is not None:
            if not is_on(x, target.mesh.own):
                what = f"the array is not on the mesh: {sharding}"
                raise MeshError(what, text=target.text, hint="place puts it there")
            layout = (
                storage_layout(target.array.layout) if order_of(x) is None else target.array.layout
            )
            x = reshard(x, (known_layout(x, sharding, target.array), layout), target.mesh.own)
        return target.bring(x)


def place(
    tree: Any,
    layouts: Any,
    mesh: JaxMesh | AbstractMesh,
    *,
    profile: ProfileLike = "auto",
    maps: Maps | None = None,
) -> Any:
    """A tree of arrays -> the same tree of global `jax.Array`s, each under its layout.

    tree: arrays of numpy or JAX in dicts, lists, `flax.nnx` modules and states, variables of `flax.linen`,
    `equinox` modules. Other leaves stay as they are, and take no rule.
    layouts: `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.kernel"`) to layouts,
    as for `shard_map`; or one layout for all. Of `"layout -> layout"` the left side counts. Arrays are held
    as `shard_map` takes them. An array on the mesh is moved by a plan; of others devices receive their parts.
    maps: the `Owners` and `Needs` that layouts name.

    Raises, before anything is sent, with the name of the leaf: NotationError, ShapeError, MeshError;
    DtypeError for an array that JAX would narrow; XshardError for leaves or rules without the other.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> model = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
    >>> place(model, {"**.kernel": "i o/tp", "**": "..."}, mesh)["up"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    array_mesh = ArrayMesh(jax_mesh(mesh), mesh)
    layouts = with_maps(layouts, maps)
    leaves = array_leaves(Rules(layouts) if isinstance(layouts, Mapping) else layouts, tree)
    targets = []
    for leaf in leaves:
        with located(leaf.place):
            targets.append(_target(leaf.x, leaf.given, array_mesh) if is_array(leaf.x) else None)
    placed = []
    for leaf, target in zip(leaves, targets, strict=True):
        with located(leaf.place):
            placed.append(leaf.x if target is None else _placed(leaf.x, target, profile))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def _target(x: Any, given: Any, mesh: ArrayMesh) -> StoredArray:
    layout, _, text = sides_or_one(given)
    target = stored.at_rest(layout, mesh.free(layout.axes, text), tuple(x.shape), text)
    if not isinstance(x, jax.Array):
        check_dtype(np.asarray(x).dtype, text)
    return StoredArray.of(target, mesh, text)


def _placed(x: Any, target: StoredArray, profile: ProfileLike) -> jax.Array:
    array = target.array
    mesh = target.mesh.own
    if isinstance(x, jax.Array) and (isinstance(x, Tracer) or are_keys(x) or is_on(x, mesh)):
        src = known_layout(x, target.other_sharding(x), array)
        return reshard(x, (src, array.layout), mesh, profile=profile)
    check_order(x, array.with_layout(Layout.parse("...")), target.text)
    host = np.asarray(x)
    orders = [stored.stored_rows(array, dim) for dim in range(host.ndim)]

    def part(index: Any) -> NDArray:
        block = host
        for dim, (order, rows) in enumerate(zip(orders, index, strict=True)):
            block = block[(slice(None),) * dim + (rows if order is None else order[rows],)]
        return block

    placed = jax.make_array_from_callback(host.shape, target.sharding, part, dtype=host.dtype)
    return stored.remember(placed, array)
