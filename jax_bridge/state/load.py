"""`load`: arrays from files, each device's block read where it lies, as global arrays under layouts.

Decides who reads what: a process reads what its devices need, and once what several of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from numpy.typing import NDArray

from jax_bridge.arrays.order import remember
from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.stored import at_rest
from jax_bridge.calls import check_dtype
from jax_bridge.mesh.context import jax_mesh, xshard_mesh
from jax_bridge.mesh.machine import machine
from jax_bridge.specs import storage_sharding
from jax_bridge.state.between import assembled
from jax_bridge.state.processes import together
from jax_bridge.trees import array_leaves, is_array
from xshard import Profile, Rules, load_profile
from xshard.dtypes import carrier, n_bytes, numpy_dtype
from xshard.errors import MeshError, located
from xshard.state import Names
from xshard.state.files import Checkpoint, Load, open_checkpoint, plan_load, read_block
from xshard.state.files import verify as compare_checksums

Ended = Callable[[], jax.Array]
Named = tuple[str, jax.Array]

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
    leaves = [] if like is None else array_leaves("...", like)
    loads: dict[str, Load] = {}
    opened: list[Checkpoint] = []
    constants: dict[str, Any] = {}

    def planned() -> None:
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        opened.append(checkpoint)
        tree = None if like is None else {leaf.name: leaf.x for leaf in leaves if is_array(leaf.x)}
        options: Any = {"dtype": dtype, "like": tree, "strict": strict, "profile": profile}
        found = plan_load(checkpoint, rules, xshard_mesh(mesh), names, **options)
        loads.update((name, _as_held(name, each, mesh)) for name, each in found.items())
        others = (leaf for leaf in leaves if not is_array(leaf.x))
        constants.update((leaf.name, checkpoint.constant(leaf.name, leaf.x)) for leaf in others)
        if verify:
            compare_checksums(checkpoint, jax.process_index(), jax.process_count())

    together(planned)
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor() as threads:  # disks, and copies in numpy, leave the interpreter to others
        begun = partial(_begun, opened[0], mesh, threads)
        together(lambda: arrays.update(_each_begun_early(begun, loads)))
    for name, each in loads.items():
        if each.is_shared:
            move = each.source.layout, each.target.layout
            arrays[name] = reshard(arrays[name], move, mesh, donate=True, profile=profile)
    if like is None:
        return arrays
    known = {**constants, **arrays}
    return jax.tree.unflatten(jax.tree.structure(like), [known.get(leaf.name, leaf.x) for leaf in leaves])


def _as_held(name: str, each: Load, mesh: jax.sharding.Mesh) -> Load:
    """The load of an array as JAX can hold it."""
    with located(name):
        text = str(each.target.layout)
        check_dtype(numpy_dtype(each.made.dtype), text)
        target = at_rest(each.target.layout, each.target.mesh, each.target.shape, text)
        storage_sharding(target.layout, mesh)  # refused here, if at all
    shares = target == each.target and each.source.is_even
    return each._replace(source=each.source if shares else target, target=target)


def _each_begun_early(begun: Callable[[Load], Ended], loads: Mapping[str, Load]) -> Iterator[Named]:
    """Arrays by name, of which the next is being read already."""
    last: tuple[str, Ended] | None = None
    for name, each in loads.items():
        before, last = last, (name, begun(each))
        if before is not None:
            yield before[0], before[1]()
    if last is not None:
        yield last[0], last[1]()


def _begun(checkpoint: Checkpoint, mesh: jax.sharding.Mesh, threads: Executor, each: Load) -> Ended:
    """Begin to read an array under the layout that it is read under -> what waits for it.

    Devices of a process with one block share it.
    """
    source, stored, dtype = each.source, carrier(each.stored), numpy_dtype(each.made.dtype)
    sharding = storage_sharding(source.layout, mesh)
    holders: dict[Any, list[int]] = {}
    for i, device in enumerate(mesh.devices.flat):
        if device in sharding.addressable_devices:
            holders.setdefault(tuple(source.held(d, i) for d in range(len(source.shape))), []).append(i)
    # One memory for all blocks: the system has large pages for it where it has none for a block.
    n = n_bytes(source.max_local_shape, each.stored)
    step = -(-n // _ALIGNED) * _ALIGNED
    memory = np.empty(len(holders) * step + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED

    def read(i: int, at: int) -> NDArray[Any]:
        block = memory[at : at + n].view(stored).reshape(source.local_shape(i))
        return read_block(checkpoint, each, i, block).view(numpy_dtype(each.stored)).astype(dtype, copy=False)

    first, starts = (own[0] for own in holders.values()), range(start, len(memory), step or 1)
    blocks = zip(holders.values(), threads.map(read, first, starts), strict=True)

    def end() -> jax.Array:  # JAX's settings are those of the thread that calls
        found = {mesh.devices.flat[i]: block for own, block in blocks for i in own}
        placed = dict(zip(found, jax.device_put([*found.values()], [*found]), strict=True))
        return remember(assembled(placed, source.shape, dtype, sharding), source)

    return end
