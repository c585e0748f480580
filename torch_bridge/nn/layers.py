"""The layers: each equals the torch class of the same name, with the same parameters, on blocks.

Decides how the options of torch's modules reach the functions that compute, and which have no exact form.
Long because it is the table of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_bridge.nn import norm as norms
from torch_bridge.nn.conv import Convolution, conv, conv_transpose, padding_pairs
from torch_bridge.nn.layer import Layer
from torch_bridge.nn.placed import Placement, check_whole
from torch_bridge.nn.pool import Pool, avg_pool, global_avg_pool, max_pool
from torch_bridge.nn.resample import interpolate
from xshard import XshardError
from xshard.errors import ShapeError


def _each(value: Any, rank: int) -> tuple[Any, ...]:
    """One value for all spatial dims, or one for each."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * rank


def _pool(layer: Layer, rank: int, dilation: Any = 1) -> Pool:
    kernel, stride, padding = (_each(v, rank) for v in (layer.kernel_size, layer.stride, layer.padding))
    return Pool(kernel, stride, padding, _each(dilation, rank), layer.ceil_mode, layer.outputs)


class _Conv(Layer):
    options: ClassVar = {"outputs": ""}

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        convolution = Convolution(
            self.kernel_size,
            self.stride,
            padding_pairs(self.padding, self.kernel_size, self.dilation),
            self.dilation,
            self.groups,
            self.padding_mode,
            self.outputs,
        )
        return conv(x, placement, self.weight, self.bias, convolution)


class Conv1d(_Conv, nn.Conv1d):
    """`torch.nn.Conv1d` of blocks `(..., c, l)`."""


class Conv2d(_Conv, nn.Conv2d):
    """`torch.nn.Conv2d` of blocks `(..., c, h, w)`.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     conv = torch.nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    ...     torch.nn.init.ones_(conv.weight)
    ...     layer = xt.nn.Conv2d.from_module(conv, Mesh(sp=2), "b c h/sp w")
    ...     y = layer(torch.ones(1, 1, 3, 2))
    ...     return y.flatten().tolist(), str(xt.nn.sharding_of(y).layout)
    >>> xt.testing.run_ranks(2, turn)
    [([4.0, 6.0], 'b c h/sp w'), ([6.0], 'b c h/sp w')]
    """


class Conv3d(_Conv, nn.Conv3d):
    """`torch.nn.Conv3d` of blocks `(..., c, d, h, w)`."""


class _ConvTranspose(Layer):
    def compute(
        self, x: Tensor, placement: Placement, output_size: Sequence[int] | None = None
    ) -> tuple[Tensor, Placement]:
        extra = self.output_padding
        if output_size is not None:
            rank = len(self.kernel_size)
            options = zip(
                output_size[-rank:],
                placement.shape[-rank:],
                self.stride,
                self.padding,
                self.dilation,
                self.kernel_size,
                strict=True,
            )
            extra = tuple(n - ((rows - 1) * s - 2 * p + d * (k - 1) + 1) for n, rows, s, p, d, k in options)
        return conv_transpose(
            x,
            placement,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            output_padding=extra,
            dilation=self.dilation,
            groups=self.groups,
        )


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` of blocks `(..., c, l)`."""


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` of blocks `(..., c, h, w)`; an `output_size` is global."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` of blocks `(..., c, d, h, w)`."""


class _OverSpace(Layer):
    """A layer over the last `rank` dims."""

    rank: int

    def __init_subclass__(cls, rank: int = 0) -> None:
        cls.rank = rank


class _MaxPool(_OverSpace):
    options: ClassVar = {"outputs": ""}

    def check(self) -> None:
        if self.return_indices:
            raise XshardError("return_indices=True", hint="positions in the whole array are not computed")

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        return max_pool(x, placement, _pool(self, self.rank, self.dilation))


class MaxPool1d(_MaxPool, nn.MaxPool1d, rank=1):
    """`torch.nn.MaxPool1d` of blocks `(..., l)`."""


class MaxPool2d(_MaxPool, nn.MaxPool2d, rank=2):
    """`torch.nn.MaxPool2d` of blocks `(..., h, w)`."""


class MaxPool3d(_MaxPool, nn.MaxPool3d, rank=3):
    """`torch.nn.MaxPool3d` of blocks `(..., d, h, w)`."""


class _AvgPool(_OverSpace):
    options: ClassVar = {"outputs": ""}

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        pool = _pool(self, self.rank)
        divisor = getattr(self, "divisor_override", None)  # one dim has none
        return avg_pool(x, placement, pool, count_include_pad=self.count_include_pad, divisor=divisor)


class AvgPool1d(_AvgPool, nn.AvgPool1d, rank=1):
    """`torch.nn.AvgPool1d` of blocks `(..., l)`."""


