"""Drop-ins for `credit.domain_parallel`: weather models with rows of latitude cut over processes.

Replaces `DomainParallelManager`, `initialize_domain_parallel`, `get_domain_parallel_manager`, `HaloExchange`,
`shard_tensor`, `gather_tensor`, `shard_batch`, `convert_to_domain_parallel`, and of `credit.parallel.domain`
`sync_domain_gradients`; its `DomainParallel...` layers are in `credit_layers`. One manager serves the whole
program, as there; a manager may be any object with `domain_parallel_size` and `domain_rank`.

Better here: a halo may be wider than a block, have two widths, and be periodic, reflected or cross a pole;
`gather_tensor` has a gradient; blocks may differ in size; derivatives of any order. A converted model is
exact for every kernel, stride, dilation and padding, for transposed convolutions, pools, interpolation and
norms; a module without an exact form is refused, with its path, and not run on each part separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.many import redistribute_many
from torch_bridge.mesh.process_mesh import ProcessMesh, group_mesh, mesh_of_ranks, process_mesh
from torch_bridge.nn.domain_parallel import domain_parallel
from torch_bridge.ops import Grad, all_gather, halo_exchange
from xshard import Mesh, compat
from xshard.errors import MeshError
from xshard.ops import HaloWidth

AXIS = "domain"


class DomainParallelManager:
    """Groups of D processes, ranks [i D, (i+1) D), that cut one sample; ranks j, j + D, ... have others.

    world_size, domain_parallel_size: the number of processes, and D. shard_dim: the dim to cut.
    Raises MeshError, a ValueError, if D does not divide the number, or that is not the world's size.

    >>> import torch_bridge as xt
    >>> from torch_bridge.compat import DomainParallelManager
    >>> def turn():
    ...     manager = DomainParallelManager(4, 2)
    ...     return manager.dp_rank, manager.domain_rank, manager.neighbor_ranks()
    >>> xt.testing.run_ranks(4, turn)
    [(0, 0, (None, 1)), (0, 1, (0, None)), (1, 0, (None, 3)), (1, 1, (2, None))]
    """

    def __init__(self, world_size: int, domain_parallel_size: int, shard_dim: int = -2) -> None:
        if world_size % domain_parallel_size:
            raise MeshError(
                f"{world_size} processes in domains of {domain_parallel_size}",
                hint="domain_parallel_size divides world_size",
            )
        self.world_size, self.domain_parallel_size = world_size, domain_parallel_size
        self.data_parallel_size, self.shard_dim = world_size // domain_parallel_size, shard_dim
        self.processes = process_mesh(Mesh({"data": self.data_parallel_size, AXIS: domain_parallel_size}))
        # Made here, where all processes are.
        self._groups = {axis: self.processes.group((axis,)).process_group for axis in ("data", AXIS)}
        self.dp_rank, self.domain_rank = divmod(self.processes.device, domain_parallel_size)

    @property
    def domain_group(self) -> dist.ProcessGroup:
        """The processes that cut this one's sample."""
        return self._groups[AXIS]

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The processes with the same rows of other samples."""
        return self._groups["data"]

    @property
    def domain_world_size(self) -> int:
        return self.domain_parallel_size

    @property
    def dp_world_size(self) -> int:
        return self.data_parallel_size

    @property
    def is_first_domain_rank(self) -> bool:
        return self.domain_rank == 0

    @property
    def is_last_domain_rank(self) -> bool:
        return self.domain_rank == self.domain_parallel_size - 1

    def neighbor_ranks(self) -> tuple[int | None, int | None]:
        """The global ranks that hold the rows before and after, None beyond the ends."""
        rank = self.processes.ranks[self.processes.device]
        return (
            None if self.is_first_domain_rank else rank - 1,
            None if self.is_last_domain_rank else rank + 1,
        )


_manager: DomainParallelManager | None = None


def initialize_domain_parallel(
    world_size: int, domain_parallel_size: int, shard_dim: int = -2
) -> DomainParallelManager:
    """Set the manager that functions of this module use by default. All processes call it."""
    global _manager
    _manager = DomainParallelManager(world_size, domain_parallel_size, shard_dim)
    return _manager


def get_domain_parallel_manager() -> DomainParallelManager | None:
    """The manager set by `initialize_domain_parallel`, or None."""
    return _manager


class HaloExchange(nn.Module):
    """Widens a block by rows of its neighbours: [h, ...] -> [h + 2 halo_width, ...] along `dim`.

    Zeros beyond the ends of the array, unless `boundary` says otherwise. The gradients of copied rows are
    added at their owner. Without a manager, or on one process, a block stays as it is. halo_width, boundary,
    shape: as in `torch_bridge.halo_exchange`.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge import compat
    >>> def turn():
    ...     compat.initialize_domain_parallel(2, 2)
    ...     x = torch.arange(4).view(4, 1) + 100 * torch.distributed.get_rank()
    ...     return compat.HaloExchange(2)(x).flatten().tolist()
    >>> xt.testing.run_ranks(2, turn)
    [[0, 0, 0, 1, 2, 3, 100, 101], [2, 3, 100, 101, 102, 103, 0, 0]]
    """

    def __init__(
        self,
        halo_width: HaloWidth,
        dim: int = -2,
        *,
        boundary: str = "zero",
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.halo_width, self.dim, self.boundary, self.shape = halo_width, dim, boundary, shape

    def forward(self, x: Tensor) -> Tensor:
        manager = cutting_manager(None)
        if manager is None or self.halo_width == 0:
            return x
        return halo_exchange(
            x, self.halo_width, self.dim, AXIS, domain_of(manager), boundary=self.boundary, shape=self.shape
        )

    @staticmethod
    def trim(x: Tensor, halo_before: int, halo_after: int, dim: int = -2) -> Tensor:
        """Drop rows at both ends: [h, ...] -> [h - halo_before - halo_after, ...] along `dim`."""
        return x.narrow(dim, halo_before, x.shape[dim] - halo_before - halo_after)


def shard_tensor(
    x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None, *, uneven: bool = False
) -> Tensor:
    """This process's part of a tensor replicated in its domain: [H, ...] -> [H/D, ...] along `dim`.

    uneven: parts may differ in size. Nothing is sent; the gradient is this process's own, zeros elsewhere.
    Raises ShapeError, a ValueError, for a length that D does not divide, unless `uneven`.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge import compat
    >>> def turn():
    ...     compat.initialize_domain_parallel(2, 2)
    ...     mine = compat.shard_tensor(torch.arange(5), dim=0, uneven=True)
    ...     return mine.tolist(), compat.gather_tensor(mine, dim=0, shape=(5,)).tolist()
    >>> xt.testing.run_ranks(2, turn)
    [([0, 1, 2], [0, 1, 2, 3, 4]), ([3, 4], [0, 1, 2, 3, 4])]
    """
    found = cutting_manager(manager)
    if found is None:
        return x
    n, length = found.domain_parallel_size, x.shape[dim]
    compat.shard_whole(tuple(x.shape), dim, n, AXIS, uneven=uneven)  # raises for other lengths
    first, last = (min(i * -(-length // n), length) for i in (found.domain_rank, found.domain_rank + 1))
    return x.narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)


def gather_tensor(
    x: Tensor,
    dim: int = -2,
    manager: DomainParallelManager | None = None,
    *,
    shape: Sequence[int] | None = None,
    grad: Grad = "sum",
) -> Tensor:
    """All parts of a domain, on each of its processes: [H/D, ...] -> [H, ...] along `dim`.

    shape: the global shape, where D does not divide H. grad: the meaning of the results' gradients, as in
    `torch_bridge.all_gather`: addends ("sum": each process has a loss of its own), or equal ("replicated").
    """
    found = cutting_manager(manager)
    if found is None:
        return x
    return all_gather(x, dim, AXIS, domain_of(found), grad=grad, shape=shape)


def shard_batch(
    batch: Mapping[str, Any],
    spatial_dims_5d: int = -2,
    spatial_dims_4d: int = -2,
    manager: DomainParallelManager | None = None,
) -> Mapping[str, Any]:
    """`shard_tensor` of the tensors with 4 or 5 dims; everything else is returned as it is."""
    dims = {4: spatial_dims_4d, 5: spatial_dims_5d}
    ranks = {key: value.ndim if isinstance(value, Tensor) else 0 for key, value in batch.items()}
    return {
        key: shard_tensor(value, dims[ranks[key]], manager) if ranks[key] in dims else value
        for key, value in batch.items()
    }


def convert_to_domain_parallel(
    model: nn.Module,
    manager: DomainParallelManager | None = None,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Callable[[Any], nn.Module]] | None = None,
    *,
    shape: Sequence[int | None] | None = None,
) -> nn.Module:
    """Turn a model, in place, into one of blocks: outputs and gradients are those of the whole array.

    Inputs that have `shard_dim` besides batch and channels are cut along it. custom_converters: class ->
    function of a module of that class; its result is called on blocks as it is. shape: the inputs' global
    shape, where blocks differ in size. Gradients of parameters are this process's share, until
    `sync_domain_gradients`. The rest is as in `torch_bridge.nn.domain_parallel`, which makes another
    model and leaves this one as it is. Raises XshardError for a module without an exact form, with its path.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge import compat
    >>> def turn():
    ...     manager = compat.initialize_domain_parallel(2, 2)
    ...     conv = torch.nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    ...     torch.nn.init.ones_(conv.weight)
    ...     model = compat.convert_to_domain_parallel(torch.nn.Sequential(conv), manager)
    ...     return model(compat.shard_tensor(torch.ones(1, 1, 8, 2))).flatten().tolist()
    >>> xt.testing.run_ranks(2, turn)
    [[4.0, 6.0], [6.0, 6.0]]
    """
    found = manager or _manager
    if found is None:
        raise MeshError("no manager", hint="initialize_domain_parallel(world_size, domain_parallel_size)")
    parallel = domain_parallel(
        model,
        layout_text(shard_dim),
        domain_of(found),
        shape=shape,
        sum_gradients=False,
        converters=custom_converters,
    )
    # A dict of its own: Python 3.13 empties a shared one when the other module is collected.
    model.__class__, model.__dict__ = type(parallel), dict(parallel.__dict__)
    return model


def layout_text(shard_dim: int) -> str:
    """The layout with one dim cut, for any number of dims; counted from the end, it is a spatial one."""
    names = [f"x{d}" for d in range(-shard_dim if shard_dim < 0 else shard_dim + 1)]
    if shard_dim < 0:
        return " ".join(("b", "c", "...", f"{names[0]}/{AXIS}", *names[1:]))
    return " ".join((*names[:-1], f"{names[-1]}/{AXIS}", "..."))


@torch.no_grad()
def sync_domain_gradients(model: nn.Module, manager: DomainParallelManager | None = None) -> None:
    """Average the gradients of parameters over the domain: those of the mean of its processes' losses.

    One all-reduce per dtype.
    """
    found = cutting_manager(manager)
    if found is None:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    means = redistribute_many(gradients, f"... | mean({AXIS}) -> ...", domain_of(found))
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)


def cutting_manager(manager: DomainParallelManager | None) -> DomainParallelManager | None:
    """The given manager, or that of the program, if its domains have more than one process."""
    found = manager or _manager
    return None if found is None or found.domain_parallel_size <= 1 else found


def domain_of(manager: DomainParallelManager) -> ProcessMesh:
    """The processes that cut this one's sample: those of `domain_group`, or neighbours in the world."""
    group = getattr(manager, "domain_group", None)
    if isinstance(group, dist.ProcessGroup):
        return process_mesh(group_mesh(group, AXIS))
    first = process_mesh(group_mesh(None, AXIS)).device - manager.domain_rank
    return _neighbours(first, manager.domain_parallel_size, dist.group.WORLD)


@lru_cache(maxsize=256)
def _neighbours(first: int, size: int, world: dist.ProcessGroup) -> ProcessMesh:
    return mesh_of_ranks(Mesh({AXIS: size}), range(first, first + size))
