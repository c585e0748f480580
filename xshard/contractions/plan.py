"""A plan of a contraction: the moves of its operands, the local contractions, the move of its result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from xshard.contractions import explain
from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.placements import accesses, dim_lengths, operations
from xshard.contractions.ring import ContractionRing, rings
from xshard.contractions.shapes import Shapes, written
from xshard.contractions.types import local_type
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile
from xshard.dtypes import itemsize, name_of
from xshard.errors import PlanError
from xshard.formatting import Pictured
from xshard.layout import Mesh, Sharding
from xshard.notation.maps import maps_in, with_values
from xshard.plans.plan import Plan
from xshard.plans.serialize import from_plain, plan_to_plain, reading_plan, to_plain
from xshard.search.request import BOTH


@dataclass(frozen=True)
class Part:
    """One local contraction, with the moves before and after it, one after the other or in a `ring`."""

    takes: tuple[
        int, ...
    ]  # its operands among those that are left; the result goes behind the others
    moves: tuple[Plan, ...]
    result: Plan
    ring: ContractionRing | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of the forward pass."""
        if self.ring:
            return self.ring.seconds(self)
        return self.work + sum(move.cost for move in (*self.moves, self.result))

    @cached_property
    def used(self) -> tuple[Sharding, ...]:
        """The shardings under which the operands are contracted."""
        return tuple(move.target for move in self.moves)

    @cached_property
    def local(self) -> str:
        """`"layout, layout -> layout"`: the local contraction of every device."""
        return f"{', '.join(str(move.dst) for move in self.moves)} -> {self.result.src}"

    @cached_property
    def dims(self) -> str:
        """`"b s d, d f -> b s f"`: the local contraction without its layouts."""
        left = ", ".join(" ".join(move.dst.names) for move in self.moves)
        return f"{left} -> {' '.join(self.result.src.names)}"

    @cached_property
    def flops(self) -> int:
        """Floating point operations of the busiest device."""
        lengths = dim_lengths((x.layout for x in self.used), (x.max_local_shape for x in self.used))
        has_sum = len(lengths) > len(self.result.src.names)
        return operations(lengths.values(), len(self.moves), has_sum=has_sum)

    @cached_property
    def work(self) -> float:
        """Predicted seconds of the local contraction, and of each gradient."""
        arrays = *self.used, self.result.source
        times = accesses([array.layout.names for array in arrays])
        touched = sum(n * array.max_local_size for n, array in zip(times, arrays, strict=True))
        return self.result.profile.work(self.flops, touched, self.result.dtype)

    @property
    def backward_moves(self) -> tuple[Plan, ...]:
        """The moves of the cotangent and of the operands' gradients."""
        return (self.result.backward, *(move.backward for move in self.moves))

    @property
    def backward_seconds(self) -> float:
        """Predicted seconds of all gradients."""
        return self.work * len(self.moves) + sum(move.cost for move in self.backward_moves)


