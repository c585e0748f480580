"""Checkpoints: named arrays in safetensors files, or in files of other systems."""

from xshard.state.files.background import BackgroundSave
from xshard.state.files.checkpoint import Checkpoint
from xshard.state.files.folder import open_checkpoint, verify
from xshard.state.files.header import FileError
from xshard.state.files.runs import latest

__all__ = ["BackgroundSave", "Checkpoint", "FileError", "latest", "open_checkpoint", "verify"]
