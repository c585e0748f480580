"""The errors of this package, one class per kind of mistake, and the form of their messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

Span = tuple[int, int]


class XshardError(ValueError):
    """Base of all errors of this package.

    reason: one line, the rule that was broken and both values.
    text, span: the user's text and the part of it to mark.
    hint: an existing or a correct alternative.
    """

    def __init__(
        self,
        reason: str,
        *,
        text: str | None = None,
        span: Span | None = None,
        hint: str | None = None,
    ) -> None:
        if text is not None and span is not None and "@" in text:
            start, stop = (len(without_digests(text[:end])) for end in span)
            span = start, stop
        self.reason = reason
        self.span = span
        self.hint = hint
        self.text = None if text is None else without_digests(text)
        super().__init__(self._render())

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (forked ranks), and pickle alone does not pass keyword arguments.
        return partial(type(self), text=self.text, span=self.span, hint=self.hint), (self.reason,)

    def _render(self) -> str:
        if self.text is None:
            lines = [self.reason]
        elif self.span is None:
            lines = [f"{self.reason} in '{self.text}'"]
        else:
            # The text has its own line because prefixes of the reason (class, module, rank) differ between
            # tracebacks. A tab or a line break would move the caret.
            start, stop = self.span
            text = re.sub(r"\s", " ", self.text)
            lines = [
                f"{self.reason} in",
                f"    '{text}'",
                " " * (5 + start) + "^" * max(1, stop - start),
            ]
        if self.hint is not None:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def without_digests(text: str) -> str:
    """A text of a layout without the digests of its maps, as a user writes it."""
    return re.sub(r"(?<=\w)@[0-9a-f]{16}\b", "", text)


_E = TypeVar("_E", bound="XshardError")


def with_path(error: _E, path: str) -> _E:
    """The same error, its reason after the place where it arose, as `layers.0: ...`; "" for no place."""
    reason = f"{path}: {error.reason}" if path else error.reason
    return type(error)(reason, text=error.text, span=error.span, hint=error.hint)


@contextmanager
def located(path: str) -> Iterator[None]:
    """Errors that are raised inside begin with a place, once."""
    try:
        yield
    except XshardError as error:
        if error.reason.startswith(f"{path}:"):
            raise
        raise with_path(error, path) from error.__cause__


class NotationError(XshardError):
    """Text of a layout or an expression that is malformed, or does not fit the mesh."""


class MeshError(XshardError):
    """A mesh, an axis or a device that is malformed or does not exist."""


class ShapeError(XshardError):
    """A shape or a local block that does not fit its layout."""


class DtypeError(XshardError):
    """A dtype that does not exist or cannot be reduced."""


class LinearityError(XshardError):
    """`max` or `min` where a linear map is required."""


class PlanError(XshardError):
    """A plan that contradicts itself, or that cannot be made."""


class ProfileError(XshardError):
    """A profile that does not exist or makes no sense."""


class ReplicaError(XshardError):
    """Blocks differ along an axis that holds one value, according to the layout."""
