"""Layers: a torch module of a block, and the function that computes its outputs there.

A layer shares parameters and buffers with the ordinary module, and computes this process's block of what the
module computes on the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn import norm as norms
from torch_bridge.nn.conv import Convolution, conv, conv_transpose, padding_pairs
from torch_bridge.nn.placed import Placement, check_whole, placed_as, record, recorded
from torch_bridge.nn.pool import Pool, avg_pool, global_avg_pool, max_pool
from torch_bridge.nn.resample import interpolate
from xshard import Layout, XshardError
from xshard.errors import ShapeError, with_path

Outputs = tuple[Tensor, Placement]
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Form(NamedTuple):
    """How the modules of a class compute on blocks; `check` raises for options without an exact form."""

    compute: Callable[..., Outputs]
    check: Callable[[Any], None] = lambda module: None


class Layer:
    """A mixin before the torch class of a layer.

    A layer takes this process's block and returns this process's block of the outputs, with a record of
    their placement. An input without a record has the layer's `layout`.
    in_model: the layer is part of a model; an input without a record is an error.
    """

    form: Form
    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    path: str
    outputs: str
    in_model: bool

    if TYPE_CHECKING:  # the attributes of the torch class

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, input: Tensor, *arguments: Any, **named: Any) -> Tensor:
        try:
            if self.in_model and recorded(input) is None:
                raise ShapeError(
                    f"nothing is known of an input of shape {tuple(input.shape)}",
                    hint="it comes from a function that cannot be followed, or not from the model's inputs; "
                    "activations are checkpointed by xt.nn.checkpoint",
                )
            placement = placed_as(input, self.layout, self.mesh, self.shape)
            with torch._C.DisableTorchFunction():  # `propagation` does not look into layers
                y, result = self.form.compute(self, input, placement, *arguments, **named)
        except XshardError as error:
            raise with_path(error, self.path) from None
        return record(y, result)

    def extra_repr(self) -> str:
        ordinary = super().extra_repr()  # type: ignore[misc]
        return f"{ordinary}, '{self.layout}'" if ordinary else f"'{self.layout}'"


def layer_of(
    module: nn.Module,
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int | None] | None = None,
    path: str = "",
    outputs: str = "",
    in_model: bool = False,
) -> Any:
    """A module of a class in `LAYERS` -> the layer with its parameters.

    layout: layout of the input, as in "b c h/sp w". path: the name of the layer in errors. The other options
    are as in `domain_parallel`. Raises XshardError for a module without an exact form.
    """
    layer = same_state(module, next(LAYERS[kind] for kind in type(module).__mro__ if kind in LAYERS))
    layer.layout, layer.mesh = Layout.parse(layout), mesh
    layer.shape = None if shape is None else tuple(shape)
    layer.path, layer.outputs, layer.in_model = path or type(module).__name__, outputs, in_model
    try:
        layer.form.check(module)
    except XshardError as error:
        raise with_path(error, layer.path) from None
    return layer


def same_state(module: nn.Module, kind: type[Any]) -> Any:
    """A module of a class that shares the dicts of parameters and buffers of another; its hooks are copies.

    Loading or casting one of the two changes both.
    """
    new = object.__new__(kind)
    new.__dict__.update(module.__dict__)
    for name in HOOKS:
        new.__dict__[name] = getattr(module, name).copy()
    return new


def _each(value: Any, rank: int) -> tuple[Any, ...]:
    """One value for all spatial dims, or one for each."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * rank


def _rank(layer: Any) -> int:
    """The number of spatial dims, which ends the name of the class."""
    return int(type(layer).__name__[-2])


