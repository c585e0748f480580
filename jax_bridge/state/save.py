"""`save`: a tree of global arrays into safetensors files, each row by one of the processes that hold it.

Decides what the leaves of a tree are to a file: arrays as they are sharded, numbers and texts beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jax_bridge.arrays.order import order_of
from jax_bridge.arrays.place import place
from jax_bridge.calls import are_keys
from jax_bridge.mesh.context import xshard_mesh
from jax_bridge.specs import from_partition_spec
from jax_bridge.state.between import blocks_of
from jax_bridge.state.processes import together
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Mesh, Sharding, XshardError
from xshard.dtypes import carrier, name_of, recast
from xshard.errors import DtypeError, MeshError, located
from xshard.state import Names
from xshard.state.files import Saving, Source, plan_save, save_blocks
from xshard.trees import Leaf, named_once, place_of


def save(
    tree: Any,
    path: str | Path,
    rules: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    names: Names | None = None,
    shard_bytes: int | str | None = "5GiB",
) -> None:
    """A tree of global arrays -> a folder of safetensors files with an index, in which it is there at once.

    The layouts are those that the arrays have; they and the orders of rows are noted in the files. Every row
    is written once, by one process that holds it, all processes at once, and all of them call this.
    tree: as for `place`; its numbers and texts are noted in the index, and nothing else that is no array.
    rules: layouts by leaf names, under which `place` puts the arrays on `mesh` first; they name the dims.
    names: what is stored, of the leaves. shard_bytes: of a file.
    Raises, and leaves the checkpoint that was in the folder: FileError where the disk does; PlanError for
    sums, ShapeError, DtypeError, XshardError for names.

    >>> import tempfile
    >>> from xshard.state.files import open_checkpoint
    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> w = jax.device_put(jax.numpy.ones((4, 2)), NamedSharding(mesh, jax.P("tp")))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"up": {"kernel": w}}, folder)
    ...     {name: str(layout) for name, layout in open_checkpoint(folder).layouts.items()}
    {'up.kernel': 'd0/tp d1'}
    """
    path, arrays = Path(path), {}
    saving: list[Saving] = []
    if rules is not None:
        if mesh is None:
            raise MeshError("rules without a mesh", hint="save(tree, path, rules, mesh)")
        tree = place(tree, rules, mesh)

    def planned() -> str:
        leaves = array_leaves("...", tree)
        arrays.update(_arrays(leaves))
        constants = {leaf.name: leaf.x for leaf in leaves if isinstance(leaf.x, bool | int | float | str)}
        sources = {}
        for name, x in arrays.items():
            with located(place_of(name)):
                sources[name] = _source(x)
        saving.append(plan_save(sources, names, shard_bytes=shard_bytes, constants=constants))
        return saving[0].digest

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        own = name_of(arrays[name].dtype)
        return recast(_block(arrays[name], device).view(carrier(own)), own, dtype)

    if len(set(together(planned))) > 1:
        hint = "names, shapes, shardings, numbers and texts are the same in all"
        raise XshardError("processes save different trees", hint=hint)
    here = jax.process_index()
    save_blocks(saving[0], path, block_of, together, here, leads=here == 0)


def _arrays(leaves: list[Leaf]) -> dict[str, jax.Array]:
    for leaf in filter(lambda leaf: is_array(leaf.x), leaves):
        if isinstance(leaf.x, Tracer):
            raise XshardError(f"{leaf.place}: a traced array has no values", hint="save outside of jax.jit")
        if isinstance(leaf.x, jax.ShapeDtypeStruct):
            raise XshardError(f"{leaf.place}: a type has no values", hint="save arrays")
        if isinstance(leaf.x, jax.Array) and leaf.x.is_deleted():
            raise XshardError(f"{leaf.place}: the array was donated or deleted", hint="save before that")
        if are_keys(leaf.x):
            raise DtypeError(f"{leaf.place}: PRNG keys", hint="save jax.random.key_data(keys)")
    return {name: x for name, x in named_once((leaf.name, leaf.x) for leaf in leaves).items() if is_array(x)}


def _source(x: Any) -> Source:
    """How an array is held; one without a mesh is held whole, by each process."""
    known, at = order_of(x), getattr(x, "sharding", None)
    if not isinstance(at, NamedSharding):
        return Source(Sharding(Layout.parse("..."), Mesh(), x.shape), name_of(x.dtype), [0])
    layout = from_partition_spec(at.spec, x.ndim) if known is None else known.layout
    sharding = Sharding(layout, xshard_mesh(at.mesh), x.shape)
    return Source(sharding, name_of(x.dtype), [device.process_index for device in at.mesh.devices.flat])


def _block(x: Any, device: int) -> NDArray[Any]:
    """What the device has at this position in the mesh."""
    at = getattr(x, "sharding", None)
    return np.asarray(blocks_of(x)[at.mesh.devices.flat[device]] if isinstance(at, NamedSharding) else x)
