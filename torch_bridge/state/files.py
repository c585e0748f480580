"""`save` and `load`: trees of local blocks to and from files.

All processes succeed or fail together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack, overload

import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike
from torch_bridge.models.names import is_part
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.redistribution import redistribute
from torch_bridge.state import leaves
from torch_bridge.state.leaves import LocalArray, axes_of, processes_of, rank
from torch_bridge.state.members import Members, OptimizerState
from torch_bridge.versions.pytree import tree_map_with_path
from xshard import Profile, ProfileLike, XshardError, dtypes, errors, load_profile
from xshard.cost.machine import node_processes
from xshard.errors import ReplicaError, api_boundary
from xshard.rules import RulesLike
from xshard.signatures import Bytes, Count
from xshard.state import Names
from xshard.state.files import BackgroundSave, Checkpoint
from xshard.state.files import verify as compare_checksums
from xshard.state.files.background import save_beside
from xshard.state.files.folder import CheckpointLike, open_on_all
from xshard.state.files.loading import (
    Load,
    LoadKeywords,
    in_both,
    load_of,
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
from xshard.trees import group_by_bytes, joined, leaf_name, place_of

T = TypeVar("T")

BUCKET_BYTES = 256 * 2**20  # of blocks that are read by one process and sent to others


@api_boundary
def save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    shard_bytes: Bytes = "5GiB",
    shapes: Mapping[str, Sequence[int]] | None = None,
    keep: Count | None = None,
) -> None:
    """Save local blocks as safetensors files, in a folder that all processes can reach.

        xt.save({"w": block}, "checkpoint", {"w": "o/tp i"}, mesh)     # blocks of [o/tp, i]
        xt.save({"model": model, "optimizer": optimizer, "step": 20}, "run/step_20", keep=3)

    Every element is written once, by one of the processes that have it; processes write at the same
    time. The folder keeps the checkpoint that it had until the new one is complete. All processes
    of the mesh call it.

    Args:
        tree: A model, a state dict, or any tree of tensors, numbers, texts, models, optimizers
            beside their models, and others with a `state_dict()`. Parallel models, their
            optimizers and DTensors bring their layouts.
        path: The folder.
        rules: Layouts of the other tensors by name. None: they are replicated.
        mesh: The processes. None: the world.
        names: Maps this program's names to stored names.
        shard_bytes: The most bytes of a file.
        shapes: Global shapes by name, if blocks differ in size.
        keep: How many checkpoints of the run stay: folders beside this one whose names differ in
            the number at the end. None: all.

    Raises:
        XshardError: A name has no rule; on all processes, before anything is written.
        ReplicaError: Blocks differ between processes that have one as their layouts say; likewise.
        PlanError: A layout has sums or halos; likewise.
        DtypeError: A dtype cannot be stored; likewise.
        FileError: The disk is full; the old checkpoint is as it was.

    Examples:
        >>> import tempfile, torch, torch.distributed as dist, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def there_and_back(folder):
        ...     block = torch.full((1, 4), dist.get_rank())
        ...     xt.save({"w": block}, folder, {"w": "o/tp i"}, Mesh(tp=2))
        ...     return xt.load(folder, {"w": "o i/tp"}, Mesh(tp=2))["w"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     xt.testing.run_ranks(2, there_and_back, folder)
        [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    save_blocks(_plan_together(tree, Path(path), rules, mesh, names, shard_bytes, shapes, keep))


@api_boundary
def async_save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    shard_bytes: Bytes = "5GiB",
    shapes: Mapping[str, Sequence[int]] | None = None,
    keep: Count | None = None,
) -> BackgroundSave:
    """Save as `save` does, and return when the blocks are copied: threads write them meanwhile.

        saving = xt.async_save({"model": model, "optimizer": optimizer, "step": 20}, "run/step_20", keep=3)
        ...                                 # steps change the model, and not what is written
        saving.wait()                       # before the next save; raises what went wrong

    The checkpoint appears in its folder when all processes have written, also if nobody waits.
    Nothing is sent meanwhile. Each process copies the blocks that it writes to the CPU's memory.

    Args:
        tree: As for `save`.
        path: The folder.
        rules: As for `save`.
        mesh: The processes. None: the world.
        names: Maps this program's names to stored names.
        shard_bytes: The most bytes of a file.
        shapes: Global shapes by name, if blocks differ in size.
        keep: How many checkpoints of the run stay, as for `save`.

    Returns:
        The save, of which `wait()` ends when the checkpoint is in its place.

    Raises:
        XshardError: As `save` does, before anything is written.

    Examples:
        >>> import tempfile, torch, torch_bridge as xt
        >>> def saved_beside(folder):
        ...     block = torch.zeros(3)
        ...     saving = xt.async_save({"w": block, "step": 20}, folder)
        ...     block += 1
        ...     saving.wait()
        ...     return xt.load(folder)["w"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     xt.testing.run_ranks(2, saved_beside, folder)
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    return save_beside(
        _plan_together(tree, Path(path), rules, mesh, names, shard_bytes, shapes, keep)
    )


def _plan_together(
    tree: Any,
    path: Path,
    rules: RulesLike | None,
    mesh: MeshLike | None,
    names: Names | None,
    shard_bytes: Bytes,
    shapes: Mapping[str, Sequence[int]] | None,
    keep: int | None,
) -> SaveTask:
    """Plan a save on all processes, and compare what several of them have. Raises as `save` does."""
    ranks = processes_of(mesh)
    members = Members()
    # `plan_and_describe` runs inside the comparison of ranks, so that all raise if one fails, and leaves its
    # plan here.
    plans: list[Saving] = []

    def plan_and_describe() -> dict[str, Any]:
        check_numbered(path, keep)
        members.add_tree(tree)
        members.add_arrays(rules, mesh, shapes)
        members.add_states()
        sources = {name: _source_of(name, array) for name, array in members.arrays.items()}
        plan = plan_save(sources, names, shard_bytes=shard_bytes, constants=members.constants)
        plans.append(plan)
        facts = {"folder": str(path), "files": plan.digest}
        for name, source in sources.items():
            facts[place_of(name)] = repr(source.sharding)
        for name, constant in members.constants.items():
            facts[place_of(name)] = repr(constant)
        return facts

    call = f"save to {path}"
    leaves.compare_facts(ranks, call, plan_and_describe)
    all_or_none = partial(leaves.all_or_none, ranks, call)
    block_of = partial(_block_in_file, members.arrays)
    task = SaveTask(
        plan=plans[0],
        path=path,
        block_of=block_of,
        all_or_none=all_or_none,
        writers=Writers(ranks, rank()),
        keep=keep,
    )
    differing = differing_replicas(task)
    all_or_none(lambda: _check_replicas([members.arrays[name] for name in differing]))
    return task


def _block_in_file(
    arrays: Mapping[str, LocalArray], name: str, device: int, dtype: str
) -> NDArray[Any]:
    """Return this process's block of an array, as a file has it."""
    block = arrays[name].block
    assert block is not None
    # A file has the values: numpy cannot see that a tensor is the conjugate of its memory.
    return _as_numpy(block.to("cpu", getattr(torch, dtype)).resolve_conj().resolve_neg())


def _source_of(name: str, array: LocalArray) -> Source:
    """Return an array as the saving plan takes it. Raises XshardError for one without values."""
    with errors.located(place_of(name)):
        if array.is_meta:
            hint = "save after the model has values"
            raise XshardError("it is on the meta device", hint=hint)
        return Source(array.sharding, dtypes.name_of(array.dtype), array.ranks)


def _check_replicas(arrays: Sequence[LocalArray]) -> None:
    """Raise ReplicaError for the first array whose replicas differ by more than rounding.

    All processes call it together.

    Args:
        arrays: The arrays with replicas that differ in their bits.
    """
    for array in arrays:
        context = ParallelContext(array.mesh)
        if array.block is None:
            continue
        try:
            context.compare([(place_of(array.names[0]), array.block, array.sharding)])
        except ReplicaError as error:
            finding, _, _ = str(error.hint).partition("\n")
            hint = f"{finding}\n  if it is sharded, rules= says how, as 'o/dp ...', "
            hint += "and models and optimizers "
            hint += 'in the tree know it: {"model": model, "optimizer": optimizer}; what each process has '
            hint += "for itself, as BatchNorm's statistics, has to be made equal: nn.SyncBatchNorm, or a mean"
            raise ReplicaError(error.reason, text=error.text, span=error.span, hint=hint) from None


class TorchLoadKeywords(LoadKeywords, total=False):
    """The keywords of `load` on which the type of its result does not depend."""

    dtype: torch.dtype | str | None
    device: DeviceLike


@overload
def load(
    path: CheckpointLike,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    like: None = None,
    **options: Unpack[TorchLoadKeywords],
) -> dict[str, Any]: ...


@overload
def load(
    path: CheckpointLike,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    like: T,
    **options: Unpack[TorchLoadKeywords],
) -> T: ...


@api_boundary
def load(  # noqa: PLR0913  one option for each thing that a file does not say
    path: CheckpointLike,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    like: Any = None,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device: DeviceLike = "cpu",
    profile: ProfileLike = "auto",
    verify: bool = False,
) -> Any:
    """Load local blocks from files: each process reads the rows that it needs, and no others.

        blocks = xt.load("checkpoint", {"w": "o i/tp"}, mesh)      # {"w": [o, i/tp]}
        xt.load("checkpoint", like=model)                          # fills its parameters

    All processes of the mesh call it.

    Args:
        path: A safetensors file, a folder of them, or an open checkpoint of any format.
        rules: Layouts by the names in this program. None: all are replicated.
        mesh: The processes. None: the world.
        names: Maps stored names to this program's names.
        like: A model or a tree, as for `save`, with tensors to fill in place, on their devices and
            in their dtypes. Optimizers need no state yet.
        strict: Every array, number and text has to be in both `like` and the files. Otherwise a warning names
            those that are not; they stay as they are.
        dtype: The dtype of all floats, without `like`.
        device: For new tensors. Parameters of a parallel model on the meta device are made there,
            too.
        profile: The machine. If it has a disk, processes that need the same rows may read a part
            each and share it.
        verify: Compare checksums, which reads everything once.

    Returns:
        Local blocks, numbers and texts by name, or `like` with the stored numbers and texts.

    Raises:
        FileError: A file is malformed; on all processes, before anything is read.
        XshardError: A name has no rule, or a rule no name; likewise.
        ShapeError: An array has another shape in `like`; likewise.

    Examples:
        >>> import tempfile, torch, torch.distributed as dist, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def resumed(folder):
        ...     mesh, block = Mesh(dp=2), torch.full((2, 2), dist.get_rank())
        ...     xt.save({"w": block, "step": 3}, folder, {"w": "o/dp i"}, mesh)
        ...     tree = {"w": torch.empty(4, 1, dtype=block.dtype), "step": 0}
        ...     return xt.load(folder, {"w": "o i/dp"}, mesh, like=tree)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = xt.testing.run_ranks(2, resumed, folder)[0]
        >>> loaded["step"], loaded["w"].flatten().tolist()
        (3, [0, 0, 1, 1])
    """
    ranks = processes_of(mesh)
    call = f"load {path}"
    disk_profile = load_profile(machine_profile(profile))
    checkpoint = open_on_all(path, partial(leaves.all_or_none, ranks, call))
    loading = _Loading(checkpoint, ranks, disk_profile)

    def plan_and_describe() -> dict[str, Any]:
        if like is None:
            loading.plan_new(rules, mesh, names, dtype)
        else:
            loading.plan_into(like, rules, mesh, names, strict)
        if verify:
            # Each process checks a part of the files.
            compare_checksums(checkpoint, ranks.index(rank()), len(ranks))
        return loading.facts()

    leaves.compare_facts(ranks, call, plan_and_describe)
    tensors = loading.read(device)
    if not isinstance(path, Checkpoint):  # the caller's own stays open
        checkpoint.close()
    loading.replace_meta(tensors)
    if like is None:
        return {**checkpoint.readable_constants(tensors), **tensors}
    leaves.all_or_none(ranks, call, lambda: loading.fill_objects(tensors))
    return loading.with_constants("", like)


class _ArrayLoad(NamedTuple):
    """The load of a stored array, and the array that it fills."""

    load: Load
    array: LocalArray


@dataclass
class _Loading:
    """A load in phases: open and plan, compare `facts` between ranks, read and share.

    Attributes:
        checkpoint: The open checkpoint.
        ranks: The ranks that load.
        profile: The machine, for shared reads.
        loads: What is read, by stored name, or by this program's name without a tree to fill.
        constants: Stored numbers and texts for the tree to fill, by name.
        members: Tensors, optimizers and so on of the tree to fill.
        optimizers: The optimizers in it.
        stored_as_values: The objects in it whose state is stored as a value.
        strict: Whether every name has to be in the tree and in the checkpoint.
    """

    checkpoint: Checkpoint
    ranks: Sequence[int]
    profile: Profile
    loads: dict[str, _ArrayLoad] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    optimizers: list[OptimizerState] = field(default_factory=list)
    stored_as_values: Sequence[str] = ()
    strict: bool = True

    def plan_new(
        self, rules: RulesLike | None, mesh: MeshLike | None, names: Names | None, dtype: Any
    ) -> None:
        """Plan the load of every stored array into new memory."""
        if not rules:
            rules = None  # `rules={}` too means that all are replicated
        axes = axes_of(mesh)
        planned = plan_load(self.checkpoint, rules, axes, names, dtype=dtype, profile=self.profile)
        for name, load in planned.items():
            # Without a tree, blocks have the stored dtype, or `dtype` if they are floats.
            array_dtype = getattr(torch, load.array.dtype)
            on_mesh = axes if mesh is None else mesh
            array = LocalArray(
                names=[name],
                block=None,
                dtype=array_dtype,
                sharding=load.target,
                mesh=on_mesh,
                ranks=self.ranks,
            )
            self.loads[name] = _ArrayLoad(load, array)

    def plan_into(
        self,
        like: Any,
        rules: RulesLike | None,
        mesh: MeshLike | None,
        names: Names | None,
        strict: bool,
    ) -> None:
        """Plan which stored array is loaded into which tensor of a model or a tree; fills `loads`.

        Nothing is read from the arrays yet.

        Args:
            like: The model or tree.
            rules: Layouts of its tensors by patterns of names.
            mesh: The processes of plain tensors.
            names: How names in the files differ from the model's.
            strict: Whether a name that only one of them has is an error.
        """
        self.strict = strict
        # The arrays in the files, by the names that the model has for them.
        stored = stored_as(self.checkpoint, names)
        shapes = {name: array.shape for name, array in stored.items()}
        # The files tell global shapes: without them, all blocks would have to have one size.
        self.members.add_tree(like)
        self.stored_as_values = self.members.take_stored(self.checkpoint, stored)
        self.members.add_arrays(rules, mesh, shapes)
        for optimizer_name in self.members.optimizers:
            state = self.members.optimizer_state(optimizer_name)
            self.members.arrays.update(state.targets(stored))
            self.optimizers.append(state)
            # The names of tensors stand for them until they are read.
            state.stored_groups(self.checkpoint, {name: name for name in stored}, strict)
            self.members.constants.update(state.needed_constants(self.checkpoint))
        self.constants = stored_constants(
            self.checkpoint, self.members.constants, names, strict, self._goes_to_object
        )
        arrays = list(self.members.arrays.values())
        # For each tensor the name under which it is stored (a tied one has several), or None.
        stored_names = in_both(stored, [array.names for array in arrays], strict)
        for array, name in zip(arrays, stored_names, strict=True):
            # A tensor without memory must be replaced; only a parallel model has a function for it.
            if array.is_meta and array.put is None:
                hint = "xt.parallelize or model.to_empty(device=...) first"
                raise XshardError(f"{array.names[0]} is on the meta device", hint=hint)
            if name is None:  # not in the files, which `strict=False` allows
                continue
            with errors.located(name):
                dtype = dtypes.name_of(array.dtype)
                load = load_of(self.checkpoint, stored[name], dtype, array.sharding, self.profile)
            self.loads[name] = _ArrayLoad(load, array)

    def _goes_to_object(self, leaf: str) -> bool:
        """Return whether an object or an optimizer takes what is stored under a name."""
        if any(optimizer.takes(leaf) for optimizer in self.optimizers):
            return True
        return any(is_part(leaf, name) for name in self.stored_as_values)

    def facts(self) -> dict[str, Any]:
        """Return the shape and the layout in which each array is read: all ranks have to agree."""
        facts: dict[str, Any] = {}
        for name, (load, _) in self.loads.items():
            facts[name] = (load.array.shape, str(load.source.layout))
        return facts

    def read(self, device: DeviceLike) -> dict[str, Tensor]:
        """Read this process's block of every array from the files; return blocks by name.

        Replicas of a block share the reading: each reads a part of the rows, and sends it to the
        others.
        """
        names = list(self.loads)
        shared_bytes = [_shared_bytes(load) for load, _ in self.loads.values()]
        tensors = {}
        with ThreadPoolExecutor(_n_threads(len(self.ranks))) as threads:
            # Until they are sent, rows that are read for replicas take memory beside the blocks: so
            # arrays are read in groups with at most BUCKET_BYTES of them, or one array.
            for indices in group_by_bytes(shared_bytes, BUCKET_BYTES):
                group = [names[i] for i in indices]
                tensors.update(self._read_group(group, device, threads))
        return tensors

    def _read_group(
        self, names: Sequence[str], device: DeviceLike, threads: ThreadPoolExecutor
    ) -> dict[str, Tensor]:
        """Read this process's blocks of some arrays by threads, share them, and return them by name."""
        tensors = {}
        for name in names:
            array = self.loads[name].array
            # A DTensor's mesh may lack this process, which then has no block of it.
            if rank() in array.ranks:
                tensors[name] = array.target(device)
        shared_rows = threads.map(self._read_array, tensors, tensors.values())
        self._share(dict(zip(tensors, shared_rows, strict=True)), tensors)
        return tensors

    def _read_array(self, name: str, out: Tensor) -> Tensor | None:
        """Read this process's block of one array into `out`, or its share of the rows if it has replicas.

        Replicas of a block share the reading: each reads some rows. These are returned, to be sent to
        the others, and `out` is filled later. Returns None if `out` is filled now.
        """
        load, array = self.loads[name]
        stored_dtype = getattr(torch, load.stored)
        # numpy cannot write to GPUs, nor to views that torch conjugates or negates when it reads them.
        is_view = out.is_conj() or out.is_neg()
        is_writable = out.device.type == "cpu" and not is_view and out.dtype == stored_dtype
        if is_writable and not load.is_shared:
            # Into its memory, without a copy.
            read_block(self.checkpoint, load, array.device, _as_numpy(out))
            return None
        rows = torch.from_numpy(read_block(self.checkpoint, load, array.device)).view(stored_dtype)
        if load.is_shared:
            return rows.to(out.device, out.dtype)
        out.copy_(rows)
        return None

    def _share(self, rows_read: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> None:
        """Complete the blocks of arrays of which each replica has read some rows; fills `tensors`.

        Replicas of a block read different rows of it, and send them to each other, many arrays in one
        collective: with 2 replicas of a block of 8 rows, each reads 4.

        Args:
            rows_read: The rows that this process has read, by name; None for an array that it read whole.
            tensors: The blocks to fill, by name.
        """
        rows_by_mesh: dict[MeshLike, dict[str, Tensor]] = {}
        for name, rows in rows_read.items():
            if rows is not None:
                array = self.loads[name].array
                mesh = ParallelContext(array.mesh).mesh_of(array.sharding)
                rows_on_mesh = rows_by_mesh.setdefault(mesh, {})
                rows_on_mesh[name] = rows
        for mesh, rows_on_mesh in rows_by_mesh.items():
            moves = {}
            shapes = {}
            for name in rows_on_mesh:
                load = self.loads[name].load
                # `load.source` is how parts are sharded, over replicas too; `load.target`, how blocks.
                moves[name] = f"{load.source.layout} -> {load.target.layout}"
                shapes[name] = load.array.shape
            blocks = redistribute(rows_on_mesh, moves, mesh, shape=shapes, profile=self.profile)
            for name, block in blocks.items():
                tensors[name].copy_(block)

    def fill_objects(self, tensors: Mapping[str, Tensor]) -> None:
        """Give optimizers, schedulers and the like the state that was read.

        Args:
            tensors: The tensors that were read, by stored name.
        """
        read = {}
        for name, (_, array) in self.loads.items():
            if name in tensors:
                read[array.names[0]] = tensors[name]
        for optimizer in self.optimizers:
            optimizer.load(read, self.checkpoint, self.strict)
        for name, state in self.members.states.items():
            value = self.with_constants(name, state.value)
            if name in self.stored_as_values:
                value = self.checkpoint.value(name, self.members.tensors)  # filled in place
            state.load(value)

    def with_constants(self, name: str, tree: Any) -> Any:
        """Return a tree, which is called `name` in the whole one, with stored numbers and texts."""
        constants = self.constants
        return tree_map_with_path(
            lambda keys, x: constants.get(joined(name, leaf_name(keys)), x), tree
        )

    def replace_meta(self, tensors: Mapping[str, Tensor]) -> None:
        """Give a model its new parameters, which were on the meta device."""
        for name, (_, array) in self.loads.items():
            if array.is_meta and array.put is not None:
                array.put(tensors[name])


def _n_threads(n_ranks: int) -> int:
    """Return this process's share of the cores of its node, at least two threads.

    Disks, and copies in numpy, release the interpreter. More threads than cores only cost memory.
    """
    n_node_ranks = node_processes(n_ranks) or n_ranks
    n_cores = os.cpu_count() or 1
    return max(2, n_cores // n_node_ranks)


def _shared_bytes(load: Load) -> int:
    """Return the most bytes that a process reads of an array for others.

    0 if it reads for itself.
    """
    if not load.is_shared:
        return 0
    return dtypes.n_bytes(load.source.max_local_shape, load.stored)


def _as_numpy(x: Tensor) -> NDArray[Any]:
    """Return a tensor on a CPU as numpy has it, in the same memory.

    numpy lacks bfloat16 and float8: they are whole numbers of the same size.
    """
    carrier = dtypes.carrier(dtypes.name_of(x.dtype))
    return x.detach().view(getattr(torch, carrier.name)).numpy()
