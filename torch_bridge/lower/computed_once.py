"""A property that is computed once, without a lock.

`functools.cached_property` of Python 3.11 holds one lock for all objects while it computes. Ranks may be
threads of one process: one that makes a group would wait for its members, which wait for the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class computed_once(Generic[T]):  # noqa: N801 (read as the decorator that it is)
    """As `functools.cached_property`, for what makes process groups."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, of: Any, owner: type) -> T:
        if of is None:
            return self  # type: ignore[return-value]
        of.__dict__[self.name] = value = self.compute(of)
        return value
