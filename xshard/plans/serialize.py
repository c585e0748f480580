"""A plan as plain data for JSON, and back. Only the name of its profile is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from xshard.cost.model import Profile
from xshard.cost.profile_files import load_profile
from xshard.dtypes import name_of
from xshard.errors import PlanError, XshardError
from xshard.layout import Layout, Mesh
from xshard.plans.plain import fields_from_plain, fields_to_plain, from_plain, mesh_to_plain, split_from_plain
from xshard.steps import Step

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
    except Exception as error:  # hostile text may have any value in any place
        raise PlanError(f"this is no plan: {type(error).__name__}: {error}") from None


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """A plan -> its JSON as a dict."""
    return {
        "src": str(plan.src),
        "dst": str(plan.dst),
        **mesh_to_plain(plan.steps_mesh),
        "src_devices": [] if isinstance(plan.devices, range) else list(plan.devices),
        "shape": list(plan.shape),
        "dtype": plan.dtype,
        "scale": str(plan.scale),
        "profile": plan.profile.name,
        "memory_limit": plan.memory_limit,
        "objective": plan.objective,
        "steps": [{"step": step.kind, **fields_to_plain(step)} for step in plan.steps],
        "after": [str(stage.after.layout) for stage in plan.stages],
    }


def plan_from_plain(data: dict[str, Any], profile: Profile | str | None) -> tuple[dict[str, Any], list[str]]:
    """The inverse: the arguments of `Plan`, and the layouts to which its steps should lead."""
    machine = load_profile(data["profile"] if profile is None else profile)
    values = {
        "src": Layout.parse(data["src"]),
        "dst": Layout.parse(data["dst"]),
        "mesh": Mesh(data["mesh"]),
        "devices": tuple(data.get("src_devices", ())),
        "shape": tuple(data["shape"]),
        "dtype": name_of(data["dtype"]),
        "scale": from_plain(Fraction, data["scale"]),
        "profile": machine,
        "memory_limit": from_plain(int | None, data["memory_limit"]),
        "objective": data["objective"],
        "split": split_from_plain(data.get("split", {})),
        "steps": tuple(_step(step, machine) for step in data["steps"]),
    }
    return values, data["after"]


def _step(data: dict[str, Any], profile: Profile) -> Step:
    kind = Step.registry.get(data.get("step", ""))
    if kind is None:
        raise PlanError(
            f"no step {data.get('step')!r}", hint=f"steps are: {', '.join(sorted(Step.registry))}"
        )
    values = fields_from_plain(kind, {name: value for name, value in data.items() if name != "step"})
    machine = {"profile": profile} if "profile" in kind.__annotations__ else {}
    return kind(**values, **machine)
