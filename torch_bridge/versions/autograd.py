"""What autograd knows about tensors and about a backward pass that runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.versions.support import private_names

with private_names():
    # Hot: whether forward mode is possible. Only the forward pass of an autograd.Function, as a
    # reentrant checkpoint is one, disables it. Without this question each call would read the
    # stack, which is slow.
    is_forward_mode_enabled = torch._C._is_fwd_grad_enabled

    _set_forward_mode_enabled: Any = torch.autograd.forward_ad._set_fwd_grad_enabled
    # The number of the backward pass that runs on this thread, -1 outside of one. A reentrant checkpoint
    # runs a pass of its own inside.
    backward_pass_id = torch._C._current_graph_task_id
    _engine: Any = torch.autograd.Variable._execution_engine
    _run_backward_code = torch.autograd.graph._engine_run_backward.__code__
    # The number that the next node of autograd made on this thread will have.
    number_of_next_node = torch._C._autograd._get_sequence_nr
    # Lets autograd save what one function returns, in place of tensors, until `remove_saving_hooks`.
    # Without it: torch's context is for a `with` block, which cannot begin in one hook and end in another.
    push_saving_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    _pop_saving_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
    _top_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _lazy_clone = torch._lazy_clone
    _is_lazy_copy: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    _address: Any = torch._C._data_address  # type: ignore[attr-defined]

SavingHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack

# The node of autograd that makes a DTensor of a block, by its name: the gradient of the DTensor is
# the block's, not the array's. torch gives no other sign of it.
FROM_LOCAL_NODE = "_FromTorchTensorBackward"
# The node of a compiled function begins with this name: it stands for all that was computed inside.
COMPILED_NODE = "CompiledFunction"
CAST_NODE = "ToCopyBackward0"  # the node of a cast


def writes_to(x: Tensor) -> int:
    """Count the writes to a tensor's memory.

    It tells a parameter that an optimiser has changed from one that is as it was gathered. Without
    it, a backward pass could use other values than its forward pass.
    """
    return x._version


def lazy_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy each tensor when it, or its copy, is first written to; at once, where its memory is foreign.

    Foreign is what torch has not allocated, as shared memory.
    """
    with torch.no_grad():
        try:
            return list(map(_lazy_clone, tensors))
        except RuntimeError:
            return [x.clone() for x in tensors]


