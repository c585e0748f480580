"""A plan as JSON, and back.

Decides the keys, and how a field of a step is written and read: by its declared type. Of a profile only
the name is written. Whether what was read is a plan, the plan decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from xshard import dtypes
from xshard.arguments import whole_numbers
from xshard.cost.model import Profile
from xshard.cost.profile_files import load_profile
from xshard.errors import PlanError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.notation.parser import Shard
from xshard.steps import Step
from xshard.steps.base import DimCut

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which reads and writes itself by this


@contextmanager
def reading_plan() -> Iterator[None]:
    """Turn any error raised while reading a plan into a PlanError."""
    try:
        yield
    except PlanError:
        raise
    except XshardError as error:
        raise PlanError(f"this is no plan: {error}") from None
    except Exception as error:  # it may have anything in the place of anything
        raise PlanError(f"this is no plan: {type(error).__name__}: {error}") from None


def plan_to_json(plan: Plan) -> str:
    """`Plan.to_json`."""
    return json.dumps(
        {
            "src": str(plan.src),
            "dst": str(plan.dst),
            **_mesh_to_plain(plan.steps_mesh),
            "src_devices": [] if isinstance(plan.devices, range) else list(plan.devices),
            "shape": list(plan.shape),
            "dtype": plan.dtype,
            "scale": str(plan.scale),
            "profile": plan.profile.name,
            "memory_limit": plan.memory_limit,
            "objective": plan.objective,
            "steps": [_step_to_plain(s) for s in plan.steps],
            "after": [str(stage.after.layout) for stage in plan.stages],
        },
        indent=1,
    )


def plan_from_json(text: str, profile: Profile | str | None) -> tuple[dict[str, Any], list[str]]:
    """Text of `plan_to_json` -> the arguments of `Plan`, and the layouts that it says its steps lead to."""
    data: dict[str, Any] = json.loads(text)
    machine = load_profile(data["profile"] if profile is None else profile)
    values = {
        "src": Layout.parse(data["src"]),
        "dst": Layout.parse(data["dst"]),
        "mesh": Mesh(data["mesh"]),
        "devices": tuple(data.get("src_devices", ())),
        "shape": tuple(data["shape"]),
        "dtype": dtypes.name_of(data["dtype"]),
        "scale": _fraction(data["scale"]),
        "profile": machine,
        "memory_limit": None if data["memory_limit"] is None else _numbers([data["memory_limit"]])[0],
        "objective": data["objective"],
        "split": _split(data.get("split", {})),
        "steps": tuple(_step(s, machine) for s in data["steps"]),
    }
    return values, data["after"]


def _step_to_plain(step: Step) -> dict[str, Any]:
    written = (f.name for f in fields(step) if f.type != "Profile")  # type: ignore[arg-type]
    return {"step": step.kind, **{name: _to_plain(getattr(step, name)) for name in written}}


def _step(data: dict[str, Any], profile: Profile) -> Step:
    values = dict(data)
    kind = Step.registry.get(values.pop("step", ""))
    if kind is None:
        raise PlanError(
            f"no step {data.get('step')!r}", hint=f"steps are: {', '.join(sorted(Step.registry))}"
        )
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if set(values) - set(known):
        raise PlanError(f"step {kind.kind!r} has no {sorted(set(values) - set(known))}")
    read = {name: _FROM_PLAIN[str(known[name].type)](value) for name, value in values.items()}
    return kind(**read, **{name: profile for name, f in known.items() if f.type == "Profile"})


def _mesh_to_plain(mesh: Mesh) -> dict[str, Any]:
    base, split = (mesh.base, mesh.split) if isinstance(mesh, SubAxisMesh) else (mesh, ())
    return {"mesh": dict(zip(base.axes, base.sizes, strict=True)), "split": dict(split)}


def _split(data: dict[str, list[int]]) -> Split:
    return tuple((axis, _numbers(sizes)) for axis, sizes in data.items())


def _numbers(values: list[int]) -> tuple[int, ...]:
    found = whole_numbers(values)
    if found is None or any(type(n) is not int for n in found):
        raise PlanError(f"{values} are no whole numbers")
    return found


def _fraction(text: str) -> Fraction:
    """`"1/8"` -> 1/8; what has more digits than a number of devices, or an exponent, is no scale."""
    if not re.fullmatch(r"\d{1,9}(/\d{1,9})?", text):
        raise PlanError(f"{text!r} is no scale")
    return Fraction(text)


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    if isinstance(value, Sharding):
        ends = {"layout": str(value.layout), "shape": list(value.shape)}
        return {**ends, **_mesh_to_plain(value.mesh)}
    return str(value) if isinstance(value, Layout | Shard | Fraction) else value


def _shards(values: list[str]) -> tuple[Shard, ...]:
    shards = tuple(shard for v in values for shard in Layout.parse(f"d/{v}").dims[0].shards)
    if [str(shard) for shard in shards] != values:
        raise PlanError(f"{values} are no cuts")
    return shards


def _cuts(values: list[tuple[str, list[str]]]) -> tuple[DimCut, ...]:
    return tuple((str(dim), _shards(shards)) for dim, shards in values)


def _sharding(data: dict[str, Any]) -> Sharding:
    mesh, split = Mesh(data["mesh"]), _split(data["split"])
    mesh = SubAxisMesh(mesh, split) if split else mesh
    return Sharding(Layout.parse(data["layout"]), mesh, tuple(data["shape"]))


# How a field of a step is read back, by its declared type.
_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "tuple[int, ...]": _numbers,
    "Sharding": _sharding,
    "tuple[str, ...]": lambda values: tuple(map(str, values)),
    "tuple[Shard, ...]": _shards,
    "tuple[DimCut, ...]": _cuts,
    "Layout": Layout.parse,
    "Fraction": _fraction,
    "int | None": lambda value: value if value is None else int(value),
}
