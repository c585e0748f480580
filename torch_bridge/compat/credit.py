"""Drop-ins for `credit.domain_parallel`: weather models with sharded rows of latitude.

Also for `sync_domain_gradients` of `credit.parallel.domain`. One manager, any object with
`domain_parallel_size` and `domain_rank`, serves the whole program, as there. Without one, or on one
process, blocks stay as they are and layers are the ordinary modules. Better here: a halo may be
wider than a block, have two widths, and be periodic, reflected or cross a pole; `gather_tensor` has
a gradient; blocks may differ in size; derivatives of any order. Models and layers are exact, also
at the poles; a module without an exact form is refused, with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import ProcessMesh, group_mesh, mesh_of_ranks, process_mesh
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.domain_parallel import domain_parallel
from torch_bridge.nn.layers import layer_of, share_state
from torch_bridge.nn.placed import Placement, placed_as, record
from torch_bridge.nn.window import interpolate
from torch_bridge.ops import all_gather, halo_exchange
from torch_bridge.redistribution import redistribute
from xshard import Layout, Mesh, XshardError, compat
from xshard.errors import MeshError, api_boundary
from xshard.layout.partition import ceil_div
from xshard.ops import Grad, HaloWidth, Shape
from xshard.signatures import Count

AXIS = "domain"


@api_boundary
class DomainParallelManager:
    """Groups of D processes, ranks [i D, (i+1) D), that each shard one sample.

    Args:
        world_size: The number of processes.
        domain_parallel_size: D.
        shard_dim: The dim that is sharded.

    Raises:
        MeshError: A ValueError: D does not divide `world_size`, or that is not the world's size.

    Examples:
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
            reason = f"{world_size} processes in domains of {domain_parallel_size}"
            raise MeshError(reason, hint="domain_parallel_size divides world_size")
        self.world_size = world_size
        self.domain_parallel_size = domain_parallel_size
        self.data_parallel_size = world_size // domain_parallel_size
        self.shard_dim = shard_dim
        mesh = Mesh({"data": self.data_parallel_size, AXIS: domain_parallel_size})
        self.processes = process_mesh(mesh)
        # A process group must be made by all processes together: here, where all of them are.
        self.domain_group: dist.ProcessGroup = self.processes.group((AXIS,)).process_group
        self.data_parallel_group: dist.ProcessGroup = self.processes.group(("data",)).process_group
        self.dp_rank, self.domain_rank = divmod(self.processes.device, domain_parallel_size)
        self.domain_world_size = self.domain_parallel_size
        self.dp_world_size = self.data_parallel_size
        self.is_first_domain_rank = self.domain_rank == 0
        self.is_last_domain_rank = self.domain_rank == domain_parallel_size - 1

    def neighbor_ranks(self) -> tuple[int | None, int | None]:
        """Return the ranks with the rows before and after, None at the edges of the array."""
        rank = self.processes.ranks[self.processes.device]
        rank_before = None if self.is_first_domain_rank else rank - 1
        rank_after = None if self.is_last_domain_rank else rank + 1
        return rank_before, rank_after


@runtime_checkable
class AnyManager(Protocol):
    """A `DomainParallelManager`, or a manager of CREDIT itself."""

    @property
    def domain_parallel_size(self) -> int:
        """The number of processes that share one sample."""

    @property
    def domain_rank(self) -> int:
        """The position of this process among them."""


Manager = AnyManager | None
_manager: Manager = None  # of the whole program, as in CREDIT, whose functions take it by default


@api_boundary
def initialize_domain_parallel(
    world_size: Count, domain_parallel_size: Count, shard_dim: int = -2
) -> DomainParallelManager:
    """Divide all processes into domains, for all functions of this module.

    A domain is a group of processes that hold parts of one sample: 8 processes in domains of 2 work
    on 4 samples. All processes call it. Functions without `manager=` use these domains.

    Args:
        world_size: The number of processes.
        domain_parallel_size: The number of processes in a domain.
        shard_dim: The dim along which samples are cut.

    Returns:
        The manager, which knows this process's domain, and its place in it.

    Raises:
        MeshError: A ValueError: the size of a domain does not divide `world_size`, or that is not
            the number of all processes.
    """
    global _manager
    _manager = DomainParallelManager(world_size, domain_parallel_size, shard_dim)
    return _manager


