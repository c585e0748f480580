"""Weights that follow a running trainer: a `Publisher` in its program, a `Subscriber` in another."""

from torch_bridge.live.endpoint import LostVersionError
from torch_bridge.live.versions import Publisher, Subscriber

__all__ = ["LostVersionError", "Publisher", "Subscriber"]
