"""Checkpoints of orbax: its tree of metadata, and arrays that tensorstore reads. Nothing is unpickled."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from numpy.typing import NDArray

from jax_bridge.specs import from_partition_spec
from xshard import Mesh, Sharding, XshardError, dtypes
from xshard.errors import api_boundary
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.header import FileError
from xshard.trees import leaf_name

METADATA = "_METADATA"
_CACHE_BYTES = 2**28  # of chunks, so that one that several devices need is decompressed once


@api_boundary
def open_orbax(path: str | Path) -> Checkpoint:
    """Open a folder that orbax wrote; no array is read yet.

    Numbers are arrays without dims; texts are left out. Layouts are the saved shardings.

    Args:
        path: A folder that orbax wrote, or a step of its manager.

    Returns:
        The open checkpoint.

    Raises:
        FileError: Orbax did not write the folder, or did not finish, or it has several trees.
    """
    folder = _folder_of_tree(Path(path).absolute())
    tree = _read_metadata(folder)
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    arrays = {}
    layouts = {}
    mesh = None
    for leaf_path, leaf in tree.leaves:
        if not isinstance(leaf, ocp.metadata.ArrayMetadata):
            continue
        name = leaf_name(leaf_path)
        spec = _tensorstore_spec(folder, leaf.name, tree)
        # `open` returns at once: all arrays are opened concurrently, and a read waits for its own.
        opened = tensorstore.open(spec, context=context, open=True, read=True)
        dtype = dtypes.name_of(leaf.dtype)
        arrays[name] = _Array(tuple(leaf.shape), dtype, spec["kvstore"]["path"], opened)

        saved = _saved_sharding(leaf)
        if saved is None:
            continue
        # A checkpoint has one mesh, the first. Arrays that were saved on another have no layout.
        if mesh is None:
            mesh = saved.mesh
        if saved.layout.axes and saved.mesh == mesh:
            layouts[name] = saved.layout
    places = dict.fromkeys(arrays, folder.name)
    return Checkpoint(arrays, layouts=layouts, mesh=mesh, places=places)


class _Array(NamedTuple):
    """An array in the chunks of zarr: a `Stored`."""

    shape: tuple[int, ...]
    dtype: str
    place: str
    opened: tensorstore.Future

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Read a box of the array into memory, without a copy. Raises FileError."""
        try:
            stored = self.opened.result()
            target = tensorstore.array(out.view(stored.dtype.numpy_dtype), copy=False, write=True)
            target.write(stored[box]).result()
        except ValueError as error:
            raise FileError(f"{self.place}: {error}") from None


class _SavedTree(NamedTuple):
    """The metadata of a saved tree.

    Attributes:
        leaves: Pairs of a path of keys and the metadata of the leaf there.
        is_packed: All arrays are in one store; else each is in a folder of its own.
        is_zarr3: Arrays are in version 3 of zarr, else in version 2.
    """

    leaves: list[tuple[Any, Any]]
    is_packed: bool
    is_zarr3: bool


def _folder_of_tree(path: Path) -> Path:
    """Return the folder with orbax's metadata: this one, or the only one directly in it.

    Raises FileError if there is none, or several.
    """
    if (path / METADATA).exists():
        return path
    folders = [file.parent for file in path.glob(f"*/{METADATA}")]
    if len(folders) != 1:
        trees = ", ".join(sorted(folder.name for folder in folders)) if folders else "none"
        hint = "a step of a manager, or one tree in it: one that is being written has another name"
        raise FileError(f"{path} must have one tree of orbax, but has: {trees}", hint=hint)
    return folders[0]


def _read_metadata(folder: Path) -> _SavedTree:
    """Read the metadata of a tree. Raises FileError if orbax cannot."""
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
        leaves, _ = jax.tree_util.tree_flatten_with_path(metadata.tree)
        is_packed = ocp.type_handlers.is_ocdbt_checkpoint(epath.Path(folder))
    except Exception as error:  # any error of a reader that trusts the bytes
        raise FileError(f"{folder / METADATA} is not what orbax writes: {error}") from None
    return _SavedTree(leaves, is_packed, metadata.use_zarr3)


def _saved_sharding(leaf: Any) -> Sharding | None:
    """Return the sharding of an array as saved; None if it had no mesh, or no layout says it."""
    saved = leaf.sharding
    if not isinstance(saved, ocp.metadata.NamedShardingMetadata):
        return None
    sizes = map(int, saved.shape)
    with suppress(XshardError):
        layout = from_partition_spec(jax.P(*saved.partition_spec), len(leaf.shape))
        mesh = Mesh(dict(zip(saved.axis_names, sizes, strict=True)))
        return Sharding(layout, mesh, tuple(leaf.shape))
    return None


def _tensorstore_spec(folder: Path, name: str, tree: _SavedTree) -> dict[str, Any]:
    """Return the description by which tensorstore opens an array: driver, file, and options.

    Args:
        folder: The checkpoint.
        name: The array's name in it.
        tree: How the checkpoint is stored.

    Raises:
        FileError: The name leads out of the folder.
    """
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise FileError(f"{folder / METADATA}: '{name}' is not in the folder")
    store: dict[str, Any] = {"driver": "file", "path": f"{folder}/{name}/"}
    if tree.is_packed:
        files = {"driver": "file", "path": f"{folder}/"}
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    # Missing chunks are an error, not zeros.
    return {
        "driver": "zarr3" if tree.is_zarr3 else "zarr",
        "kvstore": store,
        "fill_missing_data_reads": False,
    }
