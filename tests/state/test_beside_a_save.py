"""Readers beside saves into the same folder: one checkpoint, old or new, or the right error for none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.state.checkpoints import arrays, load, save
from xshard.state.files import Checkpoint, FileError, folder, open_checkpoint, saving

MANY_FILES: dict[str, Any] = {"shard_bytes": 1}  # one for each array


def number_of(found: Checkpoint | dict[str, Any]) -> int:
    """The seed of the arrays: all have to be of one save."""
    values = {name: found[name][0] for name in found} if isinstance(found, dict) else None
    read = values or {name: found.read(name) for name in found}  # type: ignore[union-attr]
    [seed] = [i for i in range(9) if all(np.array_equal(read[n], x) for n, x in arrays(i).items())]
    return seed


@pytest.mark.parametrize("function", ["read_index", "read_header", "map_file"])
def test_a_reader_has_one_checkpoint(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole saves, one and several, come before any call of the reader."""
    original = getattr(folder, function)
    for seed in range(12):
        pick = random.Random(seed)
        save(tmp_path, arrays(), **MANY_FILES)
        n_saves = [0]

        def beside(*arguments: Any, pick: random.Random = pick, n: list[int] = n_saves) -> Any:
            if n[0] < 4 and pick.random() < 0.6:
                n[0] += 1
                with monkeypatch.context() as patch:
                    patch.setattr(folder, function, original)
                    save(tmp_path, arrays(n[0]), **MANY_FILES)
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(folder, function, beside)
            assert number_of(load(tmp_path)) <= n_saves[0]


def test_a_reader_gives_up_beside_saves_that_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(path: Path) -> Any:
        calls.append(path)
        save(tmp_path, arrays(), **MANY_FILES)
        return original(path)

    calls: list[Path] = []
    original = folder.read_header
    save(tmp_path, arrays(), **MANY_FILES)
    monkeypatch.setattr(folder, "read_header", beside)
    with pytest.raises(FileError, match="No such file"):
        open_checkpoint(tmp_path)
    assert len(calls) == folder.MAX_TRIES


@pytest.mark.parametrize(
    ("damage", "message"), [(Path.unlink, "No such file"), (Path.touch, "is not a whole")]
)
def test_what_is_damaged_is_read_once(
    damage: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, arrays(), **MANY_FILES)
    file = max(tmp_path.glob("model-*.safetensors"))
    file.unlink()
    if damage is Path.touch:
        file.touch()
    calls: list[Path] = []
    original = folder.read_header
    monkeypatch.setattr(folder, "read_header", lambda path: calls.append(path) or original(path))
    with pytest.raises(FileError, match=message):
        open_checkpoint(tmp_path)
    assert len(calls) == len(set(calls))


def test_all_processes_open_the_same(tmp_path: Path) -> None:
    """One of them opens it before a save, and another one after it."""
    saves = [1, 2, 3]

    def two_processes(work: Callable[[], Any]) -> list[Any]:
        first = work()
        if saves:
            save(tmp_path, arrays(saves.pop(0)))
        return [first, work()]

    save(tmp_path, arrays())
    assert number_of(folder.open_on_all(tmp_path, two_processes)) == 3 and not saves
    opened = iter(range(1000))
    with pytest.raises(FileError, match=r"different checkpoints\n  open it again after the save"):
        folder.open_on_all(tmp_path, lambda work: [work(), next(opened)])


@pytest.mark.parametrize("place", ["new", "link", "file", "there"])
def test_an_old_checkpoint_is_named_only_where_there_is_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / place
    if place == "there":
        save(path, arrays())
    if place == "link":
        path.symlink_to(tmp_path / "nowhere")
    if place == "file":
        path.touch()

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_reserve", full)
    with pytest.raises(FileError) as failed:
        save(path, arrays(1))
    whole = "the checkpoint that was there is whole" in str(failed.value)
    none = "no checkpoint was there, and none is now" in str(failed.value)
    assert (whole, none) == (place == "there", place != "there")
