"""Trees of tensors on other meshes, in one program or in two."""

from torch_bridge.state.live import Publisher, Subscriber
from torch_bridge.state.transfer import transfer

__all__ = ["Publisher", "Subscriber", "transfer"]
