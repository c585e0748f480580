"""Weights that follow a running trainer, from a `Publisher` to a `Subscriber`."""

from torch_bridge.live.endpoint import LostVersionError
from torch_bridge.live.versions import Publisher, Subscriber

__all__ = ["LostVersionError", "Publisher", "Subscriber"]
