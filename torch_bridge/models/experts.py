"""Experts under the rule `"t/ep c -> t/to(ep) c"`: rows go to those that they chose, and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.routing import RouteCall, Routed
from xshard.errors import PlanError, ShapeError, located
from xshard.models import ParameterUse

Values = dict[Any, Any]  # arguments by position or name
Uses = Mapping[str, ParameterUse]


@dataclass(eq=False, repr=False)
class RoutedExperts:
    """A module's experts here; it gets rows by experts, a choice each. last: bytes received, both ways."""

    module: nn.Module
    call: RouteCall
    last: tuple[int, int] | None = None
    _under_way: list[tuple[Routed, int]] = field(default_factory=list)

    def enter(self, key: Any, values: Values) -> None:
        """Send the rows, `values[key]`, with their choices and weights: all three become those that came."""
        rows = values[key]
        tensors = {k: x for k, x in values.items() if isinstance(x, Tensor) and k != key}
        chosen = next(
            (k for k, x in tensors.items() if not x.is_floating_point() and x.ndim == 2), None
        )
        if chosen is None or len(tensors[chosen]) != len(rows):
            hint = f"rows have shape {tuple(rows.shape)}, and choices beside them [rows, k], of whole numbers"
            raise ShapeError("experts are called without a choice for each row", hint=hint)
        to = tensors[chosen]
        weighted = [k for k, x in tensors.items() if x.is_floating_point() and x.shape == to.shape]
        there, copies = self.call.send([rows, *(values[k] for k in weighted)], to)
        values[key], values[chosen] = there.rows, there.groups[:, None].to(to.dtype)
        for k, x in zip(weighted, copies[1:], strict=True):
            values[k] = x.reshape(-1)[there.order][:, None]
        self._under_way.append((there, sum(map(_row_bytes, copies))))

    def leave(self, result: Any) -> Any:
        """The results of rows that came -> their sums at home; None of a call that failed -> None."""
        if not self._under_way or result is None:
            self._under_way = self._under_way[:-1]
            return None
        there, width = self._under_way.pop()
        if not isinstance(result, Tensor):
            raise ShapeError(
                f"experts return a {type(result).__name__}", hint="a tensor: a result per row"
            )
        if not len(result):  # gradients of unused experts are zeros, as on one device
            for x in self.module.parameters():
                result = result + x[:0].sum().to(result.dtype)
        came, left = there.beyond
        forward = came * (width + 4 * there.k) + left * _row_bytes(result)
        has_gradient = torch.is_grad_enabled() and there.copies.requires_grad
        self.last = forward, (left * width + came * _row_bytes(result)) * has_gradient
        return there.back(result)


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def route_experts(
    hooks: Mapping[str, Any],
    context: ParallelContext,
    parameters: list[ShardedParameter],
    uses: Uses,
) -> list[tuple[nn.Module, str, int, int]]:
    """Give modules with the rule their experts -> `num_experts` of each, the whole and this process's."""
    counts = []
    for name, each in hooks.items():
        if axes := next((rule.rule.routed for rule in each.inputs if rule.rule.routed), None):
            with located(name or "the model"):
                owner, rows = _experts_of_each(name, axes, context, parameters, uses)
                parts = {expert: part for part, experts in enumerate(rows) for expert in experts}
                groups = tuple(part for _, part in sorted(parts.items()))
                each.experts = RoutedExperts(owner, RouteCall(axes, context.mesh, groups))
            if vars(owner).get("num_experts") == len(parts):
                own = rows[context.processes.along(axes).device]
                counts.append((owner, "num_experts", len(parts), len(own)))
    return counts


def _experts_of_each(
    name: str,
    axes: tuple[str, ...],
    context: ParallelContext,
    parameters: list[ShardedParameter],
    uses: Uses,
) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """A module of experts by its name, and the experts of each process along the axes."""
    ranks = context.processes.ranks
    mesh = context.axes
    shares = set[Any]()
    owner = None
    devices = [ranks.index(rank) for rank in context.processes.along(axes).ranks]
    for x in parameters:
        for full, (module, _) in zip(x.names, x.owners, strict=True):
            if full.rpartition(".")[0] == name and full in uses:
                owner = module
                layout = uses[full].used.in_order(uses[full].stored.names)
                held = (
                    layout.positions(mesh, x.sharding.shape, 0, device).tolist()
                    for device in devices
                )
                shares.add((x.sharding.shape[0], *map(tuple, held)))
    n, *rows = shares.pop() if len(shares) == 1 else (0,)
    if (
        owner is None
        or sorted(sum(rows, ())) != [*range(n)]
        or not all(list(r) == sorted(r) for r in rows)
    ):
        over = ",".join(axes)
        hint = f"parameters: '{name and name + '.'}*' as 'e/{over} ...', each expert on one process"
        raise PlanError(
            f"the parameters of experts are not sharded over '{over}' by experts", hint=hint
        )
    return owner, tuple(rows)
