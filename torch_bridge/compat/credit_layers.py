"""Drop-ins for the layers of `credit.domain_parallel`: an ordinary module in each, called on a block.

Replaces `DomainParallelConv2d` and its kin, with the same names of parameters. The manager is that of the
program when a layer is called; without one a layer is the ordinary module. Blocks have equal sizes, unless
another layer returned them. Gradients of parameters are this process's share, until `sync_domain_gradients`.

Better here: exact for every kernel, stride, dilation and padding, forward and backward, and at the poles,
where `DomainParallelPeriodicConv2d` reflects, as its module does on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_bridge.compat.credit import HaloExchange, cutting_manager, domain_of, layout_text
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.layers import layer_of, same_state
from torch_bridge.nn.placed import Placement, placed_as, record
from torch_bridge.nn.resample import interpolate
from xshard import Layout, XshardError


def _placement(x: Tensor, shard_dim: int) -> Placement | None:
    """Where a block stands in the domain of the program's manager, if there is one."""
    manager = cutting_manager(None)
    if manager is None:
        return None
    layout = Layout.parse(layout_text(shard_dim)).resolved(x.ndim)
    placement = placed_as(x, layout, domain_of(manager))
    return replace(placement, shares=placement.axes)


class _OfConvolution(nn.Module):
    """A convolution, as `conv`."""

    default_dim: ClassVar[int] = -2
    conv: Any

    def __init__(self, conv: nn.Module, shard_dim: int | None = None) -> None:
        super().__init__()
        self.conv, self.shard_dim = conv, self.default_dim if shard_dim is None else shard_dim

    @property
    def weight(self) -> Tensor:
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:
        return self.conv.bias

    def forward(self, x: Tensor) -> Tensor:
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return self.conv(x)
        layer = layer_of(self.conv, placement.layout, placement.processes)
        return layer(record(x.view_as(x), placement))


class DomainParallelConv2d(_OfConvolution):
    """A `Conv2d` of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge import compat
    >>> def turn():
    ...     compat.initialize_domain_parallel(2, 2)
    ...     conv = torch.nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    ...     torch.nn.init.ones_(conv.weight)
    ...     layer = compat.DomainParallelConv2d(conv)
    ...     return layer(compat.shard_tensor(torch.ones(1, 1, 8, 2))).flatten().tolist()
    >>> xt.testing.run_ranks(2, turn)
    [[4.0, 6.0], [6.0, 6.0]]
    """


class DomainParallelConv3d(_OfConvolution):
    """A `Conv3d` of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""

    default_dim = 3


class DomainParallelConvTranspose2d(_OfConvolution):
    """A `ConvTranspose2d` of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`."""


class DomainParallelConvTranspose3d(_OfConvolution):
    """A `ConvTranspose3d` of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""

    default_dim = 3


class DomainParallelPeriodicConv2d(_OfConvolution):
    """A `PeriodicConv2d` of blocks: circular columns, rows that reflect at the poles: `(b, c, h, w)`.

    The module has a `conv` without padding, and the `padding` of both dims. Raises XshardError for columns
    that are cut.
    """

    def __init__(self, periodic_conv: Any, shard_dim: int = -2) -> None:
        if shard_dim not in (2, -2):
            raise XshardError(f"shard_dim={shard_dim}", hint="2 or -2: rows are cut, columns wrap")
        super().__init__(periodic_conv.conv, shard_dim)
        self.padding = periodic_conv.padding
        self.halo_exchange = HaloExchange(self.padding, shard_dim, boundary="reflect")

    def forward(self, x: Tensor) -> Tensor:
        p = self.padding
        wide = self.halo_exchange(F.pad(x, (p, p, 0, 0), mode="circular"))
        return self.conv(F.pad(wide, (0, 0, p, p), mode="reflect") if cutting_manager(None) is None else wide)


class DomainParallelCrossEmbedBranch(_OfConvolution):
    """A `ZeroPad2d` and a `Conv2d` without padding, in sequence, of blocks `(b, c, h, w)`."""

    def __init__(self, branch: Any, shard_dim: int = -2) -> None:
        super().__init__(branch[1], shard_dim)
        left, right, top, bottom = branch[0].padding
        self.padding = ((top, bottom), (left, right))

    def forward(self, x: Tensor) -> Tensor:
        c, placement = self.conv, _placement(x, self.shard_dim)
        if placement is None:
            return c(F.pad(x, (*self.padding[1], *self.padding[0])))
        convolution = Convolution(c.kernel_size, c.stride, self.padding, c.dilation, c.groups)
        return record(*conv(x, placement, c.weight, c.bias, convolution))


class DomainParallelGroupNorm(nn.GroupNorm):
    """A `GroupNorm` of blocks, with the statistics of the whole array."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.__dict__.update(same_state(norm, type(self)).__dict__)

    def forward(self, x: Tensor) -> Tensor:
        placement = _placement(x, getattr(cutting_manager(None), "shard_dim", -2))
        if placement is None:
            return super().forward(x)
        layer = layer_of(self, placement.layout, placement.processes)
        return layer.forward(record(x.view_as(x), placement))  # not called: the hooks are this module's


class DomainParallelInterpolate(nn.Module):
    """Resizes blocks `(b, c, h, w)` to a size: of the block along `shard_dim`, as there."""

    def __init__(self, size: int | Sequence[int], mode: str = "bilinear", shard_dim: int = -2) -> None:
        super().__init__()
        self.size, self.mode, self.shard_dim = size, mode, shard_dim

    def forward(self, x: Tensor) -> Tensor:
        size = [self.size] * (x.ndim - 2) if isinstance(self.size, int) else list(self.size)
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return F.interpolate(x, size=size, mode=self.mode, align_corners=False)
        size[self.shard_dim % x.ndim - 2] *= placement.processes.mesh.n_devices
        return record(*interpolate(x, placement, size, None, self.mode, align_corners=False))
