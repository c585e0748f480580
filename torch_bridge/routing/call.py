"""One call of `route`: which copies of rows a process sends, how many come, and the order of what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.autodiff.pending import move_in_turn
from torch_bridge.autodiff.turns import current_part
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

    def check_arguments(self, blocks: Sequence[Tensor], to: Tensor) -> None:
        """Check the arguments of this process. Raises as `route` does."""
        layout = Layout.parse(f"t/({','.join(self.axes)})")
        mesh = checked_mesh(self.mesh, "route(x, to, axis, mesh)")
        check_axes(layout, mesh_of(mesh), str(layout))
        is_whole = not (to.is_floating_point() or to.is_complex() or to.dtype == torch.bool)
        check_rows(blocks[0].shape, to.shape, is_whole, capacity=self.capacity, sizes=self.sizes)
        check_device(to.device)
        is_limited = self.capacity is not None or self.sizes is not None
        if is_limited and current_part() is not None:
            reason = "rows beyond a limit are dropped, "
            reason += "and here the limit would be one of each part of a batch"
            hint = "no capacity= and no sizes=, or halves(model, module=...) of a module without it"
            raise PlanError(reason, hint=hint)
        # How much each process is sent follows from the values of `to`: a tensor on meta has none,
        # and under vmap there would be other lengths for each item of the batch.
        if is_batched(to) or to.is_meta:
            reason = "to says where rows go by its values: none are known, or there is one set for each batch"
            hint = "vmap(..., in_dims) with None for to; real tensors, not meta"
            raise PlanError(reason, hint=hint)

    def facts(self, blocks: Sequence[Tensor], to: Tensor) -> desync.CallFacts:
        """Check the arguments, and return what debug mode compares between processes.

        Each value is text: dtypes and shapes of rows, the number of choices, the options. Raises as
        `route` does.
        """
        self.check_arguments(blocks, to)
        sent = {
            "rows": str([(x.dtype, tuple(x.shape[1:])) for x in blocks]),
            "choices": str(to.shape[1:]),
            "options": str((self.groups, self.capacity, self.sizes)),
        }
        sent |= desync.derivative_facts(*blocks)
        # Only the processes along the axes compare: others make calls of their own, with other
        # rows.
        ranks = process_mesh(self.mesh).submesh(self.axes).ranks
        return desync.CallFacts({"mesh": mesh_with_ranks(self.mesh)}, sent, ranks)

    def send(self, blocks: Sequence[Tensor], to: Tensor) -> tuple[Routed, list[Tensor]]:
        """Send rows of several tensors to the processes of the groups (experts) that they chose.

        All tensors travel in one all-to-all. Returns what came of the first tensor, with the way
        back, and for each tensor the rows that came, `[copies, ...]`.

        Args:
            blocks: Tensors `[rows, ...]`.
            to: The groups of each row, as for `route`.
        """
        compared = self._compare_call(blocks, to)
        processes = process_mesh(self.mesh).submesh(self.axes)
        group = processes.group(self.axes)
        groups = Groups.of(self.groups, processes.mesh.n_devices)
        chosen = to.long() if to.ndim == 2 else to[:, None].long()  # [rows, k]
        if self.sizes is None:
            selection = _select(chosen, groups, self.capacity)
            lengths = _exchange_lengths(selection, chosen, blocks, group, len(groups.parts))
        else:
            selection = _select(chosen, groups, self.sizes)
            lengths = _fixed_lengths(self.sizes, groups.n_parts, chosen.shape[1])

        # `copies` is a linear map, which autograd calls with its adjoint: gradients return to their
        # rows.
        copies = _copies(selection, lengths, group, groups, is_padded=self.sizes is not None)
        moved: Any = move_in_turn(copies, *blocks)
        tensors = list(moved) if isinstance(moved, tuple) else [moved]

        # One row per choice, sorted by group; a stable sort leaves rows of a group in the order in
        # which they came. Choices of groups on other processes are last, and are cut off.
        n_groups = groups.sizes[processes.device]
        group_of_choice = _own_groups(copies.arrived_choices[0], n_groups)  # [copies, k]
        sorted_groups, order = group_of_choice.reshape(-1).sort(stable=True)
        routed = Routed(
            tensors[0],
            sorted_groups[: lengths.n_rows],
            order[: lengths.n_rows],
            n_groups,
            k=chosen.shape[1],
            dropped=selection.n_dropped,
            _copies=copies,
            _compared=compared,
        )
        return routed, tensors

    def _compare_call(self, blocks: Sequence[Tensor], to: Tensor) -> desync.Compared | None:
        """Check this process's arguments; in debug mode those of all processes, against each other."""
        if not self.debug and not desync.ALWAYS:
            self.check_arguments(blocks, to)
            return None
        text = f"route over '{','.join(self.axes)}'"
        return desync.compare_call(self.mesh, text, lambda: self.facts(blocks, to))


