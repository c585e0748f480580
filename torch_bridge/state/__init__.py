"""Trees of tensors on other meshes, in one program or in two, and in files."""

from torch_bridge.state.files import load, save
from torch_bridge.state.live import Publisher, Subscriber
from torch_bridge.state.transfer import transfer

__all__ = ["Publisher", "Subscriber", "load", "save", "transfer"]
