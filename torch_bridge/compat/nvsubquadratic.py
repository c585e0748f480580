"""Drop-ins for `nvsubquadratic.parallel`: exchange shards of sequence and channels.

Also for the functions of these names in savanna, NeMo and BioNeMo. They follow the code there, not
its docstrings: "split" and "full" refer to the sequence, which is in zigzag order: rank r of P
holds chunks r and 2P-1-r. Better here: one copy before the collective and one after it; derivatives
of any order, and forward mode; blocks of different sizes (`shape=`); any dims. Lengths that do not
divide are refused before sending.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts
from torch_bridge.mesh.process_mesh import group_mesh, mesh_of, process_mesh
from torch_bridge.redistribution import redistribute
from xshard import compat
from xshard.errors import api_boundary
from xshard.ops import Shape

AXIS = "cp"
Group = dist.ProcessGroup | int | None  # a number on processes outside of the group
Direction = Literal["split_to_full", "full_to_split"]


@api_boundary
def all_to_all_single_fn(
    group: Group,
    type: Direction,
    input: Tensor,
    with_zigzag_splitting: bool = True,
    *,
    shape: Shape = None,
    channel_dim: int = 1,
    sequence_dim: int = 2,
    debug: bool = False,
) -> Tensor:
    """Exchange a sharded sequence for sharded channels, or back, differentiably.

    "split_to_full": [B, C, L/P, ...] -> [B, C/P, L, ...]; "full_to_split" is the way back. The
    gradient is the move back, unscaled.

    Args:
        group: The processes. None: all.
        type: The direction.
        input: A block with 3, 4 or 5 dims, the sequence the first spatial one.
        with_zigzag_splitting: The sequence is sharded in zigzag order, not in contiguous pieces.
        shape: The global shape, [B, C, L, ...], if lengths do not divide.
        channel_dim: The dim of channels.
        sequence_dim: The dim of the sequence.
        debug: First compare flags and shapes with the other ranks. If they differ or one of them
            fails, all of them raise DesyncError. Also: `XSHARD_DEBUG=1`.

    Raises:
        XshardError: A ValueError: other types, dims and lengths, or a group without this process.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from torch_bridge.compat.nvsubquadratic import all_to_all_single_fn
        >>> def turn():
        ...     channel = torch.arange(8).view(1, 1, 8) + 100 * torch.distributed.get_rank()
        ...     return all_to_all_single_fn(None, "full_to_split", channel)[0].tolist()
        >>> xt.testing.run_ranks(2, turn)[0]  # chunks 0 and 3 of both channels
        [[0, 1, 6, 7], [100, 101, 106, 107]]
    """
    mesh = group_mesh(group, AXIS)

    def expression() -> str:
        return compat.all_to_all_single(
            type,
            tuple(input.shape),
            mesh_of(mesh).n_devices,
            AXIS,
            zigzag=with_zigzag_splitting,
            even=shape is None,
            channel_dim=channel_dim,
            sequence_dim=sequence_dim,
        )

    def facts() -> CallFacts:
        flags = {
            "type": type,
            "with_zigzag_splitting": str(with_zigzag_splitting),
            "shape": str(shape),
        }
        return CallFacts(
            equal_on_all=flags,
            equal_on_peers={"means": expression()},
            peers=ranks,
            not_compared={"input": str(tuple(input.shape))},
        )

    if debug or desync.ALWAYS:
        ranks = process_mesh(mesh).ranks
        desync.compare_ranks(ranks, f"all_to_all_single_fn(.., {type!r}, ..)", facts)
    return redistribute(input, expression(), mesh, shape=shape, debug=debug)


class AllToAllSingleFunction:
    """`all_to_all_single_fn` under the name and with the arguments of the autograd function."""

    @staticmethod
    @api_boundary
    def apply(
        input_tensor: Tensor,
        group: Group,
        type: Direction,
        with_zigzag_splitting: bool,
        **options: Any,
    ) -> Tensor:
        """Exchange as `all_to_all_single_fn` does: [B, C, L/P, ...] -> [B, C/P, L, ...] or back.

        options: shape, dims and debug, as there; errors are the same, too.
        """
        return all_to_all_single_fn(group, type, input_tensor, with_zigzag_splitting, **options)


@api_boundary
def zigzag_split_across_group_ranks(data: Tensor, group: Group, seq_dim: int = 0) -> Tensor:
    """Return this rank's chunks r and 2P-1-r of a replicated tensor: [L, ...] -> [L/P, ...].

    Nothing is sent. The gradient is this rank's own, with zeros elsewhere. Lengths are as under
    `l/zigzag(cp)`.

    Args:
        data: The whole tensor.
        group: The processes. None: all.
        seq_dim: The dim of the sequence.
    """
    expression = compat.zigzag_split(data.shape, seq_dim, AXIS)
    return redistribute(data, expression, group_mesh(group, AXIS))


@api_boundary
def zigzag_gather_from_group_ranks(
    data: Tensor, group: Group, seq_dim: int = 0, *, shape: Shape = None
) -> Tensor:
    """Gather a sequence that was split in zigzag order, on every rank: [L/P, ...] -> [L, ...].

    In zigzag order the sequence is cut into 2P chunks, and rank r of P holds chunks r and
    2P - 1 - r. The result has the natural order. Gradients are summed over ranks (reduce-scatter).

    Args:
        data: This rank's chunks.
        group: The processes. None: all.
        seq_dim: The dim of the sequence.
        shape: The global shape, if L does not divide.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from torch_bridge.compat import nvsubquadratic
        >>> def turn():
        ...     mine = nvsubquadratic.zigzag_split_across_group_ranks(torch.arange(6), None)
        ...     return nvsubquadratic.zigzag_gather_from_group_ranks(
        ...         mine, None, shape=(6,)
        ...     ).tolist()
        >>> xt.testing.run_ranks(2, turn)[1]
        [0, 1, 2, 3, 4, 5]
    """
    expression = compat.zigzag_gather(data.shape, seq_dim, AXIS)
    return redistribute(data, expression, group_mesh(group, AXIS), shape=shape)
