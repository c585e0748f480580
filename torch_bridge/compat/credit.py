"""Drop-ins for `credit.domain_parallel`: weather models with rows of latitude sharded over processes.

Also for `sync_domain_gradients` of `credit.parallel.domain`. One manager, any object with
`domain_parallel_size` and `domain_rank`, serves the whole program, as there. Without one, or on one process,
blocks stay as they are and layers are the ordinary modules.
Better here: a halo may be wider than a block, have two widths, and be periodic, reflected or cross a pole;
`gather_tensor` has a gradient; blocks may differ in size; derivatives of any order. Models and layers are
exact, also at the poles; a module without an exact form is refused, with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import ProcessMesh, group_mesh, mesh_of_ranks, process_mesh
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.domain_parallel import domain_parallel
from torch_bridge.nn.layers import layer_of, same_state
from torch_bridge.nn.placed import Placement, placed_as, record
from torch_bridge.nn.window import interpolate
from torch_bridge.ops import all_gather, halo_exchange
from torch_bridge.redistribution import redistribute
from xshard import Layout, Mesh, XshardError, compat
from xshard.errors import MeshError
from xshard.ops import Grad, HaloWidth, Shape

AXIS = "domain"


class DomainParallelManager:
    """Groups of `domain_parallel_size` D processes, ranks [i D, (i+1) D), that each shard one sample.

    Raises MeshError, a ValueError, if D does not divide `world_size`, or that is not the world's size.

    >>> import torch_bridge as xt
    >>> from torch_bridge.compat.credit import DomainParallelManager
    >>> def turn():
    ...     manager = DomainParallelManager(4, 2)
    ...     return manager.dp_rank, manager.domain_rank, manager.neighbor_ranks()
    >>> xt.testing.run_ranks(4, turn)
    [(0, 0, (None, 1)), (0, 1, (0, None)), (1, 0, (None, 3)), (1, 1, (2, None))]
    """

    def __init__(self, world_size: int, domain_parallel_size: int, shard_dim: int = -2) -> None:
        if world_size % domain_parallel_size:
            what = f"{world_size} processes in domains of {domain_parallel_size}"
            raise MeshError(what, hint="domain_parallel_size divides world_size")
        self.world_size = world_size
        self.domain_parallel_size = domain_parallel_size
        self.data_parallel_size = world_size // domain_parallel_size
        self.shard_dim = shard_dim
        self.processes = process_mesh(
            Mesh({"data": self.data_parallel_size, AXIS: domain_parallel_size})
        )
        # All processes make the groups together, here.
        self.domain_group: dist.ProcessGroup = self.processes.group((AXIS,)).process_group
        self.data_parallel_group: dist.ProcessGroup = self.processes.group(("data",)).process_group
        self.dp_rank, self.domain_rank = divmod(self.processes.device, domain_parallel_size)
        self.domain_world_size = self.domain_parallel_size
        self.dp_world_size = self.data_parallel_size
        self.is_first_domain_rank = self.domain_rank == 0
        self.is_last_domain_rank = self.domain_rank == domain_parallel_size - 1

    def neighbor_ranks(self) -> tuple[int | None, int | None]:
        """The global ranks with the rows before and after, None at the edges of the array."""
        rank = self.processes.ranks[self.processes.device]
        return (
            None if self.is_first_domain_rank else rank - 1,
            None if self.is_last_domain_rank else rank + 1,
        )


Manager = DomainParallelManager | None
_manager: Manager = None


def initialize_domain_parallel(
    world_size: int, domain_parallel_size: int, shard_dim: int = -2
) -> DomainParallelManager:
    """Set the manager that functions of this module use by default. All processes call it."""
    global _manager
    _manager = DomainParallelManager(world_size, domain_parallel_size, shard_dim)
    return _manager


def get_domain_parallel_manager() -> Manager:
    """The manager set by `initialize_domain_parallel`, or None."""
    return _manager


class HaloExchange(nn.Module):
    """Widens a block by rows of its neighbours: [h, ...] -> [h + 2 halo_width, ...] along `dim`.

    Options are as in `torch_bridge.ops.halo_exchange`; the rows beyond the edges are zeros by default.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat import credit
    >>> def turn():
    ...     credit.initialize_domain_parallel(2, 2)
    ...     x = torch.arange(4).view(4, 1) + 100 * torch.distributed.get_rank()
    ...     return credit.HaloExchange(2)(x).flatten().tolist()
    >>> xt.testing.run_ranks(2, turn)
    [[0, 0, 0, 1, 2, 3, 100, 101], [2, 3, 100, 101, 102, 103, 0, 0]]
    """

    def __init__(
        self, halo_width: HaloWidth, dim: int = -2, *, boundary: str = "zero", shape: Shape = None
    ) -> None:
        super().__init__()
        self.halo_width = halo_width
        self.dim = dim
        self.boundary = boundary
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if not (manager := _sharding_manager(None)) or self.halo_width == 0:
            return x
        where: Any = self.halo_width, self.dim, AXIS, _domain_of(manager)
        return halo_exchange(x, *where, boundary=self.boundary, shape=self.shape)

    @staticmethod
    def trim(x: Tensor, halo_before: int, halo_after: int, dim: int = -2) -> Tensor:
        """Drop rows at both sides: [h, ...] -> [h - halo_before - halo_after, ...] along `dim`."""
        return x.narrow(dim, halo_before, x.shape[dim] - halo_before - halo_after)


def shard_tensor(
    x: Tensor, dim: int = -2, manager: Manager = None, *, uneven: bool = False
) -> Tensor:
    """This process's part of a tensor replicated in its domain: [H, ...] -> [H/D, ...] along `dim`.

    uneven: parts may differ in size. Nothing is sent; the gradient is this process's own, zeros elsewhere.
    Raises ShapeError, a ValueError, for a length that D does not divide, unless `uneven`.
    """
    if (manager := _sharding_manager(manager)) is None:
        return x
    n = manager.domain_parallel_size
    length = x.shape[dim]
    compat.shard_whole(tuple(x.shape), dim, n, AXIS, uneven=uneven)  # raises for other lengths
    start, stop = (
        min(i * -(-length // n), length) for i in (manager.domain_rank, manager.domain_rank + 1)
    )
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def gather_tensor(
    x: Tensor, dim: int = -2, manager: Manager = None, *, shape: Shape = None, grad: Grad = "sum"
) -> Tensor:
    """All parts of a domain, on each of its processes: [H/D, ...] -> [H, ...] along `dim`.

    shape: the global shape, if D does not divide H. grad: the meaning of the results' gradients, as in
    `torch_bridge.ops.all_gather`: addends ("sum": each process has its own loss), or equal ("replicated").
    """
    manager = _sharding_manager(manager)
    return (
        x
        if manager is None
        else all_gather(x, dim, AXIS, _domain_of(manager), grad=grad, shape=shape)
    )


def shard_batch(
    batch: Mapping[str, Any],
    spatial_dims_5d: int = -2,
    spatial_dims_4d: int = -2,
    manager: Manager = None,
) -> Mapping[str, Any]:
    """`shard_tensor` of the tensors with 4 or 5 dims; everything else is returned as it is."""
    dims = {4: spatial_dims_4d, 5: spatial_dims_5d}
    tensors = {key: x for key, x in batch.items() if isinstance(x, Tensor) and x.ndim in dims}
    return {**batch, **{key: shard_tensor(x, dims[x.ndim], manager) for key, x in tensors.items()}}


def convert_to_domain_parallel(
    model: nn.Module,
    manager: Manager = None,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Callable[[Any], nn.Module]] | None = None,
    *,
    shape: Sequence[int | None] | None = None,
) -> nn.Module:
    """Turn a model, in place, into one of blocks: outputs and gradients are as for the whole array.

    Inputs that have `shard_dim` besides batch and channels are sharded along it. custom_converters: class ->
    function that converts its modules; the result is called on blocks. shape: the inputs' global shape, if
    blocks differ in size. Gradients of parameters are this process's share, until `sync_domain_gradients`.
    The rest is as in `torch_bridge.nn.domain_parallel`. Raises XshardError for modules without an exact form.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat import credit
    >>> def turn():
    ...     manager = credit.initialize_domain_parallel(2, 2)
    ...     conv = torch.nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    ...     torch.nn.init.ones_(conv.weight)
    ...     model = credit.convert_to_domain_parallel(torch.nn.Sequential(conv), manager)
    ...     return model(credit.shard_tensor(torch.ones(1, 1, 8, 2))).flatten().tolist()
    >>> xt.testing.run_ranks(2, turn)
    [[4.0, 6.0], [6.0, 6.0]]
    """
    if (manager := manager or _manager) is None:
        raise MeshError(
            "no manager", hint="initialize_domain_parallel(world_size, domain_parallel_size)"
        )
    options: Any = {"shape": shape, "sum_gradients": False, "converters": custom_converters}
    parallel = domain_parallel(model, _layout_text(shard_dim), _domain_of(manager), **options)
    # A dict of its own: Python 3.13 empties a shared one when the other module is collected.
    model.__class__, model.__dict__ = type(parallel), dict(parallel.__dict__)
    return model


@torch.no_grad()
def sync_domain_gradients(model: nn.Module, manager: Manager = None) -> None:
    """Average the gradients over the domain: the loss is the mean of its processes' losses."""
    if manager := _sharding_manager(manager):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        means = redistribute(gradients, f"... | mean({AXIS}) -> ...", _domain_of(manager))
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)