def get_domain_parallel_manager() -> Manager:
    """Return the manager set by `initialize_domain_parallel`, or None."""
    return _manager


@api_boundary
class HaloExchange(nn.Module):
    """Widens a block by rows of its neighbours: [h, ...] -> [h + 2 halo_width, ...] along `dim`.

    Args:
        halo_width: The number of rows at both sides, or a pair. Options are as in
            `torch_bridge.ops.halo_exchange`.
        dim: The dim that is sharded.
        boundary: What the rows beyond the edges are; zeros by default.
        shape: The global shape, if blocks differ in size.

    Examples:
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

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Return the wider block; without a manager, or without a width, the block itself."""
        manager = _sharding_manager(None)
        if manager is None or self.halo_width == 0:
            return x
        domain = _domain_of(manager)
        # Rows beyond one neighbour come from the next: the plan has as many messages as it needs.
        return halo_exchange(
            x, self.halo_width, self.dim, AXIS, domain, boundary=self.boundary, shape=self.shape
        )

    @staticmethod
    @api_boundary
    def trim(x: Tensor, halo_before: int, halo_after: int, dim: int = -2) -> Tensor:
        """Drop rows at both sides: [h, ...] -> [h - halo_before - halo_after, ...] along `dim`."""
        return x.narrow(dim, halo_before, x.shape[dim] - halo_before - halo_after)


@api_boundary
def shard_tensor(
    x: Tensor, dim: int = -2, manager: Manager = None, *, uneven: bool = False
) -> Tensor:
    """Cut this process's part out of a replicated tensor: [H, ...] -> [H/D, ...] along `dim`.

    D is the number of processes in a domain: 8 rows on D=2 -> rows 0 to 3, and 4 to 7. Nothing is
    sent. The gradient is this process's own, with zeros elsewhere.

    Args:
        x: The whole tensor.
        dim: The dim to shard.
        manager: The domains; None: those of `initialize_domain_parallel`.
        uneven: Parts may differ in size.

    Returns:
        A new contiguous tensor; `x` itself without a manager.

    Raises:
        ShapeError: A ValueError: D does not divide the length, and `uneven` is False.
    """
    manager = _sharding_manager(manager)
    if manager is None:
        return x
    n_parts = manager.domain_parallel_size
    length = x.shape[dim]
    # For its errors only: the part is cut below, as nothing has to be sent.
    compat.shard_whole(tuple(x.shape), dim, n_parts, AXIS, uneven=uneven)
    part_rows = ceil_div(length, n_parts)  # the last parts are smaller
    start = min(manager.domain_rank * part_rows, length)
    stop = min(start + part_rows, length)
    # A clone: the part must not keep the memory of the whole.
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


@api_boundary
def gather_tensor(
    x: Tensor, dim: int = -2, manager: Manager = None, *, shape: Shape = None, grad: Grad = "sum"
) -> Tensor:
    """Gather all parts of a domain on each of its processes: [H/D, ...] -> [H, ...] along `dim`.

    A domain is the D processes that share one sample.

    Args:
        x: This process's part.
        dim: The dim that is sharded.
        manager: The domains; None: those of `initialize_domain_parallel`.
        shape: The global shape, if D does not divide H.
        grad: What gradients of the results are, as in `torch_bridge.ops.all_gather`: addends
            ("sum": each process has its own loss), or equal ("replicated").

    Returns:
        The whole tensor; `x` itself without a manager.
    """
    manager = _sharding_manager(manager)
    if manager is None:
        return x
    return all_gather(x, dim, AXIS, _domain_of(manager), grad=grad, shape=shape)


