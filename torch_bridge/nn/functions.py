"""Functions of torch that have a layer, as `F.conv2d` and `F.max_pool2d`: what the layer computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.nn import conv as convs
from torch_bridge.nn import norm as norms
from torch_bridge.nn.conv import Convolution, padding_pairs
from torch_bridge.nn.function_call import FunctionCall, Rule
from torch_bridge.nn.placed import Outputs, placement_of, record, recorded_placement
from torch_bridge.nn.views import dim_of_groups
from torch_bridge.nn.window import interpolate, per_dim
from torch_bridge.ops import all_reduce
from torch_bridge.versions.modes import without_torch_function
from xshard import XshardError
from xshard.errors import ShapeError


def _check_whole_parameters(call: FunctionCall, *parameters: Tensor | None) -> None:
    """Raise XshardError if a weight or a bias is a block."""
    for x in parameters:
        placement = recorded_placement(x)
        if placement is not None and placement.axes:
            message = f"{call.name}() with a weight that is sharded as '{placement.layout}'"
            hint = "redistribute the weight first: each process needs all of it"
            raise XshardError(message, hint=hint)


def _recorded(outputs: Outputs) -> Tensor:
    """Return a block of outputs, with a note of its placement."""
    return record(*outputs)


def _conv(call: FunctionCall) -> Tensor:
    """Convolve, as `nn.Conv2d` does."""
    options = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    x, weight, bias, stride, padding, dilation, groups = call.arguments(
        "input", "weight", **options
    )
    kernel = tuple(weight.shape[2:])
    rank = len(kernel)
    dilations = per_dim(dilation, rank)
    if not isinstance(padding, str):
        padding = per_dim(padding, rank)
    pairs = padding_pairs(padding, kernel, dilations)
    form = Convolution(
        kernel, per_dim(stride, rank), pairs, dilations, groups, outputs=call.outputs
    )
    _check_whole_parameters(call, weight, bias)
    return _recorded(convs.conv(x, placement_of(x), weight, bias, form))


def _conv_transpose(call: FunctionCall) -> Tensor:
    """Apply a transposed convolution, as `nn.ConvTranspose2d` does."""
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    options = {"bias": None, **dict(zip(names, (1, 0, 0, 1, 1), strict=True))}
    x, weight, bias, *values = call.arguments("input", "weight", **options)
    kernel = tuple(weight.shape[2:])
    layer = SimpleNamespace(kernel_size=kernel, **dict(zip(names, values, strict=True)))
    for name in ("stride", "padding", "output_padding", "dilation"):
        setattr(layer, name, per_dim(getattr(layer, name), len(kernel)))
    layer.weight = weight
    layer.bias = bias
    _check_whole_parameters(call, weight, bias)
    return _recorded(convs.conv_transpose(layer, x, placement_of(x)))


def _max_pool(call: FunctionCall, kind: type[Any]) -> Tensor:
    """Take maxima of windows, as `nn.MaxPool2d` does."""
    options = {"padding": 0, "dilation": 1, "ceil_mode": False}
    x, kernel, stride, *values = call.arguments("input", "kernel_size", stride=None, **options)
    pool = kind(kernel, stride or None, **dict(zip(options, values, strict=True)))
    pool.outputs = call.outputs
    return _recorded(convs.max_pool(pool, x, placement_of(x)))


def _avg_pool(call: FunctionCall, kind: type[Any]) -> Tensor:
    """Average windows, as `nn.AvgPool2d` does."""
    options: dict[str, Any] = {"padding": 0, "ceil_mode": False, "count_include_pad": True}
    if kind is not nn.AvgPool1d:
        options["divisor_override"] = None
    x, kernel, stride, *values = call.arguments("input", "kernel_size", stride=None, **options)
    pool = kind(kernel, stride or None, **dict(zip(options, values, strict=True)))
    pool.outputs = call.outputs
    return _recorded(convs.avg_pool(pool, x, placement_of(x)))


def _global_avg_pool(call: FunctionCall, kind: type[Any]) -> Tensor:
    """Average whole dims, as `nn.AdaptiveAvgPool2d(1)` does."""
    x, output_size = call.arguments("input", "output_size")
    if set(per_dim(output_size, 1)) != {1}:
        message = f"{call.name}() to {output_size}"
        raise XshardError(message, hint="1 has an exact form for sharded dims")
    return _recorded(convs.global_avg_pool(kind(1), x, placement_of(x)))


def _group_norm(call: FunctionCall) -> Tensor:
    """Normalise groups of channels, as `nn.GroupNorm` does."""
    options = {"weight": None, "bias": None, "eps": 1e-5}
    x, num_groups, weight, bias, eps = call.arguments("input", "num_groups", **options)
    layer = SimpleNamespace(num_groups=num_groups, eps=eps)
    layer.weight = weight
    layer.bias = bias
    _check_whole_parameters(call, weight, bias)
    return _recorded(norms.group_norm(layer, x, placement_of(x)))


def _interpolate(call: FunctionCall) -> Tensor:
    """Resample, as `nn.Upsample` does; a size that was read from a block is one of the block."""
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    options = dict(zip(names, (None, None, "nearest", None, None, False), strict=True))
    x, size, scale_factor, mode, align_corners, recompute, antialias = call.arguments(
        "input", **options
    )
    if antialias:
        raise XshardError("interpolate() with antialias=True", hint="without it")
    placement = placement_of(x)
    return _recorded(
        interpolate(
            x,
            placement,
            None if size is None else _global_size(x, size),
            scale_factor,
            mode,
            align_corners=align_corners,
            recompute_scale_factor=recompute,
        )
    )


def _global_size(x: Tensor, size: Any) -> list[int]:
    """Return the lengths of an interpolated array, of which `x` is a block.

    `size=skip.shape[2:]` are lengths of the block of another array: those of all blocks are summed.
    Raises ShapeError for a number along a sharded dim, which may mean a block or the array.
    """
    placement = placement_of(x)
    lengths = list(per_dim(size, placement.ndim - 2))
    sharded = [i for i in range(len(lengths)) if placement.is_sharded(2 + i)]
    if sharded and not isinstance(size, torch.Size):
        i = sharded[0]
        message = f"interpolate() to {lengths[i]} rows of dim '{placement.dims[2 + i]}': "
        message += "of the block, or of the array?"
        hint = (
            "size=y.shape[2:] for the rows of another block; scale_factor=; or nn.Upsample(size), "
        )
        hint += "whose size is that of the array"
        raise ShapeError(message, hint=hint)
    for i in sharded:
        axes = placement.axes_of([2 + i])
        length = torch.tensor(lengths[i], device=x.device)
        lengths[i] = int(all_reduce(length, axes, placement.processes, grad="replicated"))
    return lengths


def _pixel_shuffle(call: FunctionCall) -> Tensor:
    """Spread channels over rows and columns: each row of a block becomes `upscale_factor` rows."""
    x, factor = call.arguments("input", "upscale_factor")
    placement = placement_of(x)
    channel_dim = placement.ndim - 3
    convs.check_channels(placement, channel_dim, placement.shape[channel_dim])
    dims = list(placement.dims)
    shape = list(placement.shape)
    shape[channel_dim] //= factor**2
    for d in (placement.ndim - 2, placement.ndim - 1):
        if placement.is_sharded(d):
            dims[d] = dim_of_groups(placement, d, factor)
        shape[d] *= factor
    # By views: torch's own function has no gradient of a block without rows.
    spread = x.unflatten(channel_dim, (shape[channel_dim], factor, factor))
    beside_factors = spread.movedim((-2, -4, -1, -3), (-4, -3, -2, -1))  # c r r h w -> c h r w r
    y = beside_factors.flatten(-2).flatten(-3, -2)
    return record(y, placement.with_dims(dims, shape))


def total_over_blocks(call: FunctionCall, dims: Sequence[int]) -> Tensor:
    """Apply `sum` or `mean` along dims of which some are sharded: the result is whole along them.

    "b c h/sp w" over h and w is "b c", or "b c 1 1", equal on all devices of sp.
    """
    placement = placement_of(call.args[0])
    total = call._replace(func=torch.sum).run()
    axes = placement.axes_of(dims)
    total = all_reduce(total, axes, placement.processes, grad="replicated")
    if call.name == "mean":
        total = total / math.prod(placement.shape[d] for d in dims)
    kept = [d for d in range(placement.ndim) if d not in dims]
    if total.ndim < placement.ndim:
        kept_dims = [placement.dims[d] for d in kept]
        return record(total, placement.with_dims(kept_dims, [placement.shape[d] for d in kept]))
    whole_dims = list(placement.layout.unsharded.dims)
    shape = [1] * placement.ndim
    for d in kept:
        whole_dims[d] = placement.dims[d]
        shape[d] = placement.shape[d]
    return record(total, placement.with_dims(whole_dims, shape))


def _without_mode(rule: Rule) -> Rule:
    """Return a rule that the mode which follows blocks does not see into."""

    def apply(call: FunctionCall) -> Any:
        with without_torch_function():
            return rule(call)

    return apply


def _of_ranks(prefix: str, suffix: str, rule: Rule, classes: str = "") -> dict[str, Rule]:
    """Return the rows of a table for 1 to 3 dims: `max_pool1d`, ...

    classes: the name of the modules, as "MaxPool"; "" for a rule that needs none.
    """
    rules: dict[str, Rule] = {}
    for rank in (1, 2, 3):
        of_rank = rule
        if classes:
            of_rank = partial(rule, kind=getattr(nn, f"{classes}{rank}d"))
        rules[f"{prefix}{rank}{suffix}"] = _without_mode(of_rank)
    return rules


FUNCTIONS: dict[str, Rule] = {
    **_of_ranks("conv", "d", _conv),
    **_of_ranks("conv_transpose", "d", _conv_transpose),
    **_of_ranks("max_pool", "d", _max_pool, "MaxPool"),
    **_of_ranks("avg_pool", "d", _avg_pool, "AvgPool"),
    **_of_ranks("adaptive_avg_pool", "d", _global_avg_pool, "AdaptiveAvgPool"),
    "group_norm": _without_mode(_group_norm),
    "interpolate": _without_mode(_interpolate),
    "pixel_shuffle": _without_mode(_pixel_shuffle),
}
