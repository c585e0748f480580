"""Plans and frozen values as plain data for JSON, and back.

A value is written by its own type, and read by the type that its field declares: JSON itself has neither
tuples nor fractions.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from xshard.cost.machine import machine_of_plan
from xshard.cost.model import Profile
from xshard.dtypes import name_of
from xshard.errors import PlanError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh, split_by, split_of
from xshard.notation.maps import maps_in, with_values
from xshard.notation.parser import Shard
from xshard.signatures import short_repr
from xshard.steps import Step

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which reads and writes itself by this


def to_plain(value: Any) -> Any:
    """Convert a value to what JSON can hold: text, numbers, lists and dicts.

    A mesh of dp=2 and tp=4 becomes {"dp": 2, "tp": 4}, a layout its text "n/dp c", a tuple a list.
    """
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mesh):
        return dict(zip(value.axes, value.sizes, strict=True))
    if isinstance(value, Sharding):
        return {
            "layout": str(value.layout),
            "shape": list(value.shape),
            **mesh_to_plain(value.mesh),
        }
    if isinstance(value, Layout | Shard | Fraction):
        return str(value)
    return value


def from_plain(declared_type: Any, value: Any) -> Any:
    """Convert a value of parsed JSON back to the type that a dataclass declares for the field.

    `tuple[int, ...]` and [2, 4] -> (2, 4); `int | None` and null -> None. The inverse of
    `to_plain`.

    Args:
        declared_type: The field's type: a class, `tuple[int, ...]`, `tuple[str, int]` or `X | None`.
        value: The parsed JSON.

    Raises:
        XshardError: The value is of another type.
    """
    arguments = typing.get_args(declared_type)
    if isinstance(declared_type, types.UnionType):  # X | None
        return None if value is None else from_plain(arguments[0], value)
    if arguments:
        return _tuple_from_plain(arguments, value)
    if declared_type in _READERS:
        return _READERS[declared_type](value)
    if type(value) is not declared_type:  # not isinstance: True is an int in Python
        expected = _NAMES.get(declared_type, declared_type.__name__)
        raise XshardError(f"{short_repr(value)} is not {expected}")
    return value


def _tuple_from_plain(item_types: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Read a tuple: of any length if its types end with `...`, else of one value for each type."""
    has_any_length = item_types[-1] is ...
    if type(value) is not list or not (has_any_length or len(value) == len(item_types)):
        raise XshardError(f"{short_repr(value)} is not a list of the right length")
    if has_any_length:
        return tuple(from_plain(item_types[0], item) for item in value)
    return tuple(map(from_plain, item_types, value))


def fields_to_plain(value: Any) -> dict[str, Any]:
    """Return the fields of a frozen value as plain data, without its profile."""
    cls: Any = type(value)
    return {name: to_plain(getattr(value, name)) for name in _field_types(cls)}


def fields_from_plain(cls: type, data: Any) -> dict[str, Any]:
    """Read what `fields_to_plain` wrote, as keyword arguments of the class.

    Raises:
        XshardError: A field is unknown, or a value has another type.
    """
    declared_types = _field_types(cls)
    if type(data) is not dict:
        raise XshardError(f"{cls.__name__} does not have the fields {short_repr(data)}")
    unknown = sorted(set(data) - set(declared_types))
    if unknown:
        raise XshardError(f"{cls.__name__} does not have the fields {unknown}")
    return {name: from_plain(declared_types[name], value) for name, value in data.items()}


def mesh_to_plain(mesh: Mesh) -> dict[str, Any]:
    """Return a mesh as plain data, with the axes that are split into sub-axes beside it."""
    if isinstance(mesh, SubAxisMesh):
        return {"mesh": to_plain(mesh.base), "split": dict(mesh.split)}
    return {"mesh": to_plain(mesh), "split": {}}


def split_from_plain(data: dict[str, list[int]]) -> Split:
    """Read the axes that are split, as `mesh_to_plain` wrote them."""
    return tuple((axis, from_plain(tuple[int, ...], sizes)) for axis, sizes in data.items())


@lru_cache(maxsize=256)
def _field_types(cls: type) -> dict[str, Any]:
    """Return the declared type of every field; a profile is written by its name, elsewhere."""
    declared_types = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    return {name: declared_types[name] for name in names if declared_types[name] is not Profile}


def _read_fraction(text: str) -> Fraction:
    # Longer ones would be a way to make the reader compute for ever.
    if not re.fullmatch(r"\d{1,9}(/\d{1,9})?", text):
        raise XshardError(f"{text!r} is not a fraction of small numbers")
    return Fraction(text)