@api_boundary
def shard_batch(
    batch: Mapping[str, Any],
    spatial_dims_5d: int = -2,
    spatial_dims_4d: int = -2,
    manager: Manager = None,
) -> Mapping[str, Any]:
    """Cut this process's part out of each tensor of a batch that has 4 or 5 dims.

    [B, C, H, W] -> [B, C, H/D, W] on D processes of a domain. Other values of the batch stay as they
    are. All processes of a domain pass the same batch; nothing is sent.

    Args:
        batch: Tensors, or any values, by name.
        spatial_dims_5d: The dim to shard of tensors with 5 dims.
        spatial_dims_4d: The dim to shard of tensors with 4 dims.
        manager: The domains; None: those of `initialize_domain_parallel`.

    Returns:
        A new dict. Parts are contiguous copies; without domains tensors stay as they are.
    """
    shard_dims = {4: spatial_dims_4d, 5: spatial_dims_5d}
    sharded = dict(batch)
    for key, x in batch.items():
        if isinstance(x, Tensor) and x.ndim in shard_dims:
            sharded[key] = shard_tensor(x, shard_dims[x.ndim], manager)
    return sharded


@api_boundary
def convert_to_domain_parallel(
    model: nn.Module,
    manager: Manager = None,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Callable[[Any], nn.Module]] | None = None,
    *,
    shape: Sequence[int | None] | None = None,
) -> nn.Module:
    """Convert a model, in place, so that each process of a domain computes its part of an array.

    Each process gives its part of the input, cut along `shard_dim`, and gets its part of the output
    for the whole: convolutions exchange rows with neighbours, norms average over processes. Gradients
    of parameters are this process's share, until `sync_domain_gradients`. Which layers can be
    converted says `torch_bridge.nn.domain_parallel`.

    Args:
        model: Any module.
        manager: The domains; None: those of `initialize_domain_parallel`.
        shard_dim: The dim of inputs that is sharded.
        custom_converters: A class -> a function that converts its modules; the result is called on
            blocks.
        shape: The inputs' global shape, if blocks differ in size.

    Returns:
        The model.

    Raises:
        MeshError: There is no manager.
        XshardError: A module has no exact form.

    Examples:
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
    if manager is None:
        manager = _manager
    if manager is None:
        hint = "initialize_domain_parallel(world_size, domain_parallel_size)"
        raise MeshError("no manager", hint=hint)
    parallel = domain_parallel(
        model,
        _layout_text(shard_dim),
        _domain_of(manager),
        shape=shape,
        sum_gradients=False,
        converters=custom_converters,
    )
    # In place, as in the original: the caller's own module object becomes the converted model.
    model.__class__ = type(parallel)
    # A dict of its own: Python 3.13 empties a shared one when the other module is collected.
    model.__dict__ = dict(parallel.__dict__)
    return model


@api_boundary
@torch.no_grad()
def sync_domain_gradients(model: nn.Module, manager: Manager = None) -> None:
    """Average parameters' gradients over the processes of a domain, which share one sample.

    The result is the gradient of the mean of these processes' losses.

    Args:
        model: A model with gradients, which are changed in place.
        manager: The domains; None: those of `initialize_domain_parallel`.
    """
    manager = _sharding_manager(manager)
    if manager is None:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # One collective for all gradients.
    means = redistribute(gradients, f"... | mean({AXIS}) -> ...", _domain_of(manager))
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)


def _sharding_manager(manager: Manager) -> Manager:
    """Return the manager, or the program's, if its domains have more than one process."""
    if manager is None:
        manager = _manager
    if manager is None or manager.domain_parallel_size <= 1:
        return None
    return manager


