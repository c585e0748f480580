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
from torch import Tensor, nn

from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike
from torch_bridge.redistribution import redistribute
from torch_bridge.state import leaves
from torch_bridge.state.leaves import LocalArray, axes_of, processes_of, rank
from torch_bridge.versions.pytree import tree_flatten_with_path, tree_map_with_path
from xshard import Profile, ProfileLike, XshardError, dtypes, errors, load_profile
from xshard.cost.machine import node_processes
from xshard.errors import api_boundary
from xshard.rules import RulesLike
from xshard.signatures import Bytes
from xshard.state import Names
from xshard.state.files import Checkpoint
from xshard.state.files import verify as compare_checksums
from xshard.state.files.folder import CheckpointLike, open_on_all
from xshard.state.files.loading import (
    Load,
    LoadKeywords,
    in_both,
    load_of,
    plan_load,
    read_block,
    stored_as,
)
from xshard.state.files.saving import Saving, Source, plan_save, save_blocks
from xshard.trees import group_by_bytes, leaf_name, place_of

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
) -> None:
    """Save local blocks as safetensors files, in a folder that all processes can reach.

        xt.save({"w": block}, "checkpoint", {"w": "o/tp i"}, mesh)     # blocks of [o/tp, i]

    Every element is written once, by one of the processes that have it; processes write at the same
    time. The folder keeps the checkpoint that it had until the new one is complete. All processes
    of the mesh call it.

    Args:
        tree: A model, a state dict, or any tree of tensors, numbers and texts. Parallel models and
            DTensors bring their layouts.
        path: The folder.
        rules: Layouts of the other tensors by name. None: they are replicated.
        mesh: The processes. None: the world.
        names: Maps this program's names to stored names.
        shard_bytes: The most bytes of a file.
        shapes: Global shapes by name, if blocks differ in size.

    Raises:
        XshardError: A name has no rule; on all processes, before anything is written.
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
    path = Path(path)
    ranks = processes_of(mesh)
    arrays: dict[str, LocalArray] = {}
    # `planned` runs inside the comparison of ranks, so that all raise if one fails, and leaves its
    # plan here.
    plans: list[Saving] = []

    def planned() -> dict[str, Any]:
        local, constants = leaves.local_arrays(tree, rules, mesh, shapes)
        arrays.update(local)
        sources = {name: _source_of(name, array) for name, array in arrays.items()}
        plan = plan_save(sources, names, shard_bytes=shard_bytes, constants=constants)
        plans.append(plan)
        facts = {"folder": str(path), "files": plan.digest}
        for name, source in sources.items():
            facts[place_of(name)] = repr(source.sharding)
        for name, constant in constants.items():
            facts[place_of(name)] = repr(constant)
        return facts

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        block = arrays[name].block
        assert block is not None
        # A file has the values: numpy cannot see that a tensor is the conjugate of its memory.
        return _as_numpy(block.to("cpu", getattr(torch, dtype)).resolve_conj().resolve_neg())

    call = f"save to {path}"
    leaves.compare_facts(ranks, call, planned)
    all_or_none = partial(leaves.all_or_none, ranks, call)
    save_blocks(plans[0], path, block_of, all_or_none, rank(), leads=rank() == ranks[0])


def _source_of(name: str, array: LocalArray) -> Source:
    """Return an array as the saving plan takes it. Raises XshardError for one without values."""
    with errors.located(place_of(name)):
        if array.is_meta:
            hint = "save after the model has values"
            raise XshardError("it is on the meta device", hint=hint)
        return Source(array.sharding, dtypes.name_of(array.dtype), array.ranks)


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
) -> dict[str, Tensor]: ...


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
        like: A model or a tree, with tensors to fill in place, on their devices and in their
            dtypes. Parallel models and DTensors bring their layouts.
        strict: Every name has to be in both `like` and the files.
        dtype: The dtype of all floats, without `like`.
        device: For new tensors. Parameters of a parallel model on the meta device are made there,
            too.
        profile: The machine. If it has a disk, processes that need the same rows may read a part
            each and share it.
        verify: Compare checksums, which reads everything once.

    Returns:
        Local blocks by name, or `like`.

    Raises:
        FileError: A file is malformed; on all processes, before anything is read.
        XshardError: A name has no rule, or a rule no name; likewise.
        ShapeError: An array has another shape in `like`; likewise.
    """
    ranks = processes_of(mesh)
    call = f"load {path}"
    disk_profile = load_profile(machine_profile(profile))
    checkpoint = open_on_all(path, partial(leaves.all_or_none, ranks, call))
    loading = _Loading(checkpoint, ranks, disk_profile)

    def planned() -> dict[str, Any]:
        if like is None:
            loading.plan_new(rules, mesh, names, dtype)
        else:
            loading.plan_into(like, rules, mesh, names, strict)
            loading.read_constants(like)
        if verify:
            # Each process checks a part of the files.
            compare_checksums(checkpoint, ranks.index(rank()), len(ranks))
        return loading.facts()

    leaves.compare_facts(ranks, call, planned)
    tensors = loading.read(device)
    if not isinstance(path, Checkpoint):  # the caller's own stays open
        checkpoint.close()
    loading.replace_meta(tensors)
    if like is None:
        return tensors
    if isinstance(like, nn.Module):
        return like
    constants = loading.constants
    return tree_map_with_path(lambda keys, x: constants.get(leaf_name(keys), x), like)


