"""How the named operations of the bridges are spelt: pieces of the expressions they stand for.

Both bridges have the same operations with the same arguments, so their text is made here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xshard.errors import ShapeError, XshardError

Axes = str | tuple[str, ...]


def dims(shape: Sequence[int], shards: Mapping[int, str] | None = None) -> str:
    """The dims of a block as text, some of them cut. Raises ShapeError for a dim it does not have.

    >>> dims((4, 2), {-1: "tp"})
    'd0 d1/tp'
    """
    names = [f"d{d}" for d in range(len(shape))]
    for dim, cut in (shards or {}).items():
        if not -len(shape) <= dim < len(shape):
            raise ShapeError(f"no dim {dim} in a block of shape {tuple(shape)}")
        names[dim] += f"/{cut}"
    return " ".join(names) or "()"


def shard(axis: Axes, order: str = "block") -> str:
    """A cut over an axis, or over several as one."""
    if order != "block":
        return f"{order}({_names(axis)})"
    return axis if isinstance(axis, str) else f"({_names(axis)})"


def whole(axis: Axes, grad: str) -> str:
    """The tag of whole values: copies, whose gradients add up, or replicas, which have none."""
    if grad not in ("sum", "replicated"):
        raise XshardError(
            f"grad={grad!r}", hint='"sum": gradients add up along the axis; "replicated": they are equal'
        )
    return tag("copy", axis) if grad == "sum" else ""


def tag(kind: str, axis: Axes) -> str:
    """A tag with the bar before it."""
    return f" | {kind}({_names(axis)})"


def _names(axis: Axes) -> str:
    return axis if isinstance(axis, str) else ",".join(axis)
