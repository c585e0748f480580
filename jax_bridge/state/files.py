"""`save` and `load`: trees of global arrays <-> files, each row written once and read by its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding
from numpy.typing import NDArray

from jax_bridge import calls, specs
from jax_bridge.arrays.reshard import place, reshard
from jax_bridge.arrays.stored import record_order, recorded_order, stored_sharding
from jax_bridge.mesh.context import jax_mesh, machine_profile, xshard_mesh
from jax_bridge.state.execute import assembled, blocks_of
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Mesh, ProfileLike, Sharding, XshardError, load_profile
from xshard.dtypes import carrier, n_bytes, name_of, numpy_dtype, recast
from xshard.errors import DtypeError, MeshError, ReplicaError, api_boundary, located
from xshard.layout.partition import ceil_div
from xshard.rules import RulesLike
from xshard.signatures import Bytes, Count
from xshard.state import Names
from xshard.state.files import BackgroundSave, Checkpoint, FileError
from xshard.state.files import verify as compare_checksums
from xshard.state.files.background import save_beside
from xshard.state.files.folder import CheckpointLike, open_on_all
from xshard.state.files.loading import (
    Load,
    LoadKeywords,
    plan_load,
    read_block,
    stored_as,
    stored_constants,
)
from xshard.state.files.runs import check_numbered
from xshard.state.files.saving import (
    SaveTask,
    Saving,
    Source,
    Writers,
    differing_replicas,
    plan_save,
    save_blocks,
)
from xshard.state.parts import TargetArray
from xshard.trees import Leaf, named_once, place_of

Wait = Callable[[], jax.Array]  # until an array is read
T = TypeVar("T")

_Constant = bool | int | float | str
_ALIGNED = 64  # bytes: host memory that begins at a multiple becomes a device's without a copy


@api_boundary
def save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    names: Names | None = None,
    shard_bytes: Bytes = "5GiB",
    keep: Count | None = None,
) -> None:
    """Save a tree of global arrays as safetensors files and an index.

        xj.save(model, "step_100")     # a folder: model-00001-of-00002.safetensors, ..., an index

    The files appear in the folder at once. Arrays are saved under the layouts that they have, which
    the files note, with the orders of rows. Every row is written once, by one process that holds
    it. Processes write at the same time, and all of them call this.

    Args:
        tree: As for `place`. Its numbers and texts are noted in the index, and other leaves are
            left out.
        path: The folder.
        rules: Layouts by leaf names, under which `place` puts the arrays on `mesh` first; they name
            the dims.
        mesh: The mesh for `rules`.
        names: Maps leaf names to stored names.
        shard_bytes: The most bytes of a file.
        keep: How many checkpoints of the run stay: folders beside this one whose names differ in
            the number at the end. None: all.

    Raises:
        FileError: The disk fails. After every error the checkpoint that was in the folder is still
            there.
        ReplicaError: An array that each process has for itself differs between them.
        PlanError: An array is under a layout with sums.
        ShapeError: An array does not fit its layout.
        DtypeError: The dtype cannot be stored.
        MeshError: There are rules without a mesh.
        XshardError: Two leaves have one name, one is complex or bytes, or processes save different
            trees.

    Examples:
        >>> import tempfile
        >>> from xshard.state.files import open_checkpoint
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> w = jax.device_put(jax.numpy.ones((4, 2)), NamedSharding(mesh, jax.P("tp")))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"up": {"kernel": w}}, folder)
        ...     {name: str(layout) for name, layout in open_checkpoint(folder).layouts.items()}
        {'up.kernel': 'd0/tp d1'}
    """
    save_blocks(_plan_on_all(tree, Path(path), rules, mesh, names, shard_bytes, keep))


@api_boundary
def async_save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    names: Names | None = None,
    shard_bytes: Bytes = "5GiB",
    keep: Count | None = None,
) -> BackgroundSave:
    """Save as `save` does, and return when the blocks are copied: threads write them meanwhile.

        saving = xj.async_save({"params": params, "opt": state, "step": 20}, "run/step_20", keep=3)
        ...                                 # steps may donate the arrays
        saving.wait()                       # before the next save; raises what went wrong

    The checkpoint appears in its folder when all processes have written, also if nobody waits.
    Nothing is sent meanwhile. Each process copies the blocks that it writes to the host.

    Args:
        tree: As for `save`.
        path: The folder.
        rules: As for `save`.
        mesh: The mesh for `rules`.
        names: Maps leaf names to stored names.
        shard_bytes: The most bytes of a file.
        keep: How many checkpoints of the run stay, as for `save`.

    Returns:
        The save, of which `wait()` ends when the checkpoint is in its place.

    Raises:
        XshardError: As `save` does, before anything is written.

    Examples:
        >>> import tempfile
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     async_save({"up": jax.numpy.ones((4, 2))}, folder).wait()
        ...     load(folder, {"**": "..."}, mesh)["up"].shape
        (4, 2)
    """
    return save_beside(_plan_on_all(tree, Path(path), rules, mesh, names, shard_bytes, keep))


class JaxLoadKeywords(LoadKeywords, total=False):
    """The keywords of `load` on which the type of its result does not depend."""

    dtype: jax.typing.DTypeLike | None


@overload
def load(
    path: CheckpointLike,
    rules: RulesLike | None,
    mesh: jax.sharding.Mesh,
    *,
    like: None = None,
    **options: Unpack[JaxLoadKeywords],
) -> dict[str, Any]: ...


@overload
def load(
    path: CheckpointLike,
    rules: RulesLike | None,
    mesh: jax.sharding.Mesh,
    *,
    like: T,
    **options: Unpack[JaxLoadKeywords],
) -> T: ...


@api_boundary
def load(  # noqa: PLR0913  one option for each decision of the user
    path: CheckpointLike,
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
    """Load a checkpoint: its arrays by name, or a tree of them, each under its layout.

        model = xj.load("step_100", {"**.kernel": "i/tp o", "**": "..."}, mesh, like=model)

    Every process calls this.

    Args:
        path: Safetensors, a folder of torch's DCP or of orbax, or an open checkpoint.
        rules: Layouts by leaf names, as for `place`. None: replicated.
        mesh: The mesh.
        names: Maps stored names to leaf names.
        like: A tree of arrays, or of types as `jax.eval_shape` gives, maybe of flax or equinox: the
            result has its structure and dtypes. Its other leaves take the checkpoint's value if
            that has one, numbers also that of an array without dims.
        strict: Every array, number and text has to be in both. Else those of the tree that are not in
            the checkpoint stay, and a warning names them.
        dtype: The dtype of all floats, without `like`.
        profile: The machine. If it has a disk, devices that need the same rows may read a part each
            and share it.
        verify: Compare checksums, which reads everything once.

    Returns:
        The arrays, numbers and texts by name; with `like` a tree of its structure.

    Raises:
        FileError: A file is malformed. All errors come on all processes, before anything is read.
        NotationError: The text of a layout is wrong.
        MeshError: The mesh is abstract, or lacks an axis.
        ShapeError: An array does not fit its layout, or the tree.
        DtypeError: JAX cannot hold the numbers.
        XshardError: A name lacks a rule, or a rule lacks names.

    Examples:
        >>> import tempfile
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"up": jax.numpy.ones((4, 2))}, folder)
        ...     load(folder, {"**": "i/tp o"}, mesh)["up"].sharding.spec
        P('tp', None)
    """
    if isinstance(jax_mesh(mesh), AbstractMesh):
        raise MeshError("an abstract mesh cannot hold arrays", hint="pass a jax.Mesh")
    profile = load_profile(machine_profile(profile, mesh))
    template = None if like is None else _Template.of(like)
    checkpoint = open_on_all(path, all_or_none)

    def plan_reads() -> _Reads:
        """Look up numbers and texts, and plan how each array is read."""
        wanted: dict[str, Any] | None = None  # all arrays of the checkpoint
        numbers: dict[str, TargetArray] = {}
        constants: dict[str, Any] = {}
        if template is not None:
            numbers = _numbers_in_arrays(checkpoint, template.constants, names)
            wanted = {**template.arrays, **numbers}
            others = {name: x for name, x in template.constants.items() if name not in numbers}
            constants = stored_constants(checkpoint, others, names, strict)
        planned = plan_load(
            checkpoint,
            rules,
            xshard_mesh(mesh),
            names,
            dtype=dtype,
            like=wanted,
            strict=strict,
            profile=profile,
        )
        constants.update(_read_numbers(checkpoint, planned, numbers))
        if verify:
            compare_checksums(checkpoint, jax.process_index(), jax.process_count())
        loads = {name: _for_jax_array(name, load, mesh) for name, load in planned.items()}
        return _Reads(loads, constants)

    reads = _result_if_all_succeed(plan_reads)
    arrays = _read_arrays(checkpoint, reads.loads, mesh)
    for name, load in reads.loads.items():
        if load.is_shared:  # its devices have read different rows
            move = (load.source.layout, load.target.layout)
            arrays[name] = reshard(arrays[name], move, mesh, donate=True, profile=profile)
    if template is None:
        return {**checkpoint.readable_constants(arrays), **arrays}
    return template.filled({**arrays, **reads.constants})


class _Template(NamedTuple):
    """The tree that a load fills, `like`: what it has, by leaf name.

    Attributes:
        structure: The structure of the tree.
        leaves: Its leaves, in order.
        arrays: Those that are arrays, or types of arrays.
        constants: Those that are numbers and texts of Python.
    """

    structure: Any
    leaves: list[Leaf]
    arrays: dict[str, Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, like: Any) -> _Template:
        """Take a tree apart."""
        tree = _with_plain_numbers(like)
        leaves = array_leaves("...", tree)  # "...": a layout for each, which nobody reads
        return cls(
            structure=jax.tree.structure(tree),
            leaves=leaves,
            arrays={leaf.name: leaf.x for leaf in leaves if is_array(leaf.x)},
            constants={leaf.name: leaf.x for leaf in leaves if isinstance(leaf.x, _Constant)},
        )

    def filled(self, loaded: Mapping[str, Any]) -> Any:
        """Return the tree with loaded values, by leaf name; leaves without one stay."""
        new_leaves = [loaded.get(leaf.name, leaf.x) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, new_leaves)


def _numbers_in_arrays(
    checkpoint: Checkpoint, tree_constants: Mapping[str, Any], names: Names | None
) -> dict[str, TargetArray]:
    """Find the numbers of a tree that are stored as arrays without dims, as orbax stores {"step": 4}."""
    arrays = stored_as(checkpoint, names)
    numbers = {}
    for name, x in tree_constants.items():
        if name in arrays and arrays[name].shape == () and not isinstance(x, str):
            numbers[name] = arrays[name]
    return numbers


def _read_numbers(
    checkpoint: Checkpoint, planned: dict[str, Load], names: Iterable[str]
) -> dict[str, Any]:
    """Read arrays without dims as numbers of Python, and take them from the arrays to be loaded."""
    numbers = {}
    for name in names:
        load = planned.pop(name)
        words = read_block(checkpoint, load, 0)
        numbers[name] = words.view(numpy_dtype(load.stored)).item()
    return numbers


# ---- work that succeeds in all processes or in none


def all_or_none(function: Callable[[], Any]) -> list[Any]:
    """Call a function in every process; if it fails in one, raise in all.

    Args:
        function: Returns something that JSON can hold.

    Returns:
        The results of all processes, in their order.

    Raises:
        Exception: In a process where the function failed, its own error.
        FileError: In all other processes.
    """
    own_value = None
    error = None
    try:
        own_value = function()
    except Exception as raised:  # of any kind: the others wait for this process in the gather below
        error = raised
    outcomes = _gather_json([own_value, None if error is None else str(error)])
    if error is not None:
        raise error
    for process, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise FileError(f"process {process} failed: {reason}")
    return [value for value, _ in outcomes]


def _result_if_all_succeed(function: Callable[[], T]) -> T:
    """Call a function in every process, and return this one's result if all have succeeded."""
    results: list[T] = []

    def keep_result() -> None:
        results.append(function())

    all_or_none(keep_result)
    return results[0]


