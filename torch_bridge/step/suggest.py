"""`suggest` for modules: a forward pass, recorded without data, as the step that `xshard.suggest` takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.step.record import recorded
from xshard import Rules, Suggestion
from xshard import suggest as suggest_step
from xshard.step.record.fuse import fused
from xshard.step.record.repeat import repeated


class TorchSuggestion(Suggestion):
    """A suggestion for a module; its unused parameters have a rule, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unused:
            self.parameters = Rules({**self.parameters, "|".join(self.unused): "..."})

    @property
    def result(self) -> str:
        """The layout of the model's result, as a loss takes it: the layout of logits, for example."""
        (name,) = self.search.problem.step.ops[-1].operands
        return str(self.layouts[name][1])


def suggest(model: nn.Module, batch: Any, mesh: MeshLike, **options: Any) -> TorchSuggestion:
    """The layouts of a model's parameters, inputs and activations that make a training step fastest.

    The forward pass runs once on the meta device: nothing is allocated, and the model, which may be on the
    meta device itself, stays as it is. Lengths that its code says, as numbers of heads, stay the
    whole's; lengths that it reads from a tensor are sharded as that tensor is.
    batch: examples of the arguments of `forward`: a tensor, a tuple, or a dict by name; only shapes and
    dtypes matter, and the first dim of the first tensor is the batch. The loss is of the first tensor of the
    result. options: as for `xshard.suggest`.
    Raises PlanError for a model that reads numbers from its data, and as `xshard.suggest` does.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(8192, 8192, dtype=torch.bfloat16), torch.empty(4096, 8192)
    >>> plan = xt.suggest(model, x, Mesh(dp=4, tp=2), memory="80GiB", micro_batches=1)
    >>> plan.parameters["weight"], plan.inputs[""], plan.result
    ('o/dp/tp i', 'b s8192 -> b s8192 | copy(dp,tp)', 'b n8192/dp/tp')
    """
    step, unused = recorded(model, batch)
    plan = suggest_step(fused(repeated(step)[0]), mesh_of(mesh), **options)
    return TorchSuggestion(plan.search, plan.assignment, plan.bound, plan.by_hand, unused=unused)
