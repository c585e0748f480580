"""Plans and frozen values as plain data for JSON, and back: fields are read by their declared types."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xshard.arguments import shown
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile
from xshard.dtypes import name_of
from xshard.errors import PlanError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.notation.maps import maps_in, with_values
from xshard.notation.parser import Shard
from xshard.steps import Step

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which reads and writes itself by this


def to_plain(value: Any) -> Any:
    """A field of a frozen value -> text, numbers, lists and dicts."""
    if isinstance(value, tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, Mesh):
        return dict(zip(value.axes, value.sizes, strict=True))
    if isinstance(value, Sharding):
        return {
            "layout": str(value.layout),
            "shape": list(value.shape),
            **mesh_to_plain(value.mesh),
        }
    return str(value) if isinstance(value, Layout | Shard | Fraction) else value


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse: `kind` is the declared type. Raises XshardError for a value of another type."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else from_plain(parts[0], value)
    if parts:  # a tuple
        if type(value) is not list or (parts[-1] is not ... and len(value) != len(parts)):
            raise XshardError(f"{shown(value)} is not a list of the right length")
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return tuple(map(from_plain, kinds, value))
    if kind in _READERS:
        return _READERS[kind](value)
    if type(value) is not kind:
        raise XshardError(f"{shown(value)} is not {_NAMES.get(kind, kind.__name__)}")
    return value


def fields_to_plain(value: Any) -> dict[str, Any]:
    """The fields of a frozen value, without its profile."""
    cls: Any = type(value)
    return {name: to_plain(getattr(value, name)) for name in _field_types(cls)}


def fields_from_plain(cls: type, data: Any) -> dict[str, Any]:
    """The inverse: arguments of the class. Raises XshardError for unknown fields and wrong types."""
    kinds = _field_types(cls)
    if type(data) is not dict or set(data) - set(kinds):
        odd = sorted(set(data) - set(kinds)) if type(data) is dict else shown(data)
        raise XshardError(f"{cls.__name__} does not have the fields {odd}")
    return {name: from_plain(kinds[name], value) for name, value in data.items()}


def mesh_to_plain(mesh: Mesh) -> dict[str, Any]:
    """A mesh, and the axes that are split into sub-axes."""
    base, split = (mesh.base, mesh.split) if isinstance(mesh, SubAxisMesh) else (mesh, ())
    return {"mesh": to_plain(base), "split": dict(split)}


def split_from_plain(data: dict[str, list[int]]) -> Split:
    """The axes that are split, of `mesh_to_plain`."""
    return tuple((axis, from_plain(tuple[int, ...], sizes)) for axis, sizes in data.items())


@lru_cache(maxsize=256)
def _field_types(cls: type) -> dict[str, Any]:
    kinds = typing.get_type_hints(cls)
    return {f.name: kinds[f.name] for f in fields(cls) if kinds[f.name] is not Profile}


def _fraction(text: str) -> Fraction:
    if not re.fullmatch(r"\d{1,9}(/\d{1,9})?", text):
        raise XshardError(f"{text!r} is not a fraction of small numbers")
    return Fraction(text)


def _shard(text: str) -> Shard:
    shards = Layout.parse(f"d/{text}").dims[0].shards
    if [str(shard) for shard in shards] != [text]:
        raise XshardError(f"{text!r} does not shard a dim")
    return shards[0]


def _sharding(data: dict[str, Any]) -> Sharding:
    mesh = Mesh(data["mesh"])
    split = split_from_plain(data["split"])
    shape = from_plain(tuple[int, ...], data["shape"])
    return Sharding(
        Layout.parse(data["layout"]), SubAxisMesh(mesh, split) if split else mesh, shape
    )


_READERS: dict[Any, Callable[[Any], Any]] = {Layout: Layout.parse, Mesh: Mesh, Shard: _shard}
_READERS |= {Sharding: _sharding, Fraction: _fraction}
_NAMES = {int: "a whole number", str: "text"}


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
    data = {"src": str(plan.src), "dst": str(plan.dst), **mesh_to_plain(plan.steps_mesh)}
    data["src_devices"] = [] if isinstance(plan.devices, range) else list(plan.devices)
    data |= {"shape": list(plan.shape), "dtype": plan.dtype, "scale": str(plan.scale)}
    data |= {
        "profile": plan.profile.name,
        "memory_limit": plan.memory_limit,
        "objective": plan.objective,
    }
    data["steps"] = [{"step": step.kind, **fields_to_plain(step)} for step in plan.steps]
    return with_values(data | {"after": [str(stage.after.layout) for stage in plan.stages]})


def plan_from_plain(
    data: dict[str, Any], profile: Profile | str | None
) -> tuple[dict[str, Any], list[str]]:
    """The inverse: the arguments of `Plan`, and the layouts to which its steps should lead."""
    machine = load_profile(data["profile"] if profile is None else profile)
    _maps = maps_in(data)  # which the texts below name
    values: dict[str, Any] = {side: Layout.parse(data[side]) for side in ("src", "dst")}
    values |= {"mesh": Mesh(data["mesh"]), "devices": tuple(data.get("src_devices", ()))}
    values |= {"shape": tuple(data["shape"]), "dtype": name_of(data["dtype"]), "profile": machine}
    values |= {"scale": from_plain(Fraction, data["scale"]), "objective": data["objective"]}
    values["memory_limit"] = from_plain(int | None, data["memory_limit"])
    values["split"] = split_from_plain(data.get("split", {}))
    values["steps"] = tuple(_step(step, machine) for step in data["steps"])
    return values, data["after"]


def _step(data: dict[str, Any], profile: Profile) -> Step:
    kind = Step.registry.get(data.get("step", ""))
    if kind is None:
        hint = f"steps are: {', '.join(sorted(Step.registry))}"
        raise PlanError(f"no step {data.get('step')!r}", hint=hint)
    values = fields_from_plain(
        kind, {name: value for name, value in data.items() if name != "step"}
    )
    machine = {"profile": profile} if "profile" in kind.__annotations__ else {}
    return kind(**values, **machine)
