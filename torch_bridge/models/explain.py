"""A parallel model as tables: where its parameters live, and the bytes that a step sends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NamedTuple

from torch import nn

from torch_bridge.mesh.machine import machine_profile
from torch_bridge.models.hooks import ModuleHooks, TensorFacts
from torch_bridge.models.parallel import ParallelModel, parallel_of
from torch_bridge.models.parameters import ShardedParameter
from torch_bridge.precision import parameter_dtypes
from xshard import dtypes, load_profile, planner
from xshard.cost.model import Profile
from xshard.errors import api_boundary
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh
from xshard.models import ActivationRule, ParameterUse, layout_text, rule_of, uncut_axes
from xshard.schedule import Schedule


class _ParameterRow(NamedTuple):
    """A parameter in the first table: its name, shape, layouts and axes of gradient sums, and bytes."""

    name: str
    texts: tuple[str, ...]
    block_bytes: int


class _Received(NamedTuple):
    """The bytes that the busiest process receives in a move, and in its adjoint in the backward pass."""

    forward: int
    backward: int


class _MoveRow(NamedTuple):
    """A move in the second table.

    Attributes:
        module: The module, with the direction of the move.
        text: The rule.
        received: None for a module that has not been called yet.
    """

    module: str
    text: str
    received: _Received | None


class _Machine(NamedTuple):
    """What the bytes of a move depend on, beside the move itself."""

    axes: Mesh
    profile: Profile


class Explanation(str):
    """Tables about a parallel model. A notebook draws the schedule below them."""

    schedule: Schedule | None = None  # of what modules gather, after a pass with `prefetch=`

    def _repr_html_(self) -> str:
        pictures = import_module("xshard.pictures.html")
        text = str(pictures.preformatted(self))
        if self.schedule is None:
            return text
        return text + self.schedule._repr_html_()


@api_boundary
def explain(model: nn.Module) -> Explanation:
    """Return tables about a parallel model: how it is sharded, what a step sends, and when.

        print(xt.explain(model))

    The bytes are those of the busiest process. Activations have theirs after the first forward pass.

    Args:
        model: A parallel model.

    Returns:
        Tables of parameters and of moves, with a sum below each. With `prefetch=`, after a pass, also the
        schedule of what modules gather: what starts to travel, and what is awaited, before each computes.
        A notebook draws it; it is the attribute `schedule` of the text.

    Raises:
        XshardError: The model is not parallel.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def table():
        ...     layer = torch.nn.Linear(6, 10)
        ...     model = xt.parallelize(
        ...         layer, {"**": "o/dp ... -> o ..."}, {"": "b i -> b/dp i"}, Mesh(dp=2)
        ...     )
        ...     return str(xt.explain(model))
        >>> for line in xt.testing.run_ranks(2, table)[0].splitlines()[2:4]:
        ...     print(line)
        parameter    shape    stored    used   gradient summed over  block
        weight       [10, 6]  o/dp ...  o ...  dp                    120 B
    """
    parallel = parallel_of(model)
    axes = parallel.context.axes
    machine = _Machine(axes, load_profile(machine_profile(parallel.context.profile)))
    title = f"{type(model).__name__} on {axes}"
    tables = [title, _table_of_parameters(parallel), _table_of_moves(parallel, machine)]
    schedule = None
    if parallel.prefetch.forward:
        schedule = parallel.prefetch.schedule()
        tables.append(str(schedule))
    explanation = Explanation("\n\n".join(tables))
    explanation.schedule = schedule
    return explanation


def _table_of_parameters(parallel: ParallelModel) -> str:
    """Write the table of parameters: shape, layouts, axes of gradient sums, and bytes of a block.

    Parameters whose names differ only in numbers share a row if all else is equal: layers.0.w and
    layers.1.w become "layers.*.w  x 2". The last row is the sum over all parameters and buffers.
    """
    by_name = parallel.by_name  # computed anew each time
    rows = []
    for name, use in parallel.uses.items():
        rows.append(_parameter_row(name, use, by_name[name], parallel))
    lines: list[tuple[str, ...]] = [
        ("parameter", "", "shape", "stored", "used", "gradient summed over", "block")
    ]
    for group in _group_similar_rows((row.name, row.texts) for row in rows):
        members = [rows[i] for i in group.members]
        block_bytes = sum(row.block_bytes for row in members)
        lines.append((group.name, group.times, *members[0].texts, format_bytes(block_bytes)))
    lines.append(("a process", "", "", "", "", "", _bytes_of_process(parallel)))
    return align_columns(lines)


def _bytes_of_process(parallel: ParallelModel) -> str:
    """Say how much of the model a process stores: "1.20 MiB of 4.00 MiB".

    With buffers, and a tied parameter once, though it has a row per name.
    """
    stored_bytes = 0
    whole_bytes = 0
    for parameter in parallel.parameters:
        itemsize = parameter.tensor.element_size()
        stored_bytes += itemsize * parameter.sharding.max_local_size
        whole_bytes += itemsize * math.prod(parameter.sharding.shape)
    return f"{format_bytes(stored_bytes)} of {format_bytes(whole_bytes)}"


def _parameter_row(
    name: str, use: ParameterUse, parameter: ShardedParameter, parallel: ParallelModel
) -> _ParameterRow:
    """Describe one use of a parameter: shape, layouts, axes of its gradient's sum, and bytes.

    For [10, 6] in float32, stored as "o/tp i" on dp=2, tp=2: ("[10, 6]", "o/tp i", "as stored", "dp")
    and 120 bytes. A tied parameter has a row for each of its names, as layouts in use may differ.
    """
    x = parameter.tensor
    if x.requires_grad:
        # All axes over which its gradient is summed: by the gathering module's backward move at
        # once, or in buckets after the backward pass.
        summed_over = " ".join(uncut_axes(parallel.used_shardings[name], use.summed_axes))
    else:
        summed_over = "frozen"
    used = "as stored" if use.used == use.stored else layout_text(use.used)
    shape = str(list(parameter.sharding.shape))
    block_bytes = parameter.sharding.max_local_size * x.element_size()
    return _ParameterRow(name, (shape, layout_text(use.stored), used, summed_over), block_bytes)


def _table_of_moves(parallel: ParallelModel, machine: _Machine) -> str:
    """Write the table of communication in a step: each move with the bytes received, both ways.

    In the order of a step: parameters are gathered, activations move, gradients are summed. Moves
    of modules whose names differ only in numbers share a row. The last row is the sum of all.
    """
    rows = _gathers(parallel, machine)
    for hooks in parallel.hooks.values():
        rows += _activation_moves(hooks, machine)
    rows += _gradient_sums(parallel, machine)

    lines: list[tuple[str, ...]] = [("module", "", "moves", "forward", "backward")]
    for group in _group_similar_rows((row.module, row.text) for row in rows):
        members = [rows[i] for i in group.members]
        columns = _sum_of_received(members)  # forward and backward
        if any(row.received is None for row in members):
            columns = ("not called yet", "not called yet")
        lines.append((group.name, group.times, members[0].text, *columns))
    lines.append(("a step", "", "", *_sum_of_received(rows)))
    return align_columns(lines)


def _sum_of_received(rows: Sequence[_MoveRow]) -> tuple[str, str]:
    """Write the bytes of moves together, forward and backward. Modules without a call count as nothing."""
    received_of_rows = [row.received for row in rows if row.received is not None]
    forward_bytes = sum(received.forward for received in received_of_rows)
    backward_bytes = sum(received.backward for received in received_of_rows)
    return format_bytes(forward_bytes), format_bytes(backward_bytes)


def _gathers(parallel: ParallelModel, machine: _Machine) -> list[_MoveRow]:
    """Describe the gathers of parameters, and what their gradients send."""
    rows = []
    for hooks in parallel.hooks.values():
        for gathered in hooks.parameters.parameters:
            x = gathered.parameter.tensor
            rule = rule_of(gathered.to_use, machine.axes)
            if not rule.moves:  # it is cast alone
                continue
            travels = gathered.dtypes(parallel.context.comm_dtype)
            facts = TensorFacts(gathered.parameter.sharding.shape, travels.forward, x.requires_grad)
            received = _received_bytes(rule, machine, facts)
            summed = _received_bytes(rule, machine, facts._replace(dtype=travels.backward))
            received = received._replace(backward=summed.backward)
            if not gathered.is_kept:  # the backward pass gathers it again
                received = received._replace(backward=sum(received))
            rows.append(_MoveRow(gathered.name, layout_text(gathered.to_use), received))
    return rows


def _activation_moves(hooks: ModuleHooks, machine: _Machine) -> list[_MoveRow]:
    """Describe the moves of a module's inputs and outputs, with the bytes of its last call.

    A module that sends rows to experts has a row more, with what this process sent and received.
    """
    rows = []
    for direction, tensor_rules in (("input", hooks.inputs), ("output", hooks.outputs)):
        for tensor_rule in tensor_rules:
            rule = tensor_rule.rule
            if not rule.moves:
                continue
            received = None
            if tensor_rule.last is not None:  # the tensor of the last call
                received = _received_bytes(rule, machine, tensor_rule.last)
            rows.append(_MoveRow(f"{hooks.title}, {direction}", rule.text, received))

    if hooks.experts is not None:
        texts = [routed.rule.text for routed in hooks.inputs if routed.rule.routed_axes]
        # What travels depends on the values: other processes may have received more.
        last_bytes = hooks.experts.last
        received = None if last_bytes is None else _Received(*last_bytes)
        rows.append(_MoveRow(f"{hooks.title}, this process", texts[0], received))
    return rows


def _gradient_sums(parallel: ParallelModel, machine: _Machine) -> list[_MoveRow]:
    """Describe the all-reduces of gradients after the backward pass, one row per parameter.

    A parameter that was gathered for use may have no such row: the way back of its gather has summed
    its gradient already.
    """
    rows = []
    for parameter in parallel.trained_parameters:
        if not parameter.axes_in_buckets:
            continue
        # In a run, one message has many gradients; the number of bytes is the same. Here each is an
        # array of one dim n, with the layouts of an all-reduce: "n | sum(dp) -> n".
        text = f"n | sum({','.join(parameter.axes_in_buckets)}) -> n"
        mesh = parameter.sharding.mesh
        block = parameter.tensor
        comm_dtype = parallel.context.comm_dtype
        travels = parameter_dtypes(parameter.precision, comm_dtype, block.dtype)
        facts = TensorFacts((block.numel(),), travels.backward, requires_grad=False)
        # The forward direction of this move is a part of the step's backward pass.
        all_reduce = _received_bytes(rule_of(text, mesh), machine._replace(axes=mesh), facts)
        received = _Received(forward=0, backward=all_reduce.forward)
        rows.append(_MoveRow("gradients, in buckets", text, received))
    return rows


def _received_bytes(rule: ActivationRule, machine: _Machine, tensor: TensorFacts) -> _Received:
    """Return the bytes that the busiest process receives in a move, and in that of the gradient.

    The move is planned, and not run. Backward is 0 for a tensor without a gradient.

    Args:
        rule: The layouts before and after.
        machine: The mesh of the model, and its profile.
        tensor: Global shape, dtype, and whether it has a gradient.
    """
    axes = machine.axes
    # A run plans on the sub-mesh of the axes that the rule names; so does this.
    named_axes = [axis for axis in axes.axes if axis in rule.axes]
    mesh = Mesh(dict(zip(named_axes, axes.sizes_of(named_axes), strict=True)))
    profile_of_axes = machine.profile.for_axes(named_axes, axes)
    layouts = (rule.src, rule.dst)
    dtype = dtypes.name_of(tensor.dtype)
    plan = planner.plan(layouts, mesh, tensor.shape, dtype, profile=profile_of_axes)
    backward = plan.backward.bytes_received if tensor.requires_grad else 0
    return _Received(plan.bytes_received, backward)


class _Group(NamedTuple):
    """Rows that differ only in numbers in their names: one row, with how many they are."""

    name: str
    times: str
    members: list[int]


def _group_similar_rows(rows: Iterable[tuple[str, object]]) -> list[_Group]:
    """Group table rows, (name, texts), with equal texts and names that differ only in numbers.

    layers.0.w, layers.1.w, head.w -> layers.*.w with "x 2" and members [0, 1], and head.w with ""
    and members [2]: these are the numbers of the rows.
    """
    names = []
    # By the name with "*" for each number, and the texts; in the order of the first row of each.
    members_by_key: dict[tuple[str, object], list[int]] = {}
    for i, (name, texts) in enumerate(rows):
        names.append(name)
        pattern = re.sub(r"\b\d+\b", "*", name)
        members_by_key.setdefault((pattern, texts), []).append(i)
    groups = []
    for (pattern, _), members in members_by_key.items():
        if len(members) == 1:
            groups.append(_Group(names[members[0]], "", members))
        else:
            groups.append(_Group(pattern, f"x {len(members)}", members))
    return groups
