"""Rows that go where values say, as tokens to experts: their groups, and the order in which they arrive. Each
row chooses groups, and each group is on one part of a mesh axis. A part gets one copy of a row if it has any
of its groups. Copies lie by the part and the row that they come from; rows, one per choice, lie by group and
then by copy and choice. With a capacity, a part gets at most so many copies from each other: the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xshard.arguments import shown, whole_number, whole_numbers
from xshard.errors import ShapeError
from xshard.layout import Layout, Mesh


@dataclass(frozen=True)
class Groups:
    """The part of each group along a mesh axis, and the number of parts."""

    parts: tuple[int, ...]
    n_parts: int

    @classmethod
    def of(cls, groups: Any, n_parts: int) -> Groups:
        """A number of groups, which lie as `g/axis` says, the part of each, or None: one group per part.

        Raises ShapeError for any other value, and for a part that is not there.

        >>> Groups.of(3, 2).parts, Groups.of([1, 0, 1], 2).parts, Groups.of(None, 2).parts
        ((0, 0, 1), (1, 0, 1), (0, 1))
        """
        number = n_parts if groups is None else whole_number(groups)
        parts = () if number is not None else whole_numbers(groups) or ()
        if number is not None and number > 0:
            mesh = Mesh(parts=n_parts)
            layout = Layout.parse("g/parts")
            rows = (layout.positions(mesh, (number,), 0, part) for part in range(n_parts))
            parts = tuple(part for part, own in enumerate(rows) for _ in own)
        if not parts or not all(type(part) is int and 0 <= part < n_parts for part in parts):
            hint = f"a number of groups, or for each its part, 0 to {n_parts - 1}"
            raise ShapeError(f"groups={shown(groups)} along {n_parts} parts", hint=hint)
        return cls(parts, n_parts)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each group among the groups of its part."""
        return tuple(self.parts[:g].count(part) for g, part in enumerate(self.parts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of groups of each part."""
        return tuple(map(self.parts.count, range(self.n_parts)))


def check_rows(rows: Sequence[int], to: Sequence[int], is_whole: bool, **limits: Any) -> None:
    """Raise ShapeError unless `to` has a whole number, or several, per row, and limits are whole and > 0."""
    if not is_whole or not len(rows) or len(to) not in (1, 2) or to[0] != rows[0]:
        kind = "" if is_whole else ", of numbers that are not whole,"
        what = f"to has shape {tuple(to)}{kind} for rows of shape {tuple(rows)}"
        raise ShapeError(
            what, hint="to[row] is a group, or to[row, choice]; a number below 0 is none"
        )
    for name, limit in limits.items():
        if limit is not None and (whole_number(limit) or 0) < 1:
            raise ShapeError(f"{name}={shown(limit)}", hint="a number of copies, 1 or more")
