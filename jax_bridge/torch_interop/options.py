"""The options of a hand-over: copying, moving, and the kind of result."""

from __future__ import annotations

from dataclasses import dataclass

from jax_bridge.torch_interop.buffers import LOG
from jax_bridge.torch_interop.handover import Arrangement
from jax_bridge.torch_interop.route import Profiles
from xshard import XshardError


@dataclass(frozen=True)
class Options:
    """The arguments copy, writable, dtensor, shape, profile and via of `to_jax` and `to_torch`."""

    copy: bool | None = None
    writable: bool = True
    dtensor: bool = False
    shape: tuple[int, ...] | None = None
    profile: Profiles = "auto"
    via: str | None = None

    def check_moved(self, found: Arrangement) -> None:
        """Log the plan that runs first; raise XshardError if nothing may be copied."""
        if self.copy is False:
            raise XshardError(
                "blocks that move cannot be handed over without a copy",
                text=found.text,
                hint="copy=None allows it",
            )
        LOG.info("%s moves the blocks first: %s", found.route.side, found.text)