def _gather_json(value: Any) -> list[Any]:
    """Gather a value of JSON from every process: process 0's, process 1's, ..."""
    if jax.process_count() == 1:
        return [value]
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # Texts differ in length, and the collective needs equal ones: lengths first, then padded texts.
    lengths = multihost_utils.process_allgather(np.array(len(encoded)))
    n_padding = int(lengths.max()) - len(encoded)
    all_padded = multihost_utils.process_allgather(np.pad(encoded, (0, n_padding)))
    all_encoded = [padded[:length] for padded, length in zip(all_padded, lengths, strict=True)]
    return [json.loads(encoded_value.tobytes()) for encoded_value in all_encoded]


# ---- save


class _SavePlan(NamedTuple):
    """A save, and the arrays by leaf name."""

    saving: Saving
    arrays: dict[str, Any]

    def block_of(self, name: str, device: int, dtype: str) -> NDArray[Any]:
        """Return an array's block on one device, as numpy words that can be written to a file.

        Args:
            name: The leaf's name.
            device: The position in the array's mesh; an array without a mesh is taken whole.
            dtype: The dtype to store, which may differ from the array's.
        """
        x = self.arrays[name]
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            x = blocks_of(x)[sharding.mesh.devices.flat[device]]
        stored = name_of(x.dtype)
        return recast(np.asarray(x).view(carrier(stored)), stored, dtype)


