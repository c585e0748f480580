"""A plan of a contraction: the moves of its operands, the local contractions, the move of its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from xshard.contractions import explain
from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.placements import accesses, dim_lengths, operations
from xshard.contractions.ring import ContractionRing, rings
from xshard.contractions.shapes import (
    Shapes,
    Sizes,
    checked_lengths,
    on_sub_axes,
    shapes_of,
    written_shardings,
)
from xshard.contractions.types import local_type
from xshard.cost.machine import load_profile, machine_of_plan
from xshard.cost.model import Profile
from xshard.dtypes import itemsize, name_of
from xshard.errors import PlanError
from xshard.formatting import Pictured
from xshard.layout import Mesh, Sharding
from xshard.layout.sub_axes import root_of
from xshard.notation.maps import maps_in, with_values
from xshard.plans.plan import Plan
from xshard.plans.serialize import from_plain, plan_to_plain, reading_plan, to_plain
from xshard.search.request import BOTH

T = TypeVar("T")


def remaining(operands: Sequence[T], operand_indices: Sequence[int]) -> list[T]:
    """Return the operands that a contraction leaves: all but those whose indices it takes."""
    return [operand for i, operand in enumerate(operands) if i not in operand_indices]


@dataclass(frozen=True)
class Part:
    """One local contraction of a plan, with the moves of its operands and of its result.

    Attributes:
        operand_indices: Of its operands, among those that the parts before it leave. Its result goes
            to the end of these.
        moves: For each operand, the move to the layout in which it is contracted.
        result: The move of the local result.
        ring: How one of these moves overlaps with the contraction; None: all run one after the other.
    """

    operand_indices: tuple[int, ...]
    moves: tuple[Plan, ...]
    result: Plan
    ring: ContractionRing | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of the forward pass."""
        if self.ring:  # moves and products at the same time
            return self.ring.seconds(self)
        return self.work + sum(move.cost for move in (*self.moves, self.result))

    @cached_property
    def contracted_shardings(self) -> tuple[Sharding, ...]:
        """The shardings under which the operands are contracted."""
        return tuple(move.target for move in self.moves)

    @cached_property
    def local(self) -> str:
        """`"layout, layout -> layout"`: the local contraction of every device."""
        return f"{', '.join(str(move.dst) for move in self.moves)} -> {self.result.src}"

    @cached_property
    def dims(self) -> str:
        """`"b s d, d f -> b s f"`: the local contraction without its layouts."""
        operand_dims = ", ".join(" ".join(move.dst.names) for move in self.moves)
        return f"{operand_dims} -> {' '.join(self.result.src.names)}"

    @cached_property
    def flops(self) -> int:
        """Floating point operations of the busiest device."""
        layouts = [sharding.layout for sharding in self.contracted_shardings]
        lengths = dim_lengths(
            layouts, [sharding.max_local_shape for sharding in self.contracted_shardings]
        )
        has_sum = len(lengths) > len(self.result.src.names)
        return operations(lengths.values(), len(self.moves), has_sum=has_sum)

    @cached_property
    def work(self) -> float:
        """Predicted seconds of the local contraction, and of each gradient."""
        arrays = (*self.contracted_shardings, self.result.source)
        # An array that no product of matrices can take as it is, is copied first.
        access_counts = accesses([array.layout.names for array in arrays])
        touched_elements = 0
        for n_accesses, array in zip(access_counts, arrays, strict=True):
            touched_elements += n_accesses * array.max_local_size
        return self.result.profile.work(self.flops, touched_elements, self.result.dtype)

    @property
    def backward_moves(self) -> tuple[Plan, ...]:
        """The moves of the cotangent and of the operands' gradients."""
        return (self.result.backward, *[move.backward for move in self.moves])

    @property
    def backward_seconds(self) -> float:
        """Predicted seconds of all gradients."""
        # The gradient of each operand is a contraction of the same size; rings run forward only.
        return self.work * len(self.moves) + sum(move.cost for move in self.backward_moves)


