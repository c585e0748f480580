"""One call of `route`: which copies of rows a process sends, how many come, and the order of what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.calls.move import mesh_with_ranks
from torch_bridge.lower.collectives import Collective
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import (
    Group,
    MeshLike,
    check_device,
    checked_mesh,
    mesh_of,
    process_mesh,
)
from torch_bridge.routing.copies import Copies, Routed
from torch_bridge.versions.functorch import is_batched
from xshard.errors import PlanError, ShapeError
from xshard.layout import Layout
from xshard.layout.layout import check_axes
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
        """Return what processes compare before this call. Raises as `route` does."""
        layout = Layout.parse(f"t/({','.join(self.axes)})")
        check_axes(
            layout, mesh_of(checked_mesh(self.mesh, "route(x, to, axis, mesh)")), str(layout)
        )
        is_whole = not (to.is_floating_point() or to.is_complex() or to.dtype == torch.bool)
        check_rows(blocks[0].shape, to.shape, is_whole, capacity=self.capacity, sizes=self.sizes)
        check_device(to.device)
        # Lengths of messages follow from values, which have to be known, and one for all.
        if is_batched(to) or to.is_meta:
            what = "to says where rows go by its values: none are known, or there is one set for each batch"
            raise PlanError(
                what, hint="vmap(..., in_dims) with None for to; real tensors, not meta"
            )
        sent = {
            "rows": str([(x.dtype, tuple(x.shape[1:])) for x in blocks]),
            "choices": str(to.shape[1:]),
            "options": str((self.groups, self.capacity, self.sizes)),
        }
        sent |= desync.derivative_facts(*blocks)
        # Other processes of the mesh may have rows of another kind.
        ranks = process_mesh(self.mesh).submesh(self.axes).ranks
        return desync.CallFacts({"mesh": mesh_with_ranks(self.mesh)}, sent, ranks, {})

    def send(self, blocks: Sequence[Tensor], to: Tensor) -> tuple[Routed, list[Tensor]]:
        """Send rows of several tensors in one all-to-all; return the route and the copies of each tensor.

        blocks: tensors `[rows, ...]`; the route has the first one. to: as for `route`.
        """
        compared = self._check(blocks, to)
        processes = process_mesh(self.mesh).submesh(self.axes)
        group = processes.group(self.axes)
        groups = Groups.of(self.groups, processes.mesh.n_devices)
        chosen = to if to.ndim == 2 else to[:, None]  # [rows, k]
        limit = self.capacity if self.sizes is None else self.sizes
        selection = _select(chosen.long(), groups, limit)
        if self.sizes is None:
            lengths = _exchange_lengths(selection, to, blocks, group, len(groups.parts))
        else:
            lengths = _fixed_lengths(self.sizes, groups.n_parts, chosen.shape[1])

        # A linear map of blocks: autograd gets its adjoint, which brings gradients home.
        copies = _copies(selection, lengths, group, groups, is_padded=self.sizes is not None)
        moved: Any = Redistribute.apply(copies, *blocks)
        tensors = list(moved) if isinstance(moved, tuple) else [moved]

        n_groups = groups.sizes[processes.device]
        own_groups = _own_groups(copies.arrived[0], n_groups)  # [copies, k]
        # By group, then by copy and choice: a stable sort. Choices of groups elsewhere come last.
        by_group, order = own_groups.reshape(-1).sort(stable=True)
        routed = Routed(
            tensors[0],
            by_group[: lengths.n_rows],
            order[: lengths.n_rows],
            n_groups,
            k=chosen.shape[1],
            dropped=selection.n_dropped,
            _copies=copies,
            _compared=compared,
        )
        return routed, tensors

    def _check(self, blocks: Sequence[Tensor], to: Tensor) -> desync.Compared | None:
        """Check this process's arguments; in debug mode those of all processes, against each other."""
        if not self.debug and not desync.ALWAYS:
            self.facts(blocks, to)
            return None
        text = f"route over '{','.join(self.axes)}'"
        return desync.compare_call(self.mesh, text, lambda: self.facts(blocks, to))