def _domain_of(manager: AnyManager) -> ProcessMesh:
    """Return the processes that shard this one's sample.

    They are the manager's `domain_group`, or neighbours in the world.
    """
    # CREDIT's own managers may keep something else under this name, or nothing.
    group = getattr(manager, "domain_group", None)
    if isinstance(group, dist.ProcessGroup):
        return process_mesh(group_mesh(group, AXIS))
    first_rank = process_mesh(group_mesh(None, AXIS)).device - manager.domain_rank
    return _neighbours(first_rank, manager.domain_parallel_size, dist.group.WORLD)


# Cached by the world too: its groups end with it.
@lru_cache(maxsize=256)
def _neighbours(first_rank: int, size: int, world: dist.ProcessGroup) -> ProcessMesh:
    return mesh_of_ranks(Mesh({AXIS: size}), range(first_rank, first_rank + size))


def _layout_text(shard_dim: int) -> str:
    """Return the layout with one sharded dim, for any number of dims: -2 -> "b c ... x0/domain x1".

    A dim counted from the end is a spatial one, behind batch and channels; 1 -> "x0 x1/domain ...".
    """
    if shard_dim < 0:
        spatial = [f"x{d}" for d in range(-shard_dim)]
        spatial[0] += f"/{AXIS}"
        return " ".join(["b", "c", "...", *spatial])
    leading = [f"x{d}" for d in range(shard_dim + 1)]
    leading[-1] += f"/{AXIS}"
    return " ".join([*leading, "..."])


def _placement(x: Tensor, shard_dim: int) -> Placement | None:
    """Return the placement of a block in the domain of the program's manager, if there is one."""
    manager = _sharding_manager(None)
    if manager is None:
        return None
    # A block that another layer returned has a record of its own layout.
    layout = Layout.parse(_layout_text(shard_dim)).resolved(x.ndim)
    placement = placed_as(x, layout, _domain_of(manager))
    # Gradients of parameters stay shares: `sync_domain_gradients` ends them.
    return replace(placement, gradient_share_axes=placement.axes)


