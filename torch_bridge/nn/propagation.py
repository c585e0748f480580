"""Records follow blocks through a model's own code, between its layers, and through checkpoints.

A torch function has a rule if its result for a block is a block of its result for the array; its arguments
are moved, and gradients of replicated ones summed. Others are refused: results could have the right shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_bridge.nn.conv import pad
from torch_bridge.nn.fft import KINDS, fft
from torch_bridge.nn.placed import (
    Placement,
    check_whole,
    placement_of,
    record,
    recorded_placement,
    recorded_placements,
)
from torch_bridge.nn.views import VIEWS, function_name, new_dims, view
from torch_bridge.ops import copy_to
from torch_bridge.versions.pytree import tree_map_only
from xshard import Layout, XshardError
from xshard.errors import ShapeError, api_boundary, with_path
from xshard.notation.parser import Dim

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Function, Args, Kwargs], Any]

# Functions that work element by element, though torch has no tag for them.
_POINTWISE = frozenset((
    "alpha_dropout", "bfloat16", "bool", "contiguous", "detach", "double", "dropout", "float", "half",
    "hardswish", "hardswish_", "imag", "int", "log_sigmoid", "logsigmoid", "long", "masked_fill",
    "ones_like", "real", "requires_grad_", "softsign", "tanhshrink", "to", "type_as", "where", "zeros_like",
))  # fmt: skip
_RANDOM = ("dropout", "alpha_dropout")


class DimsArgument(NamedTuple):
    """Where a function along some dims has them: its position (None: in no argument), and its default."""

    position: int | None
    default: int | None  # None: all dims


# Functions along dims, which must be whole: these dims stay, or they are reduced.
_ALONG_DIMS: dict[str, DimsArgument] = {
    **dict.fromkeys((
        "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "cumprod", "cumsum", "flip",
        "index_select", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "prod",
        "softmax", "softmin", "std", "sum", "var",
    ), DimsArgument(1, None)),
    **dict.fromkeys(("argsort", "glu", "sort"), DimsArgument(1, -1)),
    **dict.fromkeys(("channel_shuffle", "local_response_norm"), DimsArgument(None, 1)),
    "normalize": DimsArgument(2, 1), "roll": DimsArgument(2, None), "topk": DimsArgument(2, -1),
}  # fmt: skip
_DIMS_KEYWORDS = ("dim", "dims", "axis")

# Functions that read properties of a tensor and return no tensor.
_READING = frozenset((
    "__bool__", "__format__", "__get__", "__hash__", "__len__", "__repr__", "__set__", "backward",
    "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "numel", "register_hook", "retain_grad", "size", "stride", "type",
))  # fmt: skip
_FOLLOWED_PROPERTIES = VIEWS | {"imag", "real"}

# Functions of a block and of parameters -> the number of the block's last dims that they need whole.
_WHOLE_LAST_DIMS = {"embedding": 0, "linear": 1, "matmul": 1, "prelu": 0}
_NORMS = ("layer_norm", "rms_norm")  # as many as `normalized_shape` has


class FftFunction(NamedTuple):
    """A function of `torch.fft`: the kind of its transform, and its arguments."""

    kind: str
    length_argument: str
    default_dim: Any  # one dim, several, or None for the last ones, as many as it has lengths


_FFT_FUNCTIONS = {
    **{f"fft_{kind}": FftFunction(kind, "n", -1) for kind in KINDS},
    **{f"fft_{kind}2": FftFunction(kind, "s", (-2, -1)) for kind in KINDS},
    **{f"fft_{kind}n": FftFunction(kind, "s", None) for kind in KINDS},
}


def _pointwise(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply an elementwise torch function, such as `add`, to blocks of sharded arrays.

    Arguments that are sharded differently are first moved to the layout of the result: "h/sp w"
    plus "h w" is "h/sp w". Each result gets a note of that layout and its global shape. Raises
    XshardError for an in-place function whose first argument would have to be moved.
    """
    name = func.__name__
    inputs = list(tensors_in((*args, *kwargs.values())))
    result = _broadcast(recorded_placements(inputs))
    fitted_args = tuple(_fitted(x, result) for x in args)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place and fitted_args[0] is not args[0]:
        message = f"{name}() on a tensor that is not sharded like its result"
        raise XshardError(message, hint="not in place")
    fitted_kwargs = {key: _fitted(x, result) for key, x in kwargs.items()}
    y = func(*fitted_args, **fitted_kwargs)
    for part in tensors_in((y,)):  # frexp returns two
        # Tensors without a known layout may have broadcast dims that are not sharded, so these
        # lengths are taken from the result.
        record(part, result.with_dims(result.layout.dims, result.global_lengths(part.shape)))
    return y