@dataclass(frozen=True, repr=False)
class ContractionPlan(Pictured):
    """The placement of a contraction on `mesh`, and the moves before and after, for operands of `shapes`.

    shapes: a length for every name of an operand; `arrays` has the shapes of the arrays as they are written.
    parts: one local contraction, or with three and more operands one for every pair.
    objective: with "forward+backward", `cost` is the seconds of the forward pass and of all gradients.
    Raises PlanError if the parts do not lead from the operands to the result.

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
        left = list(self.contraction.operands)
        for part in self.parts:
            for i, move in zip(part.takes, part.moves, strict=True):
                if move.src != left[i]:
                    raise PlanError(
                        f"an operand is under '{left[i]}', its plan is for '{move.src}'"
                    )
            result = local_type(
                [move.dst for move in part.moves], part.result.src.names, part.local
            )
            if result != part.result.src:
                raise PlanError(
                    f"devices get '{result}', the plan goes on from '{part.result.src}'"
                )
            left = [layout for i, layout in enumerate(left) if i not in part.takes] + [
                part.result.dst
            ]
        if left != [self.contraction.result]:
            raise PlanError(f"the plan leads to '{left[-1]}', not to '{self.contraction.result}'")
        _ = self.arrays
        if self.memory_limit is not None and self.peak_bytes > self.memory_limit:
            raise PlanError(
                f"the plan holds {self.peak_bytes} bytes, the limit is {self.memory_limit}"
            )

    def __hash__(self) -> int:  # cheap: plans are keys of caches that every call looks at
        return hash((self.contraction.text, self.mesh, self.shapes, self.dtype))

    @property
    def text(self) -> str:
        """The expression, as the user wrote it."""
        return self.contraction.text

    @cached_property
    def arrays(self) -> tuple[Sharding, ...]:
        """The operands and the result as the text writes them, with composed dims and names that repeat."""
        return written(self.contraction, self.mesh, self.shapes)

    @cached_property
    def moves(self) -> tuple[Plan, ...]:
        """For every operand, the plan that leads it to where it is contracted."""
        left = list(range(len(self.shapes)))
        moves = dict[int, Plan]()
        for part in self.parts:
            moves |= {left[i]: move for i, move in zip(part.takes, part.moves, strict=True)}
            left = [n for i, n in enumerate(left) if i not in part.takes] + [-1]
        return tuple(moves[i] for i in range(len(self.shapes)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of all moves."""
        moves = (move for part in self.parts for move in (*part.moves, part.result))
        return tuple(dict.fromkeys(axis for move in moves for axis in move.axes))

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
        return sum(
            move.bytes_received for part in self.parts for move in (*part.moves, part.result)
        )

    @property
    def backward_bytes_received(self) -> int:
        """Bytes that it receives for all gradients, with the operands kept where they were contracted."""
        return sum(move.bytes_received for part in self.parts for move in part.backward_moves)

    @property
    def cost(self) -> float:
        """Predicted seconds of all passes that the objective counts."""
        return self.forward_cost + (self.backward_cost if self.objective == BOTH else 0.0)

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
        """Bytes that the busiest device holds at the worst moment of the forward pass."""
        n = self.itemsize
        peak = held = n * sum(array.max_local_size for array in self.arrays[:-1])
        for part in self.parts:
            for move in part.moves:
                peak = max(peak, held - n * move.source.max_local_size + move.peak_bytes)
                held += n * move.target.max_local_size if move.bytes_received else 0
            peak = max(peak, held + part.result.peak_bytes)
            held += n * part.result.target.max_local_size
        return peak

    def __str__(self) -> str:
        return explain.text(self)

    def __repr__(self) -> str:
        arguments = f"{self.text.strip()!r}, {self.mesh!r}, {self.shapes}, {self.dtype!r}"
        return f"ContractionPlan({arguments}, local={self.local!r})"

    def explain(self) -> str:
        """The role of every mesh axis, by the names of the schemes, and the costs of other placements."""
        return explain.explain(self)

    def to_json(self) -> str:
        """The plan as text, with all that is needed to check and run it elsewhere."""
        values = {
            "contraction": self.text,
            "mesh": to_plain(self.mesh),
            "shapes": to_plain(self.shapes),
        }
        values |= {
            "dtype": self.dtype,
            "profile": self.profile.name,
            "memory_limit": self.memory_limit,
        }
        parts = []
        for part in self.parts:
            moves = list(map(plan_to_plain, part.moves))
            ring = part.ring and list(part.ring.key)
            plain = {
                "takes": list(part.takes),
                "moves": moves,
                "result": plan_to_plain(part.result),
            }
            parts.append(plain | {"ring": ring})
        return json.dumps(
            with_values(values | {"objective": self.objective, "parts": parts}), indent=1
        )

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> ContractionPlan:
        """Text of `to_json` -> the plan, checked again. Raises PlanError for malformed or wrong text.

        profile: the machine to price it for, if the text names one that is not shipped.
        """
        with reading_plan():
            data = json.loads(text)
            machine = load_profile(data["profile"] if profile is None else profile)
            _maps = maps_in(data)  # which the texts below name
            call = contraction(data["contraction"])
            shapes = from_plain(Shapes, data["shapes"])
            call = call.resolved(map(len, shapes), call.operands)
            array = Mesh(data["mesh"]), shapes, name_of(data["dtype"])
            parts = tuple(_part_from_plain(part, machine) for part in data["parts"])
            limit = from_plain(int | None, data["memory_limit"])
            return ContractionPlan(call, *array, parts, machine, limit, data["objective"])


def contraction_of(expression: str | Contraction | ContractionPlan) -> Contraction:
    """The contraction of a text or of a plan. Raises NotationError."""
    if isinstance(expression, Contraction):
        return expression
    return (
        expression.contraction
        if isinstance(expression, ContractionPlan)
        else contraction(expression)
    )


def _part_from_plain(data: dict[str, Any], machine: Profile) -> Part:
    moves = tuple(Plan.from_plain(move, machine) for move in data["moves"])
    takes = from_plain(tuple[int, ...], data["takes"])
    key = data["ring"] and tuple(data["ring"])
    part = Part(takes, moves, Plan.from_plain(data["result"], machine))
    ring = next((ring for ring in rings(part) if ring.key == key), None)
    if key and not ring:
        raise PlanError(f"no part of '{part.local}' can be a ring of {key}")
    return replace(part, ring=ring)
