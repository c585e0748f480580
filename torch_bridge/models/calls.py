"""Calls of modules that run: torch does not tell hooks when one ends by KeyboardInterrupt or the like."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

from torch_bridge.autodiff.turns import suspended_frames
from torch_bridge.versions.modules import CALL_CODE


def call_of_hook() -> FrameType | None:
    """Return the frame of the module's call whose hook calls this; None while a compiler traces."""
    if torch.compiler.is_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CALL_CODE:
        frame = frame.f_back
    return frame


def is_running(call: FrameType) -> bool:
    """Return whether a call is on the stack of some thread, or of a coroutine that computes in turn."""
    # This thread's is asked first: most calls that are asked for are on it, a few frames up.
    if is_in_stack(call, sys._getframe(1)):
        return True
    tops = sys._current_frames()
    # This function's own frame would refer to itself: all that is on the stack would live on.
    del tops[threading.get_ident()]
    return any(is_in_stack(call, top) for top in (*tops.values(), *suspended_frames()))


def is_in_stack(call: FrameType, top: FrameType) -> bool:
    """Return whether a call is on the stack that ends with a frame."""
    frame: FrameType | None = top
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False
