"""Records follow blocks through a model's own code, between its layers, and through checkpoints.

A record is the placement of a block (the layout and global shape of its array), kept beside the tensor. A
torch function has a rule if its result for a block is a block of its result for the array; its arguments are
moved to fit, and gradients of replicated ones summed. Other functions are refused: a wrong result could have
the right shape.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_bridge.nn.conv import pad, total_over_blocks
from torch_bridge.nn.fft import KINDS, Kind, transform_dims
from torch_bridge.nn.function_call import FunctionCall, Rule, same_rule, tensors_in
from torch_bridge.nn.functions import FUNCTIONS
from torch_bridge.nn.placed import (
    Placement,
    check_whole,
    placement_of,
    record,
    recorded_placement,
    recorded_placements,
)
from torch_bridge.nn.views import VIEWS, new_dims, view
from torch_bridge.ops import copy_to
from torch_bridge.versions.modes import function_modes
from xshard import XshardError
from xshard.errors import api_boundary, with_path
from xshard.notation.parser import Dim

_DIMS_KEYWORDS = ("dim", "dims", "axis")
_RANDOM = ("dropout", "alpha_dropout")


def _run_reader(call: FunctionCall) -> Any:
    """Run a function that reads properties of a tensor, and returns no tensor of its elements."""
    return call.run()


def _pointwise(call: FunctionCall) -> Any:
    """Apply an elementwise torch function, such as `add`, to blocks of sharded arrays.

    Arguments that are sharded differently are first moved to the layout of the result: "h/sp w"
    plus "h w" is "h/sp w". Each result gets a note of that layout and its global shape. Raises
    XshardError for an in-place function whose first argument would have to be moved.
    """
    result = _broadcast(recorded_placements(call.tensors()))
    args = tuple(_as_in_result(x, result) for x in call.args)
    is_in_place = call.name.endswith("_") and not call.name.endswith("__")
    if is_in_place and args[0] is not call.args[0]:
        reason = f"{call.name}() on a tensor that is not sharded like its result"
        raise XshardError(reason, hint="not in place")
    kwargs = {key: _as_in_result(x, result) for key, x in call.kwargs.items()}
    y = call.func(*args, **kwargs)
    for result_tensor in tensors_in((y,)):  # frexp returns two
        # Tensors without a known layout may have broadcast dims that are not sharded: these lengths
        # are those of the block.
        record(result_tensor, result.like_block(result_tensor))
    return y


def _with_parameters(call: FunctionCall, whole_last_dims: int) -> Tensor:
    """Apply a torch function of a block and parameters, such as `linear` or `layer_norm`.

    It needs the last dims of the block whole, as c of "b s/sp c" in a linear layer; the dims before
    them may be sharded. Returns the result with a note of its layout and global shape. Raises
    XshardError if another argument is a sharded block, too.
    """
    x, *parameters = call.args
    placement = recorded_placement(x)
    # A product of two blocks could need rows that other processes have, so that all other arguments
    # must be parameters.
    tensors = tensors_in((*parameters, *call.kwargs.values()))
    if placement is None or not all(map(_may_be_parameter, tensors)):
        raise _not_of_blocks(call.name)
    first_whole_dim = placement.ndim - whole_last_dims
    check_whole(placement, range(first_whole_dim, placement.ndim), f"{call.name}()")
    y: Tensor = call.map_tensors(partial(_with_summed_gradient, placement)).run()
    # An embedding adds a dim; the product with a vector has one less.
    added_dim = next(new_dims(placement.layout))
    dims = (*placement.dims, added_dim)[: y.ndim]
    lengths = (*placement.shape[:first_whole_dim], *y.shape[first_whole_dim:])
    return record(y, placement.with_dims(dims, lengths))


def _may_be_parameter(x: Tensor) -> bool:
    """Return whether a tensor is replicated, and of at most two dims: one without a batch."""
    placement = recorded_placement(x)
    is_replicated = placement is None or not placement.axes
    return is_replicated and x.ndim <= 2


def _norm(call: FunctionCall) -> Tensor:
    """Normalise over last dims that are whole, as many as `normalized_shape` has."""
    _, normalized_shape = call.arguments("input", "normalized_shape")
    return _with_parameters(call, len(normalized_shape))


def _embedding(call: FunctionCall) -> Tensor:
    """Look up rows of a table by the numbers in a block: "b s/sp" -> "b s/sp d0".

    Raises XshardError for options that depend on all tokens of the batch, or make sparse gradients.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if call.kwargs.get(option):
            reason = "embedding() with max_norm, scale_grad_by_freq or sparse"
            raise XshardError(reason, hint="without them")
    return _with_parameters(call, 0)


