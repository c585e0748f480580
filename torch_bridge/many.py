"""`redistribute_many`: several redistributions whose messages travel together.

Decides which expression and shape each tensor of a tree has, and which tensors may share collectives. Which
of them do is decided in `lower.buckets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.function import Redistribute
from torch_bridge.autodiff.recomputed import check_not_swapped
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.dtensor.function import executables, local_block
from torch_bridge.dtensor.placements import dtensor_of
from torch_bridge.eager import compare_calls, dtensor_move, permuted, redistribute_eagerly
from torch_bridge.lower.buckets import BucketedExecutable
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers
from torch_bridge.planning import executable_for
from xshard import Profile, Rules
from xshard.errors import PlanError, located
from xshard.plans.expression import Expression, sides
from xshard.replicas import are_checked
from xshard.trees import leaf_name, place_of

T = TypeVar("T")


class Leaf(NamedTuple):
    """A tensor of the tree with what is asked for it; its name as errors have it."""

    name: str
    x: Tensor
    expression: Expression
    shape: Any


class Joint(NamedTuple):
    """A block that may travel with others. finish: its result -> that of the tensor."""

    block: Tensor
    executable: Executable
    finish: Callable[[Tensor], Tensor]


def redistribute_many(
    tensors: T,
    expressions: Any,
    mesh: MeshLike | None = None,
    *,
    shapes: Any = None,
    profile: str | Path | Profile = "auto",
    comm_dtype: CommDtypeLike = None,
    bucket_bytes: int | None = None,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> T:
    """`redistribute` of every tensor of a list, a dict, or a tree of them, with fewer collectives.

    Tensors of one dtype whose plans have the same collectives over the same processes share each of
    them, forward and backward; every result and gradient equals that of `redistribute` alone. The result
    has the structure of `tensors`.

    expressions: one for all, `xshard.Rules` over the names of tensors (`"layers.*.weight"`), or a list or
    dict nested like `tensors` with either in the place of a branch; a plain dict is no rules. shapes: the
    global shapes, likewise, where blocks differ in size. mesh: of all tensors but DTensors, which bring
    theirs. bucket_bytes: about how much a device sends together; the default is all, which needs memory for a
    second copy. profile, comm_dtype, debug: as in `redistribute`. check_replicated: likewise; each tensor
    then travels alone, as DTensors do that need a gradient.

    Raises as `redistribute` does, before anything is sent, with the name of the tensor; PlanError where the
    other trees have other branches than `tensors`.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def gather():
    ...     model = {"w": torch.ones(2, 3), "b": torch.ones(1)}
    ...     moved = xt.redistribute_many(model, {"w": "n d/tp -> n d", "b": "n/tp -> n"}, Mesh(tp=2))
    ...     return {name: tuple(x.shape) for name, x in moved.items()}
    >>> xt.testing.run_ranks(2, gather)[0]
    {'w': (2, 6), 'b': (2,)}
    """
    options: dict[str, Any] = {"profile": profile, "comm_dtype": comm_dtype}
    if torch.compiler.is_dynamo_compiling():
        from torch_bridge import compiled  # slow: it imports torch._dynamo, half a second

        options |= {"shapes": shapes, "bucket_bytes": bucket_bytes}
        options |= {"debug": debug, "check_replicated": check_replicated}
        return compiled.eagerly(redistribute_many, tensors, expressions, mesh, **options)
    check_not_swapped()
    if debug or desync.ALWAYS:
        _compare(tensors, expressions, shapes, mesh, **options)
    leaves, structure = _leaves(tensors, expressions, shapes), tree_flatten_with_path(tensors)[1]
    together = _joint(leaves, mesh, **options)
    if are_checked(check_replicated):
        together = {}
    found: dict[int, Any] = {}
    for differentiated in (False, True):
        # Tensors without a gradient are apart: nothing is sent back for them.
        some = {i: part for i, part in together.items() if _records(part.block) == differentiated}
        if some:
            joint = BucketedExecutable(tuple(part.executable for part in some.values()), bucket_bytes)
            results = Redistribute.apply(joint, *(part.block for part in some.values()))
            found |= {i: some[i].finish(y) for i, y in zip(some, results, strict=True)}
    for i, leaf in enumerate(leaves):
        if i not in found:
            call = leaf.x, leaf.expression, _mesh_of(leaf, mesh), leaf.shape, profile, comm_dtype
            with located(leaf.name):
                found[i] = redistribute_eagerly(*call, False, False, check_replicated, leaf.name)
    return tree_unflatten([found[i] for i in range(len(leaves))], structure)


def _leaves(tensors: Any, expressions: Any, shapes: Any) -> list[Leaf]:
    """The tensors in their order. Raises PlanError for trees that differ, XshardError for other leaves."""
    said = _of_each("expressions", expressions, tensors), _of_each("shapes", shapes, tensors)
    each = zip(_named(tensors), *said, strict=True)
    return [
        Leaf(place_of(name), as_tensor(x, place_of(name) or "x"), expression, shape)
        for (name, x), expression, shape in each
    ]


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf of a tree by its name."""
    return [(leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0]]


