"""`transfer`: a tree of arrays on one mesh becomes a tree on another mesh of the same program."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, overload

import jax
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from jax_bridge import calls, specs, trees
from jax_bridge.arrays.reshard import place
from jax_bridge.arrays.stored import (
    are_same_shardings,
    check_even,
    check_order,
    known_layout,
    mesh_of,
    record_order,
)
from jax_bridge.mesh.context import jax_mesh, machine_profile, xshard_mesh
from jax_bridge.state.execute import (
    LocalBlocks,
    all_devices,
    assembled,
    blocks_of,
    execute,
    is_here,
)
from xshard import Layout, ProfileLike, Rules, Sharding, XshardError
from xshard.errors import DtypeError, MeshError, ShapeError, api_boundary, located
from xshard.layout.layout import check_axes
from xshard.notation.parser import ARROW, mark_errors
from xshard.plans.expression import Sides, sides_or_one
from xshard.signatures import Bytes
from xshard.state import Names, TreePlan, plan_transfer
from xshard.state.progress import Progress, reporting
from xshard.state.transfer import BUCKET, TransferKeywords, TransferRules
from xshard.trees import Leaf, named_once, place_of

T = TypeVar("T")


@overload
def transfer(
    tree: object,
    rules: TransferRules,
    dst_mesh: JaxMesh,
    *,
    names: Names | None = None,
    dry_run: Literal[True],
    **options: Unpack[TransferKeywords],
) -> TreePlan: ...


@overload
def transfer(
    tree: object,
    rules: TransferRules,
    dst_mesh: JaxMesh,
    *,
    names: Names,
    dry_run: Literal[False] = False,
    **options: Unpack[TransferKeywords],
) -> dict[str, jax.Array]: ...


@overload
def transfer(
    tree: T,
    rules: TransferRules,
    dst_mesh: JaxMesh,
    *,
    names: None = None,
    dry_run: bool = False,
    **options: Unpack[TransferKeywords],
) -> T: ...


@api_boundary
def transfer(  # noqa: PLR0913  one option for each decision of the user
    tree: Any,
    rules: TransferRules,
    dst_mesh: JaxMesh,
    *,
    names: Names | None = None,
    bucket_bytes: Bytes = BUCKET,
    donate: bool = False,
    progress: Progress = None,
    dry_run: bool = False,
    profile: ProfileLike = "auto",
) -> Any:
    """Move a tree of arrays to another mesh.

        model = transfer(model, {"**.kernel": "i o/tp"}, mesh_of_inference)    # -> [i, o/tp]

    All processes with a device in either mesh call it. A process without a device in the first mesh
    passes a `jax.ShapeDtypeStruct` with a sharding for each array. It has no gradient, and runs
    outside of `jit`.

    Args:
        tree: `jax.Array`s sharded over one mesh, in dicts, lists, modules of `flax` and `equinox`.
            Other leaves stay as they are. An array without a mesh, as counters are, is first
            replicated on the mesh of the others.
        rules: As for `place`, patterns of leaf names -> layouts on `dst_mesh`, or expressions.
        dst_mesh: The new mesh. Its devices may be the same, some of them, or others of the same
            kind.
        names: `xshard.state.Names`, if arrays get other names, or are fused or split.
        bucket_bytes: About the most that a device sends and receives at once; None: no limit.
        donate: Delete the arrays, bucket by bucket.
        progress: True for a bar, or a function called with the bytes done and the total; None shows
            a bar for large trees on a terminal.
        dry_run: Send nothing and return the plan, which prints as a table.
        profile: The machine to plan for.

    Returns:
        The tree with arrays on `dst_mesh`; with `names` a dict by destination names.

    Raises:
        NotationError: The text is wrong. All errors come before anything is sent, with the name of
            the leaf.
        ShapeError: Blocks have several sizes, or an array has another sharding or order.
        DtypeError: The numbers cannot be moved so, as PRNG keys with `names`.
        MeshError: No array is on a mesh, the arrays are on several, or a mesh has no devices, or
            devices of another kind.
        PlanError: No plan leads from one layout to the other.
        XshardError: A leaf lacks a rule, a rule lacks leaves, or an array is traced or deleted.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("dp",))
        >>> state = place({"up": {"kernel": jax.numpy.ones((4, 6))}}, "i/dp o", mesh)
        >>> moved = transfer(state, {"**.kernel": "i o/tp"}, jax.make_mesh((1,), ("tp",)))
        >>> moved["up"]["kernel"].sharding.spec
        P(None, 'tp')
    """
    if isinstance(rules, Mapping):
        rules = Rules(rules)
    # With `names` the rules are for the new names: no leaf of this tree has one of its own.
    leaves = trees.array_leaves(rules if names is None else "...", tree)
    to_move = [leaf for leaf in leaves if trees.is_array(leaf.x)]
    if not to_move:
        return tree
    ends = _meshes(to_move, dst_mesh)
    source_of = _source_with_rule if names is None else _source_for_names
    sources = named_once((leaf.name, source_of(leaf, ends)) for leaf in to_move)
    plan = _plan(sources, rules, ends, names, bucket_bytes, profile)
    targets = _target_shardings(plan, dst_mesh)
    if dry_run:
        return plan

    moved = _run(plan, sources, targets, ends.devices, donate=donate, progress=progress)
    if names is not None:
        return moved
    values = [moved[leaf.name] if trees.is_array(leaf.x) else leaf.x for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), values)


# ---- checks


class _Meshes(NamedTuple):
    """Both meshes of a transfer, and all devices of the program as plans number them."""

    src: JaxMesh
    dst: JaxMesh
    devices: list[jax.Device]

    def numbers(self, mesh: JaxMesh) -> list[int]:
        """Return the number of every device of a mesh, in the mesh's order."""
        return [self.devices.index(device) for device in mesh.devices.flat]