def _sharding_manager(manager: Manager) -> Manager:
    """The manager, or the one of the program, if its domains have more than one process."""
    manager = manager or _manager
    return manager if manager and manager.domain_parallel_size > 1 else None


def _domain_of(manager: DomainParallelManager) -> ProcessMesh:
    """The processes that shard this one's sample: its `domain_group`, or neighbours in the world."""
    group = getattr(manager, "domain_group", None)
    if isinstance(group, dist.ProcessGroup):
        return process_mesh(group_mesh(group, AXIS))
    first = process_mesh(group_mesh(None, AXIS)).device - manager.domain_rank
    return _neighbours(first, manager.domain_parallel_size, dist.group.WORLD)


@lru_cache(maxsize=256)
def _neighbours(first: int, size: int, world: dist.ProcessGroup) -> ProcessMesh:
    return mesh_of_ranks(Mesh({AXIS: size}), range(first, first + size))


def _layout_text(shard_dim: int) -> str:
    """The layout with one sharded dim for any number of dims; counted from the end it is a spatial one."""
    names = [f"x{d}" for d in range(-shard_dim if shard_dim < 0 else shard_dim + 1)]
    if shard_dim < 0:
        return " ".join(("b", "c", "...", f"{names[0]}/{AXIS}", *names[1:]))
    return " ".join((*names[:-1], f"{names[-1]}/{AXIS}", "..."))


