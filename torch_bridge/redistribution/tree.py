"""Trees of tensors: the call of each leaf, and the leaves that share collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_structure, tree_unflatten

from torch_bridge.autodiff.blocks import as_tensor, is_dtensor
from torch_bridge.autodiff.function import Redistribute
from torch_bridge.autodiff.pending import watched
from torch_bridge.calls.move import MoveCall
from torch_bridge.lower.executable import BucketedExecutable, Executable
from torch_bridge.mesh.desync import CallFacts, Compared, compare_call
from torch_bridge.mesh.process_mesh import MeshLike, callers
from torch_bridge.redistribution.blocks import (
    Endpoints,
    call_of,
    compare,
    move_one,
    redistribute_between,
)
from xshard.arguments import limit_of
from xshard.errors import located
from xshard.replicas import are_checked
from xshard.trees import leaf_name, prefix_branches, spread


class _Leaf(NamedTuple):
    """A tensor of the tree, its place, for errors, and its arguments of `redistribute`."""

    place: str
    x: Tensor
    arguments: tuple[Any, ...]


def redistribute_tree(
    tree: Any,
    arguments: tuple,
    bucket_bytes: int | str | None,
    debug: bool,
    check_replicated: bool | None,
) -> Any:
    """`redistribute` of every tensor of a tree, with fewer collectives: each result is the same as alone."""
    layouts, mesh, shape, *options = arguments

    def leaves() -> list[_Leaf]:
        return [
            _Leaf(place, x, (expression, None if is_dtensor(x) else mesh, whole, *options))
            for place, x, expression, whole in _spread(tree, layouts, shape)
        ]

    limit = limit_of(bucket_bytes)
    compared = _compare(tree, mesh, leaves, check_replicated, limit) if debug else []
    calls = []
    results = dict[int, Any]()
    for leaf in (tensors := leaves()):
        with located(leaf.place):
            calls.append(call_of(leaf.x, *leaf.arguments))
    if not are_checked(check_replicated):
        results = _in_buckets(tensors, calls, limit)
    for i, (leaf, call) in enumerate(zip(tensors, calls, strict=True)):
        if i not in results:
            with located(leaf.place):
                results[i] = move_one(leaf.x, call, False, check_replicated, leaf.place)
    for i, (one, leaf) in enumerate(zip(compared, tensors, strict=False)):
        watched(one, results[i], leaf.x)
    return tree_unflatten([results[i] for i in range(len(tensors))], tree_structure(tree))


def transfer_tree(
    tree: Any,
    layouts: Any,
    shape: Any,
    endpoints: Endpoints,
    debug: bool,
    check_replicated: bool | None,
) -> Any:
    """`redistribute` of every tensor of a tree between two meshes, one after the other."""
    results = []
    for place, x, expression, whole in _spread(tree, layouts, shape, is_optional=True):
        with located(place):
            results.append(
                redistribute_between(x, expression, whole, endpoints, debug, check_replicated)
            )
    return tree_unflatten(results, tree_structure(tree))


def _spread(
    tree: Any, layouts: Any, shape: Any, is_optional: bool = False
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Place, tensor (None if optional), expression and shape of leaves. Raises PlanError if trees differ."""
    trees = (
        (layouts, lambda e: not isinstance(e, Mapping | list), "layouts"),
        (shape, _is_shape, "shapes"),
    )
    expressions, shapes = (
        spread(prefix_branches(values, tree, is_value, ("tensors", what)), _named_leaves)
        for values, is_value, what in trees
    )
    for leaf, whole in zip(expressions, shapes, strict=True):
        x = None if leaf.x is None and is_optional else as_tensor(leaf.x, leaf.place or "x")
        yield leaf.place, x, leaf.given, whole.given


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0]]


def _is_shape(value: Any) -> bool:
    nested = Mapping | list | tuple | None
    inner = value if isinstance(value, list | tuple) else ()
    return not isinstance(value, Mapping) and not any(isinstance(n, nested) for n in inner)


def _in_buckets(tensors: list[_Leaf], calls: list[MoveCall], limit: int | None) -> dict[int, Any]:
    """The results of the tensors that may share collectives, by index, once all are checked: linear ones."""
    # The gradient of a max or min is not a plan, and a DTensor's may have any placements: these travel alone.
    # The block, its executable, and the function from its result to the tensor's.
    parts: dict[int, tuple[Tensor, Executable, Callable[[Tensor], Tensor]]] = {}
    for i, (leaf, call) in enumerate(zip(tensors, calls, strict=True)):
        with located(leaf.place):
            if is_dtensor(leaf.x):
                from torch_bridge.dtensor.redistribution import local_part

                prepared = local_part(leaf.x, call)
            else:
                prepared = leaf.x, call.executable_for(leaf.x), lambda y: y
        if prepared is not None and prepared[1].is_linear:
            parts[i] = prepared
    results: dict[int, Any] = {}
    for records in (False, True):
        # Tensors without a gradient are apart: nothing is sent back for them.
        some = [
            i
            for i, (x, *_) in parts.items()
            if (x.requires_grad and torch.is_grad_enabled()) == records
        ]
        if some:
            blocks, executables, finish = zip(*(parts[i] for i in some), strict=True)
            moved = Redistribute.apply(BucketedExecutable(executables, limit), *blocks)
            results |= {i: end(y) for i, end, y in zip(some, finish, moved, strict=True)}
    return results


def _compare(
    tree: Any, mesh: MeshLike | None, leaves: Callable[[], list[_Leaf]], *options: Any
) -> list[Compared | None]:
    """Raise on all ranks of the mesh unless all of them are about to move the same tensors, and can."""
    if mesh is None:
        mesh = next((x.device_mesh for x in tree_leaves(tree) if is_dtensor(x)), None)
    if mesh is None:
        return []
    tensors: list[_Leaf] = []

    def facts() -> CallFacts:
        tensors.extend(leaves())
        return CallFacts(
            {"tensors": ", ".join(leaf.place for leaf in tensors)}, {}, callers(mesh), {}
        )

    compare_call(mesh, "redistribute of a tree", facts)
    compared = []
    for leaf in tensors:
        with located(leaf.place):
            compared.append(compare(leaf.x, leaf.arguments, False, *options))
    return compared
