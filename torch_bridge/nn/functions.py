"""Functions of torch that have a layer, as `F.conv2d` and `F.max_pool2d`: what the layer computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.nn import conv as convs
from torch_bridge.nn import norm as norms
from torch_bridge.nn.function_call import FunctionCall, Rule
from torch_bridge.nn.layers import layer_of
from torch_bridge.nn.placed import Outputs, placement_of, record, recorded_placement
from torch_bridge.nn.views import dim_of_groups
from torch_bridge.nn.window import per_dim
from torch_bridge.ops import all_reduce
from xshard import XshardError
from xshard.errors import ShapeError

Options = Mapping[str, int]  # of a function, with their defaults
_CONV = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_CONV_TRANSPOSE = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def _check_whole_parameters(call: FunctionCall, *parameters: Tensor | None) -> None:
    """Raise XshardError if a weight or a bias is a block."""
    for x in parameters:
        placement = recorded_placement(x)
        if placement is not None and placement.axes:
            reason = f"{call.name}() with a weight that is sharded as '{placement.layout}'"
            hint = "redistribute the weight first: each process needs all of it"
            raise XshardError(reason, hint=hint)


def _convolve(call: FunctionCall, compute: Callable[..., Outputs], defaults: Options) -> Tensor:
    """Convolve as a layer does, whose parameters and options are arguments here.

    Args:
        call: The call.
        compute: The function of the layer.
        defaults: The defaults of the arguments after the bias, in their order.
    """
    layer = _layer_in(call, "input", "weight", bias=None, **defaults)
    layer.kernel_size = tuple(layer.weight.shape[2:])
    layer.padding_mode = "zeros"
    layer.outputs = call.outputs
    for name in defaults:
        option = getattr(layer, name)
        is_of_dims = name != "groups" and not isinstance(option, str)  # padding may be "same"
        if is_of_dims:
            setattr(layer, name, per_dim(option, len(layer.kernel_size)))
    return record(*compute(layer, layer.input, placement_of(layer.input)))


def _layer_in(call: FunctionCall, *names: str, **defaults: Any) -> SimpleNamespace:
    """Return the arguments of a call as attributes of a layer. Raises XshardError if weights are cut."""
    values = call.arguments(*names, **defaults)
    layer = SimpleNamespace(**dict(zip((*names, *defaults), values, strict=True)))
    _check_whole_parameters(call, layer.weight, layer.bias)
    return layer


def _as_layer(call: FunctionCall, module_class: type[nn.Module], names: str) -> Tensor:
    """Compute what the layer of a module computes.

    Args:
        call: The call.
        module_class: The class of the layer.
        names: The names of the arguments after the input, which are those of the module.
    """
    x, *values = call.args
    options = dict(zip(names.split(), values, strict=False)) | call.kwargs
    placement = placement_of(x)
    if options.pop("antialias", False):
        raise XshardError(f"{call.name}() with antialias=True", hint="without it")
    if options.get("size") is not None:
        options["size"] = _global_size(x, options["size"])
    layer = layer_of(
        module_class(**options), placement.layout, placement.processes, call.name, call.outputs
    )
    return layer(x)  # type: ignore[no-any-return]  # a tensor


def _group_norm(call: FunctionCall) -> Tensor:
    """Normalise groups of channels, as `nn.GroupNorm` does."""
    layer = _layer_in(call, "input", "num_groups", weight=None, bias=None, eps=1e-5)
    return record(*norms.group_norm(layer, layer.input, placement_of(layer.input)))


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
        reason = f"interpolate() to {lengths[i]} rows of dim '{placement.dims[2 + i]}': "
        reason += "of the block, or of the array?"
        hint = (
            "size=y.shape[2:] for the rows of another block; scale_factor=; or nn.Upsample(size), "
        )
        hint += "whose size is that of the array"
        raise ShapeError(reason, hint=hint)
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


def _of_ranks(prefix: str, rule: Rule) -> dict[str, Rule]:
    """Return the rows of a table for 1 to 3 dims: `conv1d`, ..."""
    return {f"{prefix}{rank}d": rule for rank in (1, 2, 3)}


def _pools(prefix: str, classes: str, names: str) -> dict[str, Rule]:
    """Return the rows of a table for pools of 1 to 3 dims, which are modules without parameters."""
    rules: dict[str, Rule] = {}
    for rank in (1, 2, 3):
        module_class = getattr(nn, f"{classes}{rank}d")
        rules[f"{prefix}{rank}d"] = partial(_as_layer, module_class=module_class, names=names)
    return rules


FUNCTIONS: dict[str, Rule] = {
    **_of_ranks("conv", partial(_convolve, compute=convs.conv_layer, defaults=_CONV)),
    **_of_ranks(
        "conv_transpose",
        partial(_convolve, compute=convs.conv_transpose, defaults=_CONV_TRANSPOSE),
    ),
    **_pools("max_pool", "MaxPool", "kernel_size stride padding dilation ceil_mode"),
    **_pools(
        "avg_pool",
        "AvgPool",
        "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    ),
    **_pools("adaptive_avg_pool", "AdaptiveAvgPool", "output_size"),
    "interpolate": partial(
        _as_layer,
        module_class=nn.Upsample,
        names="size scale_factor mode align_corners recompute_scale_factor",
    ),
    "group_norm": _group_norm,
    "pixel_shuffle": _pixel_shuffle,
}
