"""A plan of a contraction as JSON, and back.

Decides the keys; its moves are written as plans are. Whether what was read is right, the plan decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xshard import dtypes
from xshard.contractions.expression import contraction
from xshard.cost.model import Profile
from xshard.cost.profile_files import load_profile
from xshard.layout import Mesh
from xshard.plans.plan import Plan
from xshard.plans.serialize import plan_to_plain

if TYPE_CHECKING:
    from xshard.contractions.plan import ContractionPlan, Part  # which writes itself by this


def to_plain(plan: ContractionPlan) -> dict[str, Any]:
    """A plan -> what JSON knows."""
    return {
        "contraction": plan.text,
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        "shapes": [list(shape) for shape in plan.shapes],
        "dtype": plan.dtype,
        "profile": plan.profile.name,
        "memory_limit": plan.memory_limit,
        "objective": plan.objective,
        "parts": [_part_to_plain(part) for part in plan.parts],
    }


def _part_to_plain(part: Part) -> dict[str, Any]:
    return {
        "takes": list(part.takes),
        "moves": [plan_to_plain(move) for move in part.moves],
        "result": plan_to_plain(part.result),
        "ring": part.ring and list(part.ring.key),
    }


def from_plain(data: dict[str, Any], profile: Profile | str | None) -> dict[str, Any]:
    """What `to_plain` gives -> the arguments of the plan, its parts as dicts of theirs."""
    machine = load_profile(data["profile"] if profile is None else profile)
    return {
        "contraction": contraction(data["contraction"]),
        "mesh": Mesh(data["mesh"]),
        "shapes": tuple(map(tuple, data["shapes"])),
        "dtype": dtypes.name_of(data["dtype"]),
        "profile": machine,
        "memory_limit": data["memory_limit"],
        "objective": data["objective"],
        "parts": [
            {
                "takes": tuple(part["takes"]),
                "moves": tuple(Plan.from_plain(move, machine) for move in part["moves"]),
                "result": Plan.from_plain(part["result"], machine),
                "ring": part["ring"] and tuple(part["ring"]),
            }
            for part in data["parts"]
        ],
    }
