"""Weights that follow a running trainer: a `Publisher` in its program, a `Subscriber` in another."""

from torch_bridge.state.live import LostVersionError, Publisher, Subscriber

__all__ = ["LostVersionError", "Publisher", "Subscriber"]