def _with_parameters(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply a torch function of a block and parameters, such as `linear` or `layer_norm`.

    The last dims of the block, which the function works on, must not be sharded; the dims before
    them may be, as s of "b s/sp c" in a linear layer. Returns the result with a note of its layout
    and global shape. Raises XshardError if another argument is a sharded block, too.
    """
    x = args[0]
    name = func.__name__
    placement = recorded_placement(x)
    # A product of two blocks could need rows that other processes have, so that all other arguments
    # must be parameters.
    others = list(tensors_in((*args[1:], *kwargs.values())))
    if placement is None or not all(_may_be_parameter(other) for other in others):
        raise _not_of_blocks(name)
    if name == "embedding":
        _check_embedding(kwargs)
    if name in _NORMS:
        _, normalized_shape = _arguments(args, kwargs, ("input", "normalized_shape"))
        whole_dims = len(normalized_shape)
    else:
        whole_dims = _WHOLE_LAST_DIMS[name]
    first = len(placement.shape) - whole_dims
    check_whole(placement, range(first, len(placement.shape)), f"{name}()")
    options, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args[1:], kwargs))
    y = func(x, *options, **kwargs)
    # An embedding adds a dim; the product with a vector has one less.
    added_dim = next(new_dims(placement.layout))
    dims = (*placement.layout.dims, added_dim)[: y.ndim]
    shape = (*placement.shape[:first], *y.shape[first:])
    return record(y, placement.with_dims(dims, shape))


def _may_be_parameter(x: Tensor) -> bool:
    """Return whether a tensor is replicated, and of at most two dims: one without a batch."""
    placement = recorded_placement(x)
    is_replicated = placement is None or not placement.axes
    return is_replicated and x.ndim <= 2


def _check_embedding(kwargs: Kwargs) -> None:
    """Raise XshardError for options that depend on all tokens of the batch, or make sparse gradients."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if kwargs.get(option):
            raise XshardError(
                "embedding() with max_norm, scale_grad_by_freq or sparse", hint="without them"
            )


def _cat(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply `torch.cat` to blocks of sharded arrays, along a dim that is not sharded.

    Blocks that are sharded differently are first moved to one layout. Raises XshardError if the
    dim is sharded, as local rows would come in the wrong order, and for a tensor without a known
    layout among the blocks.
    """
    tensors, dim = _arguments(args, kwargs, ("tensors", "dim"), 0)
    placements = recorded_placements(tensors)
    for placement in placements:
        check_whole(placement, (_dim_number(dim, placement),), "cat()")
    if len(placements) < len(tensors):
        raise XshardError(
            "cat() of a block and a tensor without a placement", hint="slice it first"
        )
    d = _dim_number(dim, placements[0])
    # The layout of the result is found as for elementwise functions. Lengths along the concatenated
    # dim may differ, and are left out of it: each counts as 1.
    one_row = _broadcast([placement.with_length(d, 1) for placement in placements])
    lengths = [placement.shape[d] for placement in placements]
    # All are moved to this layout, so that along the other dims each device has the same rows.
    parts = [
        _fitted(x, one_row.with_length(d, length))
        for x, length in zip(tensors, lengths, strict=True)
    ]
    return record(func(parts, d), one_row.with_length(d, sum(lengths)))


def _stack(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Stack blocks along a new dim: concatenate blocks with one row there."""
    tensors, dim = _arguments(args, kwargs, ("tensors", "dim"), 0)
    rows = [view(torch.unsqueeze, (x, dim), {}) if recorded_placement(x) else x for x in tensors]
    return _cat(torch.cat, (rows, dim), {})


def _along_dims(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply a torch function along dims that are not sharded, such as `sum`, `softmax` or `max`.

    "b h/sp c" summed over c is "b h/sp"; softmax over c keeps "b h/sp c". Without dims the
    function's default is taken, often all dims. Results get a note of their layout and global
    shape. Raises an error if one of the dims is sharded. With two tensors, `max` and `min` are
    elementwise.
    """
    x = args[0]
    name = func.__name__
    candidates = _dims_candidates(name, args, kwargs)
    other = kwargs.get("other", candidates[0] if candidates else None)
    if isinstance(other, Tensor):  # the larger, or the smaller, of two tensors
        return _pointwise(func, args, kwargs)
    placement = placement_of(x)
    dims = [d for d in candidates if isinstance(d, int) and not isinstance(d, bool)]
    if not dims:
        default = _ALONG_DIMS[name].default
        if default is None:
            dims = list(range(len(placement.shape)))
        else:
            dims = [default]
    # No other process has rows of a dim that is not sharded, so that the local result is right.
    numbers = {_dim_number(d, placement) for d in dims}
    check_whole(placement, sorted(numbers), f"{name}()")
    y = func(*args, **kwargs)
    for part in tensors_in((y,)):  # max returns two
        record(part, _placement_along(placement, part, numbers))
    return y


def _dims_candidates(name: str, args: Args, kwargs: Kwargs) -> Sequence[Any]:
    """Return the arguments where a function has its dims; it may have others there, as `max(x, other)`."""
    position = _ALONG_DIMS[name].position
    candidates: list[Any] = []
    if position is not None:
        last = len(args) if name == "flip" else position + 1  # flip(x, 0, 1) has all others
        candidates.extend(args[position:last])
    candidates.extend(kwargs[key] for key in _DIMS_KEYWORDS if key in kwargs)
    if candidates and isinstance(candidates[0], list | tuple):
        return candidates[0]
    return candidates


def _placement_along(placement: Placement, y: Tensor, dims: set[int]) -> Placement:
    """Return the placement of a result, which has `dims`, with any lengths, or has lost them."""
    rank = len(placement.shape)
    kept = [d for d in range(rank) if y.ndim == rank or d not in dims]
    lengths = [
        placement.shape[d] if placement.is_sharded(d) else length
        for d, length in zip(kept, y.shape, strict=True)
    ]
    return placement.with_dims([placement.layout.dims[d] for d in kept], lengths)


def _index_select(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Select rows of a dim that is whole, by numbers that all processes have."""
    x, dim, index = _arguments(args, kwargs, ("input", "dim", "index"))
    placement = recorded_placement(index)
    # The numbers of rows that others select are needed too: the result has them all.
    if placement is not None and placement.axes:
        whole = Layout(tuple(Dim(dim.name) for dim in placement.layout.dims))
        index = placement.redistribute(index, whole)
    return _along_dims(func, (x, dim, index), {})


def _fft(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply a function of `torch.fft` to a block of a sharded array.

    It runs as our `fft`, which gathers sharded dims for the transform. Torch's arguments `n` or `s`
    and `dim` are given as one number or several; without `dim`, the last dims or all are
    transformed, as in torch.
    """
    function = _FFT_FUNCTIONS[func.__name__]
    names = ("input", function.length_argument, "dim", "norm")
    x, lengths, dims, norm = _arguments(args, kwargs, names, None, function.default_dim, None)
    placement = placement_of(x)
    if isinstance(lengths, int):
        lengths = [lengths]
    if isinstance(dims, int):
        dims = [dims]
    elif not dims:
        dims = range(-len(lengths if lengths else placement.shape), 0)
    numbers = [_dim_number(d, placement) for d in dims]
    if lengths:
        lengths = _global_fft_lengths(func.__name__, placement, numbers, lengths)
    return fft(
        x,
        placement.layout,
        placement.processes,
        " ".join(placement.layout.names[d] for d in numbers),
        kind=function.kind,
        lengths=lengths,
        norm=norm,
    )


def _global_fft_lengths(
    name: str, placement: Placement, dims: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """Turn the lengths that a model passes to an FFT into lengths of the global array.

    The model's code reads lengths from its blocks: `fft(x, n=x.shape[0])` of a block of 4 rows of
    8 means all rows. -1 stands for all rows, in arguments and result. name: the torch function, for
    errors. Raises XshardError if the transform would cut or pad a sharded dim.
    """
    result = list(lengths)
    for i, d in enumerate(dims):
        if placement.is_sharded(d) and lengths[i] != -1:
            if not placement.sharding.is_even or lengths[i] != placement.local_shape[d]:
                function = name.removeprefix("fft_")
                message = f"{function}() of {lengths[i]} rows of dim '{placement.layout.dims[d]}'"
                raise XshardError(message, hint="sharded dims keep the length that they have")
            result[i] = -1
    return result


def _pad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Apply `F.pad` to a block of a sharded array: the global array is padded, not each block.

    Dims that are not sharded are padded locally by torch. If a sharded dim is padded, rows move
    between devices, as the padded array is cut into parts anew. Returns the block with a note of
    its layout and global shape.
    """
    names = ("input", "pad", "mode", "value")
    x, pads, mode, value = _arguments(args, kwargs, names, "constant", None)
    placement = placement_of(x)
    # torch lists the pairs from the last dim to the first: here they are in the order of dims.
    pairs = tuple(zip(pads[::2], pads[1::2], strict=True))[::-1]
    first = x.ndim - len(pairs)
    # With a sharded dim, only the first and last devices have the ends of the array.
    if any(any(pair) and placement.is_sharded(d) for d, pair in enumerate(pairs, first)):
        y, result = pad(x, placement, pairs, mode, 0.0 if value is None else value)
        return record(y, result)
    shape = list(placement.shape)
    for d, pair in enumerate(pairs, first):
        shape[d] += sum(pair)
    return record(func(*args, **kwargs), placement.with_dims(placement.layout.dims, shape))


def _of_replicated(func: Function, args: Args, kwargs: Kwargs, placement: Placement) -> Any:
    """Apply any function to replicated values: its results are replicated too."""
    _check_not_random(function_name(func), args, kwargs)
    if placement.gradient_share_axes:
        args, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args, kwargs))
    result = func(*args, **kwargs)
    for y in tensors_in((result,)):
        record(y, placement.replicated_like(y))
    return result


def _check_not_random(name: str, args: Args, kwargs: Kwargs) -> None:
    """Raise XshardError for dropout of a replicated tensor in training."""
    if name not in _RANDOM:
        return
    _, p, training = _arguments(args, kwargs, ("input", "p", "training"), 0.5, True)
    if training and p > 0:
        message = f"{name}() of a whole tensor in training: devices would draw different numbers"
        raise XshardError(message, hint="use it on blocks, or after the model")


def _used_beside(placement: Placement, x: Tensor) -> Tensor:
    """Return a tensor for use with a block: its gradient is summed over axes that shard only the block."""
    placement_of_x = recorded_placement(x)
    if placement_of_x is None:  # a parameter, or a constant
        (copy,) = placement.parameter_copies([x])
        assert copy is not None
        return copy
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
    rank = max(len(placement.shape) for placement in placements)
    base = next(placement for placement in placements if len(placement.shape) == rank)
    dims = list(base.layout.dims)
    shape = list(base.shape)
    for placement in placements:
        for d in range(-1, -len(placement.shape) - 1, -1):  # broadcasting aligns the last dims
            dim = placement.layout.dims[d]
            length = placement.shape[d]
            is_longer = shape[d] == 1 and length != 1
            is_first_sharded = bool(dim.axes) and not dims[d].axes and length == shape[d]
            if is_longer or is_first_sharded:
                dims[d] = replace(dim, name=dims[d].name)
                shape[d] = length
            elif length not in (1, shape[d]):
                message = f"{length} rows of dim {dim.name!r} meet {shape[d]}"
                raise ShapeError(message, text=str(placement.layout))
    return base.with_dims(dims, shape)


def _fitted(x: Any, result: Placement) -> Any:
    """Move an argument of an elementwise function to the layout of the result.

    Along its own dims it is sharded as the result is; dims of length 1 stay whole, as they
    broadcast. A tensor without a known layout is a parameter or a constant, equal on all devices:
    it must have length 1 along sharded dims. Lists are moved item by item; other values are
    returned as they are.
    """
    if isinstance(x, list | tuple):
        return type(x)(_fitted(item, result) for item in x)
    if not isinstance(x, Tensor):
        return x
    offset = len(result.shape) - x.ndim
    if offset < 0:
        message = f"{x.ndim} dims meet {len(result.shape)}"
        raise ShapeError(message, text=str(result.layout), hint="as many dims")
    target_dims = result.layout.dims[offset:]
    placement = recorded_placement(x)
    # A parameter or a constant: on all processes equal, if it broadcasts along sharded dims.
    if placement is None:
        _check_broadcasts(x, target_dims, result)
        return _used_beside(result, x)
    dims = [
        # A dim of one row broadcasts: it stays whole.
        replace(target if length > 1 else Dim(target.name), name=dim.name)
        for dim, length, target in zip(
            placement.layout.dims, placement.shape, target_dims, strict=True
        )
    ]
    fitted = placement.with_dims(dims, placement.shape)
    # Two notations may give each device the same rows: then nothing is moved.
    if not placement.sharding.means_the_same_as(fitted.sharding):
        x = record(placement.redistribute(x, fitted.layout), fitted)
    return _used_beside(result, x)


def _check_broadcasts(x: Tensor, dims: Sequence[Dim], result: Placement) -> None:
    """Raise ShapeError if a tensor without a record has several rows where the result is sharded."""
    for length, dim in zip(x.shape, dims, strict=True):
        if length > 1 and dim.axes:
            message = f"{length} rows without a recorded sharding meet dim '{dim}'"
            hint = "slice it first, or make it an input of the model"
            raise ShapeError(message, text=str(result.layout), hint=hint)


def _dim_number(dim: int, placement: Placement) -> int:
    """Return the number of a dim that may count from the end: -1 of 4 dims -> 3."""
    rank = len(placement.shape)
    if not -rank <= dim < rank:
        raise ShapeError(f"no dim {dim} in a block of {rank} dims", text=str(placement.layout))
    return dim % rank


def _arguments(args: Args, kwargs: Kwargs, names: Sequence[str], *defaults: Any) -> list[Any]:
    """Return the arguments with these names, by position or by name; the last ones have defaults."""
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values.update(zip(names, args, strict=False))
    for key, value in kwargs.items():
        name = "dim" if key == "axis" else key
        if name in names:
            values[name] = value
    return [values[name] for name in names]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Generate the tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


_RULES: dict[str, Rule] = {
    "cat": _cat,
    "concat": _cat,
    "pad": _pad,
    "stack": _stack,
    **dict.fromkeys(_ALONG_DIMS, _along_dims),
    "index_select": _index_select,  # after `_ALONG_DIMS`, which it calls
    **dict.fromkeys(_FFT_FUNCTIONS, _fft),
    **dict.fromkeys((*_WHOLE_LAST_DIMS, *_NORMS), _with_parameters),
    **dict.fromkeys(VIEWS, view),
}


@lru_cache(maxsize=1024)
def _rule_of(name: str) -> Rule | None:
    if name in _RULES:
        return _RULES[name]
    if _is_pointwise(name):
        return _pointwise
    return None


def _is_pointwise(name: str) -> bool:
    """Return whether torch says that a function works element by element, or we know it."""
    if name in _POINTWISE:
        return True
    if name == "equal":  # it has torch's tag, but its result is one bool
        return False
    for op_name in (name, name.strip("_")):  # `__add__` and `add_` are `add`
        packet = getattr(torch.ops.aten, op_name, None)
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.pointwise in overload.tags for overload in overloads):
            return True
    return False


def _not_of_blocks(name: str) -> XshardError:
    message = f"{name}() of a block is not a block of {name}() of the array"
    hint = "use a module, which becomes a layer, or redistribute what it needs whole"
    return XshardError(message, hint=hint)


class Propagation(TorchFunctionMode):
    """Records the placements of results, or refuses a function. paths: maps ids of modules to their paths."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.paths = paths

    # Hot: called for every torch function of the model's code.
    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply the rule of a function of blocks; leave others as they are."""
        if kwargs is None:
            kwargs = {}
        placements = recorded_placements(tensors_in((*args, *kwargs.values())))
        if not placements or _only_reads(func):
            return func(*args, **kwargs)
        try:
            return self._follow(func, args, kwargs, placements)
        except XshardError as error:
            raise with_path(error, self._path()) from None

    def _follow(
        self, func: Function, args: Args, kwargs: Kwargs, placements: Sequence[Placement]
    ) -> Any:
        """Apply a torch function to blocks, by the rule for its name that also derives the layout.

        placements: the known layouts and global shapes of its tensor arguments. Raises XshardError
        for a function without a rule, unless its arguments are replicated.
        """
        # No argument is sharded: each process computes what one device would, without a rule.
        if not any(placement.axes for placement in placements):
            return _of_replicated(func, args, kwargs, placements[0])
        name = function_name(func)
        rule = _rule_of(name)
        if rule is None:
            raise _not_of_blocks(name)
        if not args:  # called as f(input=x): the rules expect the first tensor by position
            args = (kwargs["input"],)
            kwargs = {key: value for key, value in kwargs.items() if key != "input"}
        return rule(func, args, kwargs)

    def _path(self) -> str:
        """Return the path of the innermost module of the model on the call stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = id(frame.f_locals.get("self"))
            if caller in self.paths:
                return self.paths[caller]
            frame = frame.f_back
        return ""


def _only_reads(func: Function) -> bool:
    """Return whether a function, or a property, returns no tensor of the block's elements."""
    if getattr(func, "__name__", "") == "__get__":
        return function_name(func) not in _FOLLOWED_PROPERTIES
    return function_name(func) in _READING


@api_boundary
def checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
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
    return nullcontext(), Propagation({})
