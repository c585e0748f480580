"""`suggest` for modules: record a forward pass without data, and search layouts for that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of, process_mesh
from torch_bridge.precision import Precision, parameter_dtypes
from torch_bridge.redistribution import redistribute
from torch_bridge.step.record import record_step
from xshard import Layout, Rules, Suggestion
from xshard import suggest as suggest_step
from xshard.dtypes import name_of
from xshard.errors import ShapeError, api_boundary
from xshard.layout.lengths import Lengths, global_shape
from xshard.notation.parser import Shard
from xshard.step.record.fuse import fuse_operations
from xshard.step.record.repeat import find_repeated
from xshard.step.suggest import SuggestKeywords

CALLS = """\
xt.parallelize(model, plan.parameters, plan.inputs, mesh, outputs=plan.outputs,
               gathers=plan.gathers, keep=plan.once, prefetch={})"""
Losses = Tensor | tuple[Tensor, Tensor]


@dataclass(eq=False)
class TorchSuggestion(Suggestion):
    """A suggestion for a module; its unused parameters have a rule, too."""

    mesh: MeshLike = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unused:
            # `parallelize` needs a rule for every parameter.
            unused = "|".join(self.unused)
            self.parameters = Rules({**self.parameters, unused: "..."})

    def __str__(self) -> str:
        """Write the plan, and the calls that run it."""
        calls = CALLS.format(self.prefetch)
        if self.batch_parts > 1:
            calls += f"\nxt.halves(model, {self.batch_parts})"
        return f"{super().__str__()}\n{calls}"

    @property
    def result(self) -> str:
        """The layout of the model's result as a loss takes it, of logits for example."""
        # Others are operands of which the code only reads lengths.
        name, *_ = self.search.problem.step.ops[-1].operands
        return str(self.layouts[name][1])

    @property
    def result_lengths(self) -> Mapping[str, int]:
        """The lengths of dims of `result` that may be in uneven blocks, which do not tell them."""
        problem = self.search.problem
        name, *_ = problem.step.ops[-1].operands
        layout = Layout.parse(self.result)
        dims = zip(layout.names, problem.shape(name), problem.units[name], strict=True)
        # The model decides how long a dim with units is; the batch decides about others.
        return {dim: length for dim, length, n_units in dims if n_units > 1}

    @api_boundary
    def mean(self, loss: Callable[..., Losses], result: Tensor, *targets: Tensor) -> Tensor:
        """Return the mean of a loss over all rows, whatever the layout of the model's result.

            def loss_of(result):
                return plan.mean(loss, result.logits, labels)

        The last dim, as of classes, is whole in each row: where it arrives sharded, rows are sharded
        in its place. Every process computes the loss of its rows, and two numbers are summed.

        Args:
            loss: A function of rows of the result, and of the same rows of the targets. It returns
                the losses, as with `reduction="none"`, or two scalars: a sum, and what divides it, as
                the number of labels that count.
            result: This process's block of the model's result, under `plan.result`.
            targets: Whole tensors, the same on all processes, with the first dims of the result.

        Returns:
            A scalar, the same on all processes.

        Raises:
            ShapeError: The loss is a mean already, or targets have other rows.
        """
        layout = Layout.parse(self.result)
        return mean_over_rows(loss, result, targets, layout, self.mesh, self.result_lengths)


def mean_over_rows(
    loss: Callable[..., Losses],
    result: Tensor,
    targets: Sequence[Tensor],
    layout: Layout,
    mesh: MeshLike,
    lengths: Lengths | None = None,
) -> Tensor:
    """Return the mean of a loss over rows of a result; `TorchSuggestion.mean` explains it.

    Args:
        loss: A function of rows of the result, and of the same rows of the targets.
        result: This process's block of the result.
        targets: Whole tensors, with the first dims of the result.
        layout: The layout of the result.
        mesh: The devices.
        lengths: Of dims in uneven blocks, by name: one block does not tell them.
    """
    rows = _with_whole_rows(layout)
    shape = global_shape(layout, process_mesh(mesh).mesh, result.shape, str(layout), lengths)
    own_rows = redistribute(result, (layout, rows), mesh, shape=shape)
    own_targets = []
    for target in targets:
        target_layout = Layout(rows.dims[: target.ndim])
        own_targets.append(redistribute(target, (target_layout.unsharded, target_layout), mesh))
    own_sum, own_number = _sum_and_number(loss(own_rows, *own_targets))
    # The two travel together, and the number is exact in the dtype of a loss.
    sums = torch.stack([own_sum, own_number.to(own_sum.dtype)])
    if rows.axes:
        sums = redistribute(sums, f"n | sum({','.join(rows.axes)}) -> n", mesh)
    return sums[0] / sums[1]


