"""`save` and `load`: trees of global arrays <-> files, each row written once and read by its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding
from numpy.typing import NDArray

from jax_bridge import calls, specs
from jax_bridge.arrays.reshard import place, reshard
from jax_bridge.arrays.stored import at_rest, order_of, remember
from jax_bridge.mesh.context import jax_mesh, machine, xshard_mesh
from jax_bridge.state.execute import assembled, blocks_of
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Mesh, ProfileLike, Sharding, XshardError, load_profile
from xshard.dtypes import carrier, n_bytes, name_of, numpy_dtype, recast
from xshard.errors import DtypeError, MeshError, located
from xshard.rules import RulesLike
from xshard.state import Names
from xshard.state.files import Checkpoint, FileError, open_checkpoint
from xshard.state.files import verify as compare_checksums
from xshard.state.files.loading import Load, plan_load, read_block
from xshard.state.files.saving import Saving, Source, plan_save, save_blocks
from xshard.trees import Leaf, named_once, place_of

Read = Callable[[], jax.Array]

_ALIGNED = 64  # bytes: host memory that begins at a multiple becomes a device's without a copy


def save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    names: Names | None = None,
    shard_bytes: int | str | None = "5GiB",
) -> None:
    """Save a tree of global arrays as safetensors files and an index, which appear in the folder at once.

    Arrays are saved under the layouts that they have, which the files note, with the orders of rows. Every
    row is written once, by one process that holds it; processes write at the same time, and all of them call
    this. tree: as for `place`; its numbers and texts are noted in the index, and other leaves are left out.
    rules: layouts by leaf names, under which `place` puts the arrays on `mesh` first; they name the dims.
    names: maps leaf names to stored names. shard_bytes: the most bytes of a file. Raises, and leaves the
    checkpoint that was in the folder: FileError if the disk fails; PlanError for sums, ShapeError,
    DtypeError, XshardError for names.

    >>> import tempfile
    >>> from xshard.state.files import open_checkpoint
    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> w = jax.device_put(jax.numpy.ones((4, 2)), NamedSharding(mesh, jax.P("tp")))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"up": {"kernel": w}}, folder)
    ...     {name: str(layout) for name, layout in open_checkpoint(folder).layouts.items()}
    {'up.kernel': 'd0/tp d1'}
    """
    path = Path(path)
    arrays = {}
    saving: list[Saving] = []
    if rules is not None:
        if mesh is None:
            raise MeshError("rules without a mesh", hint="save(tree, path, rules, mesh)")
        tree = place(tree, rules, mesh)

    def planned() -> str:
        leaves = array_leaves("...", tree)
        arrays.update(_arrays(leaves))
        constants = {
            leaf.name: leaf.x for leaf in leaves if isinstance(leaf.x, bool | int | float | str)
        }
        sources = {}
        for name, x in arrays.items():
            with located(place_of(name)):
                sources[name] = _source(x)
        saving.append(plan_save(sources, names, shard_bytes=shard_bytes, constants=constants))
        return saving[0].digest

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        x: Any = arrays[name]
        if isinstance(sharding := getattr(x, "sharding", None), NamedSharding):
            x = blocks_of(x)[sharding.mesh.devices.flat[device]]
        stored = name_of(x.dtype)
        return recast(np.asarray(x).view(carrier(stored)), stored, dtype)

    if len(set(all_or_none(planned))) > 1:
        hint = "names, shapes, shardings, numbers and texts are the same in all"
        raise XshardError("processes save different trees", hint=hint)
    process = jax.process_index()
    save_blocks(saving[0], path, block_of, all_or_none, process, leads=process == 0)


def load(
    path: str | Path | Checkpoint,
    rules: RulesLike | None,
    mesh: jax.sharding.Mesh,
    *,
    names: Names | None = None,
    like: Any = None,
    strict: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    profile: ProfileLike = "auto",
    verify: bool = False,
) -> Any:
    """Load a checkpoint -> its arrays by name, or a tree of them, each under its layout.

    path: safetensors, a folder of torch's DCP or of orbax, or an open checkpoint. Every process calls this.
    rules: layouts by leaf names, as for `place`; None: replicated. names: maps stored names to leaf names.
    like: a tree of arrays, or of types as `jax.eval_shape` gives, maybe of flax or equinox: the result has
    its structure and dtypes. Its other leaves take the checkpoint's value if that has one. strict: every name
    has to be in both; else arrays of the tree that are not in the checkpoint stay. dtype: for all floats,
    without `like`. profile: the machine; if it has a disk, devices that need the same rows may read a part
    each and share it. verify: compare checksums, which reads everything once.
    Raises, on all processes, before anything is read: FileError for malformed files; XshardError for names
    without a rule and rules without a name; NotationError, MeshError, ShapeError, DtypeError.

    >>> import tempfile
    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"up": jax.numpy.ones((4, 2))}, folder)
    ...     load(folder, {"**": "i/tp o"}, mesh)["up"].sharding.spec
    P('tp', None)
    """
    if isinstance(jax_mesh(mesh), AbstractMesh):
        raise MeshError("an abstract mesh cannot hold arrays", hint="pass a jax.Mesh")
    profile = load_profile(machine(profile, mesh))
    leaves = [] if like is None else array_leaves("...", like)
    loads: dict[str, Load] = {}
    opened: list[Checkpoint] = []
    constants: dict[str, Any] = {}

    def planned() -> None:
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        opened.append(checkpoint)
        types = None if like is None else {leaf.name: leaf.x for leaf in leaves if is_array(leaf.x)}
        options: Any = {"dtype": dtype, "like": types, "strict": strict, "profile": profile}
        plans = plan_load(checkpoint, rules, xshard_mesh(mesh), names, **options)
        loads.update((name, _held_by_jax(name, plan, mesh)) for name, plan in plans.items())
        others = (leaf for leaf in leaves if not is_array(leaf.x))
        constants.update((leaf.name, checkpoint.constant(leaf.name, leaf.x)) for leaf in others)
        if verify:
            compare_checksums(checkpoint, jax.process_index(), jax.process_count())

    all_or_none(planned)
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor() as threads:  # disks, and copies in numpy, release the interpreter
        begin = partial(_begin_read, opened[0], mesh, threads)
        all_or_none(lambda: arrays.update(_read_ahead(begin, loads)))
    for name, each in loads.items():
        if each.is_shared:
            move = each.source.layout, each.target.layout
            arrays[name] = reshard(arrays[name], move, mesh, donate=True, profile=profile)
    if like is None:
        return arrays
    values = {**constants, **arrays}
    return jax.tree.unflatten(
        jax.tree.structure(like), [values.get(leaf.name, leaf.x) for leaf in leaves]
    )


def all_or_none(work: Callable[[], Any]) -> list[Any]:
    """Do the work in every process -> all results, through JSON. If one fails, the others raise FileError."""
    value = None
    error = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    results = _gathered([value, None if error is None else str(error)])
    if error is not None:
        raise error
    for process, (_, reason) in enumerate(results):
        if reason is not None:
            raise FileError(f"process {process} failed: {reason}")
    return [value for value, _ in results]


def _gathered(value: Any) -> list[Any]:
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(text)))
    padded = multihost_utils.process_allgather(np.pad(text, (0, int(lengths.max()) - len(text))))
    return [json.loads(row[:n].tobytes()) for row, n in zip(padded, lengths, strict=True)]


def _arrays(leaves: list[Leaf]) -> dict[str, jax.Array]:
    for leaf in filter(lambda leaf: is_array(leaf.x), leaves):
        if isinstance(leaf.x, Tracer):
            raise XshardError(
                f"{leaf.place}: a traced array cannot be saved", hint="save outside of jax.jit"
            )
        if isinstance(leaf.x, jax.ShapeDtypeStruct):
            raise XshardError(f"{leaf.place}: a type cannot be saved", hint="save arrays")
        if isinstance(leaf.x, jax.Array) and leaf.x.is_deleted():
            raise XshardError(
                f"{leaf.place}: the array was donated or deleted", hint="save before that"
            )
        if calls.are_keys(leaf.x):
            raise DtypeError(f"{leaf.place}: PRNG keys", hint="save jax.random.key_data(keys)")
    return {
        name: x
        for name, x in named_once((leaf.name, leaf.x) for leaf in leaves).items()
        if is_array(x)
    }


def _source(x: Any) -> Source:
    """The sharding of an array; an array without a mesh is replicated, and the first process writes it."""
    order = order_of(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return Source(Sharding(Layout.parse("..."), Mesh(), x.shape), name_of(x.dtype), [0])
    layout = specs.from_partition_spec(sharding.spec, x.ndim) if order is None else order.layout
    processes = [device.process_index for device in sharding.mesh.devices.flat]
    return Source(
        Sharding(layout, xshard_mesh(sharding.mesh), x.shape), name_of(x.dtype), processes
    )


def _held_by_jax(name: str, load: Load, mesh: jax.sharding.Mesh) -> Load:
    """The load of an array under the layout in which JAX can hold it."""
    with located(name):
        text = str(load.target.layout)
        calls.check_dtype(numpy_dtype(load.array.dtype), text)
        target = at_rest(load.target.layout, load.target.mesh, load.target.shape, text)
        specs.storage_sharding(target.layout, mesh)  # raises before anything is read
    shares = target == load.target and load.source.is_even
    return load._replace(source=load.source if shares else target, target=target)


def _read_ahead(
    begin: Callable[[Load], Read], loads: Mapping[str, Load]
) -> Iterator[tuple[str, jax.Array]]:
    """Arrays by name; while one is made, the next is being read."""
    reads = ((name, begin(load)) for name, load in loads.items())
    last = next(reads, None)
    while last is not None:
        (name, wait), last = last, next(reads, None)
        yield name, wait()


def _begin_read(
    checkpoint: Checkpoint, mesh: jax.sharding.Mesh, threads: Executor, load: Load
) -> Read:
    """Begin to read an array -> a function that waits for it. Devices with equal blocks share one."""
    source = load.source
    stored = carrier(load.stored)
    dtype = numpy_dtype(load.array.dtype)
    sharding = specs.storage_sharding(source.layout, mesh)
    holders: dict[Any, list[int]] = {}
    for i, device in enumerate(mesh.devices.flat):
        if device in sharding.addressable_devices:
            holders.setdefault(
                tuple(source.held(d, i) for d in range(len(source.shape))), []
            ).append(i)
    # One memory for all blocks, because the system has large pages for it but not for a single block.
    n = n_bytes(source.max_local_shape, load.stored)
    step = -(-n // _ALIGNED) * _ALIGNED
    memory = np.empty(len(holders) * step + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED

    def read(i: int, offset: int) -> NDArray[Any]:
        block = memory[offset : offset + n].view(stored).reshape(source.local_shape(i))
        return (
            read_block(checkpoint, load, i, block)
            .view(numpy_dtype(load.stored))
            .astype(dtype, copy=False)
        )

    firsts = (devices[0] for devices in holders.values())
    starts = range(start, len(memory), step or 1)
    blocks = zip(holders.values(), threads.map(read, firsts, starts), strict=True)

    def wait() -> jax.Array:  # in the caller's thread, which has JAX's settings
        by_device = {mesh.devices.flat[i]: block for devices, block in blocks for i in devices}
        placed = dict(
            zip(by_device, jax.device_put([*by_device.values()], [*by_device]), strict=True)
        )
        return remember(assembled(placed, source.shape, dtype, sharding), source)

    return wait
