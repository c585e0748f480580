"""Describe a tree of local blocks as text: its facts, from which other processes plan its transfer.

Facts are sent between ranks and between programs, so their keys and their JSON are a format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.calls.move import ranks_of
from torch_bridge.dtensor.placements import check_placed
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.state.leaves import (
    LocalArray,
    local_array,
    named_leaves,
    rank,
    tensors_and_constants,
)
from torch_bridge.versions import pytree
from xshard import Layout, Mesh, ProfileLike, Rules, trees
from xshard.dtypes import name_of
from xshard.errors import MeshError, located
from xshard.layout.sub_axes import root_of
from xshard.notation.parser import ARROW
from xshard.plans.expression import Sides, sides_or_one
from xshard.signatures import Bytes
from xshard.state import Names, TreePlan, plan_transfer

LEAF = "leaf "  # the prefix of a key that describes a tensor
PROFILE = "profile"
Facts = Mapping[str, str]
Pairs = tuple[tuple[Any, Any], ...]  # items of a mapping, hashable


class LeafFact(NamedTuple):
    """What other processes know of a tensor.

    Attributes:
        shape: The global shape.
        dtype: The name of the dtype.
        layout: The layout of the source, or "source layout -> target layout".
        device_type: As "cuda".
    """

    shape: Sequence[int]
    dtype: str
    layout: str
    device_type: str


class Route(NamedTuple):
    """Where a tree goes, and on which machine.

    A plan depends on this, on the tree, and on its rules.

    Attributes:
        dst_mesh: The target mesh.
        src_devices: The ranks of the source's devices, in the group of both meshes' processes.
        dst_devices: The ranks of the target's devices, in the same group.
        profile: The machine to plan for.
        bucket_bytes: The most bytes of a bucket.
    """

    dst_mesh: Mesh
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]
    profile: ProfileLike
    bucket_bytes: Bytes


class DescribedTree(NamedTuple):
    """A tree of tensors as its process has it, and as others know it.

    Attributes:
        blocks: This process's block of each tensor, by name.
        facts: Texts by key: "mesh"; "tree", with the structure and the numbers and strings in it;
            "leaf w" for a tensor w, with global shape, dtype and layout.
    """

    blocks: dict[str, Tensor]
    facts: dict[str, str]


def describe_tree(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None
) -> DescribedTree:
    """Describe a tree of tensors (a dict, list, ...) by texts from which its transfer can be planned.

    Other processes, which have no such tree, make the same plan from the texts.

    Raises MeshError for a missing mesh and for a tensor on another one, and as `local_array` does.

    Args:
        tree: The tree.
        rules: Layouts by patterns of names: one dict with "source -> target", or a pair of dicts.
        mesh: The mesh; None for a tree of DTensors, which have one.
        shapes: Global shapes by name, where blocks differ in size.
    """
    tensors, constants = tensors_and_constants(named_leaves(tree))
    mesh = _source_mesh(tensors, mesh)
    axes = mesh_of(mesh)
    ranks = ranks_of(mesh)
    if rank() not in ranks:
        raise MeshError(
            f"rank {rank()} is not in {mesh!r} and brings a tree", hint="pass None there"
        )
    # Numbers and strings of the tree travel in this description; tensors are sent later.
    structure = pytree.treespec_dumps(pytree.tree_structure(tree))
    facts = {
        "mesh": json.dumps([str(axes), ranks]),
        "tree": json.dumps([structure, constants]),
    }
    blocks = {}
    source_rules = _source_rules(rules, list(tensors))
    has_arrows = not _is_pair(rules)  # rules say "source -> target"
    for name, x in tensors.items():
        with located(trees.place_of(name)):
            rule = sides_or_one(source_rules[name]) if name in source_rules else None
            shape = None if shapes is None else shapes.get(name)
            array = local_array(name, x, rule, mesh, ranks, shape)
            block = _block_on_mesh(array, axes, ranks)
            fact = LeafFact(
                shape=array.sharding.shape,
                dtype=name_of(x.dtype),
                layout=_layout_text(x, rule, array.sharding.layout, has_arrows=has_arrows),
                device_type=block.device.type,
            )
        blocks[name] = block
        facts[LEAF + name] = json.dumps(fact)
    return DescribedTree(blocks, facts)


def _is_pair(rules: Any) -> bool:
    """Return whether rules are a pair: of the source, and of the target.

    Otherwise one set of rules has both, as in "n/dp d -> n d/dp".
    """
    return isinstance(rules, list | tuple)


def _source_rules(rules: Any, names: list[str]) -> Mapping[str, Any]:
    """Return the rule of each tensor by name: layouts of the source, or expressions.

    None of them has one if all are DTensors, whose placements say it.
    """
    src_rules = rules[0] if _is_pair(rules) else rules
    if src_rules is None:
        return {}
    return Rules(src_rules).match(names)


def _source_mesh(tensors: Mapping[str, Tensor], mesh: MeshLike | None) -> MeshLike:
    """Return the mesh of a tree: the one that is given, or the first DTensor's."""
    if mesh is not None:
        return mesh
    for x in tensors.values():
        if isinstance(x, DTensor):
            return x.device_mesh
    hint = "a tree of DTensors brings its mesh, any other needs src_mesh="
    raise MeshError("no src_mesh", hint=hint)


def _block_on_mesh(local: LocalArray, axes: Mesh, ranks: Sequence[int]) -> Tensor:
    """Return this process's block.

    Raises MeshError if the array is on another mesh than its tree: a transfer has one source.
    """
    is_on_mesh = root_of(local.sharding.mesh) == axes and local.ranks == ranks
    if not is_on_mesh or local.block is None:
        raise MeshError(f"it is on {local.mesh!r}, the tree on {axes!r} of ranks {ranks}")
    return local.block


