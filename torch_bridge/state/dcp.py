"""Read checkpoints of `torch.distributed.checkpoint`: only the rows that are needed.

Metadata is a pickle, so it is read with a list of allowed classes, and all that it says is checked
against the files: a damaged or a hostile folder raises FileError.
"""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from torch_bridge.versions.checkpoints import file_view, storage_offset_bytes
from xshard import XshardError, dtypes
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.folder import Mapped, map_file
from xshard.state.files.header import FileError

METADATA = ".metadata"
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# All that a pickle of DCP may name, by module. Any other class could run code.
_RECORDS = {
    metadata.__name__: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
}


def open_dcp(path: str | Path) -> Checkpoint:
    """Open a folder that `torch.distributed.checkpoint.save` (DCP) wrote; no tensor is read yet.

    DCP saves a tensor in boxes, such as the blocks of several processes, in any files of the folder;
    the file ".metadata" says where they lie. Raises FileError for metadata with anything but records
    of DCP, and for tensors with boxes outside of the folder or of their files, or boxes that overlap
    or leave a gap.
    """
    folder = Path(path)
    arrays = {}
    constants = {}
    with _as_file_error(folder / METADATA):
        with (folder / METADATA).open("rb") as file:
            records = _Records(file).load()
        # Where bytes lie, by name and by the first rows of the box in the tensor; None for a value
        # that is no tensor, such as a step number.
        items = {}
        for index, info in records.storage_data.items():
            position = None if index.offset is None else tuple(index.offset)
            items[index.fqn, position] = _item(folder, info)
        for name, record in records.state_dict_metadata.items():
            if isinstance(record, metadata.BytesStorageMetadata):
                constants[name] = items[name, None]
            else:
                arrays[name] = _tensor(name, record, items)

    files_of_tensor = {}  # for errors
    for name, tensor in arrays.items():
        files = {saved.item.file.name for saved in tensor.boxes}
        files_of_tensor[name] = ", ".join(sorted(files))
    return Checkpoint(arrays, constants=_Constants(constants), places=files_of_tensor)


class _Records(pickle.Unpickler):
    """An unpickler of DCP's records, shapes, dtypes and paths that looks up nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a record. Raises FileError for any other."""
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # the paths of another system are not made here
        if name not in _RECORDS.get(module, ()):
            raise FileError(f"it names {module}.{name}, which is not a record of DCP")
        return super().find_class(module, name)


class _Item(NamedTuple):
    """A tensor or a value that `torch.save` wrote at an offset of a file; offset and length in bytes."""

    file: Path
    offset: int
    length: int

    def load(self, device: str) -> Any:
        """Return the tensor or value; on the device "meta" without its elements."""
        with self.file.open("rb") as file:
            item_file = file_view(file, self.offset, self.length)
            return torch.load(item_file, map_location=device, weights_only=True)