def _cat(call: FunctionCall) -> Tensor:
    """Apply `torch.cat` to blocks of sharded arrays, along a dim that is not sharded.

    Blocks that are sharded differently are first moved to one layout. Raises XshardError if the
    dim is sharded, as local rows would come in the wrong order, and for a tensor without a known
    layout among the blocks.
    """
    tensors, dim = call.arguments("tensors", dim=0)
    placements = recorded_placements(tensors)
    for placement in placements:
        check_whole(placement, (placement.layout.dim_index(dim),), "cat()")
    if len(placements) < len(tensors):
        reason = "cat() of a block and a tensor without a placement"
        raise XshardError(reason, hint="slice it first")
    d = placements[0].layout.dim_index(dim)
    # The layout of the result is found as for elementwise functions. Lengths along the concatenated
    # dim may differ, and are left out of it: each counts as 1.
    one_row = _broadcast([placement.with_length(d, 1) for placement in placements])
    # All are moved to this layout, so that along the other dims each device has the same rows.
    blocks = []
    length = 0
    for x, placement in zip(tensors, placements, strict=True):
        blocks.append(_as_in_result(x, one_row.with_length(d, placement.shape[d])))
        length += placement.shape[d]
    return record(call.func(blocks, d), one_row.with_length(d, length))


def _stack(call: FunctionCall) -> Tensor:
    """Stack blocks along a new dim: concatenate blocks with one row there."""
    tensors, dim = call.arguments("tensors", dim=0)
    rows = []
    for x in tensors:
        if recorded_placement(x) is not None:  # any other tensor is refused by `_cat`
            x = view(FunctionCall(torch.unsqueeze, (x, dim), {}))
        rows.append(x)
    return _cat(FunctionCall(torch.cat, (rows, dim), {}))


def _along_dims(call: FunctionCall, position: int | None = 1, default: int | None = None) -> Any:
    """Apply a torch function along dims that are not sharded, such as `sum`, `softmax` or `sort`.

    "b h/sp c" summed over c is "b h/sp"; softmax over c keeps "b h/sp c". Results get a note of
    their layout and global shape. Raises NotationError if one of the dims is sharded.

    Args:
        call: The call.
        position: Of the dims among its arguments; None: the function takes none.
        default: The dim of a call that names none; None: all dims.
    """
    placement = placement_of(call.args[0])
    dims = _named_dims(call, position)
    if not dims:
        dims = list(range(placement.ndim)) if default is None else [default]
    # No other process has rows of a dim that is not sharded, so that the local result is right.
    dim_indices = set(map(placement.layout.dim_index, dims))
    check_whole(placement, sorted(dim_indices), f"{call.name}()")
    y = call.run()
    for result_tensor in tensors_in((y,)):  # max returns two
        record(result_tensor, _placement_along(placement, result_tensor, dim_indices))
    return y


def _sum_or_mean(call: FunctionCall) -> Any:
    """Apply `sum` or `mean`, along dims that are sharded, too."""
    placement = placement_of(call.args[0])
    dims: Sequence[int] = _named_dims(call, 1)
    if not dims:
        dims = range(placement.ndim)
    dim_indices = sorted({placement.layout.dim_index(d) for d in dims})
    if not placement.axes_of(dim_indices):
        return _along_dims(call)
    block_sums = call._replace(func=torch.sum).run()
    y, result = total_over_blocks(block_sums, placement, dim_indices)
    if call.name == "mean":
        y = y / math.prod(placement.shape[d] for d in dim_indices)
    return record(y, result)


