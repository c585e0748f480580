"""`load`: arrays from files, each device's block read where it lies, as global arrays under layouts.

Decides who reads what: a process reads what its devices need, and once what several of them have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh
from numpy.typing import NDArray

from jax_bridge.arrays.border import held
from jax_bridge.arrays.leaves import Leaf, is_array, is_layout, of_each
from jax_bridge.arrays.order import remember
from jax_bridge.arrays.partition_spec import storage_layout, to_named_sharding
from jax_bridge.arrays.reshard import reshard
from jax_bridge.mesh.machine import machine
from jax_bridge.planning import check_dtype, jax_mesh, xshard_mesh
from jax_bridge.state.between import assembled
from jax_bridge.state.processes import together
from xshard import Layout, MeshError, Profile, Rules, Sharding, load_profile
from xshard import Mesh as AxisSizes
from xshard.dtypes import carrier, n_bytes, name_of, numpy_dtype
from xshard.errors import located
from xshard.state import Names
from xshard.state.files import Checkpoint, Load, open_checkpoint, plan_load, read_block
from xshard.state.files import verify as compare_checksums
from xshard.state.files.checkpoint import in_groups
from xshard.state.files.loading import at_once, chosen, load_of, stored_as

BUCKET_BYTES = 256 * 2**20  # what is read at once
_ALIGNED = 64  # bytes: host memory from there on becomes a device's without a copy


def load(
    path: str | Path | Checkpoint,
    rules: Rules | Mapping[Any, Any] | None,
    mesh: jax.sharding.Mesh,
    *,
    names: Names | None = None,
    like: Any = None,
    strict: bool = True,
    dtype: Any = None,
    profile: str | Path | Profile = "auto",
    verify: bool = False,
) -> Any:
    """A checkpoint -> its arrays by name, or a tree of them, each under its layout.

    path: safetensors, a folder of torch's DCP or of orbax, or an open checkpoint. Every process calls this.
    rules: layouts by leaf names, as for `place`; None: whole arrays. names: what results, of what is stored.
    like: a tree of arrays, or of what `jax.eval_shape` gives, maybe of flax or equinox: the result has its
    structure and its dtypes. Of its other leaves those are as in the checkpoint that it has. strict: whether
    every name has to be in both; arrays of the tree that are not in the checkpoint stay as they are.
    dtype: of all floats, without `like`. profile: a machine; one with a disk says whether devices share what
    they read. verify: compare checksums, which reads everything once.
    Raises, on all processes, before anything is read: FileError for malformed files; XshardError for names
    without a rule and rules without a name; NotationError, MeshError, ShapeError; DtypeError for what JAX
    would narrow.

    >>> import tempfile
    >>> from jax_bridge.state.save import save
    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"up": jax.numpy.ones((4, 2))}, folder)
    ...     load(folder, {"**": "i/tp o"}, mesh)["up"].sharding.spec
    P('tp', None)
    """
    if isinstance(jax_mesh(mesh), AbstractMesh):
        raise MeshError("the mesh has no devices", hint="pass a jax.Mesh")
    rules = Rules({"**": "..."} if rules is None else rules)
    profile = load_profile(machine(profile, mesh))
    leaves = [] if like is None else of_each("...", like, is_layout, has_rule=is_array)
    loads: dict[str, Load] = {}
    opened: list[Checkpoint] = []

    def planned() -> None:
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        opened.append(checkpoint)
        if like is None:
            floats = None if dtype is None else name_of(dtype)
            found = plan_load(checkpoint, rules, xshard_mesh(mesh), names, dtype=floats, profile=profile)
        else:
            found = _loads_of(leaves, checkpoint, rules, xshard_mesh(mesh), names, strict, profile)
        loads.update((name, _as_held(name, each, mesh)) for name, each in found.items())
        if verify:
            compare_checksums(checkpoint, jax.process_index(), jax.process_count())

    together(planned)
    arrays: dict[str, jax.Array] = {}
    together(lambda: arrays.update(_read(opened[0], loads, mesh)))
    for name, each in loads.items():
        if each.is_shared:
            move = each.source.layout, each.target.layout
            arrays[name] = reshard(arrays[name], move, mesh, donate=True, profile=profile)
    if like is None:
        return arrays
    known = {**opened[0].constants, **arrays}
    return jax.tree.unflatten(jax.tree.structure(like), [known.get(leaf.name, leaf.x) for leaf in leaves])


def _loads_of(
    leaves: list[Leaf],
    checkpoint: Checkpoint,
    rules: Rules,
    axes: AxisSizes,
    names: Names | None,
    strict: bool,
    profile: Profile,
) -> dict[str, Load]:
    """The loads of the arrays of a tree, by leaf name."""
    made = stored_as(checkpoint, names)
    arrays = {leaf.name: leaf.x for leaf in leaves if is_array(leaf.x)}
    both = [name for name in chosen(made, [(name,) for name in arrays], strict) if name is not None]
    found = {}
    for name, text in rules.match(both, what="array").items():
        x = arrays[name]
        with located(name):
            target = Sharding(Layout.parse(text), axes, tuple(x.shape))
            found[name] = load_of(checkpoint, made[name]._replace(dtype=name_of(x.dtype)), target, profile)
    return found


def _as_held(name: str, each: Load, mesh: jax.sharding.Mesh) -> Load:
    """The load of an array as JAX can hold it."""
    with located(name):
        text = str(each.target.layout)
        check_dtype(numpy_dtype(each.made.dtype), text)
        target = held(each.target.layout, each.target.mesh, each.target.shape, text)
        to_named_sharding(storage_layout(target.layout), mesh)  # refused here, if at all
    shares = target == each.target and each.source.is_even
    return each._replace(source=each.source if shares else target, target=target)


def _read(
    checkpoint: Checkpoint, loads: Mapping[str, Load], mesh: jax.sharding.Mesh
) -> Iterator[tuple[str, jax.Array]]:
    """Arrays under the layouts that they are read under; devices of a process with one block share it."""
    own = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    sizes = {name: len(own) * _block_bytes(each) for name, each in loads.items()}
    for names in in_groups(sizes, BUCKET_BYTES):
        blocks = {name: list(_blocks(loads[name], own)) for name in names}
        read = iter(at_once(partial(_filled, checkpoint), itertools.chain(*blocks.values())))
        for name, some in blocks.items():
            source, dtype = loads[name].source, numpy_dtype(loads[name].made.dtype)
            found = {mesh.devices.flat[i]: x for block in some for x in [next(read)] for i in block.devices}
            placed = dict(zip(found, jax.device_put([*found.values()], [*found]), strict=True))
            sharding = to_named_sharding(storage_layout(source.layout), mesh)
            yield name, remember(assembled(placed, source.shape, dtype, sharding), source)


class _Block(NamedTuple):
    """A block of an array, the devices of this process that have it, and memory for it."""

    load: Load
    devices: list[int]
    memory: NDArray[Any]


def _blocks(load: Load, own: Sequence[int]) -> Iterator[_Block]:
    """What this process's devices have of an array: one memory, for which the system has large pages."""
    source, found = load.source, dict[Any, list[int]]()
    for i in own:
        found.setdefault(tuple(source.held(d, i) for d in range(len(source.shape))), []).append(i)
    n = _block_bytes(load)
    step = -(-n // _ALIGNED) * _ALIGNED
    memory = np.empty(len(found) * step + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    for k, devices in enumerate(found.values()):
        part = memory[start + k * step :][:n].view(carrier(load.stored))
        yield _Block(load, devices, part.reshape(source.local_shape(devices[0])))


def _block_bytes(load: Load) -> int:
    return n_bytes(load.source.max_local_shape, load.stored)


def _filled(checkpoint: Checkpoint, block: _Block) -> NDArray[Any]:
    read = read_block(checkpoint, block.load, block.devices[0], block.memory)
    return read.view(numpy_dtype(block.load.stored)).astype(numpy_dtype(block.load.made.dtype), copy=False)
