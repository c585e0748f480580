"""The errors of this package, one class per kind of mistake, and the form of their messages."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from xshard.signatures import Signature, Wrong

Span = tuple[int, int]  # characters [start, stop) of a text


class XshardError(ValueError):
    """Base of all errors of this package.

    Args:
        reason: One line: the rule that was broken, and both values where two disagree.
        text: The user's text that is wrong.
        span: The part of the text to mark.
        hint: An existing or a correct alternative.

    Attributes:
        reason: As given.
        text: As given, without the digests of maps.
        span: The part of this text.
        hint: As given.

    Examples:
        >>> print(NotationError("unknown mesh axis 'cq'", text="s/cq c", span=(2, 4), hint="cp=4"))
        unknown mesh axis 'cq' in
            's/cq c'
               ^^
          cp=4
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
            # The marks move to the left by the digests before them.
            start, stop = span
            span = (len(without_digests(text[:start])), len(without_digests(text[:stop])))
        self.reason = reason
        self.span = span
        self.hint = hint
        self.text = None if text is None else without_digests(text)
        super().__init__(self._render())

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (forked ranks), and pickle alone does not pass keyword arguments.
        make = functools.partial(type(self), text=self.text, span=self.span, hint=self.hint)
        return make, (self.reason,)

    def _render(self) -> str:
        """Return the message: the reason, the user's text with a caret below it, and the hint.

        Each is in lines of its own; text, caret and hint only if they are given.
        """
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
    """Return a text of a layout as a user writes it: `by(gp,cells@0123...)` -> `by(gp,cells)`.

    Args:
        text: Any text; digests of row maps are taken out of it.
    """
    return re.sub(r"(?<=\w)@[0-9a-f]{16}\b", "", text)


_E = TypeVar("_E", bound="XshardError")


def with_path(error: _E, path: str) -> _E:
    """Return an error like this one, whose message begins with the place where it arose.

    "2 rows" with path "layers.0" -> "layers.0: 2 rows".

    Args:
        error: The error, which stays as it is.
        path: The place, such as the name of a leaf of a tree. An empty path is no place.
    """
    reason = f"{path}: {error.reason}" if path else error.reason
    return type(error)(reason, text=error.text, span=error.span, hint=error.hint)


@contextmanager
def located(path: str) -> Iterator[None]:
    """Put a place before the message of every XshardError that is raised inside a `with` block.

    An error that begins with this place already stays as it is.

        with located("layers.0"):
            raise ShapeError("2 rows")    # ShapeError: layers.0: 2 rows

    Args:
        path: The place, such as the name of a leaf of a tree.
    """
    try:
        yield
    except XshardError as error:
        if error.reason.startswith(f"{path}:"):
            raise
        raise with_path(error, path) from error.__cause__


# ---- tracebacks

_Api = TypeVar("_Api", bound=Callable[..., Any])

# Whether a compiler records the program, which has no values yet: a bridge has its own.
is_recording: Callable[[], bool] = bool

# Packages whose frames tell a user nothing about a mistake in an argument.
_LIBRARIES = sys.stdlib_module_names | {
    "jax",
    "jaxlib",
    "jax_bridge",
    "numpy",
    "torch",
    "torch_bridge",
    "xshard",
}


def api_boundary(api: _Api) -> _Api:
    """Decorate a public function or class: tracebacks of its errors end at the user's own line.

    Wrong arguments are noticed deep inside, and the frames down there say nothing about them. With
    XSHARD_TRACEBACK=full in the environment they are shown.

    Its signature is its specification: an argument that does not fit its annotation raises
    XshardError with its name, before the function is called.

    Of a class, the constructor is decorated; public methods have decorators of their own. A call
    costs a microsecond more: hot functions call `end_at_user` themselves.

    Args:
        api: The function or the class.

    Returns:
        A function with the same signature, or the class itself.
    """
    if isinstance(api, type):
        # Layouts, meshes and shardings read their own arguments, and a plan makes thousands of them.
        checks_first = not hasattr(api, "_repr_html_")
        api.__init__ = _boundary(api.__init__, checks_first)  # type: ignore[misc]  # of this very class
        return api
    return cast(_Api, _boundary(api, checks_first=True))


