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
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torch_bridge.calls import move as calls
from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of, comm_dtypes
from torch_bridge.contractions.executable import ContractionExecutable, Lowering
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.desync import CallFacts, derivative_facts, sent_facts
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    ProcessMesh,
    check_device,
    checked_mesh,
    process_mesh,
    world_key,
)
from torch_bridge.versions.modes import unset_fake_temporarily
from xshard import ProfileLike
from xshard.arguments import limit_of
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import ContractionPlan, contraction_of, known_lengths
from xshard.contractions.shapes import Shapes, Sizes, for_operands, global_lengths
from xshard.cost.machine import resolve_profile
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, NotationError
from xshard.layout.layout import check_axes
from xshard.notation.parser import text_spans
from xshard.planner import plan_contraction
from xshard.plans.expression import check_given

HINT = "einsum(expression, x, w, mesh=mesh), with one tensor per operand"


class EinsumCall(NamedTuple):
    """A contraction, without its blocks."""

    expression: str | ContractionPlan
    mesh: MeshLike | None
    shapes: Shapes | None  # the operands' global shapes; None: inferred from blocks
    sizes: Sizes | None  # lengths by name that are known
    profile: ProfileLike
    memory_limit: int | None
    comm_dtype: CommDtypeLike | CommDtype
    overlap: str

    @classmethod
    def of(
        cls,
        expression: str | ContractionPlan,
        mesh: Any,
        *,
        profile: Any,
        overlap: str,
        shape: Any = None,
        sizes: Any = None,
        memory_limit: Any = None,
        comm_dtype: Any = None,
    ) -> EinsumCall:
        """Collect the options of a distributed `einsum`, checked, before any operand is seen.

        Raises NotationError for the expression, and ShapeError for lengths that contradict it.

        Args:
            expression: The expression, or a plan.
            mesh: None if the operands are DTensors, which have one.
            profile: The machine to plan for.
            overlap: As in `einsum`.
            shape: Global shapes of the operands. Lengths that neither this nor `sizes` gives are
                inferred later from the blocks.
            sizes: Global lengths of dims by name.
            memory_limit: As in `einsum`.
            comm_dtype: As in `einsum`.
        """
        if mesh is not None:
            checked_mesh(mesh)
        if comm_dtype is not None:
            comm_dtype = comm_dtypes(comm_dtype)
        profile = resolve_profile(profile)
        limit = limit_of(memory_limit)
        known_sizes, shapes = known_lengths(expression, sizes, shape)
        return cls(expression, mesh, shapes, known_sizes, profile, limit, comm_dtype, overlap)

    @property
    def contraction(self) -> Contraction:
        """The parsed expression."""
        return contraction_of(self.expression)

    def executable(self, blocks: Sequence[Tensor]) -> ContractionExecutable:
        """Return the executable of this process, from the cache if it is there. Raises as `einsum` does."""
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
        return calls.call_cached(_executable, blocks, self, _block_types(blocks), differentiated)

    def plan(self, blocks: Sequence[calls.Block]) -> tuple[ContractionPlan, ProcessMesh]:
        """Plan a distributed einsum for blocks of these shapes, dtype and device.

        Returns the plan, which says what is sent and multiplied, and the processes that run it.
        Raises ShapeError unless each block is this process's part of its array.

        Args:
            blocks: One per operand, described without data.
        """
        # First what all processes have in common: if this raises, it raises on all of them, and no
        # process is left waiting.
        processes = process_mesh(checked_mesh(self.mesh, HINT))
        contraction = self.contraction
        for layout in contraction.arrays:
            check_axes(layout, processes.mesh, contraction.text)
        contraction = _for_operands(contraction, blocks)
        _, dtype, tensor_device = blocks[0]
        # Moves are planned, and priced, in the dtype in which operands travel.
        dtype_name = name_of(comm_dtype_of(self.comm_dtype, dtype).forward)
        if isinstance(self.expression, ContractionPlan):
            plan = self.expression
            subject = "the operands are"
            hint = "pass the expression, or a plan made for them"
            mesh = processes.mesh
            check_given(subject, plan, dtype_name, self.shapes, mesh, text=plan.text, hint=hint)
        else:
            plan, processes = self._plan(contraction, processes, blocks, dtype_name)
        _check_product(plan, dtype, tensor_device)
        # Last, as blocks may be wrong on some processes only.
        self._check_blocks(plan, processes, contraction, blocks)
        return plan, processes

    def _plan(
        self,
        contraction: Contraction,
        processes: ProcessMesh,
        blocks: Sequence[calls.Block],
        dtype_name: str,
    ) -> tuple[ContractionPlan, ProcessMesh]:
        """Plan an einsum on the part of the mesh that its expression names.

        On a mesh (dp=2, tp=4), "m k/tp, k/tp n -> m n" is planned for the 4 devices of a tp group:
        each group along dp computes its own result. Without global shapes, they are inferred from
        the blocks, taken to be equal. Returns the plan, and those processes.
        """
        local_shapes = tuple(shape for shape, *_ in blocks)
        _, _, tensor_device = blocks[0]
        profile = machine_profile(self.profile, tensor_device)
        profile, processes = calls.part_of_mesh(contraction.arrays, processes, profile)
        shapes = self.shapes
        if not shapes:
            shapes = global_lengths(contraction, processes.mesh, local_shapes, self.sizes)
        plan = plan_contraction(
            contraction,
            processes.mesh,
            shapes,
            dtype_name,
            profile,
            self.memory_limit,
            overlap=self.overlap,
        )
        return plan, processes

    def _check_blocks(
        self,
        plan: ContractionPlan,
        processes: ProcessMesh,
        contraction: Contraction,
        blocks: Sequence[calls.Block],
    ) -> None:
        """Raise ShapeError unless each block is this process's part of its array."""
        # If the global lengths were inferred from this block, assuming equal blocks, they may be
        # wrong: the error then advises to pass them.
        is_inferred = not (self.shapes or self.sizes) and self.expression is not plan
        spans = text_spans(contraction.text).layouts
        for i, (shape, *_) in enumerate(blocks):
            calls.check_local(
                f"the block of operand {i + 1} on",
                shape,
                plan.arrays[i],
                processes,
                contraction.text,
                inferred=is_inferred,
                start=spans[i][0],
            )

    def facts(self, blocks: Sequence[Tensor], keeps: bool, async_op: bool) -> CallFacts:
        """Describe a call by texts and numbers, which ranks compare before anything is sent.

        Ranks of a plan have equal facts; the shapes of their blocks may differ.

        Args:
            blocks: Shape, dtype and device of each block.
            keeps: Whether moved operands are kept for the backward pass.
            async_op: Whether the result may be in flight.
        """
        plan, processes = self.plan(_block_types(blocks))
        mesh_text = calls.mesh_with_ranks(checked_mesh(self.mesh, HINT))
        facts = sent_facts(
            plan,
            _executed_steps(plan),
            shape=plan.shapes,
            dtype=blocks[0].dtype,
            device=blocks[0].device.type,
            comm_dtype=self.comm_dtype,
            save="used" if keeps else "given",
            async_op=async_op,
            **derivative_facts(*blocks),
        )
        return CallFacts(
            equal_on_all={"expression": plan.text, "mesh": mesh_text},
            equal_on_peers=facts,
            peers=processes.ranks,
            not_compared={"blocks": str([tuple(x.shape) for x in blocks])},
        )