def _joint(leaves: list[Leaf], mesh: MeshLike | None, **options: Any) -> dict[int, Joint]:
    """What may travel together, by place; every tensor is checked, so that errors come before messages."""
    found = {}
    for i, leaf in enumerate(leaves):
        with located(leaf.name):
            part = _prepared(leaf, mesh, **options)
        if part is not None:
            found[i] = part
    return found


def _prepared(
    leaf: Leaf, mesh: MeshLike | None, profile: str | Path | Profile, comm_dtype: CommDtypeLike
) -> Joint | None:
    """None for a max or min, whose gradient is not a plan, and for a DTensor that needs a gradient."""
    x = leaf.x
    if not isinstance(x, DTensor):
        executable = executable_for(x, leaf.expression, mesh, leaf.shape, profile, comm_dtype)
        return Joint(x, executable, lambda y: y) if executable.is_linear else None
    ends = sides(leaf.expression)
    move = dtensor_move(x, ends, None, leaf.shape, profile, comm_dtype)
    block = local_block(x)
    legs = executables(move, tuple(x.shape), tuple(block.shape), block.device)
    if _records(x) or len(legs) != 1 or not isinstance(legs[0], Executable) or not legs[0].is_linear:
        return None

    def finish(y: Tensor) -> Tensor:
        return permuted(dtensor_of(y, x.device_mesh, move.dst.placements, x.shape), ends)

    return Joint(block, legs[0].casting(x.dtype, move.op_dtype), finish)


def _records(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _mesh_of(leaf: Leaf, mesh: MeshLike | None) -> MeshLike | None:
    return None if isinstance(leaf.x, DTensor) else mesh


def _compare(tensors: Any, expressions: Any, shapes: Any, mesh: MeshLike | None, **options: Any) -> None:
    """Raise on all ranks of the mesh unless all of them are about to move the same tensors, and can."""
    meshes = [x.device_mesh for x in tree_leaves(tensors) if isinstance(x, DTensor)]
    if not dist.is_initialized() or (mesh is None and not meshes):
        return
    ranks = callers(meshes[0] if mesh is None else mesh)
    found: list[Leaf] = []

    def facts() -> CallFacts:
        found.extend(_leaves(tensors, expressions, shapes))
        return CallFacts({"tensors": ", ".join(leaf.name for leaf in found)}, {}, ranks, {})

    if dist.get_rank() in ranks:
        compare_ranks(ranks, "redistribute_many", facts)
        for leaf in found:
            with located(leaf.name):
                compare_calls(leaf.x, leaf.expression, _mesh_of(leaf, mesh), leaf.shape, **options)


def _of_each(what: str, given: Any, tree: Any, at: str = "") -> list[Any]:
    """One value for each tensor of a tree, given as one for all, by rules, or in a tree of the same branches.

    Rules in the place of a branch have names that begin there.
    """
    if isinstance(given, Rules):
        names = [name for name, _ in _named(tree)]
        found = given.match(names)
        return [found[name] for name in names]
    if not isinstance(tree, Mapping | list | tuple):
        return [given] * len(tree_leaves(tree))
    parts, by_key = dict(tree if isinstance(tree, Mapping) else enumerate(tree)), isinstance(tree, Mapping)
    if isinstance(given, Mapping) and by_key:
        odd = [key for key in (*parts, *given) if (key in given) != (key in parts)]
        if odd:
            raise PlanError(f"tensors{at} and {what}{at} differ at {odd[0]!r}", hint="the same keys in both")
    elif isinstance(given, Mapping | list) or (what == "shapes" and given is not None):
        if isinstance(given, Mapping) or by_key or len(given) != len(parts):
            raise PlanError(
                f"{len(given)} {what} for {len(parts)} tensors", hint="one for each, in a list or by key"
            )
    else:
        return [given] * len(tree_leaves(tree))
    return [
        value for key, part in parts.items() for value in _of_each(what, given[key], part, f"{at}[{key!r}]")
    ]