class AvgPool2d(_AvgPool, nn.AvgPool2d, rank=2):
    """`torch.nn.AvgPool2d` of blocks `(..., h, w)`."""


class AvgPool3d(_AvgPool, nn.AvgPool3d, rank=3):
    """`torch.nn.AvgPool3d` of blocks `(..., d, h, w)`."""


class _GlobalAvgPool(_OverSpace):
    def check(self) -> None:
        if set(_each(self.output_size, self.rank)) != {1}:
            raise XshardError(
                f"output_size={self.output_size}", hint="for cut dims, only 1 has an exact form here"
            )

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        return global_avg_pool(x, placement, self.rank)


class AdaptiveAvgPool1d(_GlobalAvgPool, nn.AdaptiveAvgPool1d, rank=1):
    """`torch.nn.AdaptiveAvgPool1d(1)` of blocks `(..., l)`: the result is whole."""


class AdaptiveAvgPool2d(_GlobalAvgPool, nn.AdaptiveAvgPool2d, rank=2):
    """`torch.nn.AdaptiveAvgPool2d(1)` of blocks `(..., h, w)`: the result is whole."""


class AdaptiveAvgPool3d(_GlobalAvgPool, nn.AdaptiveAvgPool3d, rank=3):
    """`torch.nn.AdaptiveAvgPool3d(1)` of blocks `(..., d, h, w)`: the result is whole."""


class Upsample(Layer, nn.Upsample):
    """`torch.nn.Upsample` of blocks `(b, c, ...)`, in all its modes; a `size` is global."""

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        return interpolate(
            x,
            placement,
            self.size,
            self.scale_factor,
            self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )


class GroupNorm(Layer, nn.GroupNorm):
    """`torch.nn.GroupNorm` of blocks `(b, c, ...)`, with the statistics of the whole array."""

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        return norms.group_norm(x, placement, self.num_groups, self.weight, self.bias, self.eps), placement


class LayerNorm(Layer, nn.LayerNorm):
    """`torch.nn.LayerNorm` of blocks; any dim may be cut, and `normalized_shape` is global."""

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        y = norms.layer_norm(x, placement, tuple(self.normalized_shape), self.weight, self.bias, self.eps)
        return y, placement


class RMSNorm(Layer, nn.RMSNorm):  # type: ignore[misc]  # torch names the input x here
    """`torch.nn.RMSNorm` of blocks; any dim may be cut, and `normalized_shape` is global."""

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        shape = tuple(self.normalized_shape)
        return norms.layer_norm(x, placement, shape, self.weight, None, eps, centred=False), placement


class _InstanceNorm(Layer):
    def check(self) -> None:
        if self.track_running_stats:
            raise XshardError("track_running_stats=True", hint="False: statistics of one sample at a time")

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        self._check_input_dim(x)
        if x.ndim == self._get_no_batch_dim():
            raise ShapeError(f"{x.ndim} dims, without a batch", text=str(placement.layout), hint="x[None]")
        return norms.group_norm(x, placement, x.shape[1], self.weight, self.bias, self.eps), placement


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` of blocks `(b, c, l)`, with the statistics of the whole array."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` of blocks `(b, c, h, w)`, with the statistics of the whole array."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` of blocks `(b, c, d, h, w)`, with the statistics of the whole array."""


class _BatchNorm(Layer):
    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        check_whole(placement, (1,), "this layer")
        self._check_input_dim(x)
        if placement.shape[1] != self.num_features:
            raise ShapeError(
                f"{placement.shape[1]} channels, the layer has {self.num_features}",
                text=str(placement.layout),
            )
        if not self.training and self.running_mean is not None:
            statistics = self.running_mean, self.running_var
            return norms.fixed_norm(x, placement, statistics, self.weight, self.bias, self.eps), placement
        y, mean, variance = norms.batch_norm(x, placement, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), part)
            self.running_var.lerp_(variance.to(self.running_var), part)
        return y, placement


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` of blocks `(b, c)` or `(b, c, l)`; all devices have equal running statistics."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` of blocks `(b, c, h, w)`; all devices have equal running statistics."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` of blocks `(b, c, d, h, w)`; all devices have equal running statistics."""


class Linear(Layer, nn.Linear):
    """`torch.nn.Linear` of blocks whose last dim is whole."""

    def compute(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        last = len(placement.shape) - 1
        check_whole(placement, (last,), "this layer")
        if placement.shape[last] != self.in_features:
            raise ShapeError(
                f"{placement.shape[last]} features, the layer has {self.in_features}",
                text=str(placement.layout),
            )
        weight, bias = placement.copied(self.weight, self.bias)
        assert weight is not None
        return F.linear(x, weight, bias), placement.with_length(last, self.out_features)