def _plan_on_all(
    tree: Any,
    path: Path,
    rules: RulesLike | None,
    mesh: jax.sharding.Mesh | None,
    names: Names | None,
    shard_bytes: Bytes,
    keep: int | None,
) -> SaveTask:
    """Plan a save in all processes, and compare what each has for itself. Raises as `save` does."""
    tree = _with_plain_numbers(tree)
    if rules is not None:
        if mesh is None:
            raise MeshError("rules without a mesh", hint="save(tree, path, rules, mesh)")
        tree = place(tree, rules, mesh)
    plans: list[_SavePlan] = []

    def plan_and_digest() -> str:
        check_numbered(path, keep)
        plan = _plan_save(tree, names, shard_bytes)
        plans.append(plan)
        return plan.saving.digest

    digests = all_or_none(plan_and_digest)
    if len(set(digests)) > 1:
        hint = "names, shapes, shardings, numbers and texts are the same in all"
        raise XshardError("processes save different trees", hint=hint)
    plan = plans[0]
    writers = Writers(range(jax.process_count()), jax.process_index())
    task = SaveTask(
        plan=plan.saving,
        path=path,
        block_of=plan.block_of,
        all_or_none=all_or_none,
        writers=writers,
        keep=keep,
    )
    for name in differing_replicas(task):
        hint = "one value is saved for all: make a global array of it, sharded over processes"
        raise ReplicaError(f"{place_of(name)}: its blocks differ between processes", hint=hint)
    return task


