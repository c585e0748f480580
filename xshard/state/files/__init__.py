"""Arrays in files: what a save writes, what a load reads, and safetensors as the format of both."""

from xshard.state.files.checkpoint import Box, Checkpoint, Stored
from xshard.state.files.folder import open_checkpoint, verify
from xshard.state.files.header import FileError
from xshard.state.files.loading import Load, plan_load, read_block
from xshard.state.files.saving import Saving, Source, plan_save
from xshard.state.files.writing import abort, begin, commit, save_blocks, write

__all__ = [
    "Box",
    "Checkpoint",
    "FileError",
    "Load",
    "Saving",
    "Source",
    "Stored",
    "abort",
    "begin",
    "commit",
    "open_checkpoint",
    "plan_load",
    "plan_save",
    "read_block",
    "save_blocks",
    "verify",
    "write",
]