def _executed_steps(plan: ContractionPlan) -> list[object]:
    """Return what the plan does on every rank, in an order that is the same on all."""
    steps: list[object] = [plan.local]
    for part in plan.parts:
        for move in (*part.moves, part.result):
            steps.extend(move.steps)
    steps.extend(f"rounds {part.ring.key}" for part in plan.parts if part.ring)
    return steps


def _block_types(blocks: Sequence[Tensor]) -> tuple[calls.Block, ...]:
    return tuple((x.shape, x.dtype, x.device) for x in blocks)


@layout_cache(maxsize=4096)
def _executable(
    call: EinsumCall, blocks: tuple[calls.Block, ...], differentiated: bool, world: object
) -> ContractionExecutable:
    """Lower a call. Cached by the world too: an `xshard.Mesh` has other processes in another world."""
    plan, processes = call.plan(blocks)
    _, dtype, device = blocks[0]
    travels = comm_dtype_of(call.comm_dtype, dtype)
    return Lowering(
        processes=processes,
        block=dtype,
        tensor_device=device,
        travels=travels,
        differentiated=differentiated,
    ).contraction(plan)


def _trace(blocks: list[Tensor], expression: Any, mesh: Any, save: str, **options: Any) -> Tensor:
    """Run `einsum` while a compiler records; all lengths are compiled for."""
    calls.check_no_transform()
    block_types = tuple((tuple(map(int, x.shape)), x.dtype, x.device) for x in blocks)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
    # Otherwise groups and cached tensors would be fake, or a part of the graph.
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        call = EinsumCall.of(expression, mesh, **options)
        executable = _executable(call, block_types, differentiated, world_key())
    # Lowered again: what the graph records must not come from the cache, with its tensors.
    lowering = replace(executable.lowering, lower=partial(lower, lengths={}))
    return lowering.contraction(executable.plan)(blocks, save == "used", False)