def _read_shard(text: str) -> Shard:
    """Read one shard of a dim: "zigzag(cp)"."""
    shards = Layout.parse(f"d/{text}").dims[0].shards
    # "a,b" would be read as two shards, of which the second is no part of this field.
    if [str(shard) for shard in shards] != [text]:
        raise XshardError(f"{text!r} does not shard a dim")
    return shards[0]


def _mesh_from_plain(axes: dict[str, int], split: dict[str, list[int]]) -> Mesh:
    """Read the sizes of axes, and how some are split, as `mesh_to_plain` wrote them."""
    return split_by(Mesh(axes), split_from_plain(split))


def _read_sharding(data: dict[str, Any]) -> Sharding:
    mesh = _mesh_from_plain(data["mesh"], data["split"])
    return Sharding(Layout.parse(data["layout"]), mesh, from_plain(tuple[int, ...], data["shape"]))


_READERS: dict[Any, Callable[[Any], Any]] = {
    Layout: Layout.parse,
    Mesh: Mesh,
    Shard: _read_shard,
    Sharding: _read_sharding,
    Fraction: _read_fraction,
}
_NAMES = {int: "a whole number", str: "text"}  # of types, in errors


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
    """Convert a plan to the dict that its JSON holds: layouts as text, steps as dicts of fields.

    "after" has the layout after each step, which a reader compares with what the steps give.
    """
    # Devices 0, 1, 2, ... are a range, and are written as an empty list: 10,000 take no space.
    src_devices = [] if isinstance(plan.devices, range) else list(plan.devices)
    data = {
        "src": str(plan.src),
        "dst": str(plan.dst),
        **mesh_to_plain(plan.steps_mesh),
        "own_split": dict(split_of(plan.mesh)),  # before the steps split more
        "dst_split": dict(plan.dst_split),
        "src_devices": src_devices,
        "shape": list(plan.shape),
        "dtype": plan.dtype,
        "scale": str(plan.scale),
        "profile": plan.profile.name,
        "memory_limit": plan.memory_limit,
        "objective": plan.objective,
        "steps": [{"step": step.kind, **fields_to_plain(step)} for step in plan.steps],
        "after": [str(stage.after.layout) for stage in plan.stages],
    }
    return with_values(data)


class ReadPlan(NamedTuple):
    """What the JSON of a plan says, before the plan is built."""

    arguments: dict[str, Any]  # of `Plan`
    layouts: list[str]  # to which its steps should lead, one after the other


def plan_from_plain(data: dict[str, Any], profile: Profile | str | None) -> ReadPlan:
    """Parse a plan's JSON into the arguments that make the plan, and the layouts after its steps.

    The inverse of `plan_to_plain`. The caller makes the plan, which checks itself, and compares the
    layouts, texts such as ["n"], with those that the steps give.

    Args:
        data: The parsed JSON, which may hold anything.
        profile: The machine to price the plan for. None: the one that the JSON names.
    """
    machine = machine_of_plan(data["profile"], profile)
    # Layouts name maps of rows by their digests, and the parser looks these up in a table of weak
    # references. This local is used nowhere, but keeps the maps alive while the texts are parsed.
    _maps = maps_in(data)
    arguments = {
        "src": Layout.parse(data["src"]),
        "dst": Layout.parse(data["dst"]),
        "mesh": _mesh_from_plain(data["mesh"], data.get("own_split", {})),
        "devices": tuple(data.get("src_devices", ())),
        "shape": tuple(data["shape"]),
        "dtype": name_of(data["dtype"]),
        "profile": machine,
        "scale": from_plain(Fraction, data["scale"]),
        "objective": data["objective"],
        "memory_limit": from_plain(int | None, data["memory_limit"]),
        "split": split_from_plain(data.get("split", {})),
        "dst_split": split_from_plain(data.get("dst_split", {})),
        "steps": tuple(_step_from_plain(step, machine) for step in data["steps"]),
    }
    return ReadPlan(arguments, data["after"])


def _step_from_plain(data: dict[str, Any], profile: Profile) -> Step:
    """Read one step: its kind, and the fields that this kind declares."""
    cls = Step.registry.get(data.get("step", ""))
    if cls is None:
        raise PlanError(
            f"no step {data.get('step')!r}", hint=f"steps are: {', '.join(sorted(Step.registry))}"
        )
    step_fields = {name: value for name, value in data.items() if name != "step"}
    arguments = fields_from_plain(cls, step_fields)
    if "profile" in cls.__annotations__:  # a transfer, which is priced for a machine
        arguments["profile"] = profile
    return cls(**arguments)