@api_boundary
class DomainParallelConv2d(nn.Module):
    """A convolution of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`.

    Blocks have equal sizes, unless another layer returned them. Gradients of parameters are a
    process's share, until `sync_domain_gradients`.
    """

    default_dim: ClassVar[int] = -2
    conv: Any

    def __init__(self, conv: nn.Module, shard_dim: int | None = None) -> None:
        super().__init__()
        self.conv = conv
        self.shard_dim = self.default_dim if shard_dim is None else shard_dim

    @property
    def weight(self) -> Tensor:
        """The kernel of the convolution."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the convolution."""
        return self.conv.bias

    @property
    def halo_width(self) -> int:
        """The rows that CREDIT exchanges at either side.

        Here outputs get all the rows that they need.
        """
        # The dim among the spatial ones, from the front or from the end.
        spatial_dim = self.shard_dim - 2 if self.shard_dim >= 0 else self.shard_dim
        kernel_size: int = self.conv.kernel_size[spatial_dim]
        stride: int = self.conv.stride[spatial_dim]
        if not self.conv.transposed:
            return max(0, (kernel_size - stride) // 2)
        padding: int = self.conv.padding[spatial_dim]
        return padding if kernel_size > stride else 0

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Return the block of the result."""
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return self.conv(x)
        layer = layer_of(self.conv, placement.layout, placement.processes)
        # A view: the caller's tensor itself shall have no record.
        return layer(record(x.view_as(x), placement))


class DomainParallelConvTranspose2d(DomainParallelConv2d):
    """A transposed convolution of blocks `(b, c, h, w)`: `conv`, `shard_dim=-2`."""


class DomainParallelConv3d(DomainParallelConv2d):
    """A convolution of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""

    default_dim = 3


class DomainParallelConvTranspose3d(DomainParallelConv3d):
    """A transposed convolution of blocks `(b, c, t, h, w)`: `conv`, `shard_dim=3`."""


@api_boundary
class DomainParallelPeriodicConv2d(DomainParallelConv2d):
    """A `PeriodicConv2d` of blocks `(b, c, h, w)`, whose rows reflect at the poles.

    Args:
        periodic_conv: A module with a `conv` without padding, and the `padding` of both dims.
        shard_dim: The dim of rows.

    Raises:
        XshardError: Columns are sharded.
    """

    def __init__(self, periodic_conv: Any, shard_dim: int = -2) -> None:
        if shard_dim not in (2, -2):
            hint = "2 or -2: rows are sharded, columns wrap"
            raise XshardError(f"shard_dim={shard_dim}", hint=hint)
        super().__init__(periodic_conv.conv, shard_dim)
        self.padding = periodic_conv.padding
        self.halo_exchange = HaloExchange(self.padding, shard_dim, boundary="reflect")

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Return the block of the result: columns are whole, so they are padded on the spot."""
        p = self.padding
        wide = self.halo_exchange(F.pad(x, (p, p, 0, 0), mode="circular"))
        if _sharding_manager(None) is None:  # there was no exchange
            wide = F.pad(wide, (0, 0, p, p), mode="reflect")
        return self.conv(wide)


@api_boundary
class DomainParallelCrossEmbedBranch(DomainParallelConv2d):
    """A `ZeroPad2d` and a `Conv2d` without padding, in sequence, of blocks `(b, c, h, w)`."""

    def __init__(self, branch: Any, shard_dim: int = -2) -> None:
        super().__init__(branch[1], shard_dim)
        # `ZeroPad2d` counts dims from the last one.
        left, right, top, bottom = branch[0].padding
        self.padding = ((top, bottom), (left, right))

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Pad and convolve this process's block of an array `(b, c, h, w)`.

        The result is its block of what padding and convolving the whole array would give: zeros are
        added at the ends of the whole array only, and between blocks there are rows of neighbours.
        Without domains x is the whole array.
        """
        rows, columns = self.padding  # (top, bottom), (left, right)
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return self.conv(F.pad(x, (*columns, *rows)))
        convolution = Convolution(
            kernel=self.conv.kernel_size,
            stride=self.conv.stride,
            padding=self.padding,
            dilation=self.conv.dilation,
            groups=self.conv.groups,
        )
        y, y_placement = conv(x, placement, self.conv.weight, self.conv.bias, convolution)
        return record(y, y_placement)


@api_boundary
class DomainParallelGroupNorm(nn.GroupNorm):
    """A `GroupNorm` of blocks, with the statistics of the whole array."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        # The norm's own parameters, not new ones: a state dict stays as it is.
        self.__dict__.update(share_state(norm, type(self)).__dict__)

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Return the block of the result."""
        shard_dim = getattr(_sharding_manager(None), "shard_dim", -2)
        placement = _placement(x, shard_dim)
        if placement is None:
            return super().forward(x)
        layer = layer_of(self, placement.layout, placement.processes)
        # `forward`: a call would run this module's hooks twice.
        return layer.forward(record(x.view_as(x), placement))


@api_boundary
class DomainParallelInterpolate(nn.Module):
    """Resizes blocks `(b, c, h, w)`: `size` is the block's along `shard_dim`, as there."""

    def __init__(
        self, size: int | Sequence[int], mode: str = "bilinear", shard_dim: int = -2
    ) -> None:
        super().__init__()
        self.size = size
        self.mode = mode
        self.shard_dim = shard_dim

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Return the resized block."""
        if isinstance(self.size, int):
            size = [self.size] * (x.ndim - 2)
        else:
            size = list(self.size)
        placement = _placement(x, self.shard_dim)
        if placement is None:
            return F.interpolate(x, size=size, mode=self.mode, align_corners=False)
        # From the size of a block to the size of the whole.
        size[self.shard_dim % x.ndim - 2] *= placement.processes.mesh.n_devices
        y, y_placement = interpolate(x, placement, size, None, self.mode, align_corners=False)
        return record(y, y_placement)