class _SourceArray(NamedTuple):
    """An array of numbers that moves.

    Attributes:
        x: The array, or its type in a process that has none of it.
        rule: Its layouts on both meshes; with `names` the one on the first mesh alone.
        leaf: The user's leaf: PRNG keys if `x` is their words.
        as_leaf: Makes such a leaf of moved numbers.
    """

    x: Any
    rule: Sides | Layout
    leaf: Any
    as_leaf: Callable[[jax.Array], jax.Array]


def _meshes(leaves: list[Leaf], dst_mesh: Any) -> _Meshes:
    """Find the mesh of the arrays, and check that its devices and the new mesh's can exchange.

    Raises:
        MeshError: No array is on a mesh, a mesh has no devices, or the kinds of devices differ.
        XshardError: An array is traced or deleted.
    """
    for leaf in leaves:
        with located(leaf.place):
            _check_readable(leaf.x)
    placed = [leaf for leaf in leaves if _is_placed(leaf.x)]
    if not placed:
        raise MeshError("no array is on a mesh", hint="xj.place(tree, rules, mesh) puts them there")
    src_mesh = mesh_of([leaf.x for leaf in placed], [leaf.name for leaf in placed])
    for mesh in (src_mesh, jax_mesh(dst_mesh)):
        if not isinstance(mesh, JaxMesh):
            reason = f"{mesh} is not a mesh of devices"
            raise MeshError(reason, hint="pass a jax.sharding.Mesh of devices")
    assert isinstance(src_mesh, JaxMesh)
    src_device = src_mesh.devices.flat[0]
    dst_device = dst_mesh.devices.flat[0]
    if src_device.platform != dst_device.platform:
        reason = f"the arrays are on {src_device}, the new mesh has {dst_device}, of another kind"
        hint = "jax.device_get takes arrays to the host, place from there to any mesh"
        raise MeshError(reason, hint=hint)
    return _Meshes(src_mesh, dst_mesh, all_devices(src_device))


