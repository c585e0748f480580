"""Every drop-in beside other ways to the same values and gradients, by verb, and how they are measured.

Ways: ours; the replaced system's own, with raw collectives; torch.distributed.nn.functional; DTensor.
A way without a form that has the same gradient is left out.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from benchmarks.drop_ins import transcribed
from benchmarks.halo.ways import AXIS, gathered
from benchmarks.torch_calls import Calls, Figures, calls, compared, fake_group, medians
from torch_bridge.compat import credit, ksuit, nvsubquadratic, poptorch

OURS = "xshard"
RAW = "transcribed"
FUNCTIONAL = "nn.functional"
DTENSOR = "DTensor"


@dataclass(frozen=True)
class Verb:
    """A drop-in, the shape of its block, and the ways to do it, ours first.

    replicas: whether all ranks have the same block.
    """

    name: str
    system: str
    shape: tuple[int, ...]
    ways: Mapping[str, Callable[[Tensor], Tensor]]
    replicas: bool = False

    def block(self) -> Tensor:
        """This rank's block, of whole numbers."""
        x = torch.arange(float(math.prod(self.shape))).view(self.shape) % 97
        return x if self.replicas else x + dist.get_rank()


@functools.lru_cache(maxsize=8)
def _mesh(world: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))


def _dtensor(
    src: Placement, dst: Placement, grad: Placement | None = None
) -> Callable[[Tensor], Tensor]:
    """One redistribution of a DTensor. grad: the placement of the result's gradients."""

    def move(x: Tensor) -> Tensor:
        placed = DTensor.from_local(x, _mesh(dist.group.WORLD), [src], run_check=False)
        moved = placed.redistribute(placements=[dst])
        return moved.to_local(grad_placements=None if grad is None else [grad])

    return move


def _in_natural_order(x: Tensor) -> Tensor:
    return transcribed.permuted(x, transcribed.zigzag(2 * dist.get_world_size()).argsort())


def _exchanged(x: Tensor) -> Tensor:
    return functional.all_to_all_single(torch.empty_like(x), x)


VERBS = (
    Verb(
        "AllToAllSingleFunction",
        "nvSubquadratic",
        (2, 64, 512),
        {
            OURS: lambda x: nvsubquadratic.AllToAllSingleFunction.apply(
                x, None, "split_to_full", True
            ),
            RAW: transcribed.split_to_full,
            FUNCTIONAL: lambda x: transcribed.gathered_sequence(x, _exchanged),
            DTENSOR: lambda x: _in_natural_order(_dtensor(Shard(2), Shard(1))(x)),
        },
    ),
    Verb(
        "all_gather_grad",
        "ksuit",
        (64, 1024),
        {
            OURS: ksuit.all_gather_grad,
            RAW: lambda x: torch.cat(transcribed.all_gather_grad(x)),
            FUNCTIONAL: lambda x: torch.cat(functional.all_gather(x)),
            DTENSOR: _dtensor(Shard(0), Replicate(), Partial()),
        },
    ),
    Verb(
        "all_gather_grad_overwrite",
        "ksuit",
        (64, 1024),
        {
            OURS: ksuit.all_gather_grad_overwrite,
            RAW: lambda x: torch.cat(transcribed.gathered_overwritten(x)),
            DTENSOR: _dtensor(Shard(0), Replicate()),
        },
    ),
    Verb(
        "all_reduce_sum_grad",
        "ksuit",
        (64, 1024),
        {
            OURS: ksuit.all_reduce_sum_grad,
            RAW: transcribed.reduced_sum,
            DTENSOR: _dtensor(Partial(), Replicate()),
        },
    ),
    Verb(
        "HaloExchange",
        "CREDIT",
        (1, 16, 64, 64),
        {
            OURS: credit.HaloExchange(transcribed.HALO),
            RAW: transcribed.halo,
            DTENSOR: lambda x: gathered(x, transcribed.HALO, _mesh(dist.group.WORLD)),
        },
    ),
    Verb(
        "all_reduce_cross_replica_sum(.., True)",
        "poptorch",
        (64, 1024),
        {
            OURS: lambda x: poptorch.all_reduce_cross_replica_sum(x, dist.get_world_size(), True),
            RAW: transcribed.summed_gradient,
            DTENSOR: _dtensor(Replicate(), Replicate(), Partial()),
        },
        replicas=True,
    ),
    Verb(
        "all_to_all_single_cross_replica",
        "poptorch",
        (64, 1024),
        {
            OURS: lambda x: poptorch.all_to_all_single_cross_replica(x, dist.get_world_size()),
            RAW: transcribed.all_to_all_single,
            FUNCTIONAL: _exchanged,
        },
    ),
)


def on_a_rank(rounds: int) -> list[Figures]:
    """Median seconds and received bytes of every way, by verb, on one of several gloo ranks."""
    return [compared(_calls(verb), rounds) for verb in VERBS]


def host(ranks: int, rounds: int) -> list[Figures]:
    """Seconds that the host needs per call, by verb: no rank waits for another, nothing is sent."""
    with fake_group(ranks):
        return [medians(_calls(verb), rounds) for verb in VERBS]


def _calls(verb: Verb) -> dict[str, Calls]:
    # nn.functional warns at every call that it is deprecated; the replacement it names is private.
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
    credit.initialize_domain_parallel(dist.get_world_size(), dist.get_world_size())
    return {name: calls(way, verb.block()) for name, way in verb.ways.items()}
