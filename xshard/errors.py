"""What can go wrong, one class per kind, and how it is told.

Decides the shape of every message: the rule, the user's own text with a caret under the
offending part, and a way out. Knows nothing of layouts or plans.
"""

from __future__ import annotations

Span = tuple[int, int]


class XshardError(ValueError):
    """Base of all errors of this package.

    reason: one line, the rule that was broken and both values.
    text, span: the user's text and the part of it to mark.
    hint: what is there, or what would be right.
    """

    def __init__(
        self,
        reason: str,
        *,
        text: str | None = None,
        span: Span | None = None,
        hint: str | None = None,
    ) -> None:
        self.reason, self.text, self.span, self.hint = reason, text, span, hint
        super().__init__(self._render())

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (forked ranks); keyword arguments need help with that.
        return (_rebuild, (type(self), self.reason, self.text, self.span, self.hint))

    def _render(self) -> str:
        if self.text is None:
            return self.reason if self.hint is None else f"{self.reason}\n  {self.hint}"
        head = f"{self.reason} in "
        lines = [f"{head}'{self.text}'"]
        if self.span is not None:
            start, stop = self.span
            # The caret is placed under the text of the line above, as the traceback prints it.
            indent = len(type(self).__name__) + 2 + len(head) + 1 + start
            lines.append(" " * indent + "^" * max(1, stop - start))
        if self.hint is not None:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def _rebuild(
    kind: type[XshardError], reason: str, text: str | None, span: Span | None, hint: str | None
) -> XshardError:
    return kind(reason, text=text, span=span, hint=hint)


class NotationError(XshardError):
    """The text of a layout or expression is wrong, or does not fit the mesh."""


class MeshError(XshardError):
    """A mesh, an axis or a device that cannot be."""


class ShapeError(XshardError):
    """A shape or a local block that does not fit its layout."""


class DtypeError(XshardError):
    """A dtype that does not exist or cannot be reduced."""


class LinearityError(XshardError):
    """`max` or `min` where a linear map is required."""


class PlanError(XshardError):
    """A plan that contradicts itself, or cannot be made."""
