"""Rows that go where values say, as tokens to experts: their groups, and the order in which they arrive.

Each row chooses groups, and each group is on one part of a mesh axis. A part gets one copy of a row if it has
any of its groups. Copies lie by the part and the row that they come from; rows, one per choice, lie by group
and then by copy and choice. With a capacity, a part gets at most so many copies from each other: the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xshard.arguments import whole_numbers
from xshard.errors import ShapeError
from xshard.layout import Layout, Mesh
from xshard.signatures import as_whole_number, short_repr


@dataclass(frozen=True)
class Groups:
    """The part of each group along a mesh axis, and the number of parts."""

    parts: tuple[int, ...]
    n_parts: int

    @classmethod
    def of(cls, groups: Any, n_parts: int) -> Groups:
        """Find the part of a mesh axis on which each group is, such as the device of each expert.

        Args:
            groups: A number of groups, which are sharded evenly, as a dim `g/axis` is; or a list with the
                part of each group; or None: one group per part.
            n_parts: The number of parts.

        Returns:
            The part of each group.

        Raises:
            ShapeError: `groups` is none of these, or names a part that is not there.

        Examples:
            >>> Groups.of(3, 2).parts, Groups.of([1, 0, 1], 2).parts, Groups.of(None, 2).parts
            ((0, 0, 1), (1, 0, 1), (0, 1))
        """
        n_groups = n_parts if groups is None else as_whole_number(groups)
        if n_groups is None:
            group_parts = whole_numbers(groups)  # None if it is no list
        else:
            group_parts = _parts_in_turn(n_groups, n_parts)  # empty unless there is a group
        # `whole_numbers` makes ints of all numbers that are whole, so that anything else here, such as
        # a bool or 1.5, is an error.
        if not group_parts or not all(
            type(group_part) is int and 0 <= group_part < n_parts for group_part in group_parts
        ):
            hint = f"a number of groups, or for each its part, 0 to {n_parts - 1}"
            raise ShapeError(f"groups={short_repr(groups)} along {n_parts} parts", hint=hint)
        return cls(group_parts, n_parts)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each group among the groups of its part: of parts 1, 0, 1 -> 0, 0, 1."""
        return tuple(self.parts[:group].count(part) for group, part in enumerate(self.parts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of groups of each part."""
        return tuple(self.parts.count(part) for part in range(self.n_parts))


def _parts_in_turn(n_groups: int, n_parts: int) -> tuple[int, ...]:
    """Return the part of each group under `g/parts`: 3 groups on 2 parts -> (0, 0, 1)."""
    if n_groups <= 0:  # the caller's error tells the number
        return ()
    # As a dim of groups would be sharded: the last parts may have fewer, or none.
    mesh = Mesh(parts=n_parts)
    layout = Layout.parse("g/parts")
    parts = []
    for part_index in range(n_parts):
        n_held = len(layout.positions(mesh, (n_groups,), 0, part_index))
        parts += [part_index] * n_held
    return tuple(parts)


def check_rows(rows: Sequence[int], to: Sequence[int], is_whole: bool, **limits: Any) -> None:
    """Raise ShapeError unless an array `to` can say to which group (expert) each row goes.

    `to` has one group for each row, shape (rows,), or several choices, shape (rows, choices): rows of
    shape (16, 8) need (16,), or (16, 2) for two experts a row.

    Args:
        rows: The shape of the array of rows.
        to: The shape of the array of groups.
        is_whole: The dtype of `to` is of whole numbers.
        limits: Options by name, such as a capacity: None for no limit, or a whole number > 0.
    """
    fits_rows = len(rows) > 0 and len(to) in (1, 2) and to[0] == rows[0]
    if not (is_whole and fits_rows):
        dtype_text = "" if is_whole else ", of numbers that are not whole,"
        reason = f"to has shape {tuple(to)}{dtype_text} for rows of shape {tuple(rows)}"
        hint = "to[row] is a group, or to[row, choice]; a number below 0 is none"
        raise ShapeError(reason, hint=hint)
    for name, limit in limits.items():
        if limit is None:
            continue
        count = as_whole_number(limit)
        if count is None or count < 1:
            raise ShapeError(f"{name}={short_repr(limit)}", hint="a number of copies, 1 or more")