def _layout_text(x: Tensor, rule: Sides | None, layout: Layout, *, has_arrows: bool) -> str:
    """Return a tensor's layout in the source as text, or its move, "source -> target".

    For a plain tensor that is the text of its rule. A DTensor knows its source layout, so that a rule
    may be missing, or give the target alone: a DTensor with (Shard(0),) on dp and the rule "n d/dp"
    -> "n/dp d -> n d/dp".

    Args:
        x: The tensor.
        rule: Its rule, if it has one.
        layout: How the tensor is sharded now.
        has_arrows: Whether rules contain the target; otherwise they are layouts of the source.
    """
    if rule is None:
        return str(layout)
    if isinstance(x, DTensor):
        if has_arrows and ARROW not in rule.text:
            dst = rule.dst.resolved(x.ndim)
            return f"{layout.with_names(dst.names)} -> {dst}"
        # The rule states the source layout, too: it must agree with the placements.
        check_placed(x, rule.src, rule.text)
    return rule.text


def leaf_facts(facts: Facts) -> dict[str, LeafFact]:
    """Return what is known of each tensor of a described tree, by name."""
    leaves = {}
    for key, text in facts.items():
        if key.startswith(LEAF):
            leaves[key.removeprefix(LEAF)] = LeafFact._make(json.loads(text))
    return leaves


def mesh_in(facts: Facts) -> tuple[Mesh, tuple[int, ...]]:
    """Return the mesh of a described tree, and the rank of each device."""
    mesh, ranks = json.loads(facts["mesh"])
    return Mesh.parse(mesh), tuple(ranks)


@lru_cache(maxsize=32)
def plan_described(
    facts: Pairs, dst_rules: Pairs | None, names: Names | None, route: Route
) -> TreePlan:
    """Plan the transfer of a tree of tensors between two meshes, from its description.

    Args:
        facts: The texts of `describe_tree`, as pairs, so that the plan can be cached by them.
        dst_rules: Layouts of the target by patterns of names; None if each tensor's text in `facts`
            is "source -> target".
        names: How the target names the tensors.
        route: The target mesh, and the devices of both ends.
    """
    src_mesh, _ = mesh_in(dict(facts))
    shapes = {}
    dtypes = {}
    src_rules: dict[Any, str] = {}
    for name, leaf in leaf_facts(dict(facts)).items():
        shapes[name] = leaf.shape
        dtypes[name] = leaf.dtype
        # Rules are patterns, and names may contain "*" and the like: escaped, they match themselves.
        src_rules[re.compile(re.escape(name))] = leaf.layout
    return plan_transfer(
        shapes,
        src_rules if dst_rules is None else (src_rules, dict(dst_rules)),
        src_mesh=src_mesh,
        dst_mesh=route.dst_mesh,
        src_devices=route.src_devices,
        dst_devices=route.dst_devices,
        names=names,
        dtypes=dtypes,
        profile=route.profile,
        bucket_bytes=route.bucket_bytes,
    )


def target_rules(rules: Any) -> Pairs | None:
    """Return the second of a pair of rules, hashable; None for rules with arrows."""
    if not _is_pair(rules):
        return None
    return tuple(Rules(rules[1]).items())


def rules_text(rules: Any, names: Names | None) -> dict[str, str]:
    """Return rules and names as text, which processes compare."""
    sides = rules if _is_pair(rules) else (rules,)
    texts = []
    for side in sides:  # None stands for the layouts of DTensors
        texts.append(str(None if side is None else dict(Rules(side))))
    names_text = "" if names is None else str(names.relations)
    return {"rules": " -> ".join(texts), "names": names_text}


def first_on_device(blocks: Mapping[str, Tensor]) -> Tensor | None:
    """Return a block on the device of the transfer: an accelerator if any block is on one."""
    return min(blocks.values(), key=lambda x: x.device.type == "cpu", default=None)


def rebuild_tree(
    received: dict[str, Tensor], plan: TreePlan, facts: Facts, names: Names | None
) -> Any:
    """Build the sender's tree (a dict, list, ...) from received tensors.

    Args:
        received: The received tensors by name; some move back to the CPU, in place.
        plan: The plan of the transfer.
        facts: The sender's description, with the structure, numbers and strings.
        names: How tensors were renamed, or None; renamed tensors do not fit the structure, and are
            returned as the dict by name.
    """
    _return_to_cpu(received, plan, leaf_facts(facts))
    if names:
        return received
    structure_text, constants = json.loads(facts["tree"])
    structure = pytree.treespec_loads(structure_text)
    # Leaves go into the structure in order. A tree of numbers shows their names in that order.
    numbered = pytree.tree_unflatten(range(structure.num_leaves), structure)
    paths_and_numbers, _ = pytree.tree_flatten_with_path(numbered)
    value_of = {**constants, **received}
    values = [value_of[trees.leaf_name(path)] for path, _ in paths_and_numbers]
    return pytree.tree_unflatten(values, structure)


def _return_to_cpu(
    received: dict[str, Tensor], plan: TreePlan, leaves: Mapping[str, LeafFact]
) -> None:
    """Move arrays back to the CPU that were there before, such as an optimizer's counters.

    Only if others were on accelerators.
    """
    if len({leaf.device_type for leaf in leaves.values()}) <= 1:
        return  # all are on the device that the caller chose
    for array in plan.arrays:
        x = received[array.name]
        source = leaves[array.moves[0].name]
        if source.device_type == "cpu" and x.device.type != "meta":
            received[array.name] = x.to("cpu")