def _boundary(api: Callable[..., Any], checks_first: bool) -> Callable[..., Any]:
    """Wrap a function, so that its errors end at the user's line and name wrong arguments.

    Args:
        api: The function.
        checks_first: Compare arguments with the signature before the call too, not after an error alone.
    """

    @functools.wraps(api)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            # With `debug` processes compare their calls first, so that an error of one reaches all.
            if checks_first and not is_recording() and kwargs.get("debug") is not True:
                _raise_wrong(_signature(api).wrong(args, kwargs))
            try:
                return api(*args, **kwargs)
            except Exception as error:
                _explain(error, _signature(api).wrong(args, kwargs, has_failed=True))
                raise
        except XshardError as error:
            end_at_user(error)
            raise

    return called


# Late, at the first call: annotations may name what is defined below the function.
_signature = functools.cache(Signature)


def check_arguments(api: Callable[..., Any], **given: Any) -> None:
    """Raise XshardError if an argument does not fit the signature of a function.

    `api_boundary` does so for each call. Hot functions call it where a call is unusual.

    Args:
        api: The function.
        **given: Arguments by name.
    """
    _raise_wrong(_signature(api).wrong((), given))


def _raise_wrong(wrong: Wrong | None, cause: Exception | None = None) -> None:
    """Raise XshardError for an argument that does not fit its signature."""
    if wrong is not None:
        raise XshardError(wrong.reason, hint=wrong.hint) from cause


def _explain(error: Exception, wrong: Wrong | None) -> None:
    """Raise XshardError with the name of the argument that made a call fail, if there is one."""
    if not isinstance(error, XshardError):
        _raise_wrong(wrong, error)
    elif wrong is not None and not re.search(rf"\b{wrong.name}\b", error.reason):
        raise with_path(error, wrong.name) from error.__cause__


def end_at_user(error: XshardError) -> None:
    """Shorten an error's traceback, so that it ends at the last line of the user's own code.

    The frames below that line are in this package, torch, JAX or numpy, and tell a user nothing. A
    bare `raise` afterwards adds no frame for itself. A function of the user that a library has
    called keeps its frame, and the frames above it.

        try:  # costs nothing until something is raised
            return run(x)
        except XshardError as error:
            end_at_user(error)
            raise

    Args:
        error: The error, while it is handled. Its `__traceback__` becomes shorter.
    """
    if os.environ.get("XSHARD_TRACEBACK") == "full":
        return
    last_of_user: TracebackType | None = None
    entry = error.__traceback__
    while entry is not None:
        if not _is_of_library(entry.tb_frame):
            last_of_user = entry
        entry = entry.tb_next
    if last_of_user is None:  # all frames so far are of libraries; those of callers are added later
        error.__traceback__ = None
    else:
        last_of_user.tb_next = None


def _is_of_library(frame: FrameType) -> bool:
    """Return whether a frame is of a package whose frames tell a user nothing."""
    package, _, _ = frame.f_globals.get("__name__", "").partition(".")
    return package in _LIBRARIES


# ---- what goes away


def warn_deprecated(old: str, new: str, since: str) -> None:
    """Warn at the user's line, once for each, of something that goes away two minor versions later.

        warn_deprecated("xs.plot(plan)", "xs.show(plan)", since="0.3")    # it goes away in 0.5

    Args:
        old: What the user has written.
        new: The line to write instead.
        since: The version that warns first.
    """
    major, minor = since.split(".")
    gone = f"{major}.{int(minor) + 2}"
    level = 1
    while _is_of_library(sys._getframe(level)):
        level += 1
    message = f"{old} is deprecated since xshard {since}, and goes away in {gone}: write {new}"
    warnings.warn(message, FutureWarning, stacklevel=level + 1)


# ---- kinds of mistakes


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


class UnverifiedWarning(UserWarning):
    """A parallel model trains, and nothing has shown that its rules say how its arrays lie."""


class ReplicaError(XshardError):
    """Blocks differ along an axis that holds one value, according to the layout."""
