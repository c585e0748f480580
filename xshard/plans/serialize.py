"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from typing import Any

from xshard.errors import PlanError, XshardError
from xshard.layout.layout import Layout
from xshard.notation.parser import Shard
from xshard.steps import Step
from xshard.steps.base import DimCut


@contextmanager
def reading_plan(*told: type[XshardError]) -> Iterator[None]:
    """While a plan is made of text: whatever is wrong with that is a PlanError.

    told: errors that say enough as they are.
    """
    try:
        yield
    except told:
        raise
    except XshardError as error:
        raise PlanError(f"this is no plan: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise PlanError(f"this is no plan: {type(error).__name__}: {error}") from None


def _step_to_dict(step: Step) -> dict[str, Any]:
    return {"step": step.kind, **{f.name: _to_plain(getattr(step, f.name)) for f in fields(step)}}  # type: ignore[arg-type]


def _step_from_dict(data: dict[str, Any]) -> Step:
    values = dict(data)
    kind = Step.registry.get(values.pop("step", ""))
    if kind is None:
        raise PlanError(
            f"no step {data.get('step')!r}", hint=f"steps are: {', '.join(sorted(Step.registry))}"
        )
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if set(values) - set(known):
        raise PlanError(f"step {kind.kind!r} has no {sorted(set(values) - set(known))}")
    return kind(**{name: _FROM_PLAIN[str(known[name].type)](value) for name, value in values.items()})


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    return str(value) if isinstance(value, Layout | Shard | Fraction) else value


def _shards(values: list[str]) -> tuple[Shard, ...]:
    shards = tuple(shard for v in values for shard in Layout.parse(f"d/{v}").dims[0].shards)
    if [str(shard) for shard in shards] != values:
        raise PlanError(f"{values} are no cuts")
    return shards


def _cuts(values: list[tuple[str, list[str]]]) -> tuple[DimCut, ...]:
    return tuple((str(dim), _shards(shards)) for dim, shards in values)


# How a field of a step is read back, by its declared type.
_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "tuple[str, ...]": lambda values: tuple(map(str, values)),
    "tuple[Shard, ...]": _shards,
    "tuple[DimCut, ...]": _cuts,
    "Layout": Layout.parse,
    "Fraction": Fraction,
    "int | None": lambda value: value if value is None else int(value),
}