class _Selection(NamedTuple):
    """The copies that this process sends: one for each row and process with a group that it chose.

    Attributes:
        group_slots: `[rows, k]`, the slot of the group that each choice names: see `_slots_of_groups`.
            Choices of nowhere have the slot of a process after the last one.
        processes: `[rows, k]`, the process of each choice.
        is_sent: `[rows, processes]`, whether a copy of the row goes to the process.
        copy_indices: `[rows, processes]`, the index of that copy among those to the process.
        n_copies: `[processes]`, how many go to each.
        n_dropped: How many copies were not sent for a limit.
    """

    group_slots: Tensor
    processes: Tensor
    is_sent: Tensor
    copy_indices: Tensor
    n_copies: Tensor
    n_dropped: Tensor


def _select(chosen: Tensor, groups: Groups, limit: int | None) -> _Selection:
    """Decide which rows go to which processes, from the groups (experts) that each row chose.

    A process gets one copy of a row, however many of its groups the row chose. 4 groups on 2
    processes: the row with groups [0, 1] goes to process 0 only, the one with [1, 3] to both.

    Args:
        chosen: The groups of each row, `[rows, k]`; a number below 0 goes nowhere.
        groups: Which process has each group.
        limit: The most copies from this process to one process: the first rows go, others are
            dropped. None for no limit.
    """
    n_groups = len(groups.parts)
    n_processes = groups.n_parts
    # Numbers that are no group become one more group, "nowhere", on one more process.
    nowhere = n_groups
    is_group = (chosen >= 0) & (chosen < n_groups)
    group_slots = _slots_of_groups(groups, chosen.device)[chosen.where(is_group, nowhere)]
    processes = group_slots // max(groups.sizes)

    # [rows, processes]: whether any choice of the row is on that process. The column of "nowhere",
    # the last one, is cut off again.
    needed = torch.zeros(len(chosen), n_processes + 1, dtype=torch.bool, device=chosen.device)
    needed = needed.scatter_(1, processes, True)[:, :n_processes]
    copy_indices = needed.cumsum(0) - 1  # how many rows before this one go to the same process
    is_sent = needed if limit is None else needed & (copy_indices < limit)
    n_copies = is_sent.sum(0)
    n_dropped = needed.sum() - n_copies.sum()
    return _Selection(
        group_slots=group_slots,
        processes=processes,
        is_sent=is_sent,
        copy_indices=copy_indices,
        n_copies=n_copies,
        n_dropped=n_dropped,
    )


@lru_cache(maxsize=256)
def _slots_of_groups(groups: Groups, device: torch.device) -> Tensor:
    """Return the slot of each group, and one more for nowhere: `process * max_groups + index there`.

    Groups 0, 1 on process 0 and group 2 on process 1 -> [0, 1, 2, 4], with `max_groups` 2.
    """
    # Processes may have unlike numbers of groups: each gets as many slots as the largest needs, so that
    # `// max_groups` is the process.
    max_groups = max(groups.sizes)
    slots = []
    for process, local_group in zip(groups.parts, groups.numbers, strict=True):
        slots.append(process * max_groups + local_group)
    slots.append(groups.n_parts * max_groups)
    return torch.tensor(slots, device=device)


