"""Steps as plain values for JSON, and back.

Decides how a field of a step is written and read, by its declared type. A profile is not written: the plan
names the machine. A value that does not read back as itself is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from typing import Any

from xshard.cost.model import Profile
from xshard.errors import PlanError, XshardError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import Shard
from xshard.steps import Step
from xshard.steps.base import DimCut


@contextmanager
def reading_plan() -> Iterator[None]:
    """Turn any error raised while reading a plan into a PlanError."""
    try:
        yield
    except PlanError:
        raise
    except XshardError as error:
        raise PlanError(f"this is no plan: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise PlanError(f"this is no plan: {type(error).__name__}: {error}") from None


def step_to_dict(step: Step) -> dict[str, Any]:
    """A step as plain values."""
    written = (f.name for f in fields(step) if f.type != "Profile")  # type: ignore[arg-type]
    return {"step": step.kind, **{name: _to_plain(getattr(step, name)) for name in written}}


def step_from_dict(data: dict[str, Any], profile: Profile) -> Step:
    """Values of `step_to_dict` -> the step, on this machine. Raises PlanError for a step or field unknown."""
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


def mesh_to_dict(mesh: Mesh) -> dict[str, int]:
    """A mesh as its axes and sizes."""
    return dict(zip(mesh.axes, mesh.sizes, strict=True))


def mesh_from_dict(sizes: dict[str, int], split: dict[str, list[int]] | None = None) -> Mesh:
    """Values of `mesh_to_dict` -> the mesh, with the axes of `split` split into such sizes."""
    parts = tuple((axis, tuple(n)) for axis, n in (split or {}).items())
    return SubAxisMesh(Mesh(sizes), parts) if parts else Mesh(sizes)


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    if isinstance(value, Sharding):
        mesh = value.mesh
        base, split = (mesh.base, mesh.split) if isinstance(mesh, SubAxisMesh) else (mesh, ())
        ends = {"layout": str(value.layout), "shape": list(value.shape)}
        return {**ends, "mesh": mesh_to_dict(base), "split": dict(split)}
    return str(value) if isinstance(value, Layout | Shard | Fraction) else value


def _shards(values: list[str]) -> tuple[Shard, ...]:
    shards = tuple(shard for v in values for shard in Layout.parse(f"d/{v}").dims[0].shards)
    if [str(shard) for shard in shards] != values:
        raise PlanError(f"{values} are no cuts")
    return shards


def _cuts(values: list[tuple[str, list[str]]]) -> tuple[DimCut, ...]:
    return tuple((str(dim), _shards(shards)) for dim, shards in values)


def _sharding(data: dict[str, Any]) -> Sharding:
    mesh = mesh_from_dict(data["mesh"], data["split"])
    return Sharding(Layout.parse(data["layout"]), mesh, tuple(data["shape"]))


# How a field of a step is read back, by its declared type.
_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "tuple[int, ...]": tuple,
    "Sharding": _sharding,
    "tuple[str, ...]": lambda values: tuple(map(str, values)),
    "tuple[Shard, ...]": _shards,
    "tuple[DimCut, ...]": _cuts,
    "Layout": Layout.parse,
    "Fraction": Fraction,
    "int | None": lambda value: value if value is None else int(value),
}