class _Selection(NamedTuple):
    """The copies that this process sends: one for each row and process with a group that it chose.

    places: [rows, k], where each choice is: `process * most + number of the group there`; `most` is the
        largest number of groups of a process. Choices of nowhere are as of a process after the last one.
    processes: [rows, k], the process of each choice.
    is_sent: [rows, processes], whether a copy of the row goes there.
    numbers: [rows, processes], the number of that copy among those to this process.
    n_copies: [processes], how many go to each.
    n_dropped: how many copies were not sent for a limit.
    """

    places: Tensor
    processes: Tensor
    is_sent: Tensor
    numbers: Tensor
    n_copies: Tensor
    n_dropped: Tensor


def _select(chosen: Tensor, groups: Groups, limit: int | None) -> _Selection:
    """Choose the copies to send, from the groups that rows chose: `[rows, k]`.

    limit: most copies to one process; the first rows go.
    """
    n_groups = len(groups.parts)
    n_processes = groups.n_parts
    nowhere = n_groups  # behind all groups in the table
    known = chosen.where((chosen >= 0) & (chosen < n_groups), nowhere)
    places = _places_of_groups(groups, chosen.device)[known]
    processes = places // max(groups.sizes)

    # One column more is for nowhere. Several choices of one process are one copy.
    needed = torch.zeros(len(chosen), n_processes + 1, dtype=torch.bool, device=chosen.device)
    needed = needed.scatter_(1, processes, True)[:, :n_processes]
    numbers = needed.cumsum(0) - 1  # of rows before this one that go there, too
    is_sent = needed if limit is None else needed & (numbers < limit)
    n_copies = is_sent.sum(0)
    n_dropped = needed.sum() - n_copies.sum()
    return _Selection(places, processes, is_sent, numbers, n_copies, n_dropped)


@lru_cache(maxsize=256)
def _places_of_groups(groups: Groups, device: torch.device) -> Tensor:
    """Return `process * most + number there` of each group, and of one behind all processes."""
    # Processes may have unlike numbers of groups: each gets room for the most, so that `// most` finds it.
    most = max(groups.sizes)
    places = []
    for process, number in zip(groups.parts, groups.numbers, strict=True):
        places.append(process * most + number)
    places.append(groups.n_parts * most)
    return torch.tensor(places, device=device)


class _Lengths(NamedTuple):
    """How much travels: copies to each process, copies from each, and rows, one per choice, that come."""

    sent: Sequence[int]
    received: Sequence[int]
    n_rows: int


def _fixed_lengths(size: int, n_processes: int, k: int) -> _Lengths:
    """Return lengths that are known without counting: missing copies are padding, as are their choices."""
    sizes = [size] * n_processes
    return _Lengths(sizes, sizes, n_processes * size * k)


class _Report(NamedTuple):
    """What a process tells another before rows travel."""

    n_copies: int
    n_choices: int
    highest_group: int
    row_bytes: int
    k: int


def _exchange_lengths(
    selection: _Selection,
    to: Tensor,
    blocks: Sequence[Tensor],
    group: Group,
    n_groups: int,
) -> _Lengths:
    """Tell each process how many copies and choices come, in one round, and check what they tell.

    Raises ShapeError, on all processes, for a group that is not there, or rows of other sizes.
    """
    own_reports = _own_reports(selection, to, blocks)
    sizes = [own_reports.shape[1]] * len(own_reports)
    exchange = Collective("all_to_all", group, sizes, sizes, is_even=True)
    arrived = exchange.run(own_reports.view(-1), own_reports.shape)
    # The host waits here, and nowhere else.
    own_numbers, arrived_numbers = torch.stack([own_reports, arrived]).tolist()
    told = [_Report(*numbers) for numbers in own_numbers]
    heard = [_Report(*numbers) for numbers in arrived_numbers]
    _check_reports(heard, group.ranks, n_groups)
    return _Lengths(
        [report.n_copies for report in told],
        [report.n_copies for report in heard],
        sum(report.n_choices for report in heard),
    )