class _Lengths(NamedTuple):
    """How much travels: copies to each process, copies from each, and rows, one per choice, that come."""

    sent: Sequence[int]
    received: Sequence[int]
    n_rows: int


def _fixed_lengths(size: int, n_processes: int, k: int) -> _Lengths:
    """Return lengths that are known without counting: missing copies are padding, as are their choices.

    Args:
        size: The number of copies that each process sends to each.
        n_processes: The number of processes.
        k: How many groups each row chose.
    """
    sizes = [size] * n_processes
    return _Lengths(sent=sizes, received=sizes, n_rows=n_processes * size * k)


class _Report(NamedTuple):
    """What a process tells another before rows travel.

    Attributes:
        n_copies: How many copies of rows it will send to that process.
        n_choices: How many choices of that process's groups these rows made.
        highest_group: The highest number of a group that its rows chose.
        row_bytes: The bytes of a row.
        k: How many groups each row chose.
    """

    n_copies: int
    n_choices: int
    highest_group: int
    row_bytes: int
    k: int


def _exchange_lengths(
    selection: _Selection,
    chosen: Tensor,
    blocks: Sequence[Tensor],
    group: Group,
    n_groups: int,
) -> _Lengths:
    """Exchange between all processes how many rows each will send to each, before the rows travel.

    Each process sends 5 numbers to each other (`_Report`). Raises ShapeError on all processes for a
    group that does not exist, or if rows of processes differ in size.

    Args:
        selection: Which rows of this process go where.
        chosen: The groups that rows chose, `[rows, k]`.
        blocks: The tensors that travel, for the bytes of a row.
        group: The processes.
        n_groups: The number of groups (experts) of all processes.
    """
    own_reports = _own_reports(selection, chosen, blocks)
    numbers_per_process = [len(_Report._fields)] * len(own_reports)
    exchange = Collective(
        "all_to_all", group, numbers_per_process, numbers_per_process, is_even=True
    )
    # Parts of a batch take no turns here: the rows of this one would then wait in vain for others.
    arrived = exchange.run(own_reports.view(-1), own_reports.shape)
    # The host waits here, and nowhere else.
    own_numbers, arrived_numbers = torch.stack([own_reports, arrived]).tolist()
    sent_reports = map(_Report._make, own_numbers)  # to each process
    arrived_reports = list(map(_Report._make, arrived_numbers))  # from each process
    _check_reports(arrived_reports, group.ranks, n_groups)
    return _Lengths(
        sent=[report.n_copies for report in sent_reports],
        received=[report.n_copies for report in arrived_reports],
        n_rows=sum(report.n_choices for report in arrived_reports),
    )