class _Constants(UserDict[str, Any]):
    """The values that are not tensors, each read when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        item: _Item = self.data[name]
        with _as_file_error(item.file):
            return item.load("cpu")


@dataclass(frozen=True)
class _SavedBox:
    """A box of a tensor, and the item that holds its elements."""

    box: Box
    item: _Item
    dtype: str

    @cached_property
    def mapped(self) -> Mapped:
        """The box as a numpy array that maps the file: bytes are read when it is used.

        Raises FileError if the file does not hold such a tensor: metadata and file may be of two
        different saves.
        """
        shape = tuple(rows.stop - rows.start for rows in self.box)
        with _as_file_error(self.item.file):
            tensor = self.item.load("meta")  # shape, dtype and strides, without elements
            self._check(tensor, shape)
            strides_bytes = tuple(stride * tensor.itemsize for stride in tensor.stride())
            start_byte = _first_byte(tensor)
            self._check_end(tensor, start_byte, strides_bytes)
            file, memory = map_file(self.item.file)
            file_byte = self.item.offset + start_byte  # where the elements begin in the file
            # numpy lacks some dtypes, such as bfloat16: integers of the same size hold their bits.
            carrier = dtypes.carrier(self.dtype)
            array = np.ndarray(shape, carrier, memory, file_byte, strides_bytes)
            return Mapped(
                shape=shape,
                dtype=self.dtype,
                mapped=array,
                file=file,
                start=file_byte,
                file_name=self.item.file.name,
            )

    def _check(self, tensor: Tensor, shape: Sequence[int]) -> None:
        """Raise FileError unless the item has the tensor of the metadata, as plain numbers."""
        stored = tuple(tensor.shape), dtypes.name_of(tensor.dtype)
        expected = shape, self.dtype
        location = f"at byte {self.item.offset}"
        if stored != expected:
            raise FileError(f"{stored} {location}, but {expected} in the metadata")
        if tensor.is_conj() or tensor.is_neg():
            # The bytes are those of another tensor; torch would change the sign when it reads.
            raise FileError(f"the tensor {location} is stored as its conjugate or negative")

    def _check_end(self, tensor: Tensor, start_byte: int, strides_bytes: Sequence[int]) -> None:
        """Raise FileError if elements would be outside of the item."""
        lengths_and_strides = zip(tensor.shape, strides_bytes, strict=True)
        last_byte = start_byte + sum((n - 1) * stride for n, stride in lengths_and_strides)
        if tensor.numel() and last_byte + tensor.itemsize > self.item.length:
            location = f"at byte {self.item.offset}"
            raise FileError(f"the tensor {location} has more than {self.item.length} bytes")


def _first_byte(tensor: Tensor) -> int:
    """Return the byte of its item at which a tensor on the meta device begins."""
    storage_byte = storage_offset_bytes(tensor.untyped_storage())
    return storage_byte + int(tensor.storage_offset()) * tensor.itemsize


class _Tensor(NamedTuple):
    """A tensor saved in boxes: a `Stored`."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[_SavedBox, ...]

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Read a box of the tensor into `out`, from all saved boxes that share rows with it.

        Rows 2:6 of a tensor whose rows 0:4 and 4:8 are two saved boxes: rows 2:4 of the first go to
        rows 0:2 of `out`, rows 0:2 of the second to rows 2:4.
        """
        wanted = [
            range(*rows.indices(length)) for rows, length in zip(box, self.shape, strict=True)
        ]
        for saved in self.boxes:
            common = list(map(_common_rows, wanted, saved.box))  # along each dim
            target: tuple[Any, ...] = tuple(rows.in_wanted for rows in common)
            source = tuple(rows.in_saved for rows in common)
            if all(rows.start < rows.stop for rows in target):
                # Ellipsis: a tensor without dims is read into an array, not into a number.
                saved.mapped.read(source, out[(*target, ...)])


class _SharedRows(NamedTuple):
    """The rows that two sets of rows share, as a slice of each."""

    in_wanted: slice
    in_saved: slice


def _common_rows(wanted: range, saved: slice) -> _SharedRows:
    """Return the rows in both: range(0, 10, 2), slice(3, 8) -> slices 2:4 and 1:5:2."""
    start = bisect_left(wanted, saved.start)
    stop = bisect_left(wanted, saved.stop)
    rows = wanted[start:stop]
    in_saved = slice(rows.start - saved.start, rows.stop - saved.start, rows.step)
    return _SharedRows(slice(start, stop), in_saved)


def _item(folder: Path, info: Any) -> _Item:
    """Check torch's record of where a saved item lies, and return it: file, offset and length in bytes.

    Raises FileError if its file is not in the folder itself, if the file is too short, or if an
    extension has transformed the bytes.
    """
    file = folder / info.relative_path
    stop = info.offset + info.length
    if file.parent != folder or file.is_symlink():
        raise FileError(f"'{info.relative_path}' is not a file in the folder itself")
    # A file that was cut short would map to memory that cannot be read.
    file_bytes = file.stat().st_size
    if not 0 <= info.offset <= stop <= file_bytes:
        raise FileError(f"{file.name} has {file_bytes} bytes, and not {info.offset} to {stop}")
    if getattr(info, "transform_descriptors", None):
        reason = f"{file.name} is written by {info.transform_descriptors}"
        raise FileError(reason, hint="extensions of DCP are not read")
    return _Item(file, info.offset, info.length)


def _tensor(name: str, record: Any, items: Mapping[Any, _Item]) -> _Tensor:
    """List the saved boxes of one tensor, from a checkpoint's metadata.

    Rows 4 to 7 of [8, 3] are the box that begins at (4, 0), with the sizes (4, 3).

    Args:
        name: The name of the tensor.
        record: torch's record of it.
        items: Where the bytes of each box lie, by the name of the tensor and the box's first rows.

    Raises:
        FileError: Boxes do not cover each element once, or one has fewer bytes than its elements.
    """
    dtype = dtypes.name_of(record.properties.dtype)
    shape = tuple(record.size)
    starts_and_sizes = np.array([(chunk.offsets, chunk.sizes) for chunk in record.chunks], np.int64)
    # numpy cannot infer this shape if there are no boxes or dims.
    starts_and_sizes = starts_and_sizes.reshape(len(record.chunks), 2, len(shape))
    starts = starts_and_sizes[:, 0]  # [boxes, dims]
    sizes = starts_and_sizes[:, 1]
    _check_cover(name, shape, starts, sizes)
    boxes = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        box = tuple(slice(row, row + n_rows) for row, n_rows in zip(start, size, strict=True))
        saved = _SavedBox(box, items[name, tuple(start)], dtype)
        n_elements = math.prod(size)
        if n_elements * dtypes.itemsize(dtype) > saved.item.length:
            raise FileError(
                f"{name}: {n_elements} elements of {dtype} in {saved.item.length} bytes"
            )
        boxes.append(saved)
    return _Tensor(shape, dtype, tuple(boxes))


def _check_cover(
    name: str, shape: tuple[int, ...], starts: NDArray[Any], sizes: NDArray[Any]
) -> None:
    """Raise FileError unless boxes cover an array once, without a gap or an overlap."""
    stops = starts + sizes
    is_inside = (starts >= 0).all() and (sizes >= 0).all() and (stops <= shape).all()
    has_elements = (sizes > 0).all(-1)
    # Two boxes overlap if each starts before the other's end in every dim.
    starts_before_end = (starts[has_elements][:, None] < stops[has_elements]).all(-1)
    n_overlapping = (starts_before_end & starts_before_end.T).sum()
    is_disjoint = n_overlapping <= has_elements.sum()  # each with itself alone
    n_elements = sizes.prod(-1).sum()
    if not is_inside or math.prod(shape) != n_elements or not is_disjoint:
        raise FileError(f"{name}: the parts of its {shape} elements leave a gap, or overlap")


@contextmanager
def _as_file_error(file: Path) -> Iterator[None]:
    """Raise FileError for any error of a reader that trusts the bytes of a file."""
    try:
        yield
    except XshardError as error:
        raise FileError(f"{file}: {error.reason}", hint=error.hint) from None
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    except Exception as error:
        # DCP writes the metadata when all files are complete.
        hint = (
            "torch.distributed.checkpoint.save writes .metadata last: without it nothing was saved"
        )
        raise FileError(f"{file} is not what DCP writes: {error}", hint=hint) from None