def _sum_and_number(losses: Losses) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of losses, which may be given as these two; refuse a mean."""
    if not isinstance(losses, Tensor):
        return losses
    if losses.ndim == 0:
        what = "the loss is a scalar: a mean of means is another one where rows are uneven"
        hint = 'losses with reduction="none", or two scalars: (sum, number)'
        raise ShapeError(what, hint=hint)
    return losses.sum(), losses.new_tensor(losses.numel())


def _with_whole_rows(layout: Layout) -> Layout:
    """Return a layout in which the last dim is whole: `b/dp s v/tp` -> `b/dp/tp s v`."""
    if len(layout.dims) < 2:
        return Layout(layout.dims)
    first, *others, last = layout.dims
    moved = tuple(Shard((axis,)) for axis in last.axes)
    first = replace(first, shards=first.shards + moved)
    last = replace(last, shards=())
    return Layout((first, *others, last))


@api_boundary
def suggest(
    model: nn.Module,
    batch: Any,
    mesh: MeshLike,
    *,
    precision: Precision | None = None,
    **options: Unpack[SuggestKeywords],
) -> TorchSuggestion:
    """Find the layouts of parameters, inputs and activations that make a training step fastest.

        plan = xt.suggest(model, {"input_ids": ids}, Mesh(dp=4, tp=2), memory="80GiB")

    The forward pass runs once on the meta device: nothing is allocated. The model may be on the
    meta device itself, and stays as it is. A length written in its code, as 4 in `view(b, 4, -1)`,
    means all rows of a dim, which is then not sharded; a length read from a tensor is sharded as
    that tensor is. The loss is of the first tensor of the result.

    Args:
        model: Any module.
        batch: Examples of the arguments of `forward`: a tensor, a tuple, or a dict by name. Only
            shapes and dtypes matter. The first dim of the first tensor is the batch.
        mesh: The devices: an `xshard.Mesh`, or a `DeviceMesh` with named dims.
        precision: As for `parallelize`, one for all modules.
        **options: As for `xshard.suggest`.

    Returns:
        The rules of the fastest plan, which `parallelize` takes, and its seconds and bytes.

    Raises:
        PlanError: The model reads numbers from its data, or its batch or result has no tensor.
        XshardError: As for `xshard.suggest`.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(8192, 8192, dtype=torch.bfloat16)
        ...     x = torch.empty(4096, 8192)
        >>> plan = xt.suggest(model, x, Mesh(dp=4, tp=2), memory="80GiB", micro_batches=1)
        >>> plan.parameters["weight"], plan.inputs[""], plan.result
        ('o/dp/tp i', 'b s8192 -> b s8192 | copy(dp,tp)', 'b n8192/dp/tp')
    """
    step, unused = record_step(model, batch)
    if precision is not None:
        travels = parameter_dtypes(precision, None, getattr(torch, step.dtype))
        step = replace(
            step,
            dtype=name_of(travels.result),
            stored_dtype=step.dtype,
            reduce_dtype=name_of(travels.backward),
        )
    # Equal layers become one, and light operations join their neighbours: fewer of both to search.
    step, _ = find_repeated(step)
    plan = suggest_step(fuse_operations(step), mesh_of(mesh), **options)
    return TorchSuggestion(
        plan.search, plan.assignment, plan.bound, plan.by_hand, unused=unused, mesh=mesh
    )
