"""Trees of tensors: the call of each leaf, and the leaves that share collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor, is_dtensor
from torch_bridge.autodiff.pending import PendingTensor, compare_gradients_of, move_in_turn
from torch_bridge.calls.move import MoveCall
from torch_bridge.lower.executable import BucketedExecutable, Executable
from torch_bridge.mesh.desync import CallFacts, Compared, compare_call
from torch_bridge.mesh.process_mesh import MeshLike, calling_ranks
from torch_bridge.redistribution.blocks import (
    call_of,
    check_awaitable,
    compare,
    move_one,
    redistribute_between,
)
from torch_bridge.redistribution.options import Options
from torch_bridge.versions.pytree import (
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from xshard.arguments import limit_of
from xshard.errors import located
from xshard.replicas import are_replicas_checked
from xshard.trees import is_shape, leaf_name, leaves_with_values, prefix_branches


class _Leaf(NamedTuple):
    """A tensor of a tree, with its name in errors and its own layouts and shape."""

    place: str
    x: Any  # None between two meshes, on a process outside the source
    layouts: Any
    shape: Any
    mesh: MeshLike | None  # None for a DTensor, which brings its own

    def options(self, of_tree: Options) -> Options:
        """Return the options with which this leaf would be moved alone."""
        return of_tree._replace(layouts=self.layouts, shape=self.shape, mesh=self.mesh)


class _LeafMove(NamedTuple):
    """A leaf's local block, its executable, and the function from its result to the leaf's."""

    block: Tensor
    executable: Executable
    finish: Callable[[Tensor], Tensor] | None = None  # None: the result as it is


class SharedMove(NamedTuple):
    """Moves of several tensors as one function for autograd: they share collectives."""

    indices: tuple[int, ...]  # of its tensors, in a longer list
    executable: BucketedExecutable

    def run(self, blocks: Sequence[Tensor] | Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        """Move the blocks at `indices`, differentiably."""
        moved: tuple[Tensor, ...] = move_in_turn(self.executable, *self.own_blocks(blocks))
        return moved

    def begin(self, blocks: Sequence[Tensor] | Mapping[int, Tensor]) -> list[PendingTensor]:
        """Begin to move the blocks at `indices`."""
        return PendingTensor.begin_together(self.own_blocks(blocks), self.executable)

    def own_blocks(self, blocks: Sequence[Tensor] | Mapping[int, Tensor]) -> list[Tensor]:
        """Return the blocks at `indices`."""
        return [blocks[i] for i in self.indices]


def share_collectives(
    executables: Mapping[int, Executable], blocks: Mapping[int, Tensor], bucket_bytes: int | None
) -> list[SharedMove]:
    """Group moves of several tensors so that each group shares its collectives.

    There are at most two groups: tensors that need a gradient, and those that do not, for which the
    backward pass would else send zeros.

    Args:
        executables: Linear moves, by the index of their tensor.
        blocks: This process's blocks, by index.
        bucket_bytes: The most bytes that one collective sends together; None for no limit.
    """
    is_recording = torch.is_grad_enabled()
    without_gradient: list[int] = []
    with_gradient: list[int] = []
    for i in executables:
        is_recorded = is_recording and blocks[i].requires_grad
        indices = with_gradient if is_recorded else without_gradient
        indices.append(i)
    moves = []
    for indices in (without_gradient, with_gradient):
        if indices:
            members = tuple(executables[i] for i in indices)
            together = BucketedExecutable(members, bucket_bytes)
            moves.append(SharedMove(tuple(indices), together))
    return moves


def redistribute_tree(tree: Any, options: Options) -> Any:
    """Redistribute every tensor of a dict, list or tuple, with few collectives for all of them.

    Returns a tree of the same structure. Each result is the same as if its tensor were moved alone.
    With `async_op` they are under way.
    """
    bucket_bytes = limit_of(options.bucket_bytes)
    compared = _compare_tree(tree, options, bucket_bytes) if options.debug else []

    # All calls are checked before any tensor moves: an error leaves nothing half done.
    leaves = list(_leaves(tree, options))
    calls = []
    for leaf in leaves:
        with located(leaf.place):
            if options.async_op:
                check_awaitable(leaf.x)
            calls.append(call_of(leaf.x, leaf.options(options)))

    # With `check_replicated`, each tensor is moved and compared alone, so that an error has its
    # name.
    results: dict[int, Any] = {}
    if not are_replicas_checked(options.check_replicated):
        results = _move_together(leaves, calls, bucket_bytes, options.async_op)
    for i, (leaf, call) in enumerate(zip(leaves, calls, strict=True)):
        if i not in results:
            with located(leaf.place):
                results[i] = move_one(
                    leaf.x, call, options.async_op, options.check_replicated, leaf.place
                )

    # After all moves: tensors of one bucket then have one common node in autograd's graph, and its
    # backward pass is compared once, by the first of them.
    for i, compared_call in enumerate(compared):
        compare_gradients_of(compared_call, results[i], leaves[i].x)
    return tree_unflatten([results[i] for i in range(len(leaves))], tree_structure(tree))


def transfer_tree(tree: Any, options: Options) -> Any:
    """Move every tensor of a tree between two meshes, one after the other."""
    results = []
    for leaf in _leaves(tree, options, is_optional=True):
        with located(leaf.place):
            results.append(redistribute_between(leaf.x, leaf.options(options)))
    return tree_unflatten(results, tree_structure(tree))


def _leaves(tree: Any, options: Options, is_optional: bool = False) -> Iterator[_Leaf]:
    """Yield every tensor of a tree with the layouts and the global shape that are for it.

    `layouts` and `shape` of the options may be one value for all tensors, or a tree with values for
    its branches: {"a": "n/dp -> n"} is for all tensors under "a". A tensor may be None if
    `is_optional`. Raises PlanError if the trees of layouts and shapes have other branches than the
    tensors.
    """
    # For each tensor its place in the tree, itself, and the value that is for it.
    with_layouts = _spread(options.layouts, tree, _is_expression, "layouts")
    with_shapes = _spread(options.shape, tree, is_shape, "shapes")
    for with_layout, with_shape in zip(with_layouts, with_shapes, strict=True):
        place = with_layout.place
        x = with_layout.x
        if x is not None or not is_optional:
            x = as_tensor(x, place if place else "x")
        mesh = None if is_dtensor(x) else options.mesh
        yield _Leaf(place, x, with_layout.value, with_shape.value, mesh)


def _spread(values: Any, tree: Any, is_value: Callable[[Any], bool], values_name: str) -> list[Any]:
    """Give each leaf of a tree its value; values are nested like the tree, or its first branches."""
    branches = prefix_branches(values, tree, is_value, ("tensors", values_name))
    return leaves_with_values(branches, _named_leaves)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0]]


def _is_expression(value: Any) -> bool:
    """Return whether a value is the layouts of one tensor; a tuple is a pair of them."""
    return not isinstance(value, Mapping | list)


def _move_together(
    leaves: list[_Leaf], calls: list[MoveCall], bucket_bytes: int | None, async_op: bool
) -> dict[int, Any]:
    """Redistribute those tensors that can share collectives, or begin to; return results by index.

    A tensor that cannot share, as of a max or a DTensor, is missing in the result: it has to be
    moved alone.
    """
    moves: dict[int, _LeafMove] = {}
    for i, (leaf, call) in enumerate(zip(leaves, calls, strict=True)):
        with located(leaf.place):
            move = _leaf_move(leaf.x, call)
        # The gradient of a max or min is not a plan, and a DTensor's may have any placements:
        # these travel alone.
        if move is not None and move.executable.is_linear:
            moves[i] = move

    executables = {i: move.executable for i, move in moves.items()}
    blocks = {i: move.block for i, move in moves.items()}
    results: dict[int, Any] = {}
    for shared in share_collectives(executables, blocks, bucket_bytes):
        moved: Sequence[Any] = shared.begin(blocks) if async_op else shared.run(blocks)
        for i, y in zip(shared.indices, moved, strict=True):
            finish = moves[i].finish
            results[i] = y if finish is None else finish(y)
    return results


def _leaf_move(x: Tensor, call: MoveCall) -> _LeafMove | None:
    """Prepare the move of one leaf; None for a DTensor that has to move alone."""
    if not is_dtensor(x):
        return _LeafMove(x, call.executable_for(x))
    from torch_bridge.dtensor.redistribution import local_move

    move = local_move(x, call)
    return None if move is None else _LeafMove(*move)


def _compare_tree(tree: Any, options: Options, bucket_bytes: int | None) -> list[Compared | None]:
    """Check, before anything is sent, that all ranks move the same tensors in the same way.

    For debug=True. First the names of all tensors are compared, then the call of each. Raises on
    all ranks of the mesh if they differ. Returns a comparison of the backward pass for each tensor,
    or None.
    """
    mesh = options.mesh
    if mesh is None:
        meshes = [x.device_mesh for x in tree_leaves(tree) if is_dtensor(x)]
        if not meshes:
            return []  # the call fails on every rank: nothing says which mesh it is for
        mesh = meshes[0]
    leaves: list[_Leaf] = []

    def facts() -> CallFacts:
        """Describe the tree; its leaves are kept, as they may be an error on this rank alone."""
        leaves.extend(_leaves(tree, options))
        names = ", ".join(leaf.place for leaf in leaves)
        return CallFacts({"tensors": names}, peers=calling_ranks(mesh))

    compare_call(mesh, "redistribute of a tree", facts)
    compared = []
    in_bytes = options._replace(bucket_bytes=bucket_bytes)  # 2**20 and "1MiB" are equal
    for leaf in leaves:
        with located(leaf.place):
            compared.append(compare(leaf.x, leaf.options(in_bytes)))
    return compared
