"""Checkpoints of `torch.distributed.checkpoint`: only the rows that are needed are read."""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import filesystem, metadata, utils

from xshard import XshardError, dtypes
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.folder import Mapped, map_file
from xshard.state.files.header import FileError

METADATA = ".metadata"
_RECORDS = {
    metadata.__name__: {
        *(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
        ),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "torch.serialization": {"_get_layout"},
}


def open_dcp(path: str | Path) -> Checkpoint:
    """Open a folder that `torch.distributed.checkpoint.save` wrote; no tensor is read yet. Raises FileError
    for metadata with anything but records of DCP, and for tensors with parts outside of the folder or of
    their files, or parts that overlap or leave a gap.
    """
    folder = Path(path)
    with _malformed(folder / METADATA):
        with (folder / METADATA).open("rb") as file:
            records = _Records(file).load()
        items = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): _item(folder, info)
            for index, info in records.storage_data.items()
        }
        arrays: dict[str, _Tensor] = {}
        constants: dict[str, _Item] = {}
        for name, record in records.state_dict_metadata.items():
            if isinstance(record, metadata.BytesStorageMetadata):
                constants[name] = items[name, None]
            else:
                arrays[name] = _tensor(name, record, items)
    files = {name: {part.item.file.name for part in x.parts} for name, x in arrays.items()}
    places = {name: ", ".join(sorted(each)) for name, each in files.items()}
    return Checkpoint(arrays, constants=_Constants(constants), places=places)


class _Records(pickle.Unpickler):
    """An unpickler of DCP's records, shapes, dtypes and paths that looks up nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath
        if name not in _RECORDS.get(module, ()):
            raise FileError(f"it names {module}.{name}, which is not a record of DCP")
        return super().find_class(module, name)


class _Item(NamedTuple):
    """A tensor or a value that `torch.save` wrote into a part of a file."""

    file: Path
    offset: int
    length: int

    def load(self, device: str) -> Any:
        """The tensor or value; on the device "meta" no numbers are read."""
        with self.file.open("rb") as file:
            view: Any = utils._create_file_view(file, self.offset, self.length)
            return torch.load(view, map_location=device, weights_only=True)


class _Constants(UserDict[str, Any]):
    """The values that are not tensors."""

    def __getitem__(self, name: str) -> Any:
        item: _Item = self.data[name]
        with _malformed(item.file):
            return item.load("cpu")


@dataclass(frozen=True)
class _Part:
    """A box of a tensor, in an item."""

    box: Box
    item: _Item
    dtype: str

    @cached_property
    def numbers(self) -> Mapped:
        """All elements, mapped from the disk."""
        shape = tuple(rows.stop - rows.start for rows in self.box)
        item = self.item
        with _malformed(item.file):
            tensor = item.load("meta")
            stored = tuple(tensor.shape), dtypes.name_of(tensor.dtype)
            if stored != (shape, self.dtype):
                raise FileError(
                    f"{stored} at byte {item.offset}, but {shape, self.dtype} in the metadata"
                )
            if tensor.is_conj() or tensor.is_neg():
                raise FileError(
                    f"the tensor at byte {item.offset} is stored as its conjugate or negative"
                )
            strides = tuple(step * tensor.itemsize for step in tensor.stride())
            start = (
                tensor.untyped_storage()._checkpoint_offset
                + tensor.storage_offset() * tensor.itemsize
            )
            last = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            if math.prod(shape) and last + tensor.itemsize > item.length:
                raise FileError(
                    f"the tensor at byte {item.offset} has more than {item.length} bytes"
                )
            file, memory = map_file(item.file)
            whole = np.ndarray(
                shape, dtypes.carrier(self.dtype), memory, item.offset + start, strides
            )
            return Mapped(shape, self.dtype, whole, file, item.offset + start, item.file.name)


class _Tensor(NamedTuple):
    """A tensor in parts: a `Stored`."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[_Part, ...]

    def read(self, box: Box, out: NDArray[Any]) -> None:
        wanted = [range(*rows.indices(n)) for rows, n in zip(box, self.shape, strict=True)]
        for part in self.parts:
            both = [_common(rows, of) for rows, of in zip(wanted, part.box, strict=True)]
            in_out, in_part = zip(*both, strict=True) if both else ((), ())
            if all(rows.start < rows.stop for rows in in_out):
                part.numbers.read(in_part, out[(*in_out, ...)])


def _common(wanted: range, part: slice) -> tuple[slice, slice]:
    """The rows in both, as a slice of `wanted` and as a slice of the part."""
    in_wanted = slice(*(bisect_left(wanted, bound) for bound in (part.start, part.stop)))
    rows = wanted[in_wanted]
    return in_wanted, slice(rows.start - part.start, rows.stop - part.start, rows.step)


def _item(folder: Path, info: Any) -> _Item:
    """An item of the metadata, as a part of a file in the folder."""
    file = folder / info.relative_path
    end = info.offset + info.length
    if file.parent != folder or file.is_symlink():
        raise FileError(f"'{info.relative_path}' is not a file in the folder itself")
    if not 0 <= info.offset <= end <= file.stat().st_size:
        raise FileError(
            f"{file.name} has {file.stat().st_size} bytes, and not {info.offset} to {end}"
        )
    if getattr(info, "transform_descriptors", None):
        what = f"{file.name} is written by {info.transform_descriptors}"
        raise FileError(what, hint="extensions of DCP are not read")
    return _Item(file, info.offset, info.length)


def _tensor(name: str, record: Any, items: Mapping[Any, _Item]) -> _Tensor:
    """A tensor of the metadata; its parts have each element once."""
    dtype = dtypes.name_of(record.properties.dtype)
    shape = tuple(record.size)
    chunks = np.array([(part.offsets, part.sizes) for part in record.chunks], np.int64)
    starts, sizes = chunks.reshape(len(record.chunks), 2, len(shape)).transpose(1, 0, 2)
    stops = starts + sizes
    some = (sizes > 0).all(-1)
    begin_before = (starts[some][:, None] < stops[some]).all(-1)  # the end of the other
    inside = (starts >= 0).all() and (sizes >= 0).all() and (stops <= shape).all()
    overlap = (begin_before & begin_before.T).sum() > some.sum()
    if not inside or math.prod(shape) != sizes.prod(-1).sum() or overlap:
        raise FileError(f"{name}: the parts of its {shape} elements leave a gap, or overlap")
    boxes = zip(starts.tolist(), stops.tolist(), strict=True)
    parts = [
        _Part(tuple(map(slice, start, stop)), items[name, tuple(start)], dtype)
        for start, stop in boxes
    ]
    for part, size in zip(parts, sizes.prod(-1).tolist(), strict=True):
        if size * dtypes.itemsize(dtype) > part.item.length:
            raise FileError(f"{name}: {size} elements of {dtype} in {part.item.length} bytes")
    return _Tensor(shape, dtype, tuple(parts))


@contextmanager
def _malformed(file: Path) -> Iterator[None]:
    """Raise FileError for any error of a reader that trusts the bytes of a file."""
    try:
        yield
    except XshardError as error:
        raise FileError(f"{file}: {error.reason}", hint=error.hint) from None
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    except Exception as error:
        hint = (
            "torch.distributed.checkpoint.save writes .metadata last: without it nothing was saved"
        )
        raise FileError(f"{file} is not what DCP writes: {error}", hint=hint) from None
