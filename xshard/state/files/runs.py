"""The checkpoints of a run: folders beside each other whose names end in a number, as step_20."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from xshard.errors import XshardError, api_boundary
from xshard.state.files.folder import INDEX

_NUMBERED = re.compile(r"(?P<text>.*?)(?P<number>\d+)")
_REMOVED = ".removed-"  # folders that are being removed begin so


@api_boundary
def latest(folder: str | Path) -> Path | None:
    """Find the newest whole checkpoint of a run: the folder with the highest number at its end.

        xt.load(latest("run"), like=state)      # run/step_40, beside run/step_20

    Folders that a killed save has left have no index, and are passed over.

    Args:
        folder: Where the checkpoints of the run are.

    Returns:
        The checkpoint; None if there is none yet.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     latest(folder)
    """
    checkpoints = _checkpoints_in(Path(folder))
    return checkpoints[-1] if checkpoints else None


def check_numbered(path: Path, keep: int | None) -> None:
    """Raise XshardError if old checkpoints are to be removed, and the name of this one has no number."""
    if keep is not None and _NUMBERED.fullmatch(path.name) is None:
        hint = "a folder for each step, as in f'run/step_{step}'"
        raise XshardError(f"keep={keep}, and {path} has no number at its end", hint=hint)


def remove_old(path: Path, keep: int | None) -> None:
    """Remove the checkpoints beside one, except for the `keep` with the highest numbers and itself.

    A folder is renamed first, so that nobody finds a half of it.
    """
    if keep is None:
        return
    for leftover in path.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    name_text = _text_of(path)
    numbered = [
        checkpoint
        for checkpoint in _checkpoints_in(path.parent)
        if _text_of(checkpoint) == name_text
    ]
    for old in numbered[:-keep]:
        if old.name != path.name:
            removed = old.with_name(f"{_REMOVED}{old.name}")
            with suppress(FileNotFoundError):  # the save before this one removes it, too
                old.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder whose names end in a number, in the order of these."""
    numbered = []
    for index in folder.glob(f"*/{INDEX}"):
        match = _NUMBERED.fullmatch(index.parent.name)
        if match is not None and not index.parent.name.startswith(_REMOVED):
            numbered.append((int(match["number"]), index.parent))
    return [path for _, path in sorted(numbered)]


def _text_of(path: Path) -> str:
    """Return the name of a numbered folder without its number."""
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None  # `check_numbered` has seen it
    return match["text"]
