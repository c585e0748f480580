"""Rules for torch functions of blocks: the placement of their results.

Decides which functions of a block give a block of the function of the array, and its placement; arguments
with another cut are moved, and gradients of whole ones are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement, check_whole, record, recorded
from torch_bridge.ops import copy_to
from xshard import Layout, ShapeError, Sharding, XshardError
from xshard.notation.parser import Dim

Function = Callable[..., Any]
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

# Functions that work element by element, though torch has no tag for them.
_POINTWISE = frozenset((
    "alpha_dropout", "bfloat16", "contiguous", "detach", "double", "dropout", "float", "half", "hardswish",
    "hardswish_", "log_sigmoid", "logsigmoid", "masked_fill", "ones_like", "requires_grad_", "softsign",
    "tanhshrink", "to", "type_as", "where", "zeros_like",
))  # fmt: skip
_RANDOM = ("dropout", "alpha_dropout")


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a function or method of torch, by its name, works element by element."""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name.strip("_"))]
    tags = [getattr(p, overload).tags for p in packets if p is not None for overload in p.overloads()]
    return name in _POINTWISE or any(torch.Tag.pointwise in tag for tag in tags)


def _pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _broadcast([p for p in map(recorded, tensors_in((*args, *kwargs.values()))) if p is not None])
    written, args = args[0], tuple(_fitted(a, result) for a in args)
    if func.__name__.endswith("_") and not func.__name__.endswith("__") and args[0] is not written:
        raise XshardError(
            f"{func.__name__}() on a tensor that is not cut like its result", hint="not in place"
        )
    y = func(*args, **{k: _fitted(v, result) for k, v in kwargs.items()})
    # Arguments without a record may have broadcast whole dims.
    lengths = [n if result.cuts(d) else y.shape[d] for d, n in enumerate(result.shape)]
    return record(y, _reshaped(result, result.layout.dims, lengths))


