"""Copies of rows on their way to processes that values name, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.calls.move import between_graphs
from torch_bridge.lower.collectives import Collective
from torch_bridge.mesh.desync import Compared
from torch_bridge.mesh.process_mesh import Group
from xshard.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Copies:
    """The rows of this process -> the copies of rows that others and itself send here; a linear map. index:
    the row of each copy sent, by parts, if `padded` also `rows`. sent, received: copies per part. home: the
    adjoint: copies go back, and are added up by row. batches: dims before the rows. beside: numbers of each
    copy sent, which travel with the rows; `arrived` has them then.
    """

    group: Group
    index: Tensor
    rows: int
    sent: Sequence[int]
    received: Sequence[int]
    padded: bool
    home: bool = False
    batches: int = 0
    beside: Tensor | None = None
    arrived: list[Tensor] = field(default_factory=list)
    is_linear = sends_gradient = True

    @property
    def backward(self) -> Copies:
        return replace(self, home=not self.home, beside=None)

    @property
    def tangent(self) -> Copies:
        return replace(self, beside=None)

    def batched(self, n: int) -> Copies:
        return replace(self, batches=self.batches + 1)

    def __call__(self, *blocks: Tensor) -> Any:
        d = self.batches
        shapes = [(*x.shape[:d], *x.shape[d + 1 :]) for x in blocks]
        pairs = zip(blocks, shapes, strict=True)
        tables = [x.movedim(d, 0).reshape(x.shape[d], math.prod(shape)) for x, shape in pairs]
        if self.home:
            results = [self._summed(x) for x in self._sent_on(tables, self.received, self.sent)]
        else:
            if self.padded:
                tables = [torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in tables]
            messages = [x.index_select(0, self.index) for x in tables]
            beside = [] if self.beside is None else [self.beside]
            results = self._sent_on(messages + beside, self.sent, self.received)
            self.arrived.extend(results[len(messages) :])
        pairs = zip(results, shapes, strict=False)
        moved = [x.view(len(x), *shape).movedim(0, self.batches) for x, shape in pairs]
        return moved[0] if len(moved) == 1 else tuple(moved)

    def _summed(self, copies: Tensor) -> Tensor:
        result = copies.new_zeros(self.rows + self.padded, copies.shape[1])
        result.index_add_(0, self.index, copies)
        return result[:-1].clone() if self.padded else result

    def _sent_on(
        self, tables: list[Tensor], sent: Sequence[int], received: Sequence[int]
    ) -> list[Tensor]:
        """Tables with a row per copy -> the rows that arrive. All travel in one all-to-all, as bytes."""
        parts = [_bytes(x) for x in tables]
        message = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        widths = [x.shape[1] for x in parts]
        width = message.shape[1]
        messages, arriving = ([n * width for n in numbers] for numbers in (sent, received))
        sends = Collective("all_to_all", self.group, messages, arriving)
        arrived = sends.run(message.view(-1), (sum(received), width))
        if len(tables) == 1:
            split = [arrived]
        else:  # each begins at an address of its own, as its dtype may need
            split = [
                x.clone(memory_format=torch.contiguous_format) for x in arrived.split(widths, 1)
            ]
        rows = sum(received)
        return [
            x.view(-1).view(t.dtype).view(rows, t.shape[1])
            for x, t in zip(split, tables, strict=True)
        ]


def _bytes(x: Tensor) -> Tensor:
    rows, width = x.shape
    return x.contiguous().view(-1).view(torch.uint8).view(rows, width * x.element_size())


@dataclass(eq=False)
class Routed:
    """Rows that came, by group, and the way back. copies: a row for each row of a process with a choice here,
    by processes. groups: the group of each of `rows`, by its number here. order: its number among all choices
    of all copies, `k` for each. dropped: how many copies of this process's rows were not sent for a capacity,
    on the device.
    """

    copies: Tensor
    groups: Tensor
    order: Tensor
    n_groups: int
    k: int
    dropped: Tensor
    _there: Copies
    _compared: Compared | None

    @property
    def _of_copy(self) -> Tensor:
        return self.order // self.k

    @cached_property
    def rows(self) -> Tensor:
        """A row per choice, by groups: `[n, ...]`. With `sizes=`, those beyond their sum are padding."""
        return self.copies.index_select(0, self._of_copy)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of rows of each group here: `[groups]`, int64, on the device."""
        bounds = torch.arange(self.n_groups + 1, device=self.groups.device)
        return torch.searchsorted(self.groups, bounds).diff()

    @between_graphs
    def back(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """A result per row of `rows` -> the sum of results of each row at home: `[n, ...] -> [rows, ...]`.

        weights: factors of results, with the shape of `to`. Products are added up before one row returns for
        each copy. All processes call it. Raises ShapeError.
        """
        if y.ndim < 1 or len(y) != len(self.order):
            hint = f"a result for each of {len(self.order)} rows, in their order"
            raise ShapeError(f"results of shape {tuple(y.shape)}", hint=hint)
        ones = [1] * (y.ndim - 1)
        if self._there.padded:  # with any values
            known = torch.arange(len(y), device=y.device) < self.sizes.sum()
            y = y.where(known.view(-1, *ones), 0)
        products = y
        if weights is not None:
            table = weights if weights.ndim == 2 else weights[:, None]
            if table.shape != (self._there.rows, self.k):
                raise ShapeError(
                    f"weights have shape {tuple(weights.shape)}", hint="the shape of to"
                )
            there = Redistribute.apply(self._there.tangent, table)
            products = y * there.reshape(-1).index_select(0, self.order).view(-1, *ones)
        shares = products.new_zeros(len(self.copies), *y.shape[1:]).index_add(
            0, self._of_copy, products
        )
        return self.home(shares.to(y.dtype))

    @property
    def beyond(self) -> tuple[int, int]:
        """How many copies came from other processes, and how many are at others."""
        own = self._there.group.process_group.rank()
        received, sent = (sum(n) - n[own] for n in (self._there.received, self._there.sent))
        return received, sent

    @between_graphs
    def home(self, y: Tensor) -> Tensor:
        """A result per copy -> their sum for each row of this process. All processes call it."""
        tied = y + self.copies[:0].sum().to(
            y.dtype
        )  # without rows too, the backward pass sends to others
        result = Redistribute.apply(self._there.backward, tied)
        return self._compared.watched(result, self.copies) if self._compared else result
