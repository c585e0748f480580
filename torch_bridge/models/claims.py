"""What rules claim: blocks that come to a rule as replicas are equal. Compared once, by a sample of elements.

A batch that is already in shards fits "b i -> b/dp i", which expects a whole one: each process would train on
a part of its part, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge.calls.move import PLAIN_TYPES
from torch_bridge.lower.collectives import FOUR_BITS
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.replicas import ComparedBlock, Comparison, compare_all
from torch_bridge.versions.functorch import has_functorch_transforms
from xshard import Layout, Sharding
from xshard.dtypes import name_of
from xshard.models import ActivationRule
from xshard.replicas import ReplicaCheck

SAMPLED = 256  # elements of a block
# The distance of these in memory: a prime, which goes through all columns, whatever the length of a row.
_DISTANCE = 2_654_435_761


class Claim(NamedTuple):
    """What a rule calls equal on several processes, and some elements of a block that has come to it."""

    check: ReplicaCheck
    sample: Tensor


def claim_of(rule: ActivationRule, x: Tensor, context: ParallelContext, title: str) -> Claim | None:
    """Return what a rule claims of a block as it comes: that replicas are equal, and where.

    A rule takes blocks for replicas along the axes on its right side alone, as dp in "b i -> b/dp i". Of
    axes that it does not name it says nothing, and `copy` on its left may mark what differs. Returns None
    if it claims nothing, and for a block without values, as on the meta device.

    Args:
        rule: The rule.
        x: This process's block.
        context: The mesh.
        title: The name of the block in errors.
    """
    axes = [axis for axis in rule.dst.axes if axis not in rule.src.axes]
    mesh = context.processes.submesh(axes).mesh
    if not mesh.long_axes or not _has_values(x):
        return None
    replicated = Sharding(Layout("...").resolved(x.ndim), mesh, tuple(x.shape))
    check = ReplicaCheck(
        sharding=replicated,
        mesh=context.axes,
        dtype=name_of(x.dtype),
        text=rule.text,
        cotangents=False,
        name=title,
    )
    indices = torch.arange(SAMPLED, device=x.device) * _DISTANCE % x.numel()
    return Claim(check, x.detach().reshape(-1)[indices])


def _has_values(x: Tensor) -> bool:
    """Return whether a block has elements to read: it is not empty, fake or inside a transform."""
    is_plain = type(x) in PLAIN_TYPES and not x.is_meta and not has_functorch_transforms()
    return is_plain and x.numel() > 0 and x.dtype not in FOUR_BITS


def check_claims(
    claims: Sequence[Claim | None], context: ParallelContext, device: torch.device
) -> None:
    """Raise ReplicaError, on all processes, if blocks differ that should be equal.

    Args:
        claims: One for each rule, in an order equal on all processes; None where nothing has come.
        context: The mesh of the processes, which all call it.
        device: Where tensors can travel.
    """
    processes = context.processes
    # Some processes may not have called a module, or not with this argument.
    flags = torch.tensor([float(claim is not None) for claim in claims], device=device)
    is_on_all = context.all_reduce(flags, "min").tolist()
    compared = []
    for claim, is_shared in zip(claims, is_on_all, strict=True):
        if is_shared and claim is not None:
            comparison = Comparison(
                claim.check, processes.ranks, processes=processes, callers=processes
            )
            compared.append(ComparedBlock(comparison, claim.sample))
    if compared:
        compare_all(compared)