def make_if_lazy(x: Tensor) -> None:
    """Make a lazy copy now, if a tensor is one.

    Else a thread of gloo would make it. Torch hangs, or worse, if two threads let go of memory that
    lazy copies share at once (2.13, `COWDeleterContext.decrement_refcount`).
    """
    if _is_lazy_copy(x):
        x.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the elements of tensors are; a write to one that has a lazy copy moves them.

    Without it, writes through `.data`, which torch does not count, would not be seen.
    """
    return list(map(_address, tensors))


def viewed_tensor(x: Tensor) -> Tensor | None:
    """Return the tensor whose memory a view has; None for a tensor with memory of its own.

    Without it, an operation that writes to a slice would not be seen to change the array.
    """
    return x._base


def origin_of(x: Tensor) -> Hashable:
    """Return what tells a tensor from all others: its node, its number there, and how it lies in memory."""
    return x.grad_fn, x.output_nr, x.stride(), x.device


def origin_of_cast(x: Tensor) -> Hashable:
    """Return the origin of the tensor of which this one is a cast, or a view of one; None for others.

    Without it, autograd would save what autocast makes of a gathered parameter.
    """
    viewed = viewed_tensor(x)
    cast = x if viewed is None else viewed
    node: Any = cast.grad_fn
    if node is None or node.name() != CAST_NODE:
        return None
    (source,) = node.next_functions
    return *source, cast.stride(), cast.device


def is_in_backward_pass() -> bool:
    """Return whether autograd runs a backward pass on this thread.

    A checkpoint runs a module again inside of one.

    Without it, a module that is computed again would undo the backward pass that it is a part of,
    or be taken for one that is called by itself.
    """
    return backward_pass_id() != -1


def call_after_backward(callback: Callable[[], None], if_failed: Callable[[], None]) -> None:
    """Let autograd call a function at the end of the running backward pass, or another if it fails.

    `if_failed` is called when the pass is over, after any exception; it is called after a success,
    too, and has to do nothing then.

    Without it, nothing would tell when the last gradient has come, as some may never come.
    """
    # Autograd holds the callback as long as the pass runs, and drops it before an exception arrives.
    held = partial(callback)
    finalizer = weakref.finalize(held, if_failed)
    finalizer.atexit = False
    _engine.queue_callback(held)


def remove_saving_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> bool:
    """Remove a pair of hooks, which others may be above of; return whether it was there.

    Without it, hooks of a pass that was interrupted would stay, or those of a `with` block around the
    next pass would go in their place.
    """
    top = top_saving_hooks()
    if top is None:
        return False
    _pop_saving_hooks()
    if top == (pack, unpack):
        return True
    was_there = remove_saving_hooks(pack, unpack)
    push_saving_hooks(*top)
    return was_there


@contextmanager
def outside_function() -> Iterator[None]:
    """Record as around the forward pass of an `autograd.Function` in which this is called.

    Without it, code that has nothing to do with the function would record nothing.
    """
    with torch.enable_grad(), _set_forward_mode_enabled(True):
        yield


def take_off_saving_hooks(hook_pairs: Sequence[SavingHooks]) -> bool:
    """Remove pairs of hooks, if they are on top, in this order; return whether they were.

    Without it, hooks of one coroutine would pack what another saves, as torch keeps them for a thread.
    """
    for i in reversed(range(len(hook_pairs))):
        if top_saving_hooks() != hook_pairs[i]:
            for pair in hook_pairs[i + 1 :]:
                push_saving_hooks(*pair)
            return False
        _pop_saving_hooks()
    return True


def drop_saving_hooks_above(hooks: SavingHooks | None) -> None:
    """Remove all hooks above a pair, or all of them for None.

    Without it, hooks of a coroutine that was interrupted would stay.
    """
    while top_saving_hooks() not in (None, hooks):
        _pop_saving_hooks()


def top_saving_hooks() -> Any:
    """Return the pair of functions by which autograd saves tensors now; None if it saves them as they are.

    Without it, hooks of ours inside a checkpoint would keep the activations that it wants to drop.
    """
    return _top_saving_hooks(True)  # also while a compiler traces


def shape_in_graph(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape that autograd's node for a parameter expects of a gradient.

    The node lives as long as a graph that uses the parameter. Without the question, a backward pass
    through an older graph would fail with shapes that nobody could explain.
    """
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    use: Any = view.grad_fn
    return shape_of_node(use.next_functions[0][0])


def shape_of_node(node: Any) -> tuple[int, ...]:
    """Return the shape of the first tensor that a node of autograd made, or accumulates a gradient of.

    Without it, a weight that is added to activations would be taken for a penalty, which is a scalar.
    """
    return tuple(node._input_metadata[0].shape)


def saved_in_node(node: Any, name: str) -> Any:
    """Return what a node of autograd has saved under a name, as the "exponent" of a power; None for nothing.

    Without it, the square of a norm would be taken for the norm, which is not the sum of those of blocks.
    """
    return getattr(node, f"_saved_{name}", None)


def number_of_node(node: Any) -> int:
    """Return the number of a node of autograd, ascending on each thread.

    Without it, nothing would tell whether a node was made in the forward pass of a module.
    """
    return node._sequence_nr()  # type: ignore[no-any-return]


def roots_of_backward_pass() -> list[Any]:
    """Return the nodes of the tensors on which `backward` was called; none if that is not known.

    Hooks run in it, on a GPU on another thread. Without the stacks of threads, hooks would never see
    the loss that they are called for, nor what was added to it outside of modules.
    """
    own_roots = _roots_on_stack(sys._getframe(1))
    if own_roots is not None:
        return own_roots
    roots_of_threads = [_roots_on_stack(frame) for frame in sys._current_frames().values()]
    known_roots = [nodes for nodes in roots_of_threads if nodes is not None]
    # Several threads may run passes: which one is this?
    return known_roots[0] if len(known_roots) == 1 else []


def _roots_on_stack(frame: FrameType | None) -> list[Any] | None:
    """Return the roots of the outermost backward pass on a stack; None if there is none."""
    roots = None
    while frame is not None:
        if frame.f_code is _run_backward_code:
            outputs = frame.f_locals["t_outputs"]
            roots = [x.grad_fn for x in outputs if getattr(x, "grad_fn", None) is not None]
        frame = frame.f_back
    return roots