@dataclass(frozen=True, repr=False)
class ContractionPlan(Pictured):
    """The placement of a contraction on a mesh, with the moves of operands and result.

    `str(plan)` is a table of all steps; `explain()` names the scheme that each mesh axis follows.

    Attributes:
        contraction: The layouts of operands and result, with one dim per name.
        mesh: The devices.
        shapes: A length for every name of an operand. `arrays` has the shapes of arrays as written.
        dtype: The name of the dtype.
        parts: One local contraction, or with three and more operands one for every pair.
        profile: The machine that the plan is priced for.
        memory_limit: Bytes that no device exceeds, or None.
        objective: With "forward+backward", `cost` is the seconds of the forward pass and of all
            gradients; with "forward", of the forward pass.

    Raises:
        PlanError: The parts do not lead from the operands to the result, or exceed the limit.

    Examples:
        >>> from xshard import plan
        >>> sizes = {"b": 8, "s": 64, "d": 32, "f": 128}
        >>> p = plan("b s/tp d, d f/tp -> b s f/tp", Mesh(tp=4), sizes=sizes)
        >>> p.local, [str(step) for move in p.moves for step in move.steps]
        ('b s d | copy(tp), d f/tp -> b s f/tp', ['all_gather s/tp'])
    """

    contraction: Contraction
    mesh: Mesh
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    parts: tuple[Part, ...]
    profile: Profile = field(default_factory=lambda: load_profile("h100"), repr=False)
    memory_limit: int | None = None
    objective: str = BOTH

    def __post_init__(self) -> None:
        # Follow the layouts through all local contractions, as if the plan ran: each must begin
        # where the one before ended.
        remaining_layouts = list(self.contraction.operands)
        for part in self.parts:
            for i, move in zip(part.operand_indices, part.moves, strict=True):
                if move.src != remaining_layouts[i]:
                    reason = f"an operand is under '{remaining_layouts[i]}', its plan is for '{move.src}'"
                    raise PlanError(reason)
            # The layout of a local contraction's result follows from those of its operands. The
            # plan stores it as well, and must store the same.
            operands = [move.dst for move in part.moves]
            result = local_type(operands, part.result.src.names, part.local)
            if result != part.result.src:
                reason = f"devices get '{result}', the plan goes on from '{part.result.src}'"
                raise PlanError(reason)
            remaining_layouts = [
                *remaining(remaining_layouts, part.operand_indices),
                part.result.dst,
            ]
        if remaining_layouts != [self.contraction.result]:
            raise PlanError(
                f"the plan leads to '{remaining_layouts[-1]}', not to '{self.contraction.result}'"
            )
        _ = self.arrays  # raises for shapes that do not fit
        if self.memory_limit is not None and self.peak_bytes > self.memory_limit:
            reason = f"the plan holds {self.peak_bytes} bytes, the limit is {self.memory_limit}"
            raise PlanError(reason)

    def __hash__(self) -> int:  # cheap: plans are keys of caches that every call looks at
        return hash((self.contraction.text, self.mesh, self.shapes, self.dtype))

    @property
    def text(self) -> str:
        """The expression, as the user wrote it."""
        return self.contraction.text

    @cached_property
    def arrays(self) -> tuple[Sharding, ...]:
        """The operands and the result as the text writes them, with composed dims and names that repeat."""
        return written_shardings(self.contraction, self.mesh, self.shapes)

    @cached_property
    def moves(self) -> tuple[Plan, ...]:
        """For every operand, the plan that leads it to where it is contracted."""
        remaining_indices = list(range(len(self.shapes)))  # -1 for the result of a part
        moves: dict[int, Plan] = {}
        for part in self.parts:
            for i, move in zip(part.operand_indices, part.moves, strict=True):
                moves[remaining_indices[i]] = move
            remaining_indices = [*remaining(remaining_indices, part.operand_indices), -1]
        return tuple(moves[i] for i in range(len(self.shapes)))

    @property
    def _all_moves(self) -> list[Plan]:
        """The moves of the forward pass, of all parts in their order."""
        return [*chain.from_iterable((*part.moves, part.result) for part in self.parts)]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of all moves, each once."""
        axes = chain.from_iterable(move.axes for move in self._all_moves)
        return tuple(dict.fromkeys(axes))

    @property
    def result(self) -> Plan:
        """The plan from the last local result to the result."""
        return self.parts[-1].result

    @property
    def local(self) -> str:
        """The local contractions, between the layouts in which they are computed."""
        return "; ".join(part.local for part in self.parts)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def flops(self) -> int:
        """Floating point operations of the busiest device, forward."""
        return sum(part.flops for part in self.parts)

    @property
    def backward_flops(self) -> int:
        """Floating point operations of the busiest device for all gradients."""
        return sum(part.flops * len(part.moves) for part in self.parts)

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives, forward, summed over the moves."""
        return sum(move.bytes_received for move in self._all_moves)

    @property
    def backward_bytes_received(self) -> int:
        """Bytes that it receives for all gradients, with the operands kept where they were contracted."""
        moves = chain.from_iterable(part.backward_moves for part in self.parts)
        return sum(move.bytes_received for move in moves)

    @property
    def cost(self) -> float:
        """Predicted seconds of all passes that the objective counts."""
        if self.objective != BOTH:
            return self.forward_cost
        return self.forward_cost + self.backward_cost

    @cached_property
    def forward_cost(self) -> float:
        """Predicted seconds of the forward pass."""
        return sum(part.seconds for part in self.parts)

    @cached_property
    def backward_cost(self) -> float:
        """Predicted seconds of all gradients."""
        return sum(part.backward_seconds for part in self.parts)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes that the busiest device holds at the worst moment of the forward pass.

        A plan of several operands is a series of local contractions (`parts`). Operands, moved
        operands and results of all of them are counted as held until the end, as the backward pass,
        or the caller, may need them.
        """
        itemsize = self.itemsize
        held_bytes = itemsize * sum(array.max_local_size for array in self.arrays[:-1])
        peak = held_bytes
        for part in self.parts:
            for move in part.moves:
                # Moves run one after the other, and all their results stay. A move's own peak
                # counts its input, which `held_bytes` has already: so it is subtracted once.
                input_bytes = itemsize * move.source.max_local_size
                peak = max(peak, held_bytes - input_bytes + move.peak_bytes)
                # A move that sends nothing is counted as a view of its input: no memory of its own.
                if move.bytes_received:
                    held_bytes += itemsize * move.target.max_local_size
            peak = max(peak, held_bytes + part.result.peak_bytes)
            held_bytes += itemsize * part.result.target.max_local_size
        return peak

    def __str__(self) -> str:
        return explain.text(self)

    def __repr__(self) -> str:
        arguments = f"{self.text.strip()!r}, {self.mesh!r}, {self.shapes}, {self.dtype!r}"
        return f"ContractionPlan({arguments}, local={self.local!r})"

    def explain(self) -> str:
        """Return the role of every mesh axis, by the names of schemes, and the costs of other placements."""
        return explain.explain(self)

    def to_json(self) -> str:
        """Return the plan as text, with all that is needed to check and run it elsewhere."""
        values = {
            "contraction": self.text,
            "mesh": to_plain(root_of(self.mesh)),
            "shapes": to_plain(self.shapes),
            "dtype": self.dtype,
            "profile": self.profile.name,
            "memory_limit": self.memory_limit,
            "objective": self.objective,
            "parts": [_part_to_plain(part) for part in self.parts],
        }
        return json.dumps(with_values(values), indent=1)

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> ContractionPlan:
        """Read the text of `to_json`, and check the plan again.

        Args:
            text: What `to_json` returned, here or elsewhere.
            profile: The machine to price it for, if the text names one that is not shipped.

        Returns:
            The plan, equal to the one that was written.

        Raises:
            PlanError: The text is malformed, or its plan is wrong.
        """
        with reading_plan():
            data = json.loads(text)
            machine = machine_of_plan(data["profile"], profile)
            # Maps of rows (`Owners`, `Needs`) that layouts below may name. A text finds them as
            # long as something refers to them, so the variable has to live until the plan is built.
            _maps = maps_in(data)
            call = contraction(data["contraction"])
            shapes = from_plain(Shapes, data["shapes"])
            # Replace `...` by as many dims as the shapes have. They have a length for each name:
            # for `(b d)` two, so that dims are counted by names, not as the text writes them.
            call = call.resolved(map(len, shapes), call.operands)
            call, mesh = on_sub_axes(call, Mesh(data["mesh"]), shapes)
            return ContractionPlan(
                contraction=call,
                mesh=mesh,
                shapes=shapes,
                dtype=name_of(data["dtype"]),
                parts=tuple(_part_from_plain(part, machine) for part in data["parts"]),
                profile=machine,
                memory_limit=from_plain(int | None, data["memory_limit"]),
                objective=data["objective"],
            )


def contraction_of(expression: str | Contraction | ContractionPlan) -> Contraction:
    """Return the contraction of a text or of a plan. Raises NotationError."""
    if isinstance(expression, Contraction):
        return expression
    if isinstance(expression, ContractionPlan):
        return expression.contraction
    return contraction(expression)


def known_lengths(
    expression: str | Contraction | ContractionPlan, sizes: Any, shape: Any
) -> tuple[Sizes | None, Shapes | None]:
    """Check the lengths that a user passes: `sizes` by name, `shape` by operand.

    Returns both with one length for each name: `(b d)` of 32 with b=8 -> (8, 4). The shapes are None
    if they have to be inferred. Raises ShapeError for lengths that do not fit those of a plan.
    """
    known_sizes, shapes = checked_lengths(sizes, shape)
    if shapes is None and known_sizes and isinstance(expression, ContractionPlan):
        shapes = tuple(array.shape for array in expression.arrays[:-1])
    if shapes is not None:
        _, shapes = shapes_of(contraction_of(expression), known_sizes, shapes)
    return known_sizes, shapes


def _part_to_plain(part: Part) -> dict[str, Any]:
    """Return a part as values of JSON."""
    return {
        "takes": list(part.operand_indices),
        "moves": [plan_to_plain(move) for move in part.moves],
        "result": plan_to_plain(part.result),
        "ring": list(part.ring.key) if part.ring else None,
    }


def _part_from_plain(data: dict[str, Any], machine: Profile) -> Part:
    """Read what `_part_to_plain` returned. Raises PlanError for a ring that the part cannot have."""
    moves = tuple(Plan.from_plain(move, machine) for move in data["moves"])
    operand_indices = from_plain(tuple[int, ...], data["takes"])
    part = Part(operand_indices, moves, Plan.from_plain(data["result"], machine))
    if not data["ring"]:
        return part
    key = tuple(data["ring"])
    for ring in rings(part):
        if ring.key == key:
            return replace(part, ring=ring)
    raise PlanError(f"no part of '{part.local}' can be a ring of {key}")
