"""Copies of rows on their way to processes that values name, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import move_in_turn
from torch_bridge.calls.move import between_graphs
from torch_bridge.lower.collectives import Collective, Pending
from torch_bridge.mesh.desync import Compared
from torch_bridge.mesh.process_mesh import Group
from xshard.errors import ShapeError, api_boundary


@dataclass(frozen=True, eq=False)
class Copies:
    """A linear map: send each local row to every process that needs a copy, and return the copies received.

    `rows [n_rows, ...] -> copies [sum(received), ...]`. Its adjoint returns copies and adds them up by row:
    `[sum(received), ...] -> [n_rows, ...]`, with senders and receivers exchanged.

    Attributes:
        group: The processes.
        index: The row of each copy that is sent, by process: `[sum(sent)]`. `n_rows` is padding.
        n_rows: How many rows this process has.
        sent: Copies to each process.
        received: Copies from each process.
        is_padded: Whether `index` has padding.
        is_adjoint: Whether copies return.
        n_batch_dims: Dims before the rows, which `vmap` added.
        choices: The k choices of each copy, `[sum(sent), k]`, which travel with the rows.
        arrived_choices: The choices of the copies received, after the call.
    """

    group: Group
    index: Tensor
    n_rows: int
    sent: Sequence[int]
    received: Sequence[int]
    is_padded: bool
    is_adjoint: bool = False
    n_batch_dims: int = 0
    choices: Tensor | None = None
    arrived_choices: list[Tensor] = field(default_factory=list)
    is_linear = True
    sends_gradient = True

    @property
    def backward(self) -> Copies:
        return replace(self, is_adjoint=not self.is_adjoint, choices=None)

    @property
    def tangent(self) -> Copies:
        return replace(self, choices=None)

    def batched(self, n: int) -> Copies:
        return replace(self, n_batch_dims=self.n_batch_dims + 1)

    def __call__(self, *blocks: Tensor) -> Any:
        return self.begin(*blocks)()

    def begin(self, *blocks: Tensor) -> Callable[[], Any]:
        """Begin to send the copies; return a function that waits, and returns what came."""
        # All dims but the rows become one: a table [rows, elements] for each tensor.
        d = self.n_batch_dims
        element_shapes = [(*x.shape[:d], *x.shape[d + 1 :]) for x in blocks]
        tables = []
        for x, shape in zip(blocks, element_shapes, strict=True):
            tables.append(x.movedim(d, 0).reshape(x.shape[d], math.prod(shape)))
        arrive = self._begin_return(tables) if self.is_adjoint else self._begin_sending(tables)

        def end() -> Any:
            # The rows go back to where they were among the dims.
            moved = []
            for x, shape in zip(arrive(), element_shapes, strict=True):
                moved.append(x.view(len(x), *shape).movedim(0, d))
            return moved[0] if len(moved) == 1 else tuple(moved)

        return end

    def _begin_sending(self, tables: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send the copies of rows, and `choices` in the same message."""
        messages = []
        for table in tables:
            if self.is_padded:  # one row of zeros more
                table = torch.cat([table, table.new_zeros(1, table.shape[1])])
            messages.append(table.index_select(0, self.index))
        if self.choices is None:
            return self._begin_exchange(messages, self.sent, self.received)
        arrive = self._begin_exchange([*messages, self.choices], self.sent, self.received)

        def end() -> list[Tensor]:
            *results, arrived_choices = arrive()
            self.arrived_choices.append(arrived_choices)
            return results

        return end

    def _begin_return(self, tables: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to return copies to the processes of their rows, which add them up by row."""
        arrive = self._begin_exchange(tables, self.received, self.sent)

        def end() -> list[Tensor]:
            sums = []
            for copies in arrive():
                sums_by_row = copies.new_zeros(self.n_rows + self.is_padded, copies.shape[1])
                sums_by_row.index_add_(0, self.index, copies)
                # The last row has what padding returned. A clone, as a view would hold its memory.
                sums.append(sums_by_row[:-1].clone() if self.is_padded else sums_by_row)
            return sums

        return end

    def _begin_exchange(
        self, tables: list[Tensor], sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Begin to send several tables of rows in one all-to-all; return what waits for those that arrive.

        float32 [5, 8] and int32 [5, 2] travel as one table of bytes, [5, 40], and are split up
        again.

        Args:
            tables: Tables `[rows, n]`, rows in the order of processes.
            sent: The number of rows to each process.
            received: The number of rows from each process.
        """
        # Tables have several dtypes, as rows and their choices: bytes travel together.
        byte_tables = [_view_as(torch.uint8, x) for x in tables]
        dtypes = [x.dtype for x in tables]
        widths = [x.shape[1] for x in byte_tables]
        joint_table = byte_tables[0] if len(tables) == 1 else torch.cat(byte_tables, 1)
        arrive = self._begin_exchange_of_bytes(joint_table, sent, received)

        def end() -> list[Tensor]:
            arrived = arrive()
            if len(dtypes) == 1:
                return [_view_as(dtypes[0], arrived)]
            # Cloned, because a view in the middle of the bytes may begin at an address that is not a
            # multiple of the size of the table's elements, as its dtype needs.
            return [
                _view_as(dtype, column.clone(memory_format=torch.contiguous_format))
                for column, dtype in zip(arrived.split(widths, 1), dtypes, strict=True)
            ]

        return end

    def _begin_exchange_of_bytes(
        self, table: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Pending:
        """Begin to send a table of bytes, `[rows, n]`; return what waits for the rows that arrive."""
        width = table.shape[1]
        sent_bytes = [n * width for n in sent]
        received_bytes = [n * width for n in received]
        exchange = Collective("all_to_all", self.group, sent_bytes, received_bytes)
        return exchange.begin(table.view(-1), (sum(received), width))


def _view_as(dtype: torch.dtype, table: Tensor) -> Tensor:
    """View a table's bits as another dtype: float32 [rows, n] -> uint8 [rows, 4 * n]."""
    width = table.shape[1] * table.element_size() // dtype.itemsize
    return table.contiguous().view(-1).view(dtype).view(len(table), width)


@dataclass(eq=False)
class Routed:
    """Rows that came to this process's groups, and the way back.

        routed = xt.route(x, to, "ep", mesh, groups=8)
        routed.rows         # [n, ...]: those of group 0, then those of group 1, ...
        routed.sizes        # [groups here]: how many each group has
        routed.back(y)      # [n, ...] -> [rows, ...]: one result per row that was sent

    Attributes:
        copies: A row for each row of a process with a choice here, by processes.
        groups: The group of each of `rows`, by its index among the groups of this process.
        order: The index of each of `rows` among all choices of all copies, `k` for each.
        n_groups: How many groups this process has.
        k: How many choices each row has.
        dropped: How many copies of this process's rows were not sent for a capacity, on the device.
    """

    copies: Tensor
    groups: Tensor
    order: Tensor
    n_groups: int
    k: int
    dropped: Tensor
    _copies: Copies
    _compared: Compared | None

    @property
    def _copy_of_row(self) -> Tensor:
        return self.order // self.k

    @cached_property
    def rows(self) -> Tensor:
        """A row per choice, by groups: `[n, ...]`. With `sizes=`, those beyond their sum are padding."""
        return self.copies.index_select(0, self._copy_of_row)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of rows of each group here: `[groups]`, int64, on the device."""
        # Groups ascend: a group's rows lie between two bounds.
        bounds = torch.arange(self.n_groups + 1, device=self.groups.device)
        return torch.searchsorted(self.groups, bounds).diff()

    @api_boundary
    @between_graphs
    def back(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Send results back to where their rows came from, and add up those of each row.

        `[n, ...] -> [rows, ...]`: a row that chose groups 2 and 5 gets
        `weights[0] * result of 2 + weights[1] * result of 5`. Results of one process for one row
        are added up before they travel. All processes call it.

        Args:
            y: A result for each of `rows`, in their order.
            weights: Factors of results, with the shape of `to`.

        Returns:
            The sum of results for each row of this process.

        Raises:
            ShapeError: Results or weights have another shape.
        """
        if y.ndim < 1 or len(y) != len(self.order):
            hint = f"a result for each of {len(self.order)} rows, in their order"
            raise ShapeError(f"results of shape {tuple(y.shape)}", hint=hint)
        column = (-1, *[1] * (y.ndim - 1))  # the shape of one number for each row of y
        products = y
        if self._copies.is_padded:
            # Results of padding, which comes last, may have any values, as NaN: they become 0.
            is_row = torch.arange(len(y), device=y.device) < self.sizes.sum()
            products = y.where(is_row.view(column), 0)
        if weights is not None:
            products = products * self._weights_of_rows(weights).view(column)
        # A process returns one sum for each copy that came.
        sums = products.new_zeros(len(self.copies), *y.shape[1:])
        sums = sums.index_add(0, self._copy_of_row, products)
        return self.home(sums.to(y.dtype))

    def _weights_of_rows(self, weights: Tensor) -> Tensor:
        """Send the weights of choices where their rows went: `[rows, k] -> [n]`. Raises ShapeError."""
        table = weights if weights.ndim == 2 else weights[:, None]
        if table.shape != (self._copies.n_rows, self.k):
            raise ShapeError(f"weights have shape {tuple(weights.shape)}", hint="the shape of to")
        arrived_choices = move_in_turn(self._copies.tangent, table)  # [copies, k]
        # A copy came with the weights of all choices of its row: each row here takes its own.
        return arrived_choices.reshape(-1).index_select(0, self.order)

    @property
    def beyond(self) -> tuple[int, int]:
        """How many copies came from other processes, and how many are at others."""
        own_rank = self._copies.group.process_group.rank()  # what stays here does not travel
        received = self._copies.received
        sent = self._copies.sent
        return sum(received) - received[own_rank], sum(sent) - sent[own_rank]

    @between_graphs
    def home(self, y: Tensor) -> Tensor:
        """Bring a result per copy home: their sum for each row of this process. All processes call it."""
        # The empty sum ties the result to the rows where none came, too: in the backward pass this process
        # then sends to others, which wait for it.
        tied = y + self.copies[:0].sum().to(y.dtype)
        result = move_in_turn(self._copies.backward, tied)
        if self._compared is None:
            return result
        return self._compared.compare_gradients_of(result, self.copies)