def _plan_save(tree: Any, names: Names | None, shard_bytes: Bytes) -> _SavePlan:
    """Plan the save of a tree: its arrays go to files, its numbers and texts into the index.

    Args:
        tree: The tree; leaves of other kinds, as functions, are left out.
        names: Maps leaf names to stored names; None to keep them.
        shard_bytes: The most bytes of a file.

    Raises:
        XshardError: A leaf is a number or text that the index cannot note.
    """
    leaves = array_leaves("...", tree)  # for their names: their layouts are on the arrays
    arrays = {}
    sources = {}
    constants = {}
    for name, x in named_once((leaf.name, leaf.x) for leaf in leaves).items():
        if is_array(x):
            arrays[name] = x
            with located(place_of(name)):
                _check_can_save(x)
                sources[name] = _source(x)
        elif isinstance(x, _Constant):
            constants[name] = x
        elif isinstance(x, complex | bytes):
            reason = f"{place_of(name)}: {type(x).__name__} cannot be saved"
            raise XshardError(reason, hint="save an array: np.asarray, or np.frombuffer of bytes")
    saving = plan_save(sources, names, shard_bytes=shard_bytes, constants=constants)
    return _SavePlan(saving, arrays)


def _with_plain_numbers(tree: Any) -> Any:
    """Put numbers and texts of Python in the place of numpy's that are both: `np.float64`, `np.str_`.

    They are a float and a text to Python, and look like arrays: saved as one, loaded as the other.
    """
    return jax.tree.map(lambda x: x.item() if isinstance(x, np.float64 | np.str_) else x, tree)