def _named_dims(call: FunctionCall, position: int | None) -> list[int]:
    """Return the dims that a call names: `x.sum((0, 1))` -> [0, 1], `softmax(x, dim=-1)` -> [-1]."""
    candidates: Any = [call.kwargs[key] for key in _DIMS_KEYWORDS if key in call.kwargs]
    if position is not None:
        candidates = [*call.args[position : position + 1], *candidates]
    if candidates and isinstance(candidates[0], list | tuple):
        candidates = candidates[0]
    # Another option may be in this place: `unbiased` in `x.std(False)`.
    return [d for d in candidates if isinstance(d, int) and not isinstance(d, bool)]


def _placement_along(placement: Placement, y: Tensor, dims: set[int]) -> Placement:
    """Return the placement of a result, which has `dims`, with any lengths, or has lost them."""
    if y.ndim == placement.ndim:
        return placement.like_block(y)
    remaining = [d for d in range(placement.ndim) if d not in dims]
    remaining_dims = [placement.dims[d] for d in remaining]
    return placement.with_dims(remaining_dims, [placement.shape[d] for d in remaining])


def _extremum(call: FunctionCall) -> Any:
    """Apply `max` or `min`: along dims, or, of two tensors, element by element."""
    _, second_tensor = call.arguments("input", other=None)
    if isinstance(second_tensor, Tensor):
        return _pointwise(call)
    return _along_dims(call)


def _flip(call: FunctionCall) -> Any:
    """Reverse dims: `x.flip(0, 1)` has one argument for each, unlike other functions along dims."""
    x, *dims = call.args
    if len(dims) > 1:
        call = call._replace(args=(x, dims))
    return _along_dims(call)


def _index_select(call: FunctionCall) -> Any:
    """Select rows of a dim that is whole, by numbers that all processes have."""
    x, dim, index = call.arguments("input", "dim", "index")
    placement = recorded_placement(index)
    # The indices in other processes' blocks are needed, too: the result has the rows of all.
    if placement is not None and placement.axes:
        index = placement.redistribute(index, placement.layout.unsharded)
    return _along_dims(FunctionCall(call.func, (x, dim, index), {}))


def _fft(call: FunctionCall, kind: Kind, lengths_name: str, default_dims: Any) -> Tensor:
    """Apply a function of `torch.fft` to a block of a sharded array, as our `fft` does.

    Args:
        call: The call.
        kind: The transform.
        lengths_name: torch's name of the argument with one or several lengths, "n" or "s".
        default_dims: One or several; None: the last ones, as many as there are lengths, or all.
    """
    defaults = {lengths_name: None, "dim": default_dims, "norm": None}
    x, lengths, dims, norm = call.arguments("input", **defaults)
    placement = placement_of(x)
    if isinstance(lengths, int):
        lengths = [lengths]
    if isinstance(dims, int):
        dims = [dims]
    elif not dims:
        dims = range(-len(lengths if lengths else placement.shape), 0)
    dim_indices = list(map(placement.layout.dim_index, dims))
    if lengths:
        lengths = _global_fft_lengths(call.name, placement, dim_indices, lengths)
    return record(*transform_dims(x, placement, kind, dim_indices, lengths, norm))


def _fft_rows(suffix: str, lengths_name: str, default_dims: Any) -> dict[str, Rule]:
    """Return the rows of the table of rules for `fft2`, `rfft2` and so on, for the suffix "2"."""
    rule = partial(_fft, lengths_name=lengths_name, default_dims=default_dims)
    return {f"fft_{name}{suffix}": partial(rule, kind=kind) for name, kind in KINDS.items()}


