"""Checkpoints: named arrays in safetensors files, or in files of other systems."""

from xshard.state.files.checkpoint import Checkpoint
from xshard.state.files.folder import open_checkpoint, verify
from xshard.state.files.header import FileError

__all__ = ["Checkpoint", "FileError", "open_checkpoint", "verify"]
