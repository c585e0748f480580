"""A plan of a contraction as plain data for JSON, and back; its moves are written as plans are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xshard.contractions.expression import contraction
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile
from xshard.dtypes import name_of
from xshard.layout import Mesh
from xshard.plans.plan import Plan
from xshard.plans.serialize import from_plain as value_from_plain
from xshard.plans.serialize import plan_to_plain
from xshard.plans.serialize import to_plain as value_to_plain

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan  # which reads and writes itself by this


def to_plain(plan: ContractionPlan) -> dict[str, Any]:
    """A plan -> text, numbers, lists and dicts."""
    return {
        "contraction": plan.text,
        "mesh": value_to_plain(plan.mesh),
        "shapes": value_to_plain(plan.shapes),
        "dtype": plan.dtype,
        "profile": plan.profile.name,
        "memory_limit": plan.memory_limit,
        "objective": plan.objective,
        "parts": [
            {
                "takes": list(part.takes),
                "moves": [plan_to_plain(move) for move in part.moves],
                "result": plan_to_plain(part.result),
                "ring": part.ring and list(part.ring.key),
            }
            for part in plan.parts
        ],
    }


def from_plain(data: dict[str, Any], profile: Profile | str | None) -> dict[str, Any]:
    """The inverse: the arguments of the plan, with its parts as dicts of their arguments."""
    machine = load_profile(data["profile"] if profile is None else profile)
    return {
        "contraction": contraction(data["contraction"]),
        "mesh": Mesh(data["mesh"]),
        "shapes": value_from_plain(tuple[tuple[int, ...], ...], data["shapes"]),
        "dtype": name_of(data["dtype"]),
        "profile": machine,
        "memory_limit": value_from_plain(int | None, data["memory_limit"]),
        "objective": data["objective"],
        "parts": [
            {
                "takes": value_from_plain(tuple[int, ...], part["takes"]),
                "moves": tuple(Plan.from_plain(move, machine) for move in part["moves"]),
                "result": Plan.from_plain(part["result"], machine),
                "ring": part["ring"] and tuple(part["ring"]),
            }
            for part in data["parts"]
        ],
    }