def _global_fft_lengths(
    name: str, placement: Placement, dims: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """Turn the lengths that a model passes to an FFT into lengths of the global array.

    The model's code reads lengths from its blocks: `fft(x, n=x.shape[0])` of a block of 4 rows of 8
    means all rows. -1 stands for all rows, in arguments and result. Raises XshardError if the
    transform would cut or pad a sharded dim.

    Args:
        name: The torch function, for errors.
        placement: The placement of the block.
        dims: The indices of the transformed dims.
        lengths: A length for each.
    """
    global_lengths = []
    for d, length in zip(dims, lengths, strict=True):
        if placement.is_sharded(d) and length != -1:
            if not placement.sharding.is_even or length != placement.local_shape[d]:
                function = name.removeprefix("fft_")
                reason = f"{function}() of {length} rows of dim '{placement.dims[d]}'"
                raise XshardError(reason, hint="sharded dims keep the length that they have")
            length = -1
        global_lengths.append(length)
    return global_lengths


def _pad(call: FunctionCall) -> Tensor:
    """Apply `F.pad` to a block of a sharded array: the global array is padded, not each block.

    Dims that are not sharded are padded locally by torch. If a sharded dim is padded, rows move
    between devices, as the padded array is cut into parts anew. Returns the block with a note of
    its layout and global shape.
    """
    x, pads, mode, value = call.arguments("input", "pad", mode="constant", value=None)
    placement = placement_of(x)
    # torch lists the pairs from the last dim to the first: here they are in the order of dims.
    pads_by_dim = tuple(zip(pads[::2], pads[1::2], strict=True))[::-1]
    first_dim = x.ndim - len(pads_by_dim)
    shape = list(placement.shape)
    for d, pads_of_dim in enumerate(pads_by_dim, first_dim):
        if any(pads_of_dim) and placement.is_sharded(d):
            # Only the first and last devices have the ends of the array, so that rows move.
            y, result = pad(x, placement, pads_by_dim, mode, 0.0 if value is None else value)
            return record(y, result)
        shape[d] += sum(pads_of_dim)
    return record(call.run(), placement.with_shape(shape))


# What is done for a function of blocks. Functions with torch's tag for elementwise ones need no row.
_RULES: dict[str, Rule | None] = {
    **same_rule(
        "__bool__ __format__ __hash__ __len__ __repr__ __set__ backward data_ptr dim element_size get_device"
        " has_names is_complex is_contiguous is_floating_point ndimension numel register_hook retain_grad"
        " size stride type",
        _run_reader,
    ),
    **same_rule(
        "alpha_dropout bfloat16 bool contiguous detach double dropout float half hardswish hardswish_ imag"
        " int log_sigmoid logsigmoid long masked_fill ones_like real requires_grad_ softsign tanhshrink to"
        " type_as where zeros_like",
        _pointwise,
    ),
    "equal": None,  # it has torch's tag, but its result is one bool
    # Along dims, which must be whole: these dims stay, or they are reduced.
    **same_rule(
        "all amax amin any argmax argmin count_nonzero cumprod cumsum log_softmax logcumsumexp logsumexp"
        " median prod softmax softmin std var",
        _along_dims,
    ),
    **same_rule("mean sum", _sum_or_mean),
    **same_rule("max min", _extremum),
    "flip": _flip,
    "index_select": _index_select,
    **same_rule("argsort glu sort", partial(_along_dims, default=-1)),
    **same_rule("channel_shuffle local_response_norm", partial(_along_dims, position=None, default=1)),
    "normalize": partial(_along_dims, position=2, default=1),
    "roll": partial(_along_dims, position=2),
    "topk": partial(_along_dims, position=2, default=-1),
    **_fft_rows("", "n", -1),
    **_fft_rows("2", "s", (-2, -1)),
    **_fft_rows("n", "s", None),
    "embedding": _embedding,
    "prelu": partial(_with_parameters, whole_last_dims=0),
    **same_rule("linear matmul", partial(_with_parameters, whole_last_dims=1)),
    **same_rule("layer_norm rms_norm", _norm),
    **same_rule("cat concat", _cat),
    "stack": _stack,
    "pad": _pad,
    **VIEWS,
    **FUNCTIONS,
}  # fmt: skip


@lru_cache(maxsize=1024)
def _rule_of(name: str) -> Rule | None:
    if name in _RULES:
        return _RULES[name]
    if _has_pointwise_tag(name):
        return _pointwise
    return None


def _has_pointwise_tag(name: str) -> bool:
    """Return whether torch says that a function works element by element."""
    for op_name in (name, name.strip("_")):  # `__add__` and `add_` are `add`
        packet = getattr(torch.ops.aten, op_name, None)
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.pointwise in overload.tags for overload in overloads):
            return True
    return False


