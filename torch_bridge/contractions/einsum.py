"""`einsum`: the public verb, and its DTensors.

Decides whether a compiler records the call or this process runs it now, and what autocast means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.autodiff.recomputed import check_not_swapped
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.contractions.planning import HINT, Asked, Block, check_number, executable_of, plan_of
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import local_of, to_placements
from torch_bridge.lower.executable import check_dense
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_world, world
from xshard import Profile
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import NEVER, OVERLAPS
from xshard.contractions.shapes import shapes_of
from xshard.errors import MeshError, PlanError, ShapeError
from xshard.notation.parser import text_spans


def einsum(
    expression: str | ContractionPlan,
    *operands: Tensor,
    mesh: MeshLike | None = None,
    shape: Sequence[Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    profile: str | Path | Profile = "auto",
    memory_limit: int | str | None = None,
    save: Literal["used", "given"] = "used",
    overlap: str = NEVER,
    comm_dtype: CommDtypeLike = None,
    async_op: bool = False,
) -> Tensor | PendingTensor:
    """This process's blocks of the operands -> its block of their contraction, differentiable.

    `"b s/tp d, d f/tp -> b s f/tp"`: every operand under its layout, and the result, in which dims that it
    lacks are summed. The plan says where it is computed: operands are moved there, each process contracts
    its blocks with `torch.einsum`, and the result is moved to where it is to be. All processes of the mesh
    call it, with equal arguments except the values of blocks, and with equal `requires_grad`. The result is a
    new tensor, contiguous; operands are left as they are.

    expression: text, or a plan (`xshard.plan`), which is run as it is. Axes that it does not name are left
    alone: blocks may differ along them.
    mesh: a `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; DTensors bring their own.
    shape, sizes: the global shape of every operand, or the length of every dim by name, where blocks
    differ in size. Without them a dim is as long as an operand says that has it whole, else blocks are equal.
    profile: the machine to plan for. memory_limit: bytes, or "2GiB", that no device may exceed, forward.
    save: what is kept for the gradients: operands where they were "used", or as they were "given", to be
    moved once more, as in ZeRO-3.
    overlap: whether a gather or a reduce-scatter may run in rounds, in which one part is contracted while the
    next travels: "never", "auto" where the profile predicts a gain, "always" where it can.
    comm_dtype: as in `redistribute`; products are computed in the operands' dtype, as by `torch.einsum`.
    async_op: return at once, with a `PendingTensor`; the move of the result is under way.
    DTensors must be placed as their layouts say, and the result is a DTensor.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, on all processes;
    ShapeError for a block that does not fit, on its own process; with XSHARD_DEBUG=1 ranks first compare
    their calls, and all of them raise DesyncError.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def layer():
    ...     x, w = torch.ones(1, 4), torch.full((4, 1), dist.get_rank())
    ...     return xt.einsum("s/tp d, d f/tp -> s f/tp", x.long(), w, mesh=Mesh(tp=2)).tolist()
    >>> xt.testing.run_ranks(2, layer)
    [[[0], [0]], [[4], [4]]]
    """
    if save not in ("used", "given"):
        raise PlanError(f"save is {save!r}", hint='"used": operands where they are contracted, or "given"')
    if overlap not in OVERLAPS:
        raise PlanError(f"no overlap {overlap!r}", hint=f"there are: {', '.join(OVERLAPS)}")
    options: dict[str, Any] = {"mesh": mesh, "shape": shape, "sizes": sizes, "profile": profile}
    options |= {"memory_limit": memory_limit, "comm_dtype": comm_dtype, "overlap": overlap}
    if torch.compiler.is_compiling():
        from torch_bridge.contractions import compiled  # slow: it imports torch._dynamo, half a second

        return compiled.einsum_recorded(expression, operands, save, async_op, options)
    check_not_swapped()
    asked, blocks = Asked.of(expression, **options), list(operands)
    if not all(isinstance(x, Tensor) for x in blocks):
        check_number(asked.contraction, blocks)
        blocks = [as_tensor(x, f"tensor {i + 1}", HINT) for i, x in enumerate(blocks)]
    run = _of_dtensors if any(isinstance(x, DTensor) for x in blocks) else _of_blocks
    return run(asked, blocks, save == "used", async_op)


def _of_blocks(asked: Asked, blocks: list[Tensor], keeps: bool, async_op: bool) -> Tensor | PendingTensor:
    check_world()
    for x in blocks:
        check_dense(x)
    if torch._C._is_any_autocast_enabled():
        blocks = list(map(autocast, blocks))
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
    facts = tuple((x.shape, x.dtype, x.device) for x in blocks)
    if desync.ALWAYS:
        _compare(asked, facts, differentiated)
    fake = next((x.fake_mode for x in blocks if isinstance(x, FakeTensor)), None)
    if fake is None:
        return executable_of(asked, facts, differentiated, world())(blocks, keeps, async_op)
    with fake:  # the tensors that an executable keeps are fake too: it is not cached
        executable = executable_of.__wrapped__(asked, facts, differentiated, world())
    return executable(blocks, keeps, async_op)


def _compare(asked: Asked, blocks: tuple[Block, ...], differentiated: bool) -> None:
    """Raise on all ranks of the mesh unless all of them are about to make this call, and can."""

    def facts() -> CallFacts:
        plan, processes = plan_of(asked, blocks)
        own = {"blocks": str([tuple(shape) for shape, *_ in blocks])}
        within = {"shapes": str(plan.shapes), "dtype": str(blocks[0][1]), "plan": plan.local}
        within |= {"requires_grad": str(differentiated), "comm_dtype": str(asked.comm_dtype)}
        within["rounds"] = str([part.ring and part.ring.key for part in plan.parts])
        everywhere = {"expression": plan.text, "mesh": repr(asked.mesh)}
        return CallFacts(everywhere, within, processes.ranks, own)

    ranks = callers(asked.mesh)
    if dist.get_rank() in ranks:  # no rank waits for one outside, which raises later
        compare_ranks(ranks, asked.contraction.text, facts)


def autocast(x: Tensor) -> Tensor:
    """The block in the dtype in which autocast multiplies, cast before it travels."""
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or x.is_meta:
        return x
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _of_dtensors(asked: Asked, operands: list[Tensor], keeps: bool, async_op: bool) -> Tensor:
    given, placed = asked.contraction, [x for x in operands if isinstance(x, DTensor)]
    mesh = placed[0].device_mesh
    if async_op:
        raise PlanError("async_op is for tensors", hint="a DTensor waits for its local block at once")
    check_number(given, operands)
    if len(placed) < len(operands) or any(x.device_mesh != mesh for x in placed):
        raise MeshError("not all operands are DTensors of one mesh", text=given.text, hint="all or none are")
    if asked.mesh not in (None, mesh):
        raise MeshError(f"the DTensors are on {mesh!r}, not on {asked.mesh!r}", hint="leave the mesh out")
    shapes = shapes_of(given, None, [tuple(x.shape) for x in placed])
    if asked.shapes not in (None, shapes):
        what = f"the DTensors have shapes {shapes}, not {asked.shapes}"
        raise ShapeError(what, text=given.text, hint="leave sizes= and shape= out")
    ends = [*zip(given.operands, shapes, strict=True)]
    lengths = {name: n for layout, shape in ends for name, n in zip(layout.names, shape, strict=True)}
    shape = tuple(lengths[name] for name in given.result.names)
    to_placements(given.result, mesh, shape)  # raises where no DTensor is placed so
    spans = text_spans(given.text).layouts
    each = zip(placed, given.operands, spans, strict=False)
    blocks = [local_of(x, layout, given.text, span) for x, layout, span in each]
    y = _of_blocks(asked._replace(mesh=mesh, shapes=shapes), blocks, keeps, False)
    return as_dtensor(as_tensor(y), given.result, mesh, shape)
