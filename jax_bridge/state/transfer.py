"""`transfer`: a tree of arrays on one mesh becomes a tree on another mesh of the same program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from jax_bridge import calls, specs, trees
from jax_bridge.arrays.reshard import place
from jax_bridge.arrays.stored import (
    are_the_same,
    check_even,
    check_order,
    known_layout,
    mesh_of,
    remember,
)
from jax_bridge.mesh.context import jax_mesh, machine, xshard_mesh
from jax_bridge.state.execute import LocalBlocks, all_devices, assembled, blocks_of, execute
from xshard import Layout, ProfileLike, Rules, Sharding, XshardError
from xshard.errors import MeshError, ShapeError, located
from xshard.layout.layout import check_axes
from xshard.notation.parser import ARROW, mark_errors
from xshard.plans.expression import Sides, sides_or_one
from xshard.rules import RulesLike
from xshard.state import Names, plan_transfer
from xshard.state.progress import Progress, reporting
from xshard.state.transfer import BUCKET
from xshard.trees import Leaf, named_once, place_of


def transfer(
    tree: Any,
    rules: RulesLike | tuple[RulesLike | None, RulesLike],
    dst_mesh: JaxMesh,
    *,
    names: Names | None = None,
    bucket_bytes: int | str | None = BUCKET,
    donate: bool = False,
    progress: Progress = None,
    dry_run: bool = False,
    profile: ProfileLike = "auto",
) -> Any:
    """Move a tree of arrays to another mesh; with `names` the result is a dict by destination names.

    tree: `jax.Array`s sharded over one mesh, in dicts, lists, modules of `flax` and `equinox`. The devices of
    `dst_mesh` may be the same, some of them, or others of the same kind. Other leaves stay as they are; an
    array without a mesh, as counters are, is first replicated on the mesh of the others. All processes with a
    device in either mesh call it; a process without a device in the first passes a `jax.ShapeDtypeStruct`
    with a sharding for each array. rules: as for `place`, patterns of leaf names -> layouts on `dst_mesh`, or
    expressions. names: `xshard.state.Names`, if arrays get other names, or are fused or split. bucket_bytes:
    about the most that a device sends and receives at once; None: no limit. donate: delete the arrays, bucket
    by bucket. progress: True for a bar, or a function called with the bytes done and the total; None shows a
    bar for large trees on a terminal. dry_run: send nothing and return the plan, which prints as a table.
    It has no gradient, and runs outside of `jit`.
    Raises, before anything is sent, with the name of the leaf: NotationError, ShapeError (also for blocks of
    several sizes, and for an array with another sharding or order), DtypeError, MeshError, PlanError;
    XshardError for leaves without a rule, rules without a leaf, and arrays that are traced or deleted.

    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> state = place({"up": {"kernel": jax.numpy.ones((4, 6))}}, "i/dp o", mesh)
    >>> transfer(state, {"**.kernel": "i o/tp"}, jax.make_mesh((1,), ("tp",)))["up"][
    ...     "kernel"
    ... ].sharding.spec
    P(None, 'tp')
    """
    rules = Rules(rules) if isinstance(rules, Mapping) else rules
    leaves = trees.array_leaves(rules if names is None else "...", tree)
    to_move = [leaf for leaf in leaves if trees.is_array(leaf.x)]
    if not to_move:
        return tree
    src_mesh, devices = _mesh_and_devices(to_move, dst_mesh)
    sources = named_once(
        (leaf.name, _source(leaf, names is None, src_mesh, dst_mesh)) for leaf in to_move
    )
    src_rules: Any = {re.compile(re.escape(name)): source.rule for name, source in sources.items()}
    if names is not None:
        src_rules = src_rules, rules if isinstance(rules, Rules) else {"**": rules}
    shapes = {name: source.x.shape for name, source in sources.items()}
    dtypes = {name: source.x.dtype.name for name, source in sources.items()}
    options: Any = {
        "names": names,
        "profile": machine(profile, dst_mesh),
        "bucket_bytes": bucket_bytes,
    }
    for side, mesh in (("src", src_mesh), ("dst", dst_mesh)):
        options |= {f"{side}_mesh": xshard_mesh(mesh)}
        options |= {f"{side}_devices": list(map(devices.index, mesh.devices.flat))}
    plan = plan_transfer(shapes, src_rules, dtypes=dtypes, **options)
    targets = {}
    for array in plan.arrays:
        with located(place_of(array.name)):
            check_even(array.sharding, str(array.sharding.layout))
            targets[array.name] = specs.storage_sharding(array.sharding.layout, dst_mesh)
    if dry_run:
        return plan
    first = devices[min(*plan.src_devices, *plan.dst_devices)].process_index == jax.process_index()
    arrays = {
        name: LocalBlocks(blocks_of(source.x), source.x.dtype) for name, source in sources.items()
    }
    left = Counter(move.name for array in plan.arrays for move in array.moves)
    results: dict[str, jax.Array] = {}
    with reporting(progress, plan.bytes_moved, first) as report:
        for bucket in plan.buckets:
            for array, blocks in zip(bucket, execute(arrays, bucket, devices), strict=True):
                y = assembled(blocks, array.sharding.shape, array.dtype, targets[array.name])
                y = sources[array.name].as_leaf(y) if array.name in sources else y
                results[array.name] = remember(y, array.sharding)
            jax.block_until_ready([results[array.name] for array in bucket])
            left.subtract(move.name for array in bucket for move in array.moves)
            for name in [name for name in arrays if donate and not left[name]]:
                del arrays[name]
                for x in (sources[name].x, sources[name].leaf):
                    if isinstance(x, jax.Array) and not x.is_deleted():
                        x.delete()
            report(sum(array.traffic.total() for array in bucket))
    if names is not None:
        return results
    values = [results[leaf.name] if trees.is_array(leaf.x) else leaf.x for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), values)


class _SourceArray(NamedTuple):
    """An array of numbers that moves. leaf: maybe PRNG keys; as_leaf makes such a leaf of numbers."""

    x: Any
    rule: Sides | Layout
    leaf: Any
    as_leaf: Callable[[jax.Array], jax.Array]


def _mesh_and_devices(leaves: list[Leaf], dst_mesh: Any) -> tuple[JaxMesh, list[jax.Device]]:
    """The mesh of the arrays, and all devices of the program in the order in which plans number them."""
    for leaf in leaves:
        with located(leaf.place):
            if isinstance(leaf.x, Tracer):
                hint = "a transfer runs outside of jit and grad; on one mesh, reshard runs inside"
                raise XshardError(f"the array is traced, {jax.typeof(leaf.x)}", hint=hint)
            if isinstance(leaf.x, jax.Array) and leaf.x.is_deleted():
                raise XshardError(
                    "the array was donated or deleted", hint="donate a copy, jnp.copy(x)"
                )
    placed = [leaf for leaf in leaves if _is_placed(leaf.x)]
    if not placed:
        raise MeshError("no array is on a mesh", hint="xj.place(tree, rules, mesh) puts them there")
    src_mesh = mesh_of([leaf.x for leaf in placed], [leaf.name for leaf in placed])
    for mesh in (src_mesh, jax_mesh(dst_mesh)):
        if not isinstance(mesh, JaxMesh):
            raise MeshError(
                f"{mesh} is not a mesh of devices", hint="pass a jax.sharding.Mesh of devices"
            )
    assert isinstance(src_mesh, JaxMesh)
    src = src_mesh.devices.flat[0]
    dst = dst_mesh.devices.flat[0]
    if src.platform != dst.platform:
        reason = f"the arrays are on {src}, the new mesh has {dst}, of another kind"
        raise MeshError(
            reason, hint="jax.device_get takes arrays to the host, place from there to any mesh"
        )
    return src_mesh, all_devices(src)


def _is_placed(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _source(leaf: Leaf, has_rule: bool, src_mesh: JaxMesh, dst_mesh: JaxMesh) -> _SourceArray:
    """Check one array. has_rule: the leaf has an expression of its own; no other array is made of it."""
    with located(leaf.place):
        expression = sides_or_one(leaf.given if has_rule else "...")
        src_axes = xshard_mesh(src_mesh)
        dst_axes = xshard_mesh(dst_mesh)
        x = leaf.x if _is_placed(leaf.x) else place(leaf.x, "...", src_mesh)
        ndim = len(x.shape)
        check_axes(expression.dst, dst_axes, expression.text)
        with mark_errors(expression.text):
            src = known_layout(
                x, x.sharding, Sharding(expression.dst.resolved(ndim), dst_axes, x.shape)
            )
        if ARROW in expression.text:
            src = expression.src.resolved(ndim)
            check_axes(src, src_axes, expression.text)
            if not are_the_same(x.sharding, specs.storage_sharding(src, src_mesh), ndim):
                reason = f"the array is not sharded as '{src}'"
                raise ShapeError(reason, text=expression.text, hint=f"it has {x.sharding}")
            check_order(x, Sharding(src, src_axes, x.shape), expression.text)
        rule = Sides(src, expression.dst, expression.text)
        x, rule, as_leaf = calls.as_words(x, rule) if calls.are_keys(x) else (x, rule, lambda y: y)
        return _SourceArray(x, rule if has_rule else src, leaf.x, as_leaf)
