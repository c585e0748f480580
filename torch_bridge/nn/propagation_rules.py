"""Rules for torch functions of blocks: the placement of their results.

A function has a rule if its result for a block is a block of its result for the array. Arguments that are
sharded in another way are moved, and gradients of replicated ones are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_bridge.nn.placed import Placement, check_whole, placement_of, record, recorded
from torch_bridge.nn.view_rules import VIEWS, new_dims, view
from torch_bridge.ops import copy_to
from xshard import Layout, XshardError
from xshard.errors import ShapeError
from xshard.notation.parser import Dim

Function = Callable[..., Any]
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

# Functions that work element by element, though torch has no tag for them.
_POINTWISE = frozenset((
    "alpha_dropout", "bfloat16", "bool", "contiguous", "detach", "double", "dropout", "float", "half",
    "hardswish", "hardswish_", "int", "log_sigmoid", "logsigmoid", "long", "masked_fill", "ones_like",
    "requires_grad_", "softsign", "tanhshrink", "to", "type_as", "where", "zeros_like",
))  # fmt: skip
_RANDOM = ("dropout", "alpha_dropout")

# Functions along dims -> the position of the dims among the arguments (_NOWHERE: in no argument), and the
# default dim; None: all dims.
_NOWHERE = 9
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((
        "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "cumprod", "cumsum", "flip",
        "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "prod", "softmax",
        "softmin", "std", "sum", "var",
    ), (1, None)),
    **dict.fromkeys(("argsort", "glu", "sort"), (1, -1)),
    **dict.fromkeys(("channel_shuffle", "local_response_norm"), (_NOWHERE, 1)),
    "normalize": (2, 1), "roll": (2, None), "topk": (2, -1),
}  # fmt: skip
_DIMS = ("dim", "dims", "axis")

# Functions of a block and of parameters -> the number of the block's last dims that they need whole.
_WHOLE_LAST = {"embedding": 0, "linear": 1, "matmul": 1, "prelu": 0}


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a function or method of torch, by its name, works element by element."""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name.strip("_"))]
    tags = [getattr(p, overload).tags for p in packets if p is not None for overload in p.overloads()]
    return name in _POINTWISE or (name != "equal" and any(torch.Tag.pointwise in tag for tag in tags))


def _pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _broadcast([p for p in map(recorded, tensors_in((*args, *kwargs.values()))) if p is not None])
    written, args = args[0], tuple(_fitted(a, result) for a in args)
    if func.__name__.endswith("_") and not func.__name__.endswith("__") and args[0] is not written:
        raise XshardError(
            f"{func.__name__}() on a tensor that is not sharded like its result", hint="not in place"
        )
    y = func(*args, **{k: _fitted(v, result) for k, v in kwargs.items()})
    # Arguments without a record may have broadcast whole dims.
    lengths = [n if result.cuts(d) else y.shape[d] for d, n in enumerate(result.shape)]
    return record(y, result.remade(result.layout.dims, lengths))