def _check_readable(x: Any) -> None:
    """Raise XshardError for an array that is traced or deleted."""
    if isinstance(x, Tracer):
        hint = "a transfer runs outside of jit and grad; on one mesh, reshard runs inside"
        raise XshardError(f"the array is traced, {jax.typeof(x)}", hint=hint)
    if isinstance(x, jax.Array) and x.is_deleted():
        raise XshardError("the array was donated or deleted", hint="donate a copy, jnp.copy(x)")


def _is_placed(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _source_for_names(leaf: Leaf, meshes: _Meshes) -> _SourceArray:
    """Find the layout of an array that gets a new name, which alone has a rule.

    Raises DtypeError for PRNG keys: their words are a dim that no rule and no relation of names has.
    """
    with located(leaf.place):
        if calls.are_keys(leaf.x):
            hint = "transfer them without names=, or jax.random.key_data(keys) in their place"
            raise DtypeError("PRNG keys keep their names", hint=hint)
        x = _on_a_mesh(leaf.x, meshes.src)
        layout = _current_layout(x, Layout.parse("..."), meshes.dst)
        return _SourceArray(x, rule=layout, leaf=leaf.x, as_leaf=_unchanged)


def _source_with_rule(leaf: Leaf, meshes: _Meshes) -> _SourceArray:
    """Return an array that moves by its rule: the layout on the new mesh, or "old layout -> new layout".

    PRNG keys move as the integers that they consist of.

    Raises:
        NotationError: The rule has axes that the new mesh lacks.
        ShapeError: The array is not sharded as the rule says.
    """
    with located(leaf.place):
        rule = sides_or_one(leaf.value)
        x = _on_a_mesh(leaf.x, meshes.src)
        check_axes(rule.dst, xshard_mesh(meshes.dst), rule.text)
        both_layouts = Sides(_source_layout(x, rule, meshes), rule.dst, rule.text)
        if not calls.are_keys(x):
            return _SourceArray(x, rule=both_layouts, leaf=leaf.x, as_leaf=_unchanged)
        words = calls.as_words(x, both_layouts)
        return _SourceArray(words.array, rule=words.sides, leaf=leaf.x, as_leaf=words.back)


def _source_layout(x: Any, rule: Sides, meshes: _Meshes) -> Layout:
    """Return the layout that an array has: checked if the rule says it, found if it does not.

    Under "n/dp -> n" the array has to be sharded as "n/dp". Under "n" it has any sharding.
    """
    if ARROW in rule.text:
        src = rule.src.resolved(len(x.shape))
        _check_is_sharded_as(x, src, meshes.src, rule.text)
        return src
    with mark_errors(rule.text):
        return _current_layout(x, rule.dst, meshes.dst)


def _on_a_mesh(x: Any, mesh: JaxMesh) -> Any:
    """Return an array as it is, or replicated on the mesh if it is on none, as counters are."""
    return x if _is_placed(x) else place(x, "...", mesh)


def _current_layout(x: Any, dst: Layout, dst_mesh: JaxMesh) -> Layout:
    """Return the layout that an array has, with the names that `dst`, its new one, gives its dims."""
    new_sharding = Sharding(dst, xshard_mesh(dst_mesh), x.shape)
    return known_layout(x, x.sharding, new_sharding)


def _check_is_sharded_as(x: Any, src: Layout, mesh: JaxMesh, text: str) -> None:
    """Raise ShapeError if an array is not sharded as the left side of its expression says."""
    axes = xshard_mesh(mesh)
    check_axes(src, axes, text)
    if not are_same_shardings(x.sharding, specs.storage_sharding(src, mesh), len(x.shape)):
        reason = f"the array is not sharded as '{src}'"
        raise ShapeError(reason, text=text, hint=f"it has {x.sharding}")
    check_order(x, Sharding(src, axes, x.shape), text)


def _unchanged(x: jax.Array) -> jax.Array:
    return x


# ---- plan


def _plan(
    sources: Mapping[str, _SourceArray],
    rules: Any,
    meshes: _Meshes,
    names: Names | None,
    bucket_bytes: Bytes,
    profile: ProfileLike,
) -> TreePlan:
    """Plan the transfer of all arrays.

    Args:
        sources: The arrays by name.
        rules: The user's rules. They count for new names only: old names have `_SourceArray.rule`.
        meshes: Both meshes.
        names: The new names of arrays; None if they keep theirs.
        bucket_bytes: As of `transfer`.
        profile: The machine to plan for.
    """
    # Escaped, because a name may have characters that mean something in a pattern: `layers[0]`.
    source_rules = {re.compile(re.escape(name)): source.rule for name, source in sources.items()}
    all_rules: Any = source_rules
    if names is not None:
        # One layout instead of `Rules` is for all new names.
        new_rules = rules if isinstance(rules, Rules) else {"**": rules}
        all_rules = (source_rules, new_rules)
    return plan_transfer(
        {name: source.x.shape for name, source in sources.items()},
        all_rules,
        src_mesh=xshard_mesh(meshes.src),
        dst_mesh=xshard_mesh(meshes.dst),
        src_devices=meshes.numbers(meshes.src),
        dst_devices=meshes.numbers(meshes.dst),
        names=names,
        dtypes={name: source.x.dtype.name for name, source in sources.items()},
        profile=machine_profile(profile, meshes.dst),
        bucket_bytes=bucket_bytes,
    )


def _target_shardings(plan: TreePlan, dst_mesh: JaxMesh) -> dict[str, NamedSharding]:
    """Return JAX's sharding of every new array. Raises ShapeError for blocks of several sizes."""
    shardings = {}
    for array in plan.arrays:
        layout = array.sharding.layout
        with located(place_of(array.name)):
            check_even(array.sharding, str(layout))
            shardings[array.name] = specs.storage_sharding(layout, dst_mesh)
    return shardings


# ---- run


def _run(
    plan: TreePlan,
    sources: Mapping[str, _SourceArray],
    targets: Mapping[str, NamedSharding],
    devices: list[jax.Device],
    *,
    donate: bool,
    progress: Progress,
) -> dict[str, jax.Array]:
    """Move all arrays to the new mesh, some at a time (a bucket), and return them by name.

    Args:
        plan: The plan.
        sources: The arrays by name.
        targets: JAX's shardings of the new arrays.
        devices: All devices of the program by their numbers in the plan.
        donate: Delete an array after the last bucket that reads it.
        progress: As of `transfer`.
    """
    # The blocks of the sources that some bucket still needs.
    source_blocks = {
        name: LocalBlocks(blocks_of(source.x), source.x.dtype) for name, source in sources.items()
    }
    # One process shows the bar: the one with the first device that takes part.
    first_device = devices[min(*plan.src_devices, *plan.dst_devices)]
    moved: dict[str, jax.Array] = {}
    with reporting(progress, plan.bytes_moved, is_here(first_device)) as report:
        for bucket, released in zip(plan.buckets, plan.released, strict=True):
            arrived = execute(source_blocks, bucket, devices)
            for array, blocks in zip(bucket, arrived, strict=True):
                shape = array.sharding.shape
                y = assembled(blocks, shape, array.dtype, targets[array.name])
                if array.name in sources:  # with `names` it may be new
                    y = sources[array.name].as_leaf(y)
                moved[array.name] = record_order(y, array.sharding)
            # Wait for the bucket: JAX would start the next ones meanwhile, and devices would need
            # memory for all of them.
            jax.block_until_ready([moved[array.name] for array in bucket])
            if donate:
                for name in released:
                    # Both references to the memory have to go: the blocks, and the array.
                    del source_blocks[name]
                    _delete(sources[name])
            report(sum(array.traffic.total() for array in bucket))
    return moved


def _delete(source: _SourceArray) -> None:
    """Delete an array, and the PRNG keys that it was made of."""
    for x in (source.x, source.leaf):
        if isinstance(x, jax.Array) and not x.is_deleted():
            x.delete()
