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
from torch_bridge.nn.placed import Outputs, Placement, placement_of, record, recorded_placement
from torch_bridge.nn.views import dim_of_groups
from torch_bridge.nn.window import per_dim
from torch_bridge.ops import all_reduce
from xshard import XshardError
from xshard.errors import ShapeError
from xshard.notation.parser import Dim

# The options of a function by name, in the order of its signature, with their defaults.
Options = Mapping[str, int]
# Computes what a layer computes: a function of the layer, of its input, and of the placement of the input.
# It reads the parameters and options of the layer as attributes: `layer.weight`, `layer.stride`.
LayerFunction = Callable[[Any, Tensor, Placement], Outputs]
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


def _convolve(call: FunctionCall, compute: LayerFunction, defaults: Options) -> Tensor:
    """Convolve as a layer with the weight and the options of this call would.

    `F.conv2d(x, weight, stride=2)` computes what an `nn.Conv2d` with this weight and stride does.

    Args:
        call: A call of `F.conv1d`, `F.conv_transpose2d`, ...
        compute: What the layer computes.
        defaults: The options that the torch function takes after the bias.
    """
    arguments = _arguments_by_name(call, "input", "weight", bias=None, **defaults)
    kernel_size = tuple(arguments["weight"].shape[2:])
    options = {name: arguments[name] for name in defaults}
    layer = SimpleNamespace(
        weight=arguments["weight"],
        bias=arguments["bias"],
        kernel_size=kernel_size,
        padding_mode="zeros",
        outputs=call.outputs,
        **_one_per_dim(options, len(kernel_size)),
    )
    x = arguments["input"]
    return record(*compute(layer, x, placement_of(x)))


def _one_per_dim(options: Mapping[str, Any], n_dims: int) -> dict[str, Any]:
    """Return options as layers have them: `stride=2` of a convolution over two dims -> (2, 2)."""
    as_in_layers = {}
    for name, option in options.items():
        is_one_for_all_dims = name == "groups" or isinstance(option, str)  # padding may be "same"
        as_in_layers[name] = option if is_one_for_all_dims else per_dim(option, n_dims)
    return as_in_layers


def _arguments_by_name(call: FunctionCall, *names: str, **defaults: Any) -> dict[str, Any]:
    """Return all arguments of a call by name. Raises XshardError if its weight or bias is sharded."""
    values = call.arguments(*names, **defaults)
    arguments = dict(zip((*names, *defaults), values, strict=True))
    _check_whole_parameters(call, arguments["weight"], arguments["bias"])
    return arguments


def _as_layer(call: FunctionCall, module_class: type[nn.Module], names: str) -> Tensor:
    """Make the layer that does the same as the called function, and apply it to the input.

    `F.max_pool2d(x, 3, stride=2)` -> `nn.MaxPool2d(kernel_size=3, stride=2)`, applied to `x`.

    Args:
        call: A call of a function without weights, as `F.max_pool2d`.
        module_class: torch's class of the layer.
        names: The function's arguments after the input, in order, as words of one text. Those of
            `module_class` have the same names.
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
    arguments = _arguments_by_name(call, "input", "num_groups", weight=None, bias=None, eps=1e-5)
    x = arguments["input"]
    return record(*norms.group_norm(SimpleNamespace(**arguments), x, placement_of(x)))


def _global_size(x: Tensor, size: Any) -> list[int]:
    """Return the spatial lengths of the whole array that `interpolate(x, size)` makes.

    `size=skip.shape[2:]` has the lengths of a block of another array, `skip`. Along sharded dims
    they are summed over the blocks: 4 rows on each of 2 processes -> 8.

    Args:
        x: This process's block, (batch, channels, *spatial).
        size: As in `interpolate`. Along a sharded dim only a `torch.Size`, the type of `x.shape`,
            surely has lengths of a block: for any other type a ShapeError is raised.
    """
    placement = placement_of(x)
    lengths = list(per_dim(size, placement.ndim - 2))
    sharded = [i for i in range(len(lengths)) if placement.is_sharded(2 + i)]
    is_shape_of_block = isinstance(size, torch.Size)
    if sharded and not is_shape_of_block:
        first = sharded[0]
        raise _ambiguous_size(lengths[first], placement.dims[2 + first])
    for i in sharded:
        axes = placement.axes_of([2 + i])
        block_length = torch.tensor(lengths[i], device=x.device)
        lengths[i] = int(all_reduce(block_length, axes, placement.processes, grad="replicated"))
    return lengths


def _ambiguous_size(length: int, dim: Dim) -> ShapeError:
    """Return the error of a number of rows that may be those of a block or of the whole array."""
    reason = f"interpolate() to {length} rows of dim '{dim}': of the block, or of the array?"
    hint = "size=y.shape[2:] for the rows of another block; scale_factor=; or nn.Upsample(size), "
    hint += "whose size is that of the array"
    return ShapeError(reason, hint=hint)


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