def _with_parameters(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of a block and of parameters, for which the last dims of the block are whole."""
    placement, name, values = recorded(args[0]), func.__name__, (*args[1:], *kwargs.values())
    others = list(tensors_in(values))
    if placement is None or any(p.ndim > 2 or (recorded(p) or placement.whole(p)).axes for p in others):
        raise not_of_blocks(name)
    if name == "embedding" and any(map(kwargs.get, ("max_norm", "scale_grad_by_freq", "sparse"))):
        raise XshardError("embedding() with max_norm, scale_grad_by_freq or sparse", hint="without them")
    last = _WHOLE_LAST.get(name)
    if last is None:  # a norm
        last = len(_arguments(args, kwargs, ("input", "normalized_shape"))[1])
    first = len(placement.shape) - last
    check_whole(placement, range(first, len(placement.shape)), f"{name}()")
    rest, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args[1:], kwargs))
    y = func(args[0], *rest, **kwargs)
    dims = [*placement.layout.dims, *itertools.islice(new_dims(placement.layout), 1)][: y.ndim]
    return record(y, placement.remade(dims, (*placement.shape[:first], *y.shape[first:])))


def _cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = _arguments(args, kwargs, ("tensors", "dim"), 0)
    placements = []
    for x in tensors:
        placement = recorded(x)
        if placement is None:
            raise XshardError("cat() of a block and a tensor without a placement", hint="slice it first")
        check_whole(placement, (_dim(dim, placement),), "cat()")
        placements.append(placement)
    d = _dim(dim, placements[0])
    one_row, lengths = _broadcast([p.with_length(d, 1) for p in placements]), [p.shape[d] for p in placements]
    parts = [_fitted(x, one_row.with_length(d, n)) for x, n in zip(tensors, lengths, strict=True)]
    return record(func(parts, d), one_row.with_length(d, sum(lengths)))


def _stack(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = _arguments(args, kwargs, ("tensors", "dim"), 0)
    rows = [view(torch.unsqueeze, (x, dim), {}) if recorded(x) else x for x in tensors]
    return _cat(torch.cat, (rows, dim), {})


def _along(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function along some dims, which are whole: they stay, or they are reduced."""
    x, name = args[0], func.__name__
    position, dim = _ALONG[name]
    last = len(args) if name == "flip" else position + 1
    values: Sequence[Any] = (*args[position:last], *(kwargs[k] for k in _DIMS if k in kwargs))
    values = values[0] if values and isinstance(values[0], list | tuple) else values
    if isinstance(kwargs.get("other", values and values[0]), Tensor):  # the larger of two tensors
        return _pointwise(func, args, kwargs)
    placement = placement_of(x)
    named = [d for d in values if isinstance(d, int) and not isinstance(d, bool)]
    every = range(len(placement.shape)) if dim is None else (dim,)
    dims = {_dim(d, placement) for d in named or every}
    check_whole(placement, sorted(dims), f"{name}()")
    y = func(*args, **kwargs)
    for part in tensors_in((y,)):
        kept = [d for d in range(x.ndim) if part.ndim == x.ndim or d not in dims]
        lengths = [
            placement.shape[d] if placement.cuts(d) else n for d, n in zip(kept, part.shape, strict=True)
        ]
        record(part, placement.remade([placement.layout.dims[d] for d in kept], lengths))
    return y


def _pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, pad = _arguments(args, kwargs, ("input", "pad"))
    placement = placement_of(x)
    shape = list(placement.shape)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        d = len(shape) - 1 - i
        if before or after:
            check_whole(placement, (d,), "pad()")
        shape[d] += before + after
    return record(func(*args, **kwargs), placement.remade(placement.layout.dims, shape))


def of_whole(func: Function, args: Any, kwargs: Any, placement: Placement, name: str) -> Any:
    """Any function of replicated values: its results are replicated too."""
    if name in _RANDOM and _is_random(args, kwargs):
        raise XshardError(
            f"{name}() of a whole tensor in training: devices would draw different numbers",
            hint="use it on blocks, or after the model",
        )
    if placement.shares:
        args, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args, kwargs))
    result = func(*args, **kwargs)
    for y in tensors_in((result,)):
        record(y, placement.whole(y))
    return result


def _used_beside(placement: Placement, x: Tensor) -> Tensor:
    """A tensor for use with a block: its gradient is summed over the axes that shard only the block.

    A tensor without a record is a parameter, or a constant.
    """
    own = recorded(x)
    if own is None:
        return placement.copied(x)[0]  # type: ignore[return-value]
    missing = tuple(axis for axis in placement.axes if axis not in own.axes)
    if missing and x.requires_grad and torch.is_grad_enabled():
        return copy_to(x, missing, placement.processes)
    return x


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
    return base.remade(dims, shape)


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
        return _used_beside(result, x)
    dims = [
        replace(aim if n > 1 else Dim(aim.name), name=dim.name)
        for dim, n, aim in zip(
            placement.layout.dims, placement.shape, result.layout.dims[offset:], strict=True
        )
    ]
    aim = placement.of(replace(placement.sharding, layout=Layout(tuple(dims))))
    if not placement.sharding.means_the_same_as(aim.sharding):
        x = record(placement.moved(x, aim.layout), aim)
    return _used_beside(result, x)


def _dim(dim: int, placement: Placement) -> int:
    if not -len(placement.shape) <= dim < len(placement.shape):
        raise ShapeError(
            f"no dim {dim} in a block of {len(placement.shape)} dims", text=str(placement.layout)
        )
    return dim % len(placement.shape)


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], *defaults: Any
) -> list[Any]:
    """The arguments with these names, by position or by name; the last ones have defaults."""
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
    "cat": _cat, "concat": _cat, "pad": _pad, "stack": _stack,
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys((*_WHOLE_LAST, "layer_norm", "rms_norm"), _with_parameters),
    **dict.fromkeys(VIEWS, view),
}  # fmt: skip


def rule_of(name: str) -> Rule | None:
    """The rule of a function by its name, if there is one."""
    return RULES.get(name) or (_pointwise if is_pointwise(name) else None)


def not_of_blocks(name: str) -> XshardError:
    """The error for a function without a rule."""
    return XshardError(
        f"{name}() of a block is not a block of {name}() of the array",
        hint="use a module, which becomes a layer, or redistribute what it needs whole",
    )
