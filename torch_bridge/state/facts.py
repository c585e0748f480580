"""A tree of blocks -> its blocks by name, and what other processes have to know of it, as text.

Decides what is said of a leaf, and what is planned from that. Sends nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from torch_bridge.dtensor.placements import check_placed
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.planning import ranks_of
from torch_bridge.state.leaves import by_name, leaf_of, rank
from xshard import Mesh, Profile, Rules, dtypes
from xshard.errors import MeshError, located
from xshard.notation.parser import ARROW
from xshard.plans.expression import sides_or_one
from xshard.state import Names, TreePlan, plan_transfer
from xshard.trees import leaf_name, place_of

LEAF, PROFILE = "leaf ", "profile"
Facts = Mapping[str, str]


class Known(NamedTuple):
    """A leaf as other processes know it. rule: its layout, or its expression."""

    shape: tuple[int, ...]
    dtype: str
    rule: str
    device_type: str


def described(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """This process's blocks of a tree by name, and its facts: its mesh, its structure, and each leaf.

    Raises XshardError with the name of the leaf that does not fit its rule.
    """
    tensors, constants = by_name(tree)
    mesh = mesh or next((x.device_mesh for x in tensors.values() if isinstance(x, DTensor)), None)
    if mesh is None:
        raise MeshError("no src_mesh", hint="only a tree of DTensors brings its own")
    axes, ranks = mesh_of(mesh), ranks_of(mesh)
    if rank() not in ranks:
        raise MeshError(f"rank {rank()} is not in {mesh!r} and brings a tree", hint="pass None there")
    here, arrows = (rules[0], False) if isinstance(rules, list | tuple) else (rules, True)
    found = {} if here is None else Rules(here).match(list(tensors))
    blocks: dict[str, Tensor] = {}
    structure = json.dumps([treespec_dumps(tree_structure(tree)), constants])
    facts = {"mesh": json.dumps([str(axes), ranks]), "tree": structure}
    for name, x in tensors.items():
        with located(place_of(name)):
            rule = sides_or_one(found[name]) if name in found else None
            leaf = leaf_of(name, x, rule, mesh, ranks, (shapes or {}).get(name))
            at = leaf.sharding
            if (at.mesh, leaf.ranks) != (axes, ranks) or leaf.block is None:
                raise MeshError(f"it is on {leaf.mesh!r}, the tree on {axes!r} of ranks {ranks}")
            text = str(at.layout) if rule is None else rule.text
            if rule is not None and isinstance(x, DTensor):
                if arrows and ARROW not in text:  # its placements say where it is
                    there = rule.dst.resolved(x.ndim)
                    text = f"{at.layout.named(there.names)} -> {there}"
                else:
                    check_placed(x, rule.src, text)
            known = Known(at.shape, dtypes.name_of(x.dtype), text, leaf.block.device.type)
        blocks[name], facts[LEAF + name] = leaf.block, json.dumps(known)
    return blocks, facts


def known_leaves(facts: Facts) -> dict[str, Known]:
    """The tensors of a tree that another process has described."""
    found = {}
    for key, text in facts.items():
        if key.startswith(LEAF):
            shape, *rest = json.loads(text)
            found[key.removeprefix(LEAF)] = Known(tuple(shape), *rest)
    return found


def mesh_in(facts: Facts) -> tuple[Mesh, tuple[int, ...]]:
    """Its mesh, and the rank of every device."""
    mesh, ranks = json.loads(facts["mesh"])
    return Mesh.parse(mesh), tuple(ranks)


@lru_cache(maxsize=32)
def planned(
    facts: tuple[tuple[str, str], ...],
    there: tuple[tuple[Any, Any], ...] | None,
    names: Names | None,
    mesh: Mesh,
    devices: tuple[tuple[int, ...], tuple[int, ...]],
    profile: str | Profile,
    bucket_bytes: int | str | None,
) -> TreePlan:
    """The plan for a tree that was described; there: the rules of a pair. Cached: trainers send again."""
    leaves = known_leaves(dict(facts))
    here = {re.compile(re.escape(name)): known.rule for name, known in leaves.items()}
    return plan_transfer(
        {name: known.shape for name, known in leaves.items()},
        here if there is None else (here, dict(there)),
        src_mesh=mesh_in(dict(facts))[0],
        dst_mesh=mesh,
        src_devices=devices[0],
        dst_devices=devices[1],
        names=names,
        dtypes={name: known.dtype for name, known in leaves.items()},
        profile=profile,
        bucket_bytes=bucket_bytes,
    )


def rules_there(rules: Any) -> tuple[tuple[Any, Any], ...] | None:
    """The right one of a pair of rules, as a key of caches; None for rules with arrows."""
    return tuple(Rules(rules[1]).items()) if isinstance(rules, list | tuple) else None


def asked(rules: Any, names: Names | None) -> dict[str, str]:
    """Rules and names in words, which processes compare."""
    both = rules if isinstance(rules, list | tuple) else (rules,)
    texts = (None if one is None else dict(Rules(one)) for one in both)
    return {"rules": " -> ".join(map(str, texts)), "names": "" if names is None else str(names.relations)}


def first_on_device(blocks: Mapping[str, Tensor]) -> Tensor | None:
    """A block whose device is that of the transfer: counters of steps may be on the CPU beside the others."""
    found = sorted(blocks.values(), key=lambda x: x.device.type == "cpu")
    return found[0] if found else None


def tree_of(found: dict[str, Tensor], plan: TreePlan, facts: Facts, names: Names | None) -> Any:
    """Results by name -> the tree that was described; with names, whose tree nobody described, by name.

    What was on the CPU beside tensors on other devices, as counters of steps, goes there again.
    """
    kinds = {name: known.device_type for name, known in known_leaves(facts).items()}
    mixed = len(set(kinds.values())) > 1
    for array in plan.arrays:
        x = found[array.name]
        if mixed and kinds[array.moves[0].name] == "cpu" and x.device.type != "meta":
            found[array.name] = x.to("cpu")
    if names:
        return found
    spec, values = json.loads(facts["tree"])
    template = treespec_loads(spec)
    empty = tree_unflatten(range(template.num_leaves), template)
    leaves = {leaf_name(path): None for path, _ in tree_flatten_with_path(empty)[0]} | values | found
    return tree_unflatten(leaves.values(), template)