def _own_reports(selection: _Selection, chosen: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return what this process tells each other one before rows travel: `[processes, 5]`, integers.

    The columns are those of `_Report`: copies of rows for that process, choices of its groups among
    them, then the same for all: the highest group chosen, bytes of a row, and k, the choices of a
    row. The result stays on the device, so that the host does not wait.
    """
    n_copies = selection.n_copies
    n_processes = len(n_copies)
    # Choices of nowhere count for one more process, whose column of `is_sent` is False.
    processes = selection.processes  # [rows, k]
    is_sent = pad(selection.is_sent, (0, 1))
    travels = is_sent.gather(1, processes).long()  # [rows, k]: 1 if the row goes to its process
    n_choices = n_copies.new_zeros(n_processes + 1)
    n_choices.scatter_add_(0, processes.reshape(-1), travels.reshape(-1))

    # On the device: `.item()` would make the host wait.
    highest = chosen.max() if chosen.numel() else n_copies.new_tensor(-1)
    row_bytes = sum(math.prod(x.shape[1:]) * x.element_size() for x in blocks)
    columns = [n_copies, n_choices[:n_processes], highest.expand(n_processes)]
    columns += [torch.full_like(n_copies, number) for number in (row_bytes, chosen.shape[1])]
    return torch.stack(columns, 1)


def _check_reports(reports: Sequence[_Report], ranks: Sequence[int], n_groups: int) -> None:
    """Raise ShapeError for a group that does not exist, or rows of unequal size.

    Every process gets these numbers of every other, so that all raise.

    Args:
        reports: What each process told, in the order of `ranks`.
        ranks: The ranks of the processes.
        n_groups: The number of groups: 0 to n_groups - 1 exist, numbers below 0 mean nowhere.
    """
    for rank, report in zip(ranks, reports, strict=True):
        if report.highest_group >= n_groups:
            hint = f"groups are 0 to {n_groups - 1}, as groups= says; a number below 0 is none"
            raise ShapeError(f"rank {rank} has a row for group {report.highest_group}", hint=hint)
    if len({(report.row_bytes, report.k) for report in reports}) > 1:
        texts = []
        for rank, report in zip(ranks, reports, strict=True):
            texts.append(f"rank {rank}: {report.row_bytes} bytes, {report.k} choices")
        reason = "rows of processes differ in their bytes, or in their choices"
        raise ShapeError(reason, hint=", ".join(texts))


def _copies(
    selection: _Selection, lengths: _Lengths, group: Group, groups: Groups, *, is_padded: bool
) -> Copies:
    """List the rows that are sent in the order of the message: by process, then by row.

    Row 0 goes to both of 2 processes, row 1 to the second -> rows [0, 0, 1] in the message. The
    choices of each row travel beside it.

    Args:
        selection: Which rows go where.
        lengths: How many rows each process is sent, and sends.
        group: The processes.
        groups: Which process has each group.
        is_padded: Whether each process is sent exactly as many rows as `lengths` says, filled up
            with rows of zeros where there are fewer.
    """
    n_rows, n_processes = selection.is_sent.shape
    copies = _in_order_of_message(selection, lengths.sent, is_padded)  # [sent]
    rows = copies // n_processes
    processes = copies % n_processes
    # Beside each copy travel the k choices of its row, as slots counted from the receiver's first:
    # its groups are then 0, 1, ..., and all others are negative or too large. Padding is row
    # `n_rows`, whose choices are nowhere.
    max_groups = max(groups.sizes)
    group_slots = pad(selection.group_slots, (0, 0, 0, 1), value=n_processes * max_groups)
    choices = group_slots[rows] - processes[:, None] * max_groups
    return Copies(
        group=group,
        index=rows,
        n_rows=n_rows,
        sent=lengths.sent,
        received=lengths.received,
        is_padded=is_padded,
        choices=choices.int(),
    )


def _in_order_of_message(selection: _Selection, sent: Sequence[int], is_padded: bool) -> Tensor:
    """Return `row * n_processes + process` of each copy that is sent, by process, then by row.

    Row 0 goes to both of 2 processes, row 1 to process 1 -> 0, 1, 3. Padding has the number after
    those of all copies: 4 for these 2 rows.
    """
    n_processes = len(sent)
    n_sent = sum(sent)
    if is_padded:
        starts = torch.arange(n_processes, device=selection.group_slots.device) * sent[0]
    else:
        starts = selection.n_copies.cumsum(0) - selection.n_copies
    # The slot of each copy in the message. Copies that are not sent share one slot behind its end,
    # which is cut off.
    slots = (starts + selection.copy_indices).where(selection.is_sent, n_sent)  # [rows, processes]
    padding = slots.numel()
    copies = slots.new_full((n_sent + 1,), padding)
    copies.scatter_(0, slots.reshape(-1), torch.arange(padding, device=slots.device))
    return copies[:-1]


def _own_groups(choices: Tensor, n_groups: int) -> Tensor:
    """Return the index on this process of the group that each choice names; `n_groups` if it is elsewhere."""
    local_groups = choices.long()
    return local_groups.where((local_groups >= 0) & (local_groups < n_groups), n_groups)
