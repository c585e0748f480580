"""Experts under the rule `"t/ep c -> t/to(ep) c"`: rows go to those that they chose, and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.turns import PerPart
from torch_bridge.models.names import module_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.routing import RouteCall, Routed
from xshard import Sharding
from xshard.errors import PlanError, ShapeError, located

if TYPE_CHECKING:
    from torch_bridge.models.hooks import ModuleHooks

Values = dict[Any, Any]  # arguments by position or name


class Count(NamedTuple):
    """An integer attribute of a module that is the length of a sharded dim, as `num_experts` is."""

    module: nn.Module
    attribute: str
    whole: int  # on one device
    local: int  # on this process


class _UnderWay(NamedTuple):
    """Rows that came, and the bytes of what travelled for each copy of a row."""

    routed: Routed
    copy_bytes: int


@dataclass(eq=False, repr=False)
class RoutedExperts:
    """This process's experts of one module, which is called with the rows that chose them.

    The module gets rows sorted by expert, `[n, c]`, one for each choice, with choices and weights `[n, 1]`.

    Attributes:
        module: The module of experts.
        call: The options of `route`.
        last: The bytes that the last pass received, forward and backward, for `explain`.
    """

    module: nn.Module
    call: RouteCall
    last: tuple[int, int] | None = None
    # One for each pass that has begun, of each part of a batch.
    _under_way: PerPart[Sequence[_UnderWay]] = field(
        default_factory=partial(PerPart[Sequence[_UnderWay]], ())
    )

    def dispatch(self, key: Any, values: Values) -> None:
        """Send the rows of a call to the processes of their experts; replace the arguments in place.

        This process's rows [t, c], each with the indices of k experts [t, k] and their weights
        [t, k], become the n rows for which its own experts were chosen, by any process: [n, c], with
        one expert [n, 1] and one weight [n, 1] each. `combine` sends the results back.

        Args:
            key: The position or the name of the rows among the arguments.
            values: The arguments by position or name. Experts are integers, weights floats of the
                same shape.
        """
        choices_key = _choices_key(key, values)
        choices = values[choices_key]
        weight_keys = []
        for other_key, x in values.items():
            is_float = isinstance(x, Tensor) and x.is_floating_point()
            if is_float and other_key != key and x.shape == choices.shape:
                weight_keys.append(other_key)

        # Weights travel with their rows, in the same message. `arrived` has what came of each tensor:
        # a row, with all k weights, comes once to a process that has any of its experts.
        sent = [values[sent_key] for sent_key in (key, *weight_keys)]
        routed, arrived = self.call.send(sent, choices)
        values[key] = routed.rows  # [n, c], sorted by expert
        # The module is called as before, with one expert per row: those of this process, from 0.
        values[choices_key] = routed.groups[:, None].to(choices.dtype)
        for weight_key, weights in zip(weight_keys, arrived[1:], strict=True):
            # `order` has, for each of the n rows, the number of its choice in the flat [copies * k].
            values[weight_key] = weights.reshape(-1)[routed.order][:, None]
        copy_bytes = sum(_row_bytes(x) for x in arrived)
        self._under_way.value = (*self._under_way.value, _UnderWay(routed, copy_bytes))

    def forget_passes(self) -> None:
        """Forget passes that have begun, and end no more."""
        self._under_way.value = ()

    def combine(self, result: Any) -> Any:
        """Send the results of experts back, and add up those of each row: [n, c] -> [t, c].

        t are the rows of this process, n the rows that came to its experts. Called after `forward`,
        also if it failed: then the result is None, and None is returned. Sets `last`, the bytes that
        this pass has received.
        """
        if not self._under_way.value:
            return None  # the call failed before its rows were sent
        *outer, under_way = self._under_way.value  # the last is of the innermost pass
        self._under_way.value = outer
        if result is None:
            return None
        if not isinstance(result, Tensor):
            raise ShapeError(
                f"experts return a {type(result).__name__}", hint="a tensor: a result per row"
            )
        if not len(result):
            # No row came to this process. Adding an empty sum of each parameter gives it a gradient
            # of zeros, as unused experts have on one device, where it would else be None.
            for x in self.module.parameters():
                result = result + x[:0].sum().to(result.dtype)
        self.last = _received_bytes(under_way, _row_bytes(result))
        return under_way.routed.back(result)


def _received_bytes(under_way: _UnderWay, result_bytes: int) -> tuple[int, int]:
    """Return the bytes that a pass receives from other processes, forward and backward.

    Args:
        under_way: The rows that came.
        result_bytes: The bytes of the result of one row.
    """
    routed, copy_bytes = under_way
    n_received, n_sent = routed.beyond  # copies of rows
    # Beside the rows travel 4 bytes for each choice; results return as one row for each copy.
    forward_bytes = n_received * (copy_bytes + 4 * routed.k) + n_sent * result_bytes
    backward_bytes = 0
    if torch.is_grad_enabled() and routed.copies.requires_grad:
        # Gradients go the other way round, and choices have none.
        backward_bytes = n_sent * copy_bytes + n_received * result_bytes
    return forward_bytes, backward_bytes


def _choices_key(key: Any, values: Values) -> Any:
    """Find the argument that says which experts each row chose; return its position or name.

    Beside rows [t, c] it is the only tensor with integers and two dims, [t, k]: k experts per row.
    Raises ShapeError if there is none, or several.

    Args:
        key: The position or the name of the rows.
        values: All arguments, by position or name.
    """
    rows = values[key]
    tables = []
    for other_key, x in values.items():
        is_table = other_key != key and isinstance(x, Tensor) and x.ndim == 2
        is_mask = is_table and x.dtype == torch.bool
        if is_table and not is_mask and not x.is_floating_point() and len(x) == len(rows):
            tables.append(other_key)
    if len(tables) != 1:
        hint = f"rows have shape {tuple(rows.shape)}, and choices beside them [rows, k], of whole numbers"
        reason = f"experts need one argument with choices for each row, not {len(tables)}: {tables}"
        raise ShapeError(reason, hint=hint)
    return tables[0]


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def route_experts(
    hooks: Mapping[str, ModuleHooks],
    context: ParallelContext,
    parameters: Sequence[ShardedParameter],
    used_shardings: Mapping[str, Sharding],
) -> list[Count]:
    """Let modules of experts route rows to the processes of their experts; sets `experts` of hooks.

    A rule "t/ep c -> t/to(ep) c" for the input of a module asks for that. The modules stay as they
    are. Returns the attributes `num_experts` of these modules, each with the number that it has to
    be on this process: 8 experts over ep=4 -> 2.

    Args:
        hooks: The hooks of all modules with rules, by name.
        context: The mesh and options.
        parameters: The parameters.
        used_shardings: How modules use each parameter, by name. This says which process has which
            experts.
    """
    counts = []
    for name, module_hooks in hooks.items():
        axes = _routed_axes(module_hooks)
        if not axes:
            continue
        with located(module_hooks.title):
            experts = _experts_of(name, axes, context, parameters, used_shardings)
        call = RouteCall(axes, context.mesh, experts.process_of_each())
        module_hooks.experts = RoutedExperts(experts.module, call)
        # transformers' experts loop over them by this attribute.
        if vars(experts.module).get("num_experts") == experts.n_experts:
            process = context.processes.submesh(axes).device
            n_local = len(experts.by_process[process])
            counts.append(Count(experts.module, "num_experts", experts.n_experts, n_local))
    return counts


def _routed_axes(hooks: ModuleHooks) -> tuple[str, ...]:
    """Return the axes along which a module's rows go where they chose; none for most modules."""
    for rule in hooks.inputs:
        if rule.rule.routed_axes:
            return rule.rule.routed_axes
    return ()


