"""Errors of torch programs, beside those in `xshard.errors`."""

from xshard.errors import XshardError

__all__ = ["CollectiveError", "DesyncError"]


class CollectiveError(XshardError, RuntimeError):
    """A collective failed: a process of its group has ended, has failed, or has not come in time.

    The backend's own error is its cause. Later communication in this world is unreliable.
    """


class DesyncError(XshardError):
    """Ranks are about to make different calls, or some of them fail where others do not."""
