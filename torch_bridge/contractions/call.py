"""A contraction as a value: its plan, its executable, and the facts that ranks compare.
It checks first the values that all processes have in common, so that all raise or none; then local blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torch_bridge.calls import move as calls
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of, comm_dtypes
from torch_bridge.contractions.executable import ContractionExecutable, Lowering
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.desync import CallFacts, derivatives_of, sent_facts
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    ProcessMesh,
    as_mesh,
    check_device,
    process_mesh,
    world,
)
from xshard import ProfileLike
from xshard.arguments import limit_of
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import ContractionPlan, contraction_of
from xshard.contractions.shapes import for_operands, shapes_of, whole_lengths, whole_shapes
from xshard.cost.machine import asked_for
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, NotationError
from xshard.layout.layout import check_axes
from xshard.notation.parser import text_spans
from xshard.planner import plan_contraction
from xshard.plans.expression import check_given

Shapes = tuple[tuple[int, ...], ...]

HINT = "einsum(expression, x, w, mesh=mesh), with one tensor per operand"


class EinsumCall(NamedTuple):
    """A contraction, without its blocks."""

    expression: str | ContractionPlan
    mesh: MeshLike | None
    shapes: Shapes | None  # the operands' global shapes; None: inferred from blocks
    profile: ProfileLike
    memory_limit: int | None
    comm_dtype: CommDtypeLike
    overlap: str

    @classmethod
    def of(
        cls,
        expression: str | ContractionPlan,
        mesh: Any,
        shape: Any = None,
        sizes: Any = None,
        **rest: Any,
    ) -> EinsumCall:
        """The call with the options of `einsum`. Raises NotationError, ShapeError for shapes."""
        if mesh is not None:
            as_mesh(mesh)
        travels = rest.get("comm_dtype")
        limit = limit_of(rest.get("memory_limit"))
        travels = None if travels is None else comm_dtypes(travels)
        call = cls(
            expression, mesh, None, asked_for(rest["profile"]), limit, travels, rest["overlap"]
        )
        if shape is None and sizes is None:
            return call
        return call._replace(shapes=shapes_of(call.contraction, *whole_lengths(sizes, shape))[1])

    @property
    def contraction(self) -> Contraction:
        """The parsed expression."""
        return contraction_of(self.expression)

    def executable(self, blocks: Sequence[Tensor]) -> ContractionExecutable:
        """The executable of this process, from the cache if it is there. Raises as `einsum` does."""
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
        return calls.unless_fake(_executable, blocks, self, _facts(blocks), differentiated)

    def plan(self, blocks: Sequence[calls.Block]) -> tuple[ContractionPlan, ProcessMesh]:
        """The plan, and the processes that run it. Raises ShapeError unless the blocks fit."""
        call = self.contraction
        processes = process_mesh(as_mesh(self.mesh, HINT))
        for layout in call.arrays:
            check_axes(layout, processes.mesh, call.text)
        call = _for_operands(call, blocks)
        _, dtype, tensor_device = blocks[0]
        name = name_of(comm_dtype_of(self.comm_dtype, dtype).forward)
        if isinstance(self.expression, ContractionPlan):
            plan = self.expression
            about = {"text": plan.text, "hint": "pass the expression, or a plan made for them"}
            check_given("the operands are", plan, name, self.shapes, processes.mesh, **about)
        else:
            axes = tuple(dict.fromkeys(axis for layout in call.arrays for axis in layout.axes))
            links = calls.links_along(machine(self.profile, tensor_device), axes, processes)
            processes = processes.along(axes)
            shapes = self.shapes or whole_shapes(
                call, processes.mesh, tuple(shape for shape, *_ in blocks)
            )
            limit = self.memory_limit
            overlap = self.overlap
            plan = plan_contraction(
                call, processes.mesh, shapes, name, links, limit, None, None, overlap
            )
        _check_product(plan, dtype, tensor_device)
        inferred = self.shapes is None and self.expression is not plan
        starts = text_spans(call.text).layouts
        for i, (array, (block, *_)) in enumerate(zip(plan.arrays, blocks, strict=False)):
            what = f"the block of operand {i + 1} on"
            options = {"inferred": inferred, "start": starts[i][0]}
            calls.check_local(what, block, array, processes, call.text, **options)
        return plan, processes

    def facts(self, blocks: Sequence[Tensor], keeps: bool, async_op: bool) -> CallFacts:
        """What ranks compare before this call with blocks."""
        plan, processes = self.plan(_facts(blocks))
        moves = (move for part in plan.parts for move in (*part.moves, part.result))
        rounds = (f"rounds {part.ring.key}" for part in plan.parts if part.ring)
        steps = (plan.local, *(step for move in moves for step in move.steps), *rounds)
        sent = {"shape": plan.shapes, "dtype": blocks[0].dtype, "device": blocks[0].device.type}
        sent |= {
            "comm_dtype": self.comm_dtype,
            "save": "used" if keeps else "given",
            "async_op": async_op,
        }
        within = sent_facts(plan, steps, **sent, **derivatives_of(*blocks))
        own = {"blocks": str([tuple(x.shape) for x in blocks])}
        everywhere = {"expression": plan.text, "mesh": calls.ranked(as_mesh(self.mesh, HINT))}
        return CallFacts(everywhere, within, processes.ranks, own)


def _facts(blocks: Sequence[Tensor]) -> tuple[calls.Block, ...]:
    return tuple((x.shape, x.dtype, x.device) for x in blocks)


@layout_cache(maxsize=4096)
def _executable(
    call: EinsumCall, blocks: tuple[calls.Block, ...], differentiated: bool, world: object
) -> ContractionExecutable:
    """Cached by the world too: an `xshard.Mesh` has other processes in another world."""
    plan, processes = call.plan(blocks)
    _, dtype, device = blocks[0]
    travels = comm_dtype_of(call.comm_dtype, dtype)
    return Lowering(processes, dtype, device, travels, differentiated).contraction(plan)


def _traced(blocks: list[Tensor], expression: Any, mesh: Any, save: str, **options: Any) -> Tensor:
    """`einsum` while a compiler records; all lengths are compiled for."""
    calls.check_no_transform()
    lengths = tuple((tuple(map(int, x.shape)), x.dtype, x.device) for x in blocks)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
    with (
        unset_fake_temporarily(),
        disable_proxy_modes_tracing(),
    ):  # groups and cached tensors must be real
        call = EinsumCall.of(expression, mesh, **options)
        executable = _executable(call, lengths, differentiated, world())
    lowering = replace(executable.lowering, lower=partial(lower, lengths={}))
    return lowering.contraction(executable.plan)(blocks, save == "used", False)


calls.TRACED["einsum"] = _traced


def _for_operands(given: Contraction, blocks: Sequence[calls.Block]) -> Contraction:
    """The contraction of such blocks. Raises XshardError unless each operand has one, all of one kind."""
    check_number(given, blocks)
    check_device(blocks[0][2])
    for (_, *kind), span in zip(blocks, text_spans(given.text).layouts, strict=False):
        for error, one, other in zip((DtypeError, MeshError), blocks[0][1:], kind, strict=True):
            if one != other:
                what = f"one operand is {one}, another {other}"
                hint = "x.to(...): they are multiplied as they are"
                raise error(what, text=given.text, span=span, hint=hint)
    return for_operands(given, tuple(tuple(shape) for shape, *_ in blocks))


def check_number(given: Contraction, tensors: Sequence[object]) -> None:
    """Raise NotationError unless there is one tensor per operand."""
    if len(tensors) != len(given.operands):
        what = f"{len(tensors)} tensors for {len(given.operands)} operands"
        raise NotationError(what, text=given.text, hint=HINT)


def _check_product(plan: ContractionPlan, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DtypeError where torch cannot multiply such a dtype."""
    for part in plan.parts:
        local = LocalContraction.of(part, 0)
        try:
            local(
                *(
                    torch.zeros((2,) * len(dims), dtype=dtype, device=device)
                    for dims in local.operands
                )
            )
        except RuntimeError as error:
            what = f"torch cannot multiply {dtype}: {str(error).partition(chr(10))[0]}"
            raise DtypeError(
                what, text=plan.text, hint="cast the operands first: x.to(...)"
            ) from None