def _of_replicated(call: FunctionCall, placement: Placement) -> Any:
    """Apply any function to replicated values: its results are replicated too."""
    if call.name in _RANDOM:
        _check_not_random(call)
    if placement.gradient_share_axes:
        call = call.map_tensors(partial(_with_summed_gradient, placement))
    result = call.run()
    for y in tensors_in((result,)):
        record(y, placement.replicated_like(y))
    return result


def _check_not_random(call: FunctionCall) -> None:
    """Raise XshardError for dropout of a replicated tensor in training."""
    _, p, training = call.arguments("input", p=0.5, training=True)
    if training and p > 0:
        reason = (
            f"{call.name}() of a whole tensor in training: devices would draw different numbers"
        )
        raise XshardError(reason, hint="use it on blocks, or after the model")


def _with_summed_gradient(placement: Placement, x: Tensor) -> Tensor:
    """Return a tensor for use with a block: its gradient is summed over axes that shard only the block."""
    placement_of_x = recorded_placement(x)
    if placement_of_x is None:  # a parameter, or a constant
        [x] = placement.parameter_copies([x])
        return x
    missing_axes = tuple(axis for axis in placement.axes if axis not in placement_of_x.axes)
    if missing_axes and x.requires_grad and torch.is_grad_enabled():
        return copy_to(x, missing_axes, placement.processes)
    return x


def _broadcast(placements: Sequence[Placement]) -> Placement:
    """Choose how the result of an elementwise function of several blocks is sharded.

    A placement is a layout and a global shape. Each dim is sharded as in the first argument that
    shards it: "h/sp w" and "h w/tp" -> "h/sp w/tp". Dims of length 1 broadcast, and missing ones
    are added in front, as in numpy. Raises ShapeError for lengths that differ.
    """
    base = max(placements, key=attrgetter("ndim"))
    dims = list(base.dims)
    shape = list(base.shape)
    for placement in placements:
        first_dim = base.ndim - placement.ndim  # the last dims are aligned
        for d, dim in enumerate(placement.dims, first_dim):
            length = placement.shape[d - first_dim]
            repeats_one_row = shape[d] == 1 and length != 1
            is_first_sharded = length == shape[d] and dim.axes and not dims[d].axes
            if repeats_one_row or is_first_sharded:
                dims[d] = replace(dim, name=dims[d].name)
                shape[d] = length
            elif length not in (1, shape[d]):
                raise placement.shape_error(f"{length} rows of dim {dim.name!r} meet {shape[d]}")
    return base.with_dims(dims, shape)


def _as_in_result(x: Any, result: Placement) -> Any:
    """Move the tensors of an argument of an elementwise function to the layout of its result."""
    if isinstance(x, Tensor):
        return _tensor_as_in_result(x, result)
    if isinstance(x, list | tuple):
        return type(x)(_as_in_result(item, result) for item in x)
    return x


def _tensor_as_in_result(x: Tensor, result: Placement) -> Tensor:
    """Move a tensor to the layout of the result that it is broadcast to.

    For a result "b h/sp w", "h w" becomes "h/sp w"; dims that broadcast, of length 1, become whole.
    A tensor without a known layout is a parameter or a constant, equal on all devices: it must have
    length 1 along sharded dims.
    """
    if x.ndim > result.ndim:
        raise result.shape_error(f"{x.ndim} dims meet {result.ndim}", "as many dims")
    first_dim = result.ndim - x.ndim
    target_dims = result.dims[first_dim:]
    placement = recorded_placement(x)
    if placement is None:
        _check_broadcasts(x, target_dims, result)
        return _with_summed_gradient(result, x)
    dims = list(placement.layout.unsharded.dims)
    for d, target in enumerate(target_dims):
        if placement.shape[d] == result.shape[first_dim + d]:
            dims[d] = replace(target, name=dims[d].name)
    fitted = placement.with_dims(dims, placement.shape)
    # Two notations may give each device the same rows: then nothing is moved.
    if not placement.sharding.means_the_same_as(fitted.sharding):
        x = record(placement.redistribute(x, fitted.layout), fitted)
    return _with_summed_gradient(result, x)


