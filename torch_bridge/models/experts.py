"""Experts under the rule `"t/ep c -> t/to(ep) c"`: rows go to those that they chose, and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.routing import RouteCall, Routed
from xshard.errors import PlanError, ShapeError, located
from xshard.models import ParameterUse

if TYPE_CHECKING:
    from torch_bridge.models.hooks import ModuleHooks

Values = dict[Any, Any]  # arguments by position or name
Uses = Mapping[str, ParameterUse]


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
    _under_way: list[_UnderWay] = field(default_factory=list)  # one for each pass that has begun

    def enter(self, key: Any, values: Values) -> None:
        """Send the rows of a call to the processes of the experts that they chose.

        Afterwards `values` has the rows that came to this process, to call its own experts with.

        Rows [t, c], choices [t, k] and weights [t, k] in `values` become rows [n, c], choices [n, 1]
        and weights [n, 1]: one row for each choice of an expert of this process.

        Args:
            key: The position or the name of the rows among the arguments.
            values: The arguments by position or name, changed in place. Choices are whole numbers,
                weights floats of their shape.
        """
        rows = values[key]
        choices_key = _choices_key(key, values)
        choices = values[choices_key]
        weight_keys = []
        for other_key, x in values.items():
            if other_key != key and _is_float_tensor(x) and x.shape == choices.shape:
                weight_keys.append(other_key)

        # Weights travel as columns of the rows, in the same message.
        weights = [values[weight_key] for weight_key in weight_keys]
        routed, copies = self.call.send([rows, *weights], choices)
        values[key] = routed.rows
        # The module is called as before, with one choice per row: its experts here count from 0.
        values[choices_key] = routed.groups[:, None].to(choices.dtype)
        for weight_key, weight in zip(weight_keys, copies[1:], strict=True):
            # A copy of a row came with the weights of all k choices of the row; `order` picks, for
            # each row of the call, the weight of the one choice for which it is there.
            values[weight_key] = weight.reshape(-1)[routed.order][:, None]
        copy_bytes = sum(_row_bytes(x) for x in copies)
        self._under_way.append(_UnderWay(routed, copy_bytes))

    def leave(self, result: Any) -> Any:
        """Send the results of experts back, and add up those of each row: [n, c] -> [t, c].

        Called after `forward`, even of a call that failed: its result is None, and None is
        returned. Notes in `last` the bytes that travelled forward and will travel backward.
        """
        if not self._under_way:
            return None  # the call failed before its rows were sent
        routed, copy_bytes = self._under_way.pop()  # the innermost pass, if a module calls itself
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

        received, sent = routed.beyond
        result_bytes = _row_bytes(result)
        # Beside the rows travel 4 bytes for each choice; results return as one row for each copy.
        forward_bytes = received * (copy_bytes + 4 * routed.k) + sent * result_bytes
        backward_bytes = 0
        if torch.is_grad_enabled() and routed.copies.requires_grad:
            backward_bytes = sent * copy_bytes + received * result_bytes
        self.last = (forward_bytes, backward_bytes)
        return routed.back(result)


def _choices_key(key: Any, values: Values) -> Any:
    """Find which argument of a call says which experts each row chose.

    It is the first argument with two dims and a dtype without fractions, beside the rows
    themselves: for rows [t, c], a table [t, k]. Returns its position or its name. Raises ShapeError
    if there is none, or if its length is not t.

    Args:
        key: The position or the name of the rows.
        values: All arguments, by position or name.
    """
    rows = values[key]
    for other_key, x in values.items():
        is_table = other_key != key and isinstance(x, Tensor) and x.ndim == 2
        if is_table and not x.is_floating_point():
            if len(x) == len(rows):
                return other_key
            break  # the first table of whole numbers has to fit
    hint = (
        f"rows have shape {tuple(rows.shape)}, and choices beside them [rows, k], of whole numbers"
    )
    raise ShapeError("experts are called without a choice for each row", hint=hint)


def _is_float_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def route_experts(
    hooks: Mapping[str, ModuleHooks],
    context: ParallelContext,
    parameters: Sequence[ShardedParameter],
    uses: Uses,
) -> list[Count]:
    """Prepare the modules of experts whose input rule sends rows to experts on other processes.

    Such a rule is "t/ep c -> t/to(ep) c". Sets `experts` of the hooks of these modules. Returns,
    for each module with an attribute `num_experts`, that attribute and what it has to be on this
    process: 8 experts over ep=4 -> 2.

    Args:
        hooks: The hooks of all modules with rules, by name.
        context: The mesh and options.
        parameters: The parameters, whose layouts say which process has which experts.
        uses: How modules use each parameter, by name.
    """
    counts = []
    for name, module_hooks in hooks.items():
        axes = _routed_axes(module_hooks)
        if not axes:
            continue
        with located(module_hooks.title):
            module, experts_by_process = _experts_of(name, axes, context, parameters, uses)
            # For each expert the process that has it: ((0, 1), (2, 3)) -> 0, 0, 1, 1.
            process_of: dict[int, int] = {}
            for process, experts in enumerate(experts_by_process):
                process_of.update(dict.fromkeys(experts, process))
            groups = tuple(process_of[expert] for expert in sorted(process_of))
            module_hooks.experts = RoutedExperts(module, RouteCall(axes, context.mesh, groups))
        # transformers' experts loop over them by this attribute.
        if vars(module).get("num_experts") == len(groups):
            own_experts = experts_by_process[context.processes.submesh(axes).device]
            counts.append(Count(module, "num_experts", len(groups), len(own_experts)))
    return counts


def _routed_axes(hooks: ModuleHooks) -> tuple[str, ...]:
    """Return the axes along which a module's rows go where they chose; none for most modules."""
    for rule in hooks.inputs:
        if rule.rule.routed_axes:
            return rule.rule.routed_axes
    return ()


