"""A tree of local blocks as facts: the text from which other processes plan its transfer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_bridge.calls.move import ranks_of
from torch_bridge.dtensor.placements import check_placed
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.state.leaves import local_array, rank, tensors_and_constants
from xshard import Mesh, Rules, trees
from xshard.dtypes import name_of
from xshard.errors import MeshError, located
from xshard.notation.parser import ARROW
from xshard.plans.expression import sides_or_one
from xshard.state import Names, TreePlan, plan_transfer

LEAF = "leaf "
PROFILE = "profile"
Facts = Mapping[str, str]
Pairs = tuple[tuple[Any, Any], ...]  # items of a mapping, hashable


def described(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The local blocks of a tree by name, and its facts: its mesh, its structure, and each leaf."""
    tensors, constants = tensors_and_constants(tree)
    mesh = mesh or next((x.device_mesh for x in tensors.values() if isinstance(x, DTensor)), None)
    if mesh is None:
        raise MeshError(
            "no src_mesh", hint="a tree of DTensors brings its mesh, any other needs src_mesh="
        )
    axes = mesh_of(mesh)
    ranks = ranks_of(mesh)
    if rank() not in ranks:
        raise MeshError(
            f"rank {rank()} is not in {mesh!r} and brings a tree", hint="pass None there"
        )
    src_rules, arrows = (rules[0], False) if isinstance(rules, list | tuple) else (rules, True)
    rule_of = {} if src_rules is None else Rules(src_rules).match(list(tensors))
    blocks: dict[str, Tensor] = {}
    structure = json.dumps([pytree.treespec_dumps(pytree.tree_structure(tree)), constants])
    facts = {"mesh": json.dumps([str(axes), ranks]), "tree": structure}
    for name, x in tensors.items():
        with located(trees.place_of(name)):
            rule = sides_or_one(rule_of[name]) if name in rule_of else None
            local = local_array(name, x, rule, mesh, ranks, (shapes or {}).get(name))
            sharding = local.sharding
            if (sharding.mesh, local.ranks) != (axes, ranks) or local.block is None:
                raise MeshError(f"it is on {local.mesh!r}, the tree on {axes!r} of ranks {ranks}")
            text = str(sharding.layout) if rule is None else rule.text
            if rule is not None and isinstance(x, DTensor):
                if arrows and ARROW not in text:  # its placements are its source layout
                    dst = rule.dst.resolved(x.ndim)
                    text = f"{sharding.layout.named(dst.names)} -> {dst}"
                else:
                    check_placed(x, rule.src, text)
            leaf = sharding.shape, name_of(x.dtype), text, local.block.device.type
        blocks[name], facts[LEAF + name] = local.block, json.dumps(leaf)
    return blocks, facts


def leaf_facts(facts: Facts) -> Iterator[dict[str, Any]]:
    """Shapes, dtypes, layouts or expressions, and kinds of devices of the tensors of a described tree."""
    leaves = {
        key.removeprefix(LEAF): json.loads(facts[key]) for key in facts if key.startswith(LEAF)
    }
    return ({name: leaf[i] for name, leaf in leaves.items()} for i in range(4))


def mesh_in(facts: Facts) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh of a described tree, and the rank of each device."""
    mesh, ranks = json.loads(facts["mesh"])
    return Mesh.parse(mesh), tuple(ranks)


@lru_cache(maxsize=32)
def plan_described(
    facts: Pairs, dst_rules: Pairs | None, names: Names | None, *there: Any
) -> TreePlan:
    """The plan for a described tree, cached. there: the mesh, both meshes' devices, profile, bucket_bytes."""
    shapes, dtypes, layouts, _ = leaf_facts(dict(facts))
    dst_mesh, (src_devices, dst_devices), profile, bucket_bytes = there
    src_mesh = mesh_in(dict(facts))[0]
    src_rules = {re.compile(re.escape(n)): layouts[n] for n in layouts}
    rules: Any = src_rules if dst_rules is None else (src_rules, dict(dst_rules))
    devices: Any = {"src_mesh": src_mesh, "src_devices": src_devices, "dst_devices": dst_devices}
    options: Any = {"names": names, "profile": profile, "bucket_bytes": bucket_bytes}
    return plan_transfer(shapes, rules, dst_mesh=dst_mesh, dtypes=dtypes, **devices, **options)


def target_rules(rules: Any) -> Pairs | None:
    """The second of a pair of rules, hashable; None for rules with arrows."""
    return tuple(Rules(rules[1]).items()) if isinstance(rules, list | tuple) else None


def rules_text(rules: Any, names: Names | None) -> dict[str, str]:
    """Rules and names as text, which processes compare."""
    both = rules if isinstance(rules, list | tuple) else (rules,)
    texts = (None if one is None else dict(Rules(one)) for one in both)
    return {
        "rules": " -> ".join(map(str, texts)),
        "names": "" if names is None else str(names.relations),
    }


def first_on_device(blocks: Mapping[str, Tensor]) -> Tensor | None:
    """A block on the device of the transfer, which is the CPU only if no block is elsewhere."""
    return min(blocks.values(), key=lambda x: x.device.type == "cpu", default=None)


def tree_of(received: dict[str, Tensor], plan: TreePlan, facts: Facts, names: Names | None) -> Any:
    """Results by name -> the described tree; by name with `names`. Counters of steps go to the CPU again."""
    *_, kinds = leaf_facts(facts)
    mixed = len(set(kinds.values())) > 1
    for array in plan.arrays:
        x = received[array.name]
        if mixed and kinds[array.moves[0].name] == "cpu" and x.device.type != "meta":
            received[array.name] = x.to("cpu")
    if names:
        return received
    spec, values = json.loads(facts["tree"])
    template = pytree.treespec_loads(spec)
    empty = pytree.tree_unflatten(range(template.num_leaves), template)
    names_only = {
        trees.leaf_name(path): None for path, _ in pytree.tree_flatten_with_path(empty)[0]
    }
    return pytree.tree_unflatten((names_only | values | received).values(), template)
