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
from xshard import Mesh, XshardError, dtypes
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.header import FileError
from xshard.trees import leaf_name

METADATA = "_METADATA"
_CACHE_BYTES = 2**28  # of chunks, so that one that several devices need is decompressed once


def open_orbax(path: str | Path) -> Checkpoint:
    """Open a folder that orbax wrote, or a step of its manager; no array is read yet. Numbers are arrays
    without dims; texts are left out. Layouts are the saved shardings. Raises FileError for a folder that
    orbax did not write, or did not finish, or that has several trees.
    """
    folder = _folder(Path(path).absolute())
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
        leaves = jax.tree_util.tree_flatten_with_path(metadata.tree)[0]
        packed = ocp.type_handlers.is_ocdbt_checkpoint(epath.Path(folder))
    except Exception as error:  # any error of a reader that trusts the bytes
        raise FileError(f"{folder / METADATA} is not what orbax writes: {error}") from None
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    arrays = {}
    layouts = {}
    meshes = {}
    for path_to, leaf in leaves:
        if not isinstance(leaf, ocp.metadata.ArrayMetadata):
            continue
        name = leaf_name(path_to)
        sharding = leaf.sharding
        spec = _spec(folder, leaf.name, packed, metadata.use_zarr3)
        opened = tensorstore.open(spec, context=context, open=True, read=True)  # all at once
        arrays[name] = _Array(
            tuple(leaf.shape), dtypes.name_of(leaf.dtype), spec["kvstore"]["path"], opened
        )
        if isinstance(sharding, ocp.metadata.NamedShardingMetadata):
            with suppress(XshardError):  # a sharding without a layout
                layouts[name] = from_partition_spec(
                    jax.P(*sharding.partition_spec), len(leaf.shape)
                )
                meshes[name] = Mesh(
                    dict(zip(sharding.axis_names, map(int, sharding.shape), strict=True))
                )
    one = next(iter(meshes.values()), None)
    layouts = {
        name: layout for name, layout in layouts.items() if layout.axes and meshes.get(name) == one
    }
    return Checkpoint(arrays, layouts=layouts, mesh=one, places=dict.fromkeys(arrays, folder.name))


class _Array(NamedTuple):
    """An array in the chunks of zarr: a `Stored`."""

    shape: tuple[int, ...]
    dtype: str
    place: str
    opened: tensorstore.Future

    def read(self, box: Box, out: NDArray[Any]) -> None:
        try:
            stored = self.opened.result()
            target = tensorstore.array(out.view(stored.dtype.numpy_dtype), copy=False, write=True)
            target.write(stored[box]).result()
        except ValueError as error:
            raise FileError(f"{self.place}: {error}") from None


def _spec(folder: Path, name: str, packed: bool, zarr3: bool) -> dict[str, Any]:
    """The spec of an array for tensorstore. packed: all arrays are in one store, else each in a folder."""
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise FileError(f"{folder / METADATA}: '{name}' is not in the folder")
    store: dict[str, Any] = {"driver": "file", "path": f"{folder}/{'' if packed else f'{name}/'}"}
    if packed:
        store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
    # Missing chunks are an error, not zeros.
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": store,
        "fill_missing_data_reads": False,
    }


def _folder(path: Path) -> Path:
    """The folder of a tree: this one, or the one in it."""
    folders = (
        [path]
        if (path / METADATA).exists()
        else [file.parent for file in path.glob(f"*/{METADATA}")]
    )
    if len(folders) != 1:
        trees = ", ".join(sorted(folder.name for folder in folders)) or "none"
        hint = "a step of a manager, or one tree in it: one that is being written has another name"
        raise FileError(f"{path} must have one tree of orbax, but has: {trees}", hint=hint)
    return folders[0]