def _check_broadcasts(x: Tensor, dims: Sequence[Dim], result: Placement) -> None:
    """Raise ShapeError if a tensor without a record has several rows where the result is sharded."""
    for length, dim in zip(x.shape, dims, strict=True):
        if length > 1 and dim.axes:
            reason = f"{length} rows without a recorded sharding meet dim '{dim}'"
            raise result.shape_error(reason, "slice it first, or make it an input of the model")


def _not_of_blocks(name: str) -> XshardError:
    reason = f"{name}() of a block is not a block of {name}() of the array"
    hint = "use a module, which becomes a layer, or redistribute what it needs whole"
    return XshardError(reason, hint=hint)


class Propagation(TorchFunctionMode):
    """Records the placements of results, or refuses a function.

    Args:
        paths: Of the modules of the model.
        outputs: How the outputs of convolutions and pools are sharded.
    """

    def __init__(self, paths: Mapping[nn.Module, str], outputs: str = "") -> None:
        super().__init__()
        self.paths = paths
        self.outputs = outputs

    # Hot: called for every torch function of the model's code.
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply the rule of a function of blocks; leave others as they are."""
        call = FunctionCall(func, args, {} if kwargs is None else kwargs, self.outputs)
        placements = recorded_placements(call.tensors())
        if not placements or _only_reads(call):
            return call.run()
        try:
            # No argument is sharded: each process computes what one device would, without a rule.
            if not any(placement.axes for placement in placements):
                return _of_replicated(call, placements[0])
            return _of_blocks(call)
        except XshardError as error:
            raise with_path(error, self._path()) from None

    def _path(self) -> str:
        """Return the path of the innermost module of the model on the call stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and caller in self.paths:
                return self.paths[caller]
            frame = frame.f_back
        return ""


def _only_reads(call: FunctionCall) -> bool:
    """Return whether a function, or a property, returns no tensor of the block's elements."""
    if getattr(call.func, "__name__", "") == "__get__":
        return call.name not in _RULES
    return _RULES.get(call.name) is _run_reader


def _of_blocks(call: FunctionCall) -> Any:
    """Apply a torch function to blocks, by the rule for its name that also derives the layout.

    Raises XshardError for a function without a rule.
    """
    rule = _rule_of(call.name)
    if rule is None:
        raise _not_of_blocks(call.name)
    if not call.args:  # called as f(input=x): the rules expect the first tensor by position
        kwargs = dict(call.kwargs)
        call = call._replace(args=(kwargs.pop("input"),), kwargs=kwargs)
    return rule(call)


R = TypeVar("R")


@api_boundary
def checkpoint(function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """Call a function without keeping its activations: the backward pass computes them again.

        y = xt.nn.checkpoint(self.block, x)         # in the code of a model

    It is `torch.utils.checkpoint.checkpoint`, which also works in the code of models that
    `domain_parallel` converts: what it knows of layouts is there again in the second run.

    Args:
        function: The function to call.
        *arguments: Its arguments.
        **options: Keyword arguments of the function and of torch's checkpoint, except `use_reentrant`,
            which is False, and `context_fn`.

    Returns:
        What the function returns.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(torch.square, x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    options["use_reentrant"] = False
    options["context_fn"] = _checkpoint_contexts
    return torch.utils.checkpoint.checkpoint(function, *arguments, **options)


def _checkpoint_contexts() -> tuple[Any, Any]:
    """Return the contexts of the first computation, and of the second, which no model follows by itself."""
    outputs = [mode.outputs for mode in function_modes() if isinstance(mode, Propagation)]
    return nullcontext(), Propagation({}, *outputs[:1])
