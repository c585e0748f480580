"""An expression and blocks -> the plan of a contraction, and the executable of this process.

Decides what is checked about the blocks, and how long dims are where nobody says. Sends nothing, though it
makes groups. It checks first what all processes have in common (expression, mesh, dtypes, given shapes), so
that all of them raise or none; then the blocks, whose shapes only their own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.contractions.executable import ContractionExecutable, Lowering
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, check_device, process_mesh
from torch_bridge.planning import require_mesh
from xshard import DtypeError, Mesh, MeshError, NotationError, Profile, ShapeError, dtypes, load_profile, plan
from xshard.contractions.expression import Contraction, contraction, shapes_of
from xshard.contractions.plan import ContractionPlan
from xshard.layout import Sharding
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim, text_spans
from xshard.plans.expression import check_block, whole_shape
from xshard.search.request import BOTH, FORWARD

HINT = "einsum(expression, x, w, mesh=mesh), with one tensor per operand"
Shapes = tuple[tuple[int, ...], ...]


class Asked(NamedTuple):
    """What a call asks for, but its blocks: the key of the plans. shapes: global, where they are given."""

    expression: str | ContractionPlan
    mesh: MeshLike | None
    shapes: Shapes | None
    profile: str | Path | Profile
    memory_limit: int | str | None
    comm_dtype: CommDtypeLike

    @property
    def contraction(self) -> Contraction:
        given = self.expression
        return given.contraction if isinstance(given, ContractionPlan) else contraction(given)


def asked_for(
    expression: str | ContractionPlan,
    mesh: MeshLike | None,
    shape: Any,
    sizes: Any,
    profile: str | Path | Profile,
    memory_limit: int | str | None,
    comm_dtype: CommDtypeLike,
) -> Asked:
    """A call without its blocks. Raises NotationError for what is no contraction, ShapeError."""
    asked = Asked(expression, mesh, None, profile, memory_limit, comm_dtype)
    if shape is None and sizes is None:
        return asked
    return asked._replace(shapes=shapes_of(asked.contraction, sizes, shape))


Block = tuple[tuple[int, ...], torch.dtype, torch.device]  # what a plan needs to know of a tensor


@lru_cache(maxsize=4096)
def executable_of(
    asked: Asked, blocks: tuple[Block, ...], world: dist.ProcessGroup | None
) -> ContractionExecutable:
    """The executable for such blocks. Raises as `einsum` does.

    world: a part of the cache's key, since an `xshard.Mesh` has other processes in another world.
    """
    plan, processes = plan_of(asked, blocks)
    _, dtype, device = blocks[0]
    travels = comm_dtype_of(asked.comm_dtype, dtype)
    return Lowering(processes, dtype, device, travels).contraction(plan)


def plan_of(asked: Asked, blocks: Sequence[Block]) -> tuple[ContractionPlan, ProcessMesh]:
    """The plan for such blocks, and the processes that run it."""
    given, processes = asked.contraction, process_mesh(require_mesh(asked.mesh, HINT))
    layouts = (*given.operands, given.result)
    for layout in layouts:
        check_axes(layout, processes.mesh, given.text)
    name = dtypes.name_of(comm_dtype_of(asked.comm_dtype, _one_kind(given, blocks)).forward)
    named = tuple(dict.fromkeys(axis for layout in layouts for axis in layout.axes))
    if isinstance(asked.expression, ContractionPlan):
        found = asked.expression
        _check_plan(found, processes.mesh, name, asked.shapes)
    else:
        # Devices have other numbers in a part of the mesh, but the same links.
        machine = load_profile(asked.profile).along(named, processes.mesh)
        processes = processes.along(named)
        _check_dims(given, blocks)
        shapes = asked.shapes or _shapes_of_whole(given, processes.mesh, [shape for shape, *_ in blocks])
        found = plan(
            given.text,
            processes.mesh,
            shapes,
            name,
            profile=machine,
            memory_limit=asked.memory_limit,
            objective=BOTH if blocks[0][1].is_floating_point or blocks[0][1].is_complex else FORWARD,
        )
    _check_local(found, blocks)
    for i, (layout, shape, block) in enumerate(zip(given.operands, found.shapes, blocks, strict=True)):
        source = Sharding(layout, processes.mesh, shape)
        check_block(
            f"the block of operand {i + 1} on rank {processes.ranks[processes.device]}",
            tuple(block[0]),
            source.local_shape(processes.device),
            layout.names,
            given.text,
            f"under '{layout}' that is the part of device {processes.device} of {source.mesh!r} "
            f"of a {shape} array",
            inferred=asked.shapes is None,
            start=text_spans(given.text).layouts[i][0],
        )
    return found, processes


def _one_kind(given: Contraction, blocks: Sequence[Block]) -> torch.dtype:
    """The dtype of all operands. Raises NotationError, DtypeError, MeshError."""
    if len(blocks) != len(given.operands):
        what = f"{len(blocks)} tensors for {len(given.operands)} operands"
        raise NotationError(what, text=given.text, hint=HINT)
    _, dtype, device = blocks[0]
    for (_, other, where), span in zip(blocks, text_spans(given.text).layouts, strict=False):
        if other != dtype:
            what = f"one operand is {dtype}, another {other}"
            raise DtypeError(what, text=given.text, span=span, hint="x.to(dtype): torch.einsum takes one dtype")
        if where != device:
            what = f"one operand is on '{device}', another on '{where}'"
            raise MeshError(what, text=given.text, span=span, hint="move it: x.to(device)")
    check_device(device)
    return dtype


def _check_plan(found: ContractionPlan, mesh: Mesh, dtype: str, shapes: Shapes | None) -> None:
    if found.mesh != mesh:
        raise MeshError(f"the plan is for {found.mesh!r}, this is {mesh!r}")
    if found.dtype != dtype:
        raise DtypeError(f"the plan is for {found.dtype}, the operands have {dtype}")
    if shapes not in (None, found.shapes):
        raise ShapeError(f"the plan is for {found.shapes} arrays, not {shapes}")


def _check_local(found: ContractionPlan, blocks: Sequence[Block]) -> None:
    """Raise DtypeError where torch has no product of such a dtype."""
    _, dtype, device = blocks[0]
    for part in found.parts:
        local = LocalContraction.of(part, 0)
        try:
            local(*(torch.zeros((2,) * len(dims), dtype=dtype, device=device) for dims in local.operands))
        except (RuntimeError, NotImplementedError) as error:
            why = str(error).partition("\n")[0]
            raise DtypeError(f"torch has no product of {dtype}: {why}", text=found.text) from None


def _check_dims(given: Contraction, blocks: Sequence[Block]) -> None:
    for layout, (shape, *_), span in zip(given.operands, blocks, text_spans(given.text).layouts, strict=False):
        if len(shape) != len(layout.names):
            what = f"a block of {len(shape)} dims, {tuple(shape)}, for '{layout}'"
            raise ShapeError(what, text=given.text, span=span, hint="one dim per name")


def _shapes_of_whole(given: Contraction, mesh: Mesh, blocks: Sequence[Sequence[int]]) -> Shapes:
    """Global shapes: what blocks say of whole dims, then what cuts say in numbers, else that of equal blocks."""
    each = [list(zip(layout.dims, block, strict=True)) for layout, block in zip(given.operands, blocks, strict=True)]
    whole = {dim.name: rows for pairs in each for dim, rows in pairs if not dim.shards}
    shapes = []
    for layout, pairs in zip(given.operands, each, strict=True):
        known = replace(layout, dims=tuple(Dim(d.name) if d.name in whole else d for d, _ in pairs))
        rows = [rows if not dim.shards else whole.get(dim.name, rows) for dim, rows in pairs]
        shapes.append(whole_shape(known, mesh, rows, given.text))
    return shapes_of(given, None, shapes)