class _ArrayLoad(NamedTuple):
    """The load of a stored array, and the array that it fills."""

    load: Load
    array: LocalArray


@dataclass
class _Loading:
    """A load in phases: open and plan, compare `facts` between ranks, read and share.

    loads: by stored name, or by this program's name without a tree to fill.
    constants: numbers and texts of the tree to fill, by name, as they are stored.
    """

    checkpoint: Checkpoint
    ranks: Sequence[int]
    profile: Profile
    loads: dict[str, _ArrayLoad] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

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
            array = LocalArray([name], None, array_dtype, load.target, on_mesh, self.ranks)
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

        like: the model or tree. rules: layouts of its tensors by patterns of names. names: how names
        in the files differ from the model's. strict: raise for tensors that only one side has.
        """
        # The arrays in the files, by the names that the model has for them.
        stored = stored_as(self.checkpoint, names)
        shapes = {name: array.shape for name, array in stored.items()}
        # The files tell global shapes: without them, all blocks would have to have one size.
        by_name, _ = leaves.local_arrays(like, rules, mesh, shapes)
        arrays = list(by_name.values())
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

    def read_constants(self, like: Any) -> None:
        """Read the numbers and texts that a tree to fill has; a module has none of its own."""
        if isinstance(like, nn.Module):
            return
        paths_and_leaves, _ = tree_flatten_with_path(like)
        for path, x in paths_and_leaves:
            if not isinstance(x, Tensor):
                name = leaf_name(path)
                self.constants[name] = self.checkpoint.constant(name, x)

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
            for numbers in group_by_bytes(shared_bytes, BUCKET_BYTES):
                group = [names[i] for i in numbers]
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
        parts = threads.map(self._read_array, tensors, tensors.values())
        self._share(dict(zip(tensors, parts, strict=True)), tensors)
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

    def _share(self, parts: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> None:
        """Complete the blocks of arrays of which each replica has read some rows; fills `tensors`.

        Replicas of a block read different rows of it, and send them to each other, many arrays in one
        collective: with 2 replicas of a block of 8 rows, each reads 4.

        parts: the rows that this process has read, by name; None for an array that it read whole.
        tensors: the blocks to fill, by name.
        """
        parts_by_mesh: dict[MeshLike, dict[str, Tensor]] = {}
        for name, part in parts.items():
            if part is not None:
                parts_on_mesh = parts_by_mesh.setdefault(self.loads[name].array.mesh, {})
                parts_on_mesh[name] = part
        for mesh, parts_on_mesh in parts_by_mesh.items():
            moves = {}
            shapes = {}
            for name in parts_on_mesh:
                load = self.loads[name].load
                # `load.source` is how parts are sharded, over replicas too; `load.target`, how blocks.
                moves[name] = f"{load.source.layout} -> {load.target.layout}"
                shapes[name] = load.array.shape
            blocks = redistribute(parts_on_mesh, moves, mesh, shape=shapes, profile=self.profile)
            for name, block in blocks.items():
                tensors[name].copy_(block)

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