calls.TRACED["einsum"] = _trace


def _for_operands(contraction: Contraction, blocks: Sequence[calls.Block]) -> Contraction:
    """Check that the operands match an einsum expression, and resolve its "..." for their dims.

    Args:
        contraction: The parsed expression.
        blocks: Shape, dtype and device of each operand.

    Raises:
        XshardError: There is not one operand per layout.
        DtypeError: Operands have unlike dtypes.
        MeshError: Operands are on unlike devices.
    """
    check_operand_count(contraction, blocks)
    _, dtype, device = blocks[0]
    check_device(device)
    spans = text_spans(contraction.text).layouts  # of the operands, then of the result
    for block, span in zip(blocks, spans, strict=False):
        _, other_dtype, other_device = block
        hint = "x.to(...): they are multiplied as they are"
        if dtype != other_dtype:
            reason = f"one operand is {dtype}, another {other_dtype}"
            raise DtypeError(reason, text=contraction.text, span=span, hint=hint)
        if device != other_device:
            reason = f"one operand is {device}, another {other_device}"
            raise MeshError(reason, text=contraction.text, span=span, hint=hint)
    return for_operands(contraction, tuple(tuple(shape) for shape, *_ in blocks))


def check_operand_count(contraction: Contraction, tensors: Sequence[object]) -> None:
    """Raise NotationError unless there is one tensor per operand."""
    if len(tensors) != len(contraction.operands):
        reason = f"{len(tensors)} tensors for {len(contraction.operands)} operands"
        raise NotationError(reason, text=contraction.text, hint=HINT)


def _check_product(plan: ContractionPlan, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DtypeError if torch cannot multiply this dtype, such as int64 on a GPU.

    Each product of the plan is tried on operands of length 2 per dim, before anything is sent.
    """
    for part in plan.parts:
        # Only names of dims are used, which are the same for all devices: device 0 will do.
        local = LocalContraction.of(part, 0)
        blocks = [
            torch.zeros((2,) * len(names), dtype=dtype, device=device) for names in local.operands
        ]
        try:
            local(*blocks)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            finding = f"torch cannot multiply {dtype}: {reason}"
            hint = "cast the operands first: x.to(...)"
            raise DtypeError(finding, text=plan.text, hint=hint) from None
