"""`own_experts`: a module of experts by itself, in a model that something else runs and trains."""

from __future__ import annotations

from typing import Unpack

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.parallelize import Model, ParallelizeKeywords, parallelize
from xshard.errors import api_boundary
from xshard.ops import Axes


@api_boundary
def own_experts(
    module: Model, axis: Axes, mesh: MeshLike, **options: Unpack[ParallelizeKeywords]
) -> Model:
    """Shard a module of experts, and send rows to the processes of the experts they chose.

        module = xt.own_experts(module, "ep", mesh)     # parameters [e, ...] -> [e/ep, ...]

    The module is as in transformers: its parameters have experts as their first dim. It is called with rows
    `[t, c]`, their experts `[t, k]` and weights `[t, k]`, and returns `[t, c]`. Afterwards each process calls
    it with rows of its own, any number of them.

    This is the rule `"t/ep c -> t/to(ep) c"` of `parallelize`, which is for whole models. Here gradients are
    of all losses along the axis; you sum over other axes yourself.

    Args:
        module: The module of experts, whole.
        axis: The mesh axis that shards experts, or several taken as one.
        mesh: As for `redistribute`.
        **options: As for `parallelize`.

    Returns:
        The module itself.

    Raises:
        XshardError: As `parallelize` does; a call of the module raises as `route` does.

    Examples:
        >>> import torch, torch_bridge as xt, xshard as xs
        >>> class Scales(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.arange(4.0))
        ...
        ...     def forward(self, x, chosen, weights):
        ...         return (x[:, None] * (self.scale[chosen] * weights)[:, :, None]).sum(1)
        >>> def step():
        ...     module = xt.own_experts(Scales(), "ep", xs.Mesh(ep=2))
        ...     x, chosen = torch.ones(1, 3), torch.tensor([[1, 3]])
        ...     return module.scale.tolist(), module(x, chosen, torch.ones(1, 2)).tolist()
        >>> xt.testing.run_ranks(2, step)
        [([0.0, 1.0], [[4.0, 4.0, 4.0]]), ([2.0, 3.0], [[4.0, 4.0, 4.0]])]
    """
    axes = axis if isinstance(axis, str) else ",".join(axis)
    parameters = {"*": f"e/({axes}) ..."}
    inputs = {"": f"t/({axes}) ... -> t/to({axes}) ..."}
    return parallelize(module, parameters, inputs, mesh, **options)
