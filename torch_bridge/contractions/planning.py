"""An expression and blocks -> the plan of a contraction, and the executable of this process.

Decides what is checked about the blocks, and how long dims are where nobody says. Sends nothing, though it
makes groups. It checks first what all processes have in common (expression, mesh, dtypes, given shapes), so
that all of them raise or none; then the blocks, whose shapes only their own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.contractions.executable import ContractionExecutable, Lowering
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, World, check_device, process_mesh
from torch_bridge.planning import links_along, require_mesh
from xshard import Mesh, Profile, dtypes, planner
from xshard.arguments import limit_of
from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import NEVER
from xshard.contractions.shapes import shapes_of, whole_lengths, whole_shapes
from xshard.cost.machine import asked_for
from xshard.errors import DtypeError, MeshError, NotationError, ShapeError
from xshard.layout import Sharding
from xshard.layout.layout import check_axes
from xshard.notation.parser import text_spans
from xshard.plans.expression import check_block

Shapes = tuple[tuple[int, ...], ...]
Block = tuple[tuple[int, ...], torch.dtype, torch.device]  # what a plan needs to know of a tensor

HINT = "einsum(expression, x, w, mesh=mesh), with one tensor per operand"


class Asked(NamedTuple):
    """A call without its blocks. shapes: of the operands, where they are given."""

    expression: str | ContractionPlan
    mesh: MeshLike | None
    shapes: Shapes | None
    profile: str | Path | Profile
    memory_limit: int | None
    comm_dtype: CommDtypeLike
    overlap: str

    @classmethod
    def of(
        cls,
        expression: str | ContractionPlan,
        *,
        profile: Any,
        mesh: Any = None,
        shape: Any = None,
        sizes: Any = None,
        memory_limit: Any = None,
        comm_dtype: Any = None,
        overlap: str = NEVER,
    ) -> Asked:
        """A call with the options of `einsum`. Raises NotationError, ShapeError for shapes."""
        if mesh is not None:
            require_mesh(mesh)
        comm_dtype = tuple(comm_dtype) if isinstance(comm_dtype, list) else comm_dtype
        asked = cls(expression, mesh, None, asked_for(profile), limit_of(memory_limit), comm_dtype, overlap)
        if shape is None and sizes is None:
            return asked
        return asked._replace(shapes=shapes_of(asked.contraction, *whole_lengths(sizes, shape)))

    @property
    def contraction(self) -> Contraction:
        """What it contracts."""
        given = self.expression
        return given.contraction if isinstance(given, ContractionPlan) else contraction(given)


@lru_cache(maxsize=4096)
def executable_of(
    asked: Asked, blocks: tuple[Block, ...], differentiated: bool, world: World
) -> ContractionExecutable:
    """The executable for such blocks. Raises as `einsum` does.

    world: a part of the cache's key, since an `xshard.Mesh` has other processes in another world.
    """
    found, processes = plan_of(asked, blocks)
    _, dtype, device = blocks[0]
    travels = comm_dtype_of(asked.comm_dtype, dtype)
    return Lowering(processes, dtype, device, travels, differentiated).contraction(found)


def plan_of(asked: Asked, blocks: Sequence[Block]) -> tuple[ContractionPlan, ProcessMesh]:
    """The plan for such blocks, and the processes that run it."""
    given, processes = asked.contraction, process_mesh(require_mesh(asked.mesh, HINT))
    layouts = (*given.operands, given.result)
    for layout in layouts:
        check_axes(layout, processes.mesh, given.text)
    _check_operands(given, blocks)
    _, dtype, device = blocks[0]
    travels = comm_dtype_of(asked.comm_dtype, dtype)
    if isinstance(asked.expression, ContractionPlan):
        found = asked.expression
        _check_plan(found, processes.mesh, dtypes.name_of(travels.forward), asked.shapes)
    else:
        named = tuple(dict.fromkeys(axis for layout in layouts for axis in layout.axes))
        links = links_along(machine(asked.profile, device), named, processes)
        processes = processes.along(named)
        shapes = asked.shapes or whole_shapes(given, processes.mesh, [shape for shape, *_ in blocks])
        name, limit = dtypes.name_of(travels.forward), asked.memory_limit
        ends = given.text, processes.mesh, None, shapes
        found = planner.plan_contraction(*ends, name, links, limit, None, None, asked.overlap)
    _check_product(found, dtype, device)
    _check_blocks(asked, found, processes, [shape for shape, *_ in blocks])
    return found, processes


def _check_operands(given: Contraction, blocks: Sequence[Block]) -> None:
    """Raise NotationError, DtypeError, MeshError, ShapeError unless blocks are alike, one per operand."""
    check_number(given, blocks)
    check_device(blocks[0][2])
    spans = text_spans(given.text).layouts
    for layout, (shape, *kind), span in zip(given.operands, blocks, spans, strict=False):
        for error, one, other in zip((DtypeError, MeshError), blocks[0][1:], kind, strict=True):
            if one != other:
                what = f"one operand is {one}, another {other}"
                raise error(
                    what, text=given.text, span=span, hint="x.to(...): they are multiplied as they are"
                )
        if len(shape) != len(layout.names):
            what = f"a block of shape {tuple(shape)} for '{layout}'"
            raise ShapeError(what, text=given.text, span=span, hint="one name per dim")


def check_number(given: Contraction, tensors: Sequence[object]) -> None:
    """Raise NotationError unless there is one tensor per operand."""
    if len(tensors) != len(given.operands):
        what = f"{len(tensors)} tensors for {len(given.operands)} operands"
        raise NotationError(what, text=given.text, hint=HINT)


def _check_plan(found: ContractionPlan, mesh: Mesh, dtype: str, shapes: Shapes | None) -> None:
    about: Any = {"text": found.text, "hint": "pass the expression, or a plan made for them"}
    if found.mesh != mesh:
        raise MeshError(f"the plan is for {found.mesh!r}, this is {mesh!r}", **about)
    if found.dtype != dtype:
        raise DtypeError(f"the plan is for {found.dtype}, the operands have {dtype}", **about)
    if shapes not in (None, found.shapes):
        raise ShapeError(f"the plan is for {found.shapes} arrays, not {shapes}", **about)


def _check_product(found: ContractionPlan, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DtypeError where torch has no product of such a dtype."""
    for part in found.parts:
        local = LocalContraction.of(part, 0)
        try:
            local(*(torch.zeros((2,) * len(dims), dtype=dtype, device=device) for dims in local.operands))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            what = f"torch has no product of {dtype}: {why}"
            raise DtypeError(what, text=found.text, hint="cast the operands first: x.to(...)") from None


def _check_blocks(
    asked: Asked, found: ContractionPlan, processes: ProcessMesh, blocks: Sequence[tuple[int, ...]]
) -> None:
    given, device = found.contraction, processes.device
    for i, (layout, shape, block) in enumerate(zip(given.operands, found.shapes, blocks, strict=True)):
        check_block(
            f"the block of operand {i + 1} on rank {processes.ranks[device]}",
            tuple(block),
            Sharding(layout, processes.mesh, shape).local_shape(device),
            layout.names,
            given.text,
            f"under '{layout}' that is the part of device {device} of {processes.mesh!r} of a {shape} array",
            inferred=asked.shapes is None and asked.expression is not found,
            start=text_spans(given.text).layouts[i][0],
        )