class _Experts(NamedTuple):
    """The experts of a module: how many, and the numbers of those that each process has."""

    module: nn.Module
    n_experts: int
    by_process: tuple[tuple[int, ...], ...]

    def is_partition(self) -> bool:
        """Return whether each expert is on one process, and those of each process ascend."""
        listed: list[int] = []
        for experts in self.by_process:
            if list(experts) != sorted(experts):
                return False
            listed += experts
        return sorted(listed) == list(range(self.n_experts))

    def process_of_each(self) -> tuple[int, ...]:
        """Return the process that has each expert: ((0, 1), (2, 3)) -> (0, 0, 1, 1)."""
        processes = [0] * self.n_experts
        for process, experts in enumerate(self.by_process):
            for expert in experts:
                processes[expert] = process
        return tuple(processes)


def _experts_of(
    name: str,
    axes: tuple[str, ...],
    context: ParallelContext,
    parameters: Sequence[ShardedParameter],
    used_shardings: Mapping[str, Sharding],
) -> _Experts:
    """Find which experts of a module each process has, by the layouts of the module's parameters.

    The first dim of each parameter is that of experts: "e/ep ..." with 4 experts on ep=2 puts
    experts 0, 1 on the first process and 2, 3 on the second: ((0, 1), (2, 3)). Raises PlanError
    unless all parameters have the same experts on a process, in ascending order, and each expert is
    on one process.

    Args:
        name: The module of experts.
        axes: The mesh axes along which experts are sharded.
        context: The mesh and options.
        parameters: The parameters of the model.
        used_shardings: Layout and global shape of each parameter in use, by name.
    """
    processes = context.processes
    # The mesh devices of the processes along `axes`.
    devices = [processes.ranks.index(rank) for rank in processes.submesh(axes).ranks]
    distinct = set()  # what parameters say; more than one if they disagree
    for parameter in parameters:
        for full_name, slot in zip(parameter.names, parameter.slots, strict=True):
            if module_of(full_name) != name or full_name not in used_shardings:
                continue
            sharding = used_shardings[full_name]
            by_process = tuple(_experts_on(device, sharding) for device in devices)
            distinct.add(_Experts(slot.module, sharding.shape[0], by_process))

    if len(distinct) == 1:
        (only,) = distinct
        if only.is_partition():
            return only
    over = ",".join(axes)
    pattern = f"{name}.*" if name else "*"
    hint = f"parameters: '{pattern}' as 'e/{over} ...', each expert on one process"
    raise PlanError(
        f"the parameters of experts are not sharded over '{over}' by experts", hint=hint
    )


def _experts_on(device: int, sharding: Sharding) -> tuple[int, ...]:
    """List the experts that a device has of a parameter, whose first dim is theirs."""
    experts = sharding.layout.positions(sharding.mesh, sharding.shape, 0, device)
    return tuple(experts.tolist())