def _prelu(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight = _arguments(args, kwargs, ("input", "weight"))
    placement = _placed(x)
    return record(func(x, *placement.copied(weight)), placement)


def _getitem(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    placement = _placed(x)
    index = list(index) if isinstance(index, tuple) else [index]
    for at in [i for i, part in enumerate(index) if part is Ellipsis]:
        index[at : at + 1] = [slice(None)] * (x.ndim - len(index) + 1)
    if not all(isinstance(i, slice) for i in index) or len(index) > x.ndim:
        raise XshardError("a block indexed by more than slices", hint="slice whole dims, as in x[:, :4]")
    check_whole(placement, (d for d, i in enumerate(index) if i != slice(None)), "a slice")
    y = func(*args)
    lengths = [n if placement.cuts(d) else y.shape[d] for d, n in enumerate(placement.shape)]
    return record(y, _reshaped(placement, placement.layout.dims, lengths))


def _cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = _arguments(args, kwargs, ("tensors", "dim"), 0)
    found = []
    for x in tensors:
        placement = recorded(x)
        if placement is None:
            raise XshardError(
                "cat() of a block and a tensor without a recorded sharding", hint="slice it first"
            )
        check_whole(placement, (_dim(dim, placement),), "cat()")
        found.append((x, placement))
    d = _dim(dim, found[0][1])
    one_row = _broadcast([placement.with_length(d, 1) for _, placement in found])
    parts = [_fitted(x, one_row.with_length(d, placement.shape[d])) for x, placement in found]
    return record(func(parts, d), one_row.with_length(d, sum(placement.shape[d] for _, placement in found)))


def _split(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "chunks" if func.__name__ == "chunk" else "split_size_or_sections", "dim")
    x, n, dim = _arguments(args, kwargs, names, 0)
    placement = _placed(x)
    d = _dim(dim, placement)
    check_whole(placement, (d,), f"{func.__name__}()")
    return tuple(record(y, placement.with_length(d, y.shape[d])) for y in func(x, n, d))


def _reduce(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, keepdim = _arguments(args, kwargs, ("input", "dim", "keepdim"), None, False)
    placement = _placed(x)
    every = range(len(placement.shape))
    dims = sorted({_dim(d, placement) for d in ([dim] if isinstance(dim, int) else dim or every)})
    check_whole(placement, dims, f"{func.__name__}()")
    layout, shape = list(placement.layout.dims), list(placement.shape)
    for d in reversed(dims):
        if keepdim:
            shape[d] = 1
        else:
            del layout[d], shape[d]
    return record(func(*args, **kwargs), _reshaped(placement, layout, shape))


def _softmax(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = _arguments(args, kwargs, ("input", "dim"), None)
    placement = _placed(x)
    if dim is None:
        raise XshardError(f"{func.__name__}() without dim", hint="name the dim, as in dim=1")
    check_whole(placement, (_dim(dim, placement),), f"{func.__name__}()")
    return record(func(*args, **kwargs), placement)


def _pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, pad = _arguments(args, kwargs, ("input", "pad"))
    placement = _placed(x)
    shape = list(placement.shape)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        d = len(shape) - 1 - i
        if before or after:
            check_whole(placement, (d,), "pad()")
        shape[d] += before + after
    return record(func(*args, **kwargs), _reshaped(placement, placement.layout.dims, shape))


def _flatten(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, start, stop = _arguments(args, kwargs, ("input", "start_dim", "end_dim"), 0, -1)
    placement = _placed(x)
    first, last = _dim(start, placement), _dim(stop, placement)
    check_whole(placement, range(first, last + 1), "flatten()")
    y, layout, shape = func(*args, **kwargs), list(placement.layout.dims), list(placement.shape)
    layout[first : last + 1] = [Dim(layout[first].name)]
    shape[first : last + 1] = [y.shape[first]]
    return record(y, _reshaped(placement, layout, shape))


def of_whole(func: Function, args: Any, kwargs: Any, placement: Placement, name: str) -> Any:
    """Any function of replicated values: its results are replicated too."""
    if name in _RANDOM and _is_random(args, kwargs):
        raise XshardError(
            f"{name}() of a whole tensor in training: devices would draw different numbers",
            hint="use it on blocks, or after the model",
        )
    result = func(*args, **kwargs)
    for y in tensors_in((result,)):
        record(y, whole_placement(y, placement))
    return result


def whole_placement(x: Tensor, like: Placement) -> Placement:
    """The placement of a tensor that every device has whole."""
    dims = tuple(Dim(f"d{i}") for i in range(x.ndim))
    return like.of(Sharding(Layout(dims), like.sharding.mesh, tuple(x.shape)))


def _is_random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    _, p, training = _arguments(args, kwargs, ("input", "p", "training"), 0.5, True)
    return bool(training) and p > 0


def _broadcast(found: Sequence[Placement]) -> Placement:
    """The placement of the result of a broadcasting function: each dim is cut as in the first cut of it."""
    rank = max(len(placement.shape) for placement in found)
    base = next(placement for placement in found if len(placement.shape) == rank)
    dims, shape = list(base.layout.dims), list(base.shape)
    for placement in found:
        for d in range(-1, -len(placement.shape) - 1, -1):
            dim, n = placement.layout.dims[d], placement.shape[d]
            if (shape[d] == 1 and n != 1) or (not dims[d].axes and dim.axes and n == shape[d]):
                dims[d], shape[d] = replace(dim, name=dims[d].name), n
            elif n not in (1, shape[d]):
                raise ShapeError(f"{n} rows of dim {dim.name!r} meet {shape[d]}", text=str(placement.layout))
    return _reshaped(base, dims, shape)


def _fitted(x: Any, result: Placement) -> Any:
    """An argument, moved to the cuts of the result; its gradient is summed over axes that do not cut it."""
    if isinstance(x, list | tuple):
        return type(x)(_fitted(v, result) for v in x)
    if not isinstance(x, Tensor):
        return x
    placement = recorded(x)
    offset = len(result.shape) - x.ndim
    if offset < 0:
        raise ShapeError(
            f"{x.ndim} dims meet {len(result.shape)}", text=str(result.layout), hint="as many dims"
        )
    if placement is None:
        for d, n in enumerate(x.shape):
            if n > 1 and result.cuts(d + offset):
                raise ShapeError(
                    f"{n} rows without a recorded sharding meet dim '{result.layout.dims[d + offset]}'",
                    text=str(result.layout),
                    hint="slice it first, or make it an input of the model",
                )
        mine: tuple[str, ...] = ()
    else:
        to = [
            replace(aim if n > 1 else Dim(aim.name), name=dim.name)
            for dim, n, aim in zip(
                placement.layout.dims, placement.shape, result.layout.dims[offset:], strict=True
            )
        ]
        aim = placement.of(replace(placement.sharding, layout=Layout(tuple(to))))
        if not placement.sharding.means_the_same_as(aim.sharding):
            x = record(placement.moved(x, aim.layout), aim)
        mine = aim.axes
    missing = tuple(axis for axis in result.axes if axis not in mine)
    if missing and result.copies and x.requires_grad and torch.is_grad_enabled():
        return copy_to(x, missing, result.processes)
    return x


def _reshaped(placement: Placement, dims: Sequence[Dim], shape: Sequence[int]) -> Placement:
    return placement.of(Sharding(Layout(tuple(dims)), placement.sharding.mesh, tuple(shape)))


def _placed(x: Tensor) -> Placement:
    placement = recorded(x)
    assert placement is not None
    return placement


def _dim(dim: int, placement: Placement) -> int:
    if not -len(placement.shape) <= dim < len(placement.shape):
        raise ShapeError(
            f"no dim {dim} in a block of {len(placement.shape)} dims", text=str(placement.layout)
        )
    return dim % len(placement.shape)


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], *defaults: Any
) -> list[Any]:
    """The arguments of these names, given by position or by name; `defaults` are those of the last ones."""
    named = {"dim" if k == "axis" else k: v for k, v in kwargs.items()}
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values |= dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
    return [values[name] for name in names]


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among arguments, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


RULES: dict[str, Rule] = {
    "__getitem__": _getitem,
    "amax": _reduce,
    "amin": _reduce,
    "cat": _cat,
    "chunk": _split,
    "concat": _cat,
    "flatten": _flatten,
    "log_softmax": _softmax,
    "mean": _reduce,
    "pad": _pad,
    "prelu": _prelu,
    "softmax": _softmax,
    "split": _split,
    "sum": _reduce,
}


def rule_of(name: str) -> Rule | None:
    """The rule of a function by its name, if there is one."""
    return RULES.get(name) or (_pointwise if is_pointwise(name) else None)
