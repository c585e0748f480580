"""`transfer`: a tree of arrays on one mesh becomes a tree on another mesh of the same program.

Decides where every array is and what is refused; `xshard.state` plans the tree, `between` carries it out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from jax_bridge.arrays.order import check_order, remember
from jax_bridge.arrays.place import place
from jax_bridge.arrays.stored import are_the_same, check_even, known_layout, mesh_of
from jax_bridge.calls import are_keys, as_words
from jax_bridge.mesh.context import jax_mesh, xshard_mesh
from jax_bridge.mesh.machine import machine
from jax_bridge.specs import storage_sharding
from jax_bridge.state.between import Held, all_devices, assembled, blocks_of, carried
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Profile, Rules, Sharding, XshardError
from xshard.errors import MeshError, ShapeError, located
from xshard.layout.layout import check_axes
from xshard.notation.parser import ARROW, mark_errors
from xshard.plans.expression import Sides, sides_or_one
from xshard.state import Names, TreePlan, plan_transfer
from xshard.state.progress import Progress, reporting
from xshard.state.transfer import BUCKET
from xshard.trees import Leaf, named_once, place_of


def transfer(
    tree: Any,
    rules: Any,
    dst_mesh: JaxMesh,
    *,
    names: Names | None = None,
    bucket_bytes: int | str | None = BUCKET,
    donate: bool = False,
    progress: Progress = False,
    dry_run: bool = False,
    profile: str | Path | Profile = "auto",
) -> Any:
    """A tree of arrays on one mesh -> the same tree on another; with `names`, a dict by the names there.

    tree: of `jax.Array`s cut over one mesh, whose devices may be those of `dst_mesh`, some of them, or others
    of the same kind; dicts, lists, modules of `flax` and `equinox`. What is no array stays as it is; an array
    on no mesh, as counters are, is put on the first one whole. All processes with a device in either mesh
    call; one without a device in the first has a `jax.ShapeDtypeStruct` with a sharding for each array.
    rules: as for `place`, patterns of leaf names, there, to layouts; an arrow says where an array is, too.
    names: `xshard.state.Names`, where arrays have other names there, or are fused or split.
    bucket_bytes: about the most that a device sends and receives at once. donate: arrays are deleted, bucket
    by bucket. progress: a bar by bytes, or a function that is called with the bytes done and all bytes.
    dry_run: return the plan, a `TreePlan` that prints as a table, and send nothing.

    It has no gradient, and runs outside of `jit`.
    Raises, before anything is sent, with the name of the leaf: NotationError, ShapeError (also for blocks of
    several sizes, and an array that is cut or ordered otherwise), DtypeError, MeshError, PlanError;
    XshardError for leaves without a rule, rules without a leaf, and arrays that are traced or deleted.

    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> state = place({"up": {"kernel": jax.numpy.ones((4, 6))}}, "i/dp o", mesh)
    >>> transfer(state, {"**.kernel": "i o/tp"}, jax.make_mesh((1,), ("tp",)))["up"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    rules = Rules(rules) if isinstance(rules, Mapping) else rules
    leaves = array_leaves(rules if names is None else "...", tree)
    given = [leaf for leaf in leaves if is_array(leaf.x)]
    if not given:
        return tree
    src_mesh, devices = _meshes(given, dst_mesh)
    entries = named_once((leaf.name, _entry(leaf, names is None, src_mesh, dst_mesh)) for leaf in given)
    here = {re.compile(re.escape(name)): entry.rule for name, entry in entries.items()}
    plan = plan_transfer(
        {name: entry.x.shape for name, entry in entries.items()},
        here if names is None else (here, rules if isinstance(rules, Rules) else {"**": rules}),
        src_mesh=xshard_mesh(src_mesh),
        dst_mesh=xshard_mesh(dst_mesh),
        src_devices=list(map(devices.index, src_mesh.devices.flat)),
        dst_devices=list(map(devices.index, dst_mesh.devices.flat)),
        names=names,
        dtypes={name: entry.x.dtype.name for name, entry in entries.items()},
        profile=machine(profile, dst_mesh),
        bucket_bytes=bucket_bytes,
    )
    targets = {}
    for array in plan.arrays:
        with located(place_of(array.name)):
            check_even(array.sharding, str(array.sharding.layout))
            targets[array.name] = storage_sharding(array.sharding.layout, dst_mesh)
    if dry_run:
        return plan
    first = devices[min(*plan.src_devices, *plan.dst_devices)].process_index == jax.process_index()
    with reporting(progress, plan.bytes_moved, first) as report:
        made = _carried_out(plan, entries, targets, devices, donate, report)
    if names is not None:
        return made
    results = [made[leaf.name] if is_array(leaf.x) else leaf.x for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


class _Entry(NamedTuple):
    """An array of numbers, where it is, and is to go if that is said.

    leaf: which is meant by it; back: what makes such a leaf of numbers.
    """

    x: Any
    rule: Sides | Layout
    leaf: Any
    back: Callable[[jax.Array], jax.Array]


def _meshes(given: list[Leaf], dst_mesh: Any) -> tuple[JaxMesh, list[jax.Device]]:
    """The mesh of the arrays, and all devices of the program in the order in which plans number them."""
    for leaf in given:
        with located(leaf.place):
            if isinstance(leaf.x, Tracer):
                hint = "a transfer runs outside of jit and grad; on one mesh, reshard runs inside"
                raise XshardError(f"the array is traced, {jax.typeof(leaf.x)}", hint=hint)
            if isinstance(leaf.x, jax.Array) and leaf.x.is_deleted():
                raise XshardError("the array was donated or deleted", hint="donate a copy, jnp.copy(x)")
    placed = [leaf for leaf in given if _is_placed(leaf.x)]
    if not placed:
        raise MeshError("no array is on a mesh", hint="xj.place(tree, rules, mesh) puts them there")
    src_mesh = mesh_of([leaf.x for leaf in placed], [leaf.name for leaf in placed])
    for mesh in (src_mesh, jax_mesh(dst_mesh)):
        if not isinstance(mesh, JaxMesh):
            raise MeshError(f"{mesh} has no devices", hint="pass a jax.sharding.Mesh of devices")
    assert isinstance(src_mesh, JaxMesh)
    ends = src_mesh.devices.flat[0], dst_mesh.devices.flat[0]
    if ends[0].platform != ends[1].platform:
        why = f"the arrays are on {ends[0]}, the new mesh has {ends[1]}, of another kind"
        raise MeshError(why, hint="jax.device_get takes arrays to the host, place from there to any mesh")
    return src_mesh, all_devices(ends[0])


def _is_placed(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _entry(leaf: Leaf, alone: bool, src_mesh: JaxMesh, dst_mesh: JaxMesh) -> _Entry:
    """Check one array. alone: the rule is about it, and no other array is made of it."""
    with located(leaf.place):
        said = sides_or_one(leaf.given if alone else "...")
        here, there = xshard_mesh(src_mesh), xshard_mesh(dst_mesh)
        x = leaf.x if _is_placed(leaf.x) else place(leaf.x, "...", src_mesh)
        check_axes(said.dst, there, said.text)
        with mark_errors(said.text):
            src = known_layout(x, x.sharding, Sharding(said.dst.resolved(len(x.shape)), there, x.shape))
        if ARROW in said.text:
            src = said.src.resolved(len(x.shape))
            check_axes(src, here, said.text)
            if not are_the_same(x.sharding, storage_sharding(src, src_mesh), len(x.shape)):
                why = f"the array is not cut as '{src}' says"
                raise ShapeError(why, text=said.text, hint=f"it has {x.sharding}")
            check_order(x, Sharding(src, here, x.shape), said.text)
        rule = Sides(src, said.dst, said.text)
        x, rule, back = as_words(x, rule) if are_keys(x) else (x, rule, lambda y: y)
        return _Entry(x, rule if alone else src, leaf.x, back)


def _carried_out(
    plan: TreePlan,
    entries: Mapping[str, _Entry],
    targets: Mapping[str, NamedSharding],
    devices: list[jax.Device],
    donate: bool,
    report: Callable[[int], object],
) -> dict[str, jax.Array]:
    """The arrays there by name, bucket after bucket. report: is called with each that has gone."""
    arrays = {name: Held(blocks_of(entry.x), entry.x.dtype) for name, entry in entries.items()}
    left = Counter(move.name for array in plan.arrays for move in array.moves)
    made = {}
    for bucket in plan.buckets:
        for array, blocks in zip(bucket, carried(arrays, bucket, devices), strict=True):
            y = assembled(blocks, array.sharding.shape, array.dtype, targets[array.name])
            y = entries[array.name].back(y) if array.name in entries else y
            made[array.name] = remember(y, array.sharding)
        jax.block_until_ready([made[array.name] for array in bucket])
        left.subtract(move.name for array in bucket for move in array.moves)
        for name in [name for name in arrays if donate and not left[name]]:
            del arrays[name]
            for x in (entries[name].x, entries[name].leaf):
                if isinstance(x, jax.Array) and not x.is_deleted():
                    x.delete()
        report(sum(array.traffic.total() for array in bucket))
    return made
