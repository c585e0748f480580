"""Checkpoints of other systems: whose a folder is, and which bridge reads it.

Decides by the names of files. The bridges, and the libraries of the formats, are imported when needed.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path

from xshard.state.files.checkpoint import Checkpoint
from xshard.state.files.header import FileError

# A file that is in each folder of a system -> the extra that brings it, and what opens the folder.
_SYSTEMS = {
    ".metadata": ("torch", "torch_bridge.state.dcp:open_dcp"),
    "_METADATA": ("orbax", "jax_bridge.state.orbax:open_orbax"),
    "_CHECKPOINT_METADATA": ("orbax", "jax_bridge.state.orbax:open_orbax"),
}


def opened_by_its_system(folder: Path) -> Checkpoint | None:
    """A folder of torch's DCP or of orbax -> its arrays; None for any other.

    Raises FileError as the system's reader does, and where the system is not installed.
    """
    found = next((system for name, system in _SYSTEMS.items() if (folder / name).exists()), None)
    if found is None:
        return None
    extra, reader = found
    try:
        function = pkgutil.resolve_name(reader)
    except ImportError as error:
        hint = f"pip install 'xshard[{extra}]'"
        raise FileError(f"{folder} needs {extra} to be read: {error}", hint=hint) from None
    opened: Checkpoint = function(folder)
    return opened