def _conv(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    padding = padding_pairs(layer.padding, layer.kernel_size, layer.dilation)
    convolution = Convolution(
        layer.kernel_size,
        layer.stride,
        padding,
        layer.dilation,
        layer.groups,
        layer.padding_mode,
        layer.outputs,
    )
    return conv(x, placement, layer.weight, layer.bias, convolution)


def _conv_transpose(
    layer: Any, x: Tensor, placement: Placement, output_size: Sequence[int] | None = None
) -> Outputs:
    options = (layer.stride, layer.padding, layer.dilation, layer.kernel_size)
    extra = layer.output_padding
    if output_size is not None:  # a global length
        rank = len(layer.kernel_size)
        lengths = zip(output_size[-rank:], placement.shape[-rank:], *options, strict=True)
        extra = tuple(n - ((rows - 1) * s - 2 * p + d * (k - 1) + 1) for n, rows, s, p, d, k in lengths)
    return conv_transpose(
        x,
        placement,
        layer.weight,
        layer.bias,
        stride=layer.stride,
        padding=layer.padding,
        output_padding=extra,
        dilation=layer.dilation,
        groups=layer.groups,
    )


def _pool(layer: Any, dilation: Any = 1) -> Pool:
    windows = (layer.kernel_size, layer.stride, layer.padding, dilation)
    kernel, stride, padding, dilation = (_each(v, _rank(layer)) for v in windows)
    return Pool(kernel, stride, padding, dilation, layer.ceil_mode, layer.outputs)


def _max_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    return max_pool(x, placement, _pool(layer, layer.dilation))


def _check_max_pool(module: Any) -> None:
    if module.return_indices:
        raise XshardError("return_indices=True", hint="positions in the whole array are not computed")


def _avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    divisor = getattr(layer, "divisor_override", None)  # one dim has none
    return avg_pool(x, placement, _pool(layer), count_include_pad=layer.count_include_pad, divisor=divisor)


def _global_avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    return global_avg_pool(x, placement, _rank(layer))


def _check_global_avg_pool(module: Any) -> None:
    if set(_each(module.output_size, 1)) != {1}:
        raise XshardError(
            f"output_size={module.output_size}", hint="for sharded dims, only 1 has an exact form here"
        )


def _upsample(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    options = {name: getattr(layer, name) for name in ("align_corners", "recompute_scale_factor")}
    return interpolate(x, placement, layer.size, layer.scale_factor, layer.mode, **options)


def _group_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    y = norms.group_norm(x, placement, layer.num_groups, layer.weight, layer.bias, layer.eps)
    return y, placement


def _layer_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    y = norms.layer_norm(x, placement, tuple(layer.normalized_shape), layer.weight, layer.bias, layer.eps)
    return y, placement


def _rms_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    eps, shape = layer.eps, tuple(layer.normalized_shape)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return norms.layer_norm(x, placement, shape, layer.weight, None, eps, centred=False), placement


def _instance_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    layer._check_input_dim(x)
    if x.ndim == layer._get_no_batch_dim():
        raise ShapeError(f"{x.ndim} dims, without a batch", text=str(placement.layout), hint="x[None]")
    return norms.group_norm(x, placement, x.shape[1], layer.weight, layer.bias, layer.eps), placement


def _check_instance_norm(module: Any) -> None:
    if module.track_running_stats:
        raise XshardError("track_running_stats=True", hint="False: statistics of one sample at a time")


def _batch_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """All devices have equal running statistics."""
    check_whole(placement, (1,), "this layer")
    layer._check_input_dim(x)
    if placement.shape[1] != layer.num_features:
        raise ShapeError(
            f"{placement.shape[1]} channels, the layer has {layer.num_features}", text=str(placement.layout)
        )
    if not layer.training and layer.running_mean is not None:
        statistics = layer.running_mean, layer.running_var
        return norms.fixed_norm(x, placement, statistics, layer.weight, layer.bias, layer.eps), placement
    y, mean, variance = norms.batch_norm(x, placement, layer.weight, layer.bias, layer.eps)
    if layer.training and layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
        part = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.to(layer.running_mean), part)
        layer.running_var.lerp_(variance.to(layer.running_var), part)
    return y, placement


# Every torch class with a layer -> its form; sizes and `normalized_shape` are global.
FORMS: dict[type[nn.Module], Form] = {
    nn.GroupNorm: Form(_group_norm),
    nn.LayerNorm: Form(_layer_norm),
    nn.RMSNorm: Form(_rms_norm),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), Form(_upsample)),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Form(_conv)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Form(_conv_transpose)),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), Form(_max_pool, _check_max_pool)),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), Form(_avg_pool)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), Form(_batch_norm)),
    **dict.fromkeys(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        Form(_global_avg_pool, _check_global_avg_pool),
    ),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), Form(_instance_norm, _check_instance_norm)
    ),
}

LAYERS: dict[type[nn.Module], type[Any]] = {
    kind: type(kind.__name__, (Layer, kind), {"form": form, "__module__": __name__})
    for kind, form in FORMS.items()
}
globals().update({layer.__name__: layer for layer in LAYERS.values()})  # pickle looks them up by name
