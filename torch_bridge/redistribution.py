"""`redistribute`: the public verb.

Decides whether a compiler records the call or this process runs it now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.eager import redistribute_eagerly
from torch_bridge.mesh.process_mesh import MeshLike
from xshard import Profile
from xshard.plans.expression import Expression


@overload
def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "auto",
    comm_dtype: CommDtypeLike = None,
    async_op: Literal[False] = False,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor: ...


@overload
def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "auto",
    comm_dtype: CommDtypeLike = None,
    async_op: bool,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor | PendingTensor: ...


def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "auto",
    comm_dtype: CommDtypeLike = None,
    async_op: bool = False,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor | PendingTensor:
    """This process's block under the left layout -> its block under the right one, differentiable.

    All processes of the mesh call it, with equal arguments except the values of `x`, and with
    equal `requires_grad`. The result is a new tensor, contiguous unless dims change their order, as in
    `n/dp d -> d n`: that is a view of what arrives. `x` is left as it is. On `meta` the result is the shape
    and dtype alone, and nothing is sent.

    expression: `"layout -> layout"`, a pair of layouts, or a plan (`x` must have its dtype), which is run
    as it is. Axes that the layouts do not name are left alone: blocks may differ along them.
    mesh: a `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; a DTensor brings its own.
    shape: the global shape, where blocks differ in size and no cut says it in numbers, as `n/sizes(dp,2,3)`.
    Without it all blocks are assumed to have the shape of `x`: if they do not, processes make different
    plans and may hang.
    profile: the machine to plan for.
    comm_dtype: the dtype in which blocks travel and are added, forward and backward, or a pair of
    dtypes; None is that of `x`. A narrower one compresses, a wider one adds exactly.
    async_op: return at once, with a `PendingTensor` that any use waits for. All processes wait for
    theirs in the same order.
    debug: first compare the call with those of the other ranks: where they differ or one of them fails,
    all of them raise DesyncError and none waits. Also: `XSHARD_DEBUG=1`.
    check_replicated: for debugging, compare the replicas and copies of `x`, and of the cotangents in the
    backward pass, which all processes must then run. Default: the environment variable
    XSHARD_CHECK_REPLICATED.
    A DTensor must be placed as the left layout says, and the result is a DTensor.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, LinearityError
    (the gradient is not defined), on all processes; ShapeError for a block that does not fit, on its
    own process: unless all processes raise it, the others wait for the group's timeout, or raise too with
    `debug`. CollectiveError, on the others, when a process of the mesh has ended. With
    `check_replicated` ReplicaError, on all processes, here or in the backward pass.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     x = torch.full((1, 4), dist.get_rank())
    ...     return xt.redistribute(x, "s/cp c -> s c/cp", Mesh(cp=2))
    >>> [y.tolist() for y in xt.testing.run_ranks(2, turn)]
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    if torch.compiler.is_compiling():
        from torch_bridge import compiled  # slow: it imports torch._dynamo, half a second

        return compiled.redistribute_recorded(
            x, expression, mesh, shape, profile, comm_dtype, async_op, check_replicated
        )
    return redistribute_eagerly(
        x, expression, mesh, shape, profile, comm_dtype, async_op, debug, check_replicated
    )
