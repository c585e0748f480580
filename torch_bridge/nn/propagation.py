"""Records follow blocks through a model's own code, between its layers, and through checkpoints. A torch
function has a rule if its result for a block is a block of its result for the array; its arguments are moved,
and gradients of replicated ones summed. Others are refused: results could have the right shape.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from torch_bridge.nn.conv import pad
from torch_bridge.nn.fft import KINDS, fft
from torch_bridge.nn.placed import Placement, check_whole, placement_of, record, recorded
from torch_bridge.nn.views import VIEWS, new_dims, view
from torch_bridge.ops import copy_to
from xshard import Layout, XshardError
from xshard.errors import ShapeError, with_path
from xshard.notation.parser import Dim

Function = Callable[..., Any]
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

# Functions that work element by element, though torch has no tag for them.
_POINTWISE = frozenset((
    "alpha_dropout", "bfloat16", "bool", "contiguous", "detach", "double", "dropout", "float", "half",
    "hardswish", "hardswish_", "imag", "int", "log_sigmoid", "logsigmoid", "long", "masked_fill",
    "ones_like", "real", "requires_grad_", "softsign", "tanhshrink", "to", "type_as", "where", "zeros_like",
))  # fmt: skip
_RANDOM = ("dropout", "alpha_dropout")

# Functions along dims -> the position of the dims among the arguments (_NOWHERE: in no argument), and the
# default dim; None: all dims.
_NOWHERE = 9
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((
        "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "cumprod", "cumsum", "flip",
        "index_select", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "prod",
        "softmax", "softmin", "std", "sum", "var",
    ), (1, None)),
    **dict.fromkeys(("argsort", "glu", "sort"), (1, -1)),
    **dict.fromkeys(("channel_shuffle", "local_response_norm"), (_NOWHERE, 1)),
    "normalize": (2, 1), "roll": (2, None), "topk": (2, -1),
}  # fmt: skip
_DIMS = ("dim", "dims", "axis")

# Functions that read properties of a tensor and return no tensor.
_READING = frozenset((
    "__bool__", "__format__", "__get__", "__hash__", "__len__", "__repr__", "__set__", "backward",
    "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "numel", "register_hook", "retain_grad", "size", "stride", "type",
))  # fmt: skip

# Functions of a block and of parameters -> the number of the block's last dims that they need whole.
_WHOLE_LAST = {"embedding": 0, "linear": 1, "matmul": 1, "prelu": 0}


def _pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _broadcast(
        [p for p in map(recorded, tensors_in((*args, *kwargs.values()))) if p is not None]
    )
    written = args[0]
    args = tuple(_fitted(a, result) for a in args)
    if func.__name__.endswith("_") and not func.__name__.endswith("__") and args[0] is not written:
        what = f"{func.__name__}() on a tensor that is not sharded like its result"
        raise XshardError(what, hint="not in place")
    y = func(*args, **{k: _fitted(v, result) for k, v in kwargs.items()})
    for part in tensors_in((y,)):  # frexp returns two
        # Arguments without a record may have broadcast whole dims.
        lengths = [n if result.cuts(d) else part.shape[d] for d, n in enumerate(result.shape)]
        record(part, result.remade(result.layout.dims, lengths))
    return y


def _with_parameters(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of a block and of parameters, for which the last dims of the block are whole."""
    placement = recorded(args[0])
    name = func.__name__
    values = (*args[1:], *kwargs.values())
    others = list(tensors_in(values))
    if placement is None or any(
        p.ndim > 2 or (recorded(p) or placement.whole(p)).axes for p in others
    ):
        raise _not_of_blocks(name)
    if name == "embedding" and any(map(kwargs.get, ("max_norm", "scale_grad_by_freq", "sparse"))):
        raise XshardError(
            "embedding() with max_norm, scale_grad_by_freq or sparse", hint="without them"
        )
    if (last := _WHOLE_LAST.get(name)) is None:  # a norm
        last = len(_named(args, kwargs, ("input", "normalized_shape"))[1])
    first = len(placement.shape) - last
    check_whole(placement, range(first, len(placement.shape)), f"{name}()")
    rest, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args[1:], kwargs))
    y = func(args[0], *rest, **kwargs)
    dims = [*placement.layout.dims, *itertools.islice(new_dims(placement.layout), 1)][: y.ndim]
    return record(y, placement.remade(dims, (*placement.shape[:first], *y.shape[first:])))


def _cat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = _named(args, kwargs, ("tensors", "dim"), 0)
    placements = [p for p in map(recorded, tensors) if p is not None]
    for placement in placements:
        check_whole(placement, (_dim(dim, placement),), "cat()")
    if len(placements) < len(tensors):
        raise XshardError(
            "cat() of a block and a tensor without a placement", hint="slice it first"
        )
    d = _dim(dim, placements[0])
    one_row = _broadcast([p.with_length(d, 1) for p in placements])
    lengths = [p.shape[d] for p in placements]
    parts = [_fitted(x, one_row.with_length(d, n)) for x, n in zip(tensors, lengths, strict=True)]
    return record(func(parts, d), one_row.with_length(d, sum(lengths)))


