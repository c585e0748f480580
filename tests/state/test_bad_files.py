"""Files that are not what they have to be: each is refused, with its name, before anything is made of it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.state.checkpoints import Runs, arrays, load, save
from xshard import XshardError
from xshard.state.files import FileError, open_checkpoint, saving, verify
from xshard.state.files.folder import INDEX

F32 = np.arange(6, dtype=np.float32).tobytes()


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file. length: what it says that its header has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def ours(**said: Any) -> bytes:
    """A file that is right, but for what its metadata say to us."""
    return packed({"__metadata__": {"xshard": json.dumps(said)}, "w": entry([2, 3], 0, 24)}, F32)


WHOLE = {"w": entry([2, 3], 0, 24)}
FILES = {
    "empty": (b"", "0 bytes"),
    "shorter than the length of its header": (b"\1\0\0", "3 bytes"),
    "truncated in the header": (packed(WHOLE)[:20], "in a file of 20"),
    "truncated in the data": (packed(WHOLE, F32[:-1]), "w: 24 bytes of shape (2, 3) at [0, 24] of 23"),
    "a header longer than all memory": (packed(WHOLE, F32, 2**63), "a header of 9223372036854775808 bytes"),
    "no JSON": (packed(b'{"w": '), "not JSON"),
    "no text": (packed(b"\xff\xfe"), "not JSON"),
    "deep JSON": (packed(b"[" * 100_000), "not JSON"),
    "a list": (packed([]), "not a JSON object"),
    "an array twice": (packed(b'{"w": 1, "w": 2}'), "'w' twice"),
    "an array that is no object": (packed({"w": 3}), "w: an array has dtype, shape and data_offsets"),
    "no offsets": (packed({"w": {"dtype": "F32", "shape": [1]}}), "w: an array has"),
    "unknown dtype": (packed({"w": entry([6], 0, 24, "F33")}, F32), "w: unknown dtype 'F33'"),
    "a dtype that is none": (packed({"w": entry([6], 0, 24, ["F32"])}, F32), "w: unknown dtype"),
    "a length below zero": (packed({"w": entry([-6], 0, 24)}, F32), "w: shape [-6]"),
    "a length that is true": (packed({"w": entry([True, 6], 0, 24)}, F32), "w: shape [True, 6]"),
    "a length that is a fraction": (packed({"w": entry([6.0], 0, 24)}, F32), "w: shape [6.0]"),
    "a shape that is a number": (packed({"w": entry(6, 0, 24)}, F32), "w: shape 6"),
    "other bytes than the shape": (packed({"w": entry([5], 0, 24)}, F32), "w: 20 bytes of shape (5,)"),
    "a shape larger than all memory": (packed({"w": entry([2**62, 2**62], 0, 24)}, F32), "w: "),
    "no rows of more than there are": (packed({"w": entry([0, 2**70], 0, 0)}), "w: no array has shape"),
    "offsets backwards": (packed({"w": entry([6], 24, 0)}, F32), "w: 24 bytes of shape (6,) at [24, 0]"),
    "offsets behind the file": (packed({"w": entry([6], 2**40, 2**40 + 24)}, F32), "w: 24 bytes"),
    "an overlap": (packed({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, F32), "of b, from 8, overlap"),
    "a gap": (packed({"a": entry([2], 0, 8), "b": entry([2], 16, 24)}, F32), "from 16, leave a gap"),
    "data behind the last array": (packed({"w": entry([5], 0, 20)}, F32), "20 bytes in a file with 24"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}, **WHOLE}, F32), "not an object of texts"),
    "our metadata, no JSON": (packed({"__metadata__": {"xshard": "{"}, **WHOLE}, F32), "not JSON"),
    "our metadata, a list": (packed({"__metadata__": {"xshard": "[]"}, **WHOLE}, F32), "not a JSON object"),
    "layouts in a list": (ours(layouts=["o i"]), "malformed metadata"),
    "a layout that is none": (ours(layouts={"w": "o//"}), "'o//'"),
    "a mesh that is none": (ours(mesh="tp=0"), "tp"),
    "names that are none": (ours(names=[{"run": ["a", "b"]}]), "is not a relation"),
    "a checksum of more than there is": (ours(sums={"w": [[[[0, 9, 1], [0, 3, 1]], 0]]}), "a checksum of"),
    "a checksum of an array that is not there": (ours(sums={"v": [[[[0, 1, 1]], 0]]}), "malformed metadata"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_file(what: str, tmp_path: Path) -> None:
    content, message = FILES[what]
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with pytest.raises(XshardError) as raised:
            open_checkpoint(path)
        text = str(raised.value)
        assert message in text and (file.name in text or str(path) in text)


def test_a_header_of_more_than_100_mb(tmp_path: Path) -> None:
    """Which the file has: its zeros cost nothing."""
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((2**27).to_bytes(8, "little"))
        file.truncate(2**28)
    with pytest.raises(
        FileError, match=r"x.safetensors is not a whole safetensors file: a header of 134217728"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.safetensors"])
def test_a_pickle_runs_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(FileError, match=name):
            open_checkpoint(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert (tmp_path / "ran").exists()  # which shows that it could have run


INDEXES = {
    "the folder above": ({"w": "../x.safetensors"}, "'../x.safetensors' is not a safetensors file of"),
    "an absolute path": ({"w": "/tmp/x.safetensors"}, "'/tmp/x.safetensors' is no"),
    "a folder below": ({"w": "a/x.safetensors"}, "'a/x.safetensors' is no"),
    "a path of Windows": ({"w": "..\\x.safetensors"}, "is not a safetensors file"),
    "another kind of file": ({"w": "x.pt"}, "'x.pt' is not a safetensors file"),
    "a NUL": ({"w": "x\0.safetensors"}, "is not a safetensors file of"),
    "a number": ({"w": 1}, "weight_map must map texts"),
    "a list": (["x.safetensors"], "weight_map must map texts"),
    "a file that is not there": ({"w": "y.safetensors"}, "y.safetensors: No such file"),
    "an array that is not there": ({"w": "x.safetensors", "v": "x.safetensors"}, "v is in None"),
    "not all arrays": ({"w": "x.safetensors"}, "u is in x.safetensors, and the index says None"),
}  # fmt: skip


@pytest.mark.parametrize("what", INDEXES)
def test_an_index(what: str, tmp_path: Path) -> None:
    weight_map, message = INDEXES[what]
    (tmp_path / "x.safetensors").write_bytes(
        packed({"w": entry([5], 0, 20), "u": entry([1], 20, 24)}, F32)
    )
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(FileError) as raised:
        open_checkpoint(tmp_path)
    assert message in str(raised.value)


def test_an_array_in_two_files(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        (tmp_path / name).write_bytes(packed(WHOLE, F32))
    with pytest.raises(FileError, match=r"w is in x.safetensors and in y.safetensors"):
        open_checkpoint(tmp_path)


def test_two_indexes(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(packed(WHOLE, F32))
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(
        FileError, match=r"2 indexes: a.safetensors.index.json, b.safetensors.index.json"
    ):
        open_checkpoint(tmp_path)


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    other = tmp_path / "x.safetensors"
    folder.mkdir()
    other.write_bytes(packed(WHOLE, F32))
    (folder / "x.safetensors").symlink_to(other)
    with pytest.raises(FileError, match=r"x.safetensors is a link out of the folder"):
        open_checkpoint(folder)
    assert list(open_checkpoint(folder, links=True)) == ["w"]
    other.unlink()
    with pytest.raises(FileError, match="No such file"):
        open_checkpoint(folder, links=True)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would never end."""
    with pytest.raises(FileError, match="missing: No such file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(FileError, match=r"no safetensors files"):
        open_checkpoint(tmp_path)
    for at in ("x.safetensors", ".metadata", "_METADATA"):  # of other systems, too
        os.mkfifo(tmp_path / at)
        with pytest.raises(FileError, match=f"{at} is not a file"):
            open_checkpoint(tmp_path)
        (tmp_path / at).unlink()
    (tmp_path / "x.safetensors").symlink_to("x.safetensors")
    with pytest.raises(FileError, match=r"Symlink loop|Too many levels"):
        open_checkpoint(tmp_path)
    # CPython 3.13 says "embedded null character", those before it "embedded null byte".
    with pytest.raises(FileError, match=r"embedded null (byte|character)"):
        open_checkpoint(tmp_path / "x\0")


def test_names_by_the_hundred_thousand(tmp_path: Path) -> None:
    """One that is twice is found in the time of reading, not by comparing each with all."""
    header = ", ".join(f'"{i}": 1' for i in (*range(100_000), 99_999))
    (tmp_path / "x.safetensors").write_bytes(packed(f"{{{header}}}".encode()))
    with pytest.raises(FileError, match="'99999' twice"):
        open_checkpoint(tmp_path)


def test_every_bit_of_the_data_counts(tmp_path: Path) -> None:
    these = arrays()
    save(tmp_path, these)
    file = next(tmp_path.glob("model-*.safetensors"))
    whole = file.read_bytes()
    assert verify(open_checkpoint(tmp_path)) == 3
    data = sum(x.nbytes for x in these.values())
    for at in range(len(whole) - data, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(FileError, match=f"{file.name}: [wb]: wrong checksum"):
            verify(open_checkpoint(tmp_path))


def there(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("call", range(5))
@pytest.mark.parametrize(
    ("module", "function"), [(saving, "_reserve"), (os, "pwrite"), (os, "fsync")]
)
def test_a_disk_that_fails_at_a_call(
    module: Any, function: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the operating system, in turn: before the index has its name nothing is changed."""
    save(tmp_path, arrays())
    before = there(tmp_path)
    calls = [0]
    original = getattr(module, function)

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] > call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(module, function, failing)
    said = ""
    try:
        save(tmp_path, arrays(1))
    except FileError as error:
        said = str(error)
    monkeypatch.undo()
    assert (
        0 < calls[0] <= call
        if not said
        else (calls[0] == call + 1 and "No space left on device" in said)
    )
    is_new = not said or "the new checkpoint is in its place" in said
    assert all(np.array_equal(load(tmp_path)[name][0], x) for name, x in arrays(is_new).items())
    assert is_new or there(tmp_path) == before


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path: Path) -> None:
    """What is gone is an error, and no signal that kills."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed({"w": entry([64, 1024], 0, 2**18)}, bytes(2**18)))
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 2**17)
        message = f"a.safetensors ends at byte {2**17}, and did not when it was opened"
        for box in ((slice(16, 64),), (slice(64), slice(8))):  # in one piece, and not
            with pytest.raises(FileError, match=re.escape(message)):
                checkpoint.read("w", box)