def _placement(x: Tensor, shard_dim: int) -> Placement | None:
    """The placement of a block in the domain of the program's manager, if there is one."""
    if (manager := _sharding_manager(None)) is None:
        return None
    placement = placed_as(
        x, Layout.parse(_layout_text(shard_dim)).resolved(x.ndim), _domain_of(manager)
    )
    return replace(placement, shares=placement.axes)


class DomainParallelConv2d(nn.Module):
    """A convolution of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`. Blocks have equal sizes, unless another
    layer returned them. Gradients of parameters are a process's share, until `sync_domain_gradients`.
    """

    default_dim: ClassVar[int] = -2
    conv: Any

    def __init__(self, conv: nn.Module, shard_dim: int | None = None) -> None:
        super().__init__()
        self.conv = conv
        self.shard_dim = self.default_dim if shard_dim is None else shard_dim

    weight = property(lambda self: self.conv.weight)
    bias = property(lambda self: self.conv.bias)

    @property
    def halo_width(self) -> int:
        """The rows that CREDIT exchanges at either side; here outputs get all the rows that they need."""
        d = self.shard_dim - 2 if self.shard_dim >= 0 else self.shard_dim
        k, s, p = (
            numbers[d] for numbers in (self.conv.kernel_size, self.conv.stride, self.conv.padding)
        )
        return (p if k > s else 0) if self.conv.transposed else max(0, (k - s) // 2)

    def forward(self, x: Tensor) -> Tensor:
        if (placement := _placement(x, self.shard_dim)) is None:
            return self.conv(x)
        return layer_of(self.conv, placement.layout, placement.processes)(
            record(x.view_as(x), placement)
        )


class DomainParallelConvTranspose2d(DomainParallelConv2d):
    """A transposed convolution of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`."""


class DomainParallelConv3d(DomainParallelConv2d):
    """A convolution of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""

    default_dim = 3


class DomainParallelConvTranspose3d(DomainParallelConv3d):
    """A transposed convolution of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""


class DomainParallelPeriodicConv2d(DomainParallelConv2d):
    """A `PeriodicConv2d` of blocks: circular columns, rows that reflect at the poles: `(b, c, h, w)`. It has
    a `conv` without padding, and the `padding` of both dims. Raises XshardError for sharded columns.
    """

    def __init__(self, periodic_conv: Any, shard_dim: int = -2) -> None:
        if shard_dim not in (2, -2):
            raise XshardError(
                f"shard_dim={shard_dim}", hint="2 or -2: rows are sharded, columns wrap"
            )
        super().__init__(periodic_conv.conv, shard_dim)
        self.padding = periodic_conv.padding
        self.halo_exchange = HaloExchange(self.padding, shard_dim, boundary="reflect")

    def forward(self, x: Tensor) -> Tensor:
        p = self.padding
        wide = self.halo_exchange(F.pad(x, (p, p, 0, 0), mode="circular"))
        whole = _sharding_manager(None) is None
        return self.conv(F.pad(wide, (0, 0, p, p), mode="reflect") if whole else wide)


class DomainParallelCrossEmbedBranch(DomainParallelConv2d):
    """A `ZeroPad2d` and a `Conv2d` without padding, in sequence, of blocks `(b, c, h, w)`."""

    def __init__(self, branch: Any, shard_dim: int = -2) -> None:
        super().__init__(branch[1], shard_dim)
        left, right, top, bottom = branch[0].padding
        self.padding = ((top, bottom), (left, right))

    def forward(self, x: Tensor) -> Tensor:
        c = self.conv
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return c(F.pad(x, (*self.padding[1], *self.padding[0])))
        convolution = Convolution(c.kernel_size, c.stride, self.padding, c.dilation, c.groups)
        return record(*conv(x, placement, c.weight, c.bias, convolution))


class DomainParallelGroupNorm(nn.GroupNorm):
    """A `GroupNorm` of blocks, with the statistics of the whole array."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.__dict__.update(same_state(norm, type(self)).__dict__)

    def forward(self, x: Tensor) -> Tensor:
        if (placement := _placement(x, getattr(_sharding_manager(None), "shard_dim", -2))) is None:
            return super().forward(x)
        layer = layer_of(self, placement.layout, placement.processes)
        return layer.forward(
            record(x.view_as(x), placement)
        )  # a call would run this module's hooks twice


class DomainParallelInterpolate(nn.Module):
    """Resizes blocks `(b, c, h, w)` to a size: the size of the block along `shard_dim`, as there."""

    def __init__(
        self, size: int | Sequence[int], mode: str = "bilinear", shard_dim: int = -2
    ) -> None:
        super().__init__()
        self.size = size
        self.mode = mode
        self.shard_dim = shard_dim

    def forward(self, x: Tensor) -> Tensor:
        size = [self.size] * (x.ndim - 2) if isinstance(self.size, int) else list(self.size)
        if (placement := _placement(x, self.shard_dim)) is None:
            return F.interpolate(x, size=size, mode=self.mode, align_corners=False)
        size[self.shard_dim % x.ndim - 2] *= placement.processes.mesh.n_devices
        return record(*interpolate(x, placement, size, None, self.mode, align_corners=False))