def _check_can_save(x: Any) -> None:
    """Raise XshardError for an array without numbers, and DtypeError for PRNG keys."""
    if isinstance(x, Tracer):
        raise XshardError("a traced array cannot be saved", hint="save outside of jax.jit")
    if isinstance(x, jax.ShapeDtypeStruct):
        raise XshardError("a type cannot be saved", hint="save arrays")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise XshardError("the array was donated or deleted", hint="save before that")
    if calls.are_keys(x):
        raise DtypeError("PRNG keys", hint="save jax.random.key_data(keys)")


def _source(x: Any) -> Source:
    """Describe an array for the planner: its layout on its mesh, and the process of each device.

    An array without a mesh is taken to be equal on all processes: one of them writes it.
    """
    dtype = name_of(x.dtype)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        n_processes = jax.process_count()
        replicated = Sharding(Layout.parse("..."), Mesh(process=n_processes), x.shape)
        return Source(replicated, dtype, range(n_processes))
    recorded = recorded_order(x)
    if recorded is None:
        layout = specs.from_partition_spec(sharding.spec, x.ndim)
    else:
        layout = recorded.layout  # with the order of rows, which a spec cannot tell
    processes = [device.process_index for device in sharding.mesh.devices.flat]
    return Source(Sharding(layout, xshard_mesh(sharding.mesh), x.shape), dtype, processes)


# ---- load


class _Reads(NamedTuple):
    """What is read from a checkpoint, by leaf name: arrays, and for a tree numbers and texts."""

    loads: dict[str, Load]
    constants: Mapping[str, Any]


def _for_jax_array(name: str, load: Load, mesh: jax.sharding.Mesh) -> Load:
    """Return the load of an array with a target that a `jax.Array` can have.

    A `jax.Array` has no overlaps and no uneven blocks: a target under `h/sp:halo(1,1,zero)` is
    replaced by one under `h/sp`, and the array is read under that layout.

    A load reads blocks under the sharding `source` and brings them to `target`. Where these differ,
    devices with equal blocks read some of the rows each, and send them to each other. That stays if
    JAX can hold both.

    Args:
        name: The array's name, for errors.
        load: The load as planned for the user's layout.
        mesh: JAX's mesh.
    """
    target = load.target
    with located(name):
        text = str(target.layout)
        calls.check_dtype(numpy_dtype(load.array.dtype), text)
        jax_target = stored_sharding(target.layout, target.mesh, target.shape, text)
        specs.storage_sharding(jax_target.layout, mesh)  # raises before anything is read
    if jax_target == target and load.source.is_even:
        return load
    # One sharding for both: nothing is sent after the blocks are read.
    return load._replace(source=jax_target, target=jax_target)