def _experts_of(
    name: str,
    axes: tuple[str, ...],
    context: ParallelContext,
    parameters: Sequence[ShardedParameter],
    uses: Uses,
) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """Find which experts of a module each process has, by the layouts of the module's parameters.

    Experts are the first dim of each parameter: "e/ep ..." with 4 experts on ep=2 -> ((0, 1), (2, 3)).
    Returns the module, too. Raises PlanError unless all its parameters agree, and put each expert,
    whole, on one process, in ascending order.
    """
    devices = [context.processes.ranks.index(r) for r in context.processes.submesh(axes).ranks]
    module: nn.Module | None = None
    # A set of what the parameters say, as (all experts, those of process 0, those of process 1,
    # ...): more than one item means that they disagree.
    splits: set[tuple[tuple[int, ...], ...]] = set()
    for parameter in parameters:
        for full_name, place in zip(parameter.names, parameter.places, strict=True):
            if full_name.rpartition(".")[0] != name or full_name not in uses:
                continue
            module = place.module
            layout = uses[full_name].used.in_order(uses[full_name].stored.names)
            shape = parameter.sharding.shape
            split = []
            for device in devices:
                experts = layout.positions(context.axes, shape, 0, device)
                split.append(tuple(experts.tolist()))
            splits.add((tuple(range(shape[0])), *split))

    # Parameters that disagree, or none at all, have no experts to send rows to.
    if module is not None and len(splits) == 1:
        all_experts, *experts_by_process = splits.pop()
        if _is_partition(experts_by_process, all_experts):
            return module, tuple(experts_by_process)
    over = ",".join(axes)
    pattern = f"{name}.*" if name else "*"
    hint = f"parameters: '{pattern}' as 'e/{over} ...', each expert on one process"
    raise PlanError(
        f"the parameters of experts are not sharded over '{over}' by experts", hint=hint
    )


def _is_partition(
    experts_by_process: Sequence[tuple[int, ...]], all_experts: tuple[int, ...]
) -> bool:
    """Return whether each expert is on one process, and those of each process ascend."""
    listed: list[int] = []
    for experts in experts_by_process:
        if list(experts) != sorted(experts):
            return False
        listed += experts
    return sorted(listed) == list(all_experts)
