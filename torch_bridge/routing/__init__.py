"""`route`: rows to processes that values name, as tokens to experts, and back; `xshard.routing` says what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.calls.move import between_graphs, ranked
from torch_bridge.lower.collectives import Collective
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import (
    Group,
    MeshLike,
    as_mesh,
    check_device,
    mesh_of,
    process_mesh,
)
from torch_bridge.routing.copies import Copies, Routed
from xshard.errors import PlanError, ShapeError
from xshard.layout import Layout
from xshard.layout.layout import check_axes
from xshard.ops import Axes
from xshard.routing import Groups, check_rows


class RouteCall(NamedTuple):
    """The options of `route`, without its rows."""

    axes: tuple[str, ...]
    mesh: MeshLike
    groups: Any = None
    capacity: int | None = None
    sizes: int | None = None
    debug: bool = False

    def facts(self, blocks: Sequence[Tensor], to: Tensor) -> desync.CallFacts:
        """What processes compare before this call. Raises as `route` does."""
        layout = Layout.parse(f"t/({','.join(self.axes)})")
        check_axes(layout, mesh_of(as_mesh(self.mesh, "route(x, to, axis, mesh)")), str(layout))
        whole = not (to.is_floating_point() or to.is_complex() or to.dtype == torch.bool)
        check_rows(blocks[0].shape, to.shape, whole, capacity=self.capacity, sizes=self.sizes)
        check_device(to.device)
        if torch._C._functorch.is_batchedtensor(to) or to.is_meta:
            what = "to says where rows go by its values: none are known, or there is one set for each batch"
            raise PlanError(
                what, hint="vmap(..., in_dims) with None for to; real tensors, not meta"
            )
        rows = str([(x.dtype, tuple(x.shape[1:])) for x in blocks])
        sent = {"rows": rows, "choices": str(to.shape[1:]), "options": str(self[2:5])}
        part = process_mesh(self.mesh).along(self.axes).ranks
        return desync.CallFacts(
            {"mesh": ranked(self.mesh)}, sent | desync.derivatives_of(*blocks), part, {}
        )

    def send(self, blocks: Sequence[Tensor], to: Tensor) -> tuple[Routed, list[Tensor]]:
        """Rows of several tensors, in one all-to-all -> the route of the first, and the copies of each."""
        compared = None
        if self.debug or desync.ALWAYS:
            text = f"route over '{','.join(self.axes)}'"
            compared = desync.compare_call(self.mesh, text, lambda: self.facts(blocks, to))
        else:
            self.facts(blocks, to)
        processes = process_mesh(self.mesh).along(self.axes)
        n = processes.mesh.n_devices
        group = processes.group(self.axes)
        n_rows = len(to)
        groups = Groups.of(self.groups, n)
        most = max(groups.sizes)
        last = len(groups.parts)
        chosen = (to if to.ndim == 2 else to[:, None]).long()
        # Groups as `part * most + number there`; those to nowhere as of a part after the last one.
        places = _places(groups, to.device)[chosen.where((chosen >= 0) & (chosen < last), last)]
        parts = places // most
        meets = torch.zeros(n_rows, n + 1, dtype=torch.bool, device=to.device).scatter_(
            1, parts, True
        )[:, :n]
        order = meets.cumsum(0) - 1
        limit = self.sizes or self.capacity
        kept = meets if limit is None else meets & (order < limit)
        count = kept.sum(0)
        if self.sizes is None:
            is_sent = pad(kept, (0, 1)).gather(1, parts).long()
            choices = count.new_zeros(n + 1).scatter_add_(
                0, parts.reshape(-1), is_sent.reshape(-1)
            )[:n]
            sent, received, came = _exchanged(count, choices, to, blocks, group, last)
            starts = count.cumsum(0) - count
        else:
            sent = received = [self.sizes] * n
            starts = torch.arange(n, device=to.device) * self.sizes
            came = n * self.sizes * chosen.shape[1]
        # Copies in the order in which they are sent, as `row * n + part`; `n_rows * n` is padding.
        slots = (starts + order).where(kept, sum(sent))
        every = torch.arange(n_rows * n, device=to.device)
        copies = count.new_full((sum(sent) + 1,), n_rows * n).scatter_(0, slots.reshape(-1), every)[
            :-1
        ]
        index = copies // n
        part = copies % n
        beside = (pad(places, (0, 0, 0, 1), value=n * most)[index] - part[:, None] * most).int()
        there = Copies(group, index, n_rows, sent, received, self.sizes is not None, beside=beside)
        moved: Any = Redistribute.apply(there, *blocks)
        moved = list(moved) if isinstance(moved, tuple) else [moved]
        here = there.arrived[0].long()
        own = groups.sizes[processes.device]
        here = here.where(
            (here >= 0) & (here < own), own
        )  # `own` is for choices of others, and comes last
        by_group, choices = here.reshape(-1).sort(stable=True)
        dropped = meets.sum() - count.sum()
        k = here.shape[1]
        return Routed(
            moved[0], by_group[:came], choices[:came], own, k, dropped, there, compared
        ), moved


def _exchanged(
    copies: Tensor,
    choices: Tensor,
    to: Tensor,
    blocks: Sequence[Tensor],
    group: Group,
    n_groups: int,
) -> tuple[list[int], list[int], int]:
    """Copies and choices for each part -> copies for each, copies and choices from all, after one round."""
    width = sum(math.prod(x.shape[1:]) * x.element_size() for x in blocks)
    most = to.max().long() if to.numel() else copies.new_tensor(-1)
    about = torch.stack([most, *(most.new_full((), n) for n in (width, math.prod(to.shape[1:])))])
    mine = torch.cat([torch.stack([copies, choices], 1), about.expand(len(copies), 3)], 1)
    sizes = [mine.shape[1]] * len(mine)
    each = Collective("all_to_all", group, sizes, sizes, is_even=True).run(
        mine.view(-1), mine.shape
    )
    sent, reports = torch.stack([mine, each]).tolist()  # the host waits here, and nowhere else
    by_rank = dict(zip(group.ranks, reports, strict=True))
    for rank, (_, _, highest, *_) in by_rank.items():
        if highest >= n_groups:
            hint = f"groups are 0 to {n_groups - 1}, as groups= says; a number below 0 is none"
            raise ShapeError(f"rank {rank} has a row for group {highest}", hint=hint)
    if len({tuple(report[3:]) for report in reports}) > 1:
        hint = ", ".join(f"rank {r}: {x[3]} bytes, {x[4]} choices" for r, x in by_rank.items())
        raise ShapeError("rows of processes differ in their bytes, or in their choices", hint=hint)
    return [x[0] for x in sent], [x[0] for x in reports], sum(x[1] for x in reports)


@lru_cache(maxsize=256)
def _places(groups: Groups, device: torch.device) -> Tensor:
    """`part * most groups of a part + number there` of each group, and one beyond all parts."""
    most = max(groups.sizes)
    pairs = zip(groups.parts, groups.numbers, strict=True)
    return torch.tensor(
        [*(part * most + i for part, i in pairs), groups.n_parts * most], device=device
    )


@between_graphs
def route(
    x: Tensor,
    to: Tensor,
    axis: Axes,
    mesh: MeshLike,
    *,
    groups: int | Sequence[int] | None = None,
    capacity: int | None = None,
    sizes: int | None = None,
    debug: bool = False,
) -> Routed:
    """Send each row to the processes of the groups that it chose, as tokens to experts, differentiably.

    `[rows, ...]` -> a `Routed`: its `rows` are those that came, a row per choice, `[n, ...]`, by group, then
    by the process and the row that they come from; `sizes` says how many each group has. `back(y, weights=)`
    brings one result per row home and adds them up. A process gets one copy of a row, however many of its
    groups the row chose, and one returns; gradients are the same two moves exchanged.
    All processes of the axis call it, with any number of rows. The host waits once, for the numbers of
    copies; then rows travel in one all-to-all, with 4 bytes beside each for every choice.

    to: the group of each row, `[rows]`, or several, `[rows, k]`; a number below 0 goes nowhere.
    axis: a mesh axis, or several taken as one, in the order of the mesh.
    groups: their number, sharded as `"g/axis"` says, or for each the part of the axis that it is on.
    Default: one per process. capacity: at most so many copies from each process to each; the first rows go.
    `Routed.dropped` is a tensor with the number of copies that were dropped here. Default: none are.
    sizes: the number of copies from each process to each, if it is known: nothing is counted, the host does
    not wait. Further ones are dropped, and missing ones are padding, which no group has.
    debug: compare the calls of all processes first, as in `redistribute`.
    Raises ShapeError for groups that are not there, on all processes of the axis, before rows are sent;
    MeshError, NotationError, DesyncError and CollectiveError as `redistribute` does.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> def doubled():
    ...     x, to = torch.arange(3.0)[:, None], torch.tensor([[3, 0], [0, 1], [3, -1]])
    ...     there = xt.route(x, to, "ep", xs.Mesh(ep=2), groups=4)
    ...     return there.sizes.tolist(), there.back(
    ...         2 * there.rows, weights=torch.ones(3, 2)
    ...     ).flatten().tolist()
    >>> xt.testing.run_ranks(2, doubled)
    [([4, 2], [0.0, 4.0, 4.0]), ([0, 4], [0.0, 4.0, 4.0])]
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    return RouteCall(axes, mesh, groups, capacity, sizes, debug).send([x], to)[0]