def _read_arrays(
    checkpoint: Checkpoint, loads: Mapping[str, Load], mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
    """Read all arrays in all processes, each under the sharding `source` of its load."""
    # Threads: disks, and copies in numpy, release the interpreter.
    with ThreadPoolExecutor() as threads:
        begin = partial(_begin_read, checkpoint, mesh, threads)
        return _result_if_all_succeed(lambda: _read_ahead(begin, loads))


def _read_ahead(begin: Callable[[Load], Wait], loads: Mapping[str, Load]) -> dict[str, jax.Array]:
    """Read all arrays; while one is copied to its devices, the next is read from the disk.

    Args:
        begin: Begins to read an array, and returns a function that waits for it.
        loads: The arrays by name.
    """
    arrays = {}
    begun: dict[str, Wait] = {}
    for name, load in loads.items():
        begun[name] = begin(load)
        if len(begun) == 2:
            # Only one ahead: the host never holds more than two arrays.
            first_name, wait = next(iter(begun.items()))
            del begun[first_name]
            arrays[first_name] = wait()
    for name, wait in begun.items():
        arrays[name] = wait()
    return arrays


def _begin_read(
    checkpoint: Checkpoint, mesh: jax.sharding.Mesh, threads: Executor, load: Load
) -> Wait:
    """Begin to read an array in threads, and return a function that waits for it.

    Each block is read once in this process, also if several of its devices hold copies of it.

    Args:
        checkpoint: The open checkpoint.
        mesh: JAX's mesh.
        threads: Where blocks are read.
        load: The array: its name, the sharding under which it is read (`source`), its dtype in the
            checkpoint (`stored`) and the one that it is to have.
    """
    source = load.source
    dtype = numpy_dtype(load.array.dtype)
    sharding = specs.storage_sharding(source.layout, mesh)
    # For each block that this process reads: the devices that hold it, as places in the mesh, and
    # memory. [[0, 2], [1, 3]] if devices 0 and 2 hold copies of one block, 1 and 3 of another.
    holders = _holders_of_blocks(source, mesh, sharding)
    memories = _aligned_memory(len(holders), n_bytes(source.max_local_shape, load.stored))

    def read(device: int, memory: NDArray[np.uint8]) -> NDArray[Any]:
        block = memory.view(carrier(load.stored)).reshape(source.local_shape(device))
        # Numbers of a dtype that numpy lacks, as bfloat16, are read as integers of the same bytes.
        words = read_block(checkpoint, load, device, block)
        return words.view(numpy_dtype(load.stored)).astype(dtype, copy=False)

    first_holders = [devices[0] for devices in holders]
    blocks = threads.map(read, first_holders, memories)

    def wait() -> jax.Array:
        """Put the blocks on devices: in the caller's thread, which has JAX's settings."""
        block_of = {}
        for devices, block in zip(holders, blocks, strict=True):
            for i in devices:
                block_of[mesh.devices.flat[i]] = block
        placed = jax.device_put(list(block_of.values()), list(block_of))
        array_of = dict(zip(block_of, placed, strict=True))
        return record_order(assembled(array_of, source.shape, dtype, sharding), source)

    return wait


def _holders_of_blocks(
    source: Sharding, mesh: jax.sharding.Mesh, sharding: NamedSharding
) -> list[list[int]]:
    """Group this process's devices, as positions in the mesh, by the block that they hold."""
    holders: dict[Any, list[int]] = {}
    for i, device in enumerate(mesh.devices.flat):
        if device in sharding.addressable_devices:
            rows = tuple(source.held(d, i) for d in range(len(source.shape)))
            holders.setdefault(rows, []).append(i)
    return list(holders.values())


def _aligned_memory(n_blocks: int, block_bytes: int) -> list[NDArray[np.uint8]]:
    """Allocate memory for blocks, of which each begins at a multiple of `_ALIGNED` bytes."""
    # One memory for all: the system has large pages for it, but not for a single block.
    stride = ceil_div(block_bytes, _ALIGNED) * _ALIGNED
    memory = np.empty(n_blocks * stride + _ALIGNED, np.uint8)
    first_offset = -memory.ctypes.data % _ALIGNED
    offsets = [first_offset + i * stride for i in range(n_blocks)]
    return [memory[offset : offset + block_bytes] for offset in offsets]
