"""Files of `torch.distributed.checkpoint`: views of parts, and where a tensor begins."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import utils

from torch_bridge.versions.support import private_names

with private_names():
    # (file, first byte, bytes) -> the part of the file as a file of its own, as `torch.load` needs
    # it. Without it each item of a checkpoint would be copied into memory.
    file_view: Any = utils._create_file_view


def storage_offset_bytes(storage: Any) -> int:
    """Return the byte of its file at which a storage begins that was loaded to the device "meta".

    torch has no other name for it. Without it, rows of a tensor could not be read without the whole
    of it.
    """
    offset: int = storage._checkpoint_offset
    return offset