def _stack(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = _named(args, kwargs, ("tensors", "dim"), 0)
    rows = [view(torch.unsqueeze, (x, dim), {}) if recorded(x) else x for x in tensors]
    return _cat(torch.cat, (rows, dim), {})


def _along(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function along some dims, which are whole: they stay, or they are reduced."""
    x = args[0]
    name = func.__name__
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
        pairs = zip(kept, part.shape, strict=True)
        lengths = [placement.shape[d] if placement.cuts(d) else n for d, n in pairs]
        record(part, placement.remade([placement.layout.dims[d] for d in kept], lengths))
    return y


def _index_select(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = _named(args, kwargs, ("input", "dim", "index"))
    if (placement := recorded(index)) is not None and placement.axes:
        index = placement.moved(
            index, Layout(tuple(Dim(dim.name) for dim in placement.layout.dims))
        )
    return _along(func, (x, dim, index), {})


def _fft(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__.removeprefix("fft_")
    kind = name.rstrip("2n")
    length = "n" if name.endswith("t") else "s"
    default = {"t": -1, "2": (-2, -1), "n": None}[name[-1]]
    x, n, dim, norm = _named(args, kwargs, ("input", length, "dim", "norm"), None, default, None)
    placement = placement_of(x)
    lengths = [n] if isinstance(n, int) else n
    dims = [dim] if isinstance(dim, int) else dim or range(-len(lengths or placement.shape), 0)
    dims = [_dim(d, placement) for d in dims]
    for i, d in enumerate(dims if lengths else ()):  # in a model's code, lengths are the block's
        if placement.cuts(d) and lengths[i] != -1:
            if not placement.sharding.is_even or lengths[i] != placement.local_shape[d]:
                what = f"{name}() of {lengths[i]} rows of dim '{placement.layout.dims[d]}'"
                raise XshardError(what, hint="sharded dims keep the length that they have")
            lengths = [*lengths[:i], -1, *lengths[i + 1 :]]
    names = " ".join(placement.layout.names[d] for d in dims)
    return fft(
        x, placement.layout, placement.processes, names, kind=kind, lengths=lengths, norm=norm
    )


def _pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, pads, mode, value = _named(args, kwargs, ("input", "pad", "mode", "value"), "constant", None)
    placement = placement_of(x)
    pairs = tuple(zip(pads[::2], pads[1::2], strict=True))[::-1]
    first = x.ndim - len(pairs)
    if any(any(pair) and placement.cuts(d) for d, pair in enumerate(pairs, first)):
        return record(*pad(x, placement, pairs, mode, value or 0.0))
    lengths = (n + sum(pair) for n, pair in zip(placement.shape[first:], pairs, strict=True))
    y = func(*args, **kwargs)
    return record(y, placement.remade(placement.layout.dims, (*placement.shape[:first], *lengths)))


def _of_whole(func: Function, args: Any, kwargs: Any, placement: Placement, name: str) -> Any:
    """Any function of replicated values: its results are replicated too."""
    if name in _RANDOM:
        _, p, training = _named(args, kwargs, ("input", "p", "training"), 0.5, True)
        if training and p > 0:
            what = f"{name}() of a whole tensor in training: devices would draw different numbers"
            raise XshardError(what, hint="use it on blocks, or after the model")
    if placement.shares:
        args, kwargs = tree_map_only(Tensor, partial(_used_beside, placement), (args, kwargs))
    result = func(*args, **kwargs)
    for y in tensors_in((result,)):
        record(y, placement.whole(y))
    return result


def _used_beside(placement: Placement, x: Tensor) -> Tensor:
    """A tensor for use with a block: its gradient is summed over the axes that shard only the block."""
    if (own := recorded(x)) is None:  # a parameter, or a constant
        return placement.copied(x)[0]  # type: ignore[return-value]
    missing = tuple(axis for axis in placement.axes if axis not in own.axes)
    if missing and x.requires_grad and torch.is_grad_enabled():
        return copy_to(x, missing, placement.processes)
    return x


def _broadcast(found: Sequence[Placement]) -> Placement:
    """The placement of the result of a broadcasting function: each dim is cut as in the first cut of it."""
    rank = max(len(placement.shape) for placement in found)
    base = next(placement for placement in found if len(placement.shape) == rank)
    dims = list(base.layout.dims)
    shape = list(base.shape)
    for placement in found:
        for d in range(-1, -len(placement.shape) - 1, -1):
            dim = placement.layout.dims[d]
            n = placement.shape[d]
            if (shape[d] == 1 and n != 1) or (not dims[d].axes and dim.axes and n == shape[d]):
                dims[d] = replace(dim, name=dims[d].name)
                shape[d] = n
            elif n not in (1, shape[d]):
                raise ShapeError(
                    f"{n} rows of dim {dim.name!r} meet {shape[d]}", text=str(placement.layout)
                )
    return base.remade(dims, shape)


def _fitted(x: Any, result: Placement) -> Any:
    """An argument, moved to the cuts of the result; its gradient is summed over axes that do not cut it."""
    if isinstance(x, list | tuple):
        return type(x)(_fitted(v, result) for v in x)
    if not isinstance(x, Tensor):
        return x
    if (offset := len(result.shape) - x.ndim) < 0:
        what = f"{x.ndim} dims meet {len(result.shape)}"
        raise ShapeError(what, text=str(result.layout), hint="as many dims")
    aims = result.layout.dims[offset:]
    if (placement := recorded(x)) is None:
        for d, n in enumerate(x.shape):
            if n > 1 and aims[d].axes:
                what = f"{n} rows without a recorded sharding meet dim '{aims[d]}'"
                hint = "slice it first, or make it an input of the model"
                raise ShapeError(what, text=str(result.layout), hint=hint)
        return _used_beside(result, x)
    rows = zip(placement.layout.dims, placement.shape, aims, strict=True)
    dims = [replace(aim if n > 1 else Dim(aim.name), name=dim.name) for dim, n, aim in rows]
    aim = placement.remade(dims, placement.shape)
    if not placement.sharding.means_the_same_as(aim.sharding):
        x = record(placement.moved(x, aim.layout), aim)
    return _used_beside(result, x)


def _dim(dim: int, placement: Placement) -> int:
    if not -len(placement.shape) <= dim < len(placement.shape):
        what = f"no dim {dim} in a block of {len(placement.shape)} dims"
        raise ShapeError(what, text=str(placement.layout))
    return dim % len(placement.shape)


def _named(
    args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], *defaults: Any
) -> list[Any]:
    """The arguments with these names, by position or by name; the last ones have defaults."""
    named = {"dim" if k == "axis" else k: v for k, v in kwargs.items()}
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values |= dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
    return [values[name] for name in names]


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


_RULES: dict[str, Rule] = {
    "cat": _cat, "concat": _cat, "pad": _pad, "stack": _stack,
    **dict.fromkeys(_ALONG, _along), "index_select": _index_select,
    **dict.fromkeys((f"fft_{kind}{end}" for kind in KINDS for end in ("", "2", "n")), _fft),
    **dict.fromkeys((*_WHOLE_LAST, "layer_norm", "rms_norm"), _with_parameters),
    **dict.fromkeys(VIEWS, view),
}  # fmt: skip


@lru_cache(maxsize=1024)
def _rule_of(name: str) -> Rule | None:
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name.strip("_"))]
    tags = [
        getattr(p, overload).tags for p in packets if p is not None for overload in p.overloads()
    ]
    pointwise = name in _POINTWISE or (
        name != "equal" and any(torch.Tag.pointwise in tag for tag in tags)
    )
    return _RULES.get(name) or (_pointwise if pointwise else None)


def _not_of_blocks(name: str) -> XshardError:
    what = f"{name}() of a block is not a block of {name}() of the array"
    return XshardError(
        what, hint="use a module, which becomes a layer, or redistribute what it needs whole"
    )


class Propagation(TorchFunctionMode):
    """Records the placements of results, or refuses a function. paths: maps ids of modules to their paths."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        placements = [
            p for p in map(recorded, tensors_in((*args, *kwargs.values()))) if p is not None
        ]
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and func.__self__.__name__ in VIEWS | {"imag", "real"}:  # type: ignore[attr-defined]
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if not placements or name in _READING:
            return func(*args, **kwargs)
        try:
            if not any(placement.axes for placement in placements):
                return _of_whole(func, args, kwargs, placements[0], name)
            if (rule := _rule_of(name)) is None:
                raise _not_of_blocks(name)
            if not args:
                args = (kwargs["input"],)
                kwargs = {k: v for k, v in kwargs.items() if k != "input"}
            return rule(func, args, kwargs)
        except XshardError as error:
            raise with_path(error, self._path()) from None

    def _path(self) -> str:
        """The path of the innermost module of the model on the call stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame.f_locals.get("self")) not in self.paths:
            frame = frame.f_back
        return "" if frame is None else self.paths[id(frame.f_locals["self"])]


def checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, also in the code of models that become domain-parallel.

    Calls the function; the backward pass computes its activations again. options: keyword arguments of
    the function and of torch's checkpoint, except `use_reentrant`, which is False, and `context_fn`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.square, x).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    """
    options |= {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Propagation({}))}
    return torch.utils.checkpoint.checkpoint(function, *arguments, **options)