def _own_reports(selection: _Selection, to: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return the `_Report` for each process, on the device: `[processes, 5]`."""
    n_copies = selection.n_copies
    n_processes = len(n_copies)
    # A choice travels with the copy for its process; the column more, of nowhere, never does.
    travels = pad(selection.is_sent, (0, 1)).gather(1, selection.processes).long()  # [rows, k]
    n_choices = n_copies.new_zeros(n_processes + 1)
    n_choices.scatter_add_(0, selection.processes.reshape(-1), travels.reshape(-1))

    # On the device: `.item()` would make the host wait.
    highest = to.max().long() if to.numel() else n_copies.new_tensor(-1)
    row_bytes = sum(math.prod(x.shape[1:]) * x.element_size() for x in blocks)
    k = math.prod(to.shape[1:])
    about_rows = torch.stack([highest, highest.new_full((), row_bytes), highest.new_full((), k)])
    counts = torch.stack([n_copies, n_choices[:n_processes]], 1)
    return torch.cat([counts, about_rows.expand(n_processes, 3)], 1)  # told to all alike


def _check_reports(reports: Sequence[_Report], ranks: Sequence[int], n_groups: int) -> None:
    """Raise ShapeError for a group that is not there, or if processes have unlike rows.

    Every process gets these numbers of every other, so that all raise.
    """
    for rank, report in zip(ranks, reports, strict=True):
        if report.highest_group >= n_groups:
            hint = f"groups are 0 to {n_groups - 1}, as groups= says; a number below 0 is none"
            raise ShapeError(f"rank {rank} has a row for group {report.highest_group}", hint=hint)
    if len({(report.row_bytes, report.k) for report in reports}) > 1:
        told = []
        for rank, report in zip(ranks, reports, strict=True):
            told.append(f"rank {rank}: {report.row_bytes} bytes, {report.k} choices")
        what = "rows of processes differ in their bytes, or in their choices"
        raise ShapeError(what, hint=", ".join(told))


def _copies(
    selection: _Selection, lengths: _Lengths, group: Group, groups: Groups, *, is_padded: bool
) -> Copies:
    """Put the copies in the order in which they are sent: by process, then by row.

    is_padded: whether each process gets as many as `lengths` says, and fewer rows are filled up.
    """
    n_rows, n_processes = selection.is_sent.shape
    device = selection.places.device
    n_sent = sum(lengths.sent)
    if is_padded:
        starts = torch.arange(n_processes, device=device) * lengths.sent[0]
    else:
        starts = selection.n_copies.cumsum(0) - selection.n_copies

    # Each copy has the number `row * processes + process`; `n_rows * processes` is padding. A copy that
    # is not sent goes to a slot behind all others.
    padding = n_rows * n_processes
    slots = (starts + selection.numbers).where(selection.is_sent, n_sent)
    in_order = slots.new_full((n_sent + 1,), padding)
    in_order.scatter_(0, slots.reshape(-1), torch.arange(padding, device=device))
    copies = in_order[:-1]
    rows = copies // n_processes
    processes = copies % n_processes

    # Beside each copy travel its row's choices, counted from the first group of the receiver: its own
    # are then 0 to its number of groups, and all others are outside of that.
    most = max(groups.sizes)
    places = pad(
        selection.places, (0, 0, 0, 1), value=n_processes * most
    )  # the row of padding: nowhere
    choices = places[rows] - processes[:, None] * most
    return Copies(
        group, rows, n_rows, lengths.sent, lengths.received, is_padded, beside=choices.int()
    )


def _own_groups(choices: Tensor, n_groups: int) -> Tensor:
    """Return the group of each choice that came, by its number here; `n_groups` if it is elsewhere."""
    numbers = choices.long()
    return numbers.where((numbers >= 0) & (numbers < n_groups), n_groups)
