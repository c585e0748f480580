"""`save` and `load`: trees of local blocks <-> files; all processes succeed or fail together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.redistribution import redistribute
from torch_bridge.state import leaves
from torch_bridge.state.leaves import LocalArray, axes_of, processes_of, rank
from xshard import Profile, ProfileLike, XshardError, dtypes, errors, load_profile
from xshard.cost.machine import node_processes
from xshard.rules import RulesLike
from xshard.state import Names
from xshard.state.files import Checkpoint, open_checkpoint
from xshard.state.files import verify as compare_checksums
from xshard.state.files.loading import Load, in_both, load_of, plan_load, read_block, stored_as
from xshard.state.files.saving import Saving, Source, plan_save, save_blocks
from xshard.trees import groups, leaf_name, place_of

BUCKET_BYTES = 256 * 2**20  # of blocks that are read by one process and sent to others
Loads = dict[str, tuple[Load, LocalArray]]


def save(
    tree: Any,
    path: str | Path,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    shard_bytes: int | str | None = "5GiB",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Save local blocks as safetensors files and an index, in a folder that all processes can reach.

    Every element is written once, by one of the processes that have it; processes write at the same time. The
    folder keeps the checkpoint that it had until the new one is complete. All processes of the mesh call it.

    tree: a model, a state dict, or any tree of tensors, numbers and texts; parallel models and DTensors bring
    their layouts. rules: layouts of the other tensors by name; None: they are replicated.
    mesh: the processes; None: the world. names: maps this program's names to stored names.
    shard_bytes: the most bytes of a file. shapes: global shapes by name, if blocks differ in size.
    Raises, on all processes: before anything is written, XshardError for a name without a rule, PlanError for
    sums and halos, DtypeError; FileError if the disk is full, with the old checkpoint as it was.

    >>> import tempfile, torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def there_and_back(folder):
    ...     xt.save({"w": torch.full((1, 4), dist.get_rank())}, folder, {"w": "o/tp i"}, Mesh(tp=2))
    ...     return xt.load(folder, {"w": "o i/tp"}, Mesh(tp=2))["w"].tolist()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     xt.testing.run_ranks(2, there_and_back, folder)
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    path = Path(path)
    ranks = processes_of(mesh)
    arrays: dict[str, LocalArray] = {}
    saving: list[Saving] = []

    def planned() -> dict[str, Any]:
        local, constants = leaves.local_arrays(tree, rules, mesh, shapes)
        arrays.update(local)
        sources = {}
        for name, array in arrays.items():
            with errors.located(place_of(name)):
                if array.is_meta:
                    raise XshardError(
                        "it is on the meta device", hint="save after the model has values"
                    )
                sources[name] = Source(array.sharding, dtypes.name_of(array.dtype), array.ranks)
        saving.append(plan_save(sources, names, shard_bytes=shard_bytes, constants=constants))
        facts = {name: source.sharding for name, source in sources.items()} | constants
        texts = {place_of(name): repr(fact) for name, fact in facts.items()}
        return {"folder": str(path), "files": saving[0].digest} | texts

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        block = arrays[name].block
        assert block is not None
        return _as_numpy(block.to("cpu", getattr(torch, dtype)).resolve_conj().resolve_neg())

    call = ranks, f"save to {path}"
    leaves.agreed(*call, planned)
    all_or_none = partial(leaves.all_or_none, *call)
    save_blocks(saving[0], path, block_of, all_or_none, rank(), leads=rank() == ranks[0])


def load(
    path: str | Path | Checkpoint,
    rules: RulesLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    like: Any = None,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    profile: ProfileLike = "auto",
    verify: bool = False,
) -> Any:
    """Load files -> local blocks by name: each process reads the rows that it needs, and no others.

    path: a safetensors file, a folder of them, or an open checkpoint of any format. rules: layouts by the
    names in this program; None: replicated. mesh: the processes, which all call it; None: the world. names:
    maps stored names to this program's names. like: a model or a tree, with tensors to fill in place, on
    their devices and in their dtypes; it is returned. Parallel models and DTensors bring their layouts.
    Parameters of a parallel model on the meta device are made on `device`. strict: every name has to be in
    both. dtype: the dtype of all floats, without `like`. profile: the machine; if it has a disk, processes
    that need the same rows may read a part each and share it. verify: compare checksums, which reads
    everything once.
    Raises, on all processes, before anything is read: FileError for malformed files, XshardError for
    names without a rule and rules without a name, ShapeError.
    """
    ranks = processes_of(mesh)
    plan_for = load_profile(machine(profile))
    loads: Loads = {}
    opened: list[Checkpoint] = []
    constants: dict[str, Any] = {}

    def planned() -> dict[str, Any]:
        opened.append(path if isinstance(path, Checkpoint) else open_checkpoint(path))
        if like is None:
            args = opened[0], rules or None, axes_of(mesh), names
            for name, load in plan_load(*args, dtype=dtype, profile=plan_for).items():
                kind = getattr(torch, load.array.dtype)
                loads[name] = (
                    load,
                    LocalArray([name], None, kind, load.target, mesh or axes_of(None), ranks),
                )
        else:
            stored = stored_as(opened[0], names)
            shapes = {name: each.shape for name, each in stored.items()}
            arrays = list(leaves.local_arrays(like, rules, mesh, shapes)[0].values())
            firsts = in_both(stored, [array.names for array in arrays], strict)
            for array, stored_name in zip(arrays, firsts, strict=True):
                if array.is_meta and array.put is None:
                    hint = "xt.parallelize or model.to_empty(device=...) first"
                    raise XshardError(f"{array.names[0]} is on the meta device", hint=hint)
                if stored_name is not None:
                    with errors.located(stored_name):
                        filled = stored[stored_name], dtypes.name_of(array.dtype), array.sharding
                        loads[stored_name] = load_of(opened[0], *filled, plan_for), array
            if not isinstance(like, nn.Module):
                named = tree_flatten_with_path(like)[0]
                saved = opened[0].constant
                others = ((leaf_name(keys), x) for keys, x in named if not isinstance(x, Tensor))
                constants.update({name: saved(name, x) for name, x in others})
        if verify:
            compare_checksums(opened[0], ranks.index(rank()), len(ranks))
        return {
            name: (load.array.shape, str(load.source.layout)) for name, (load, _) in loads.items()
        }

    leaves.agreed(ranks, f"load {path}", planned)
    result: dict[str, Tensor] = {}

    def read(name: str) -> Tensor | None:
        return _read(opened[0], *loads[name], result[name])

    plans = [load for load, _ in loads.values()]
    shared_bytes = [p.is_shared * dtypes.n_bytes(p.source.max_local_shape, p.stored) for p in plans]
    node_ranks = node_processes(len(ranks)) or len(ranks)
    # Disks, and copies in numpy, release the interpreter; more threads than cores only cost memory.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // node_ranks)) as threads:
        every = list(loads)
        for group in groups(shared_bytes, BUCKET_BYTES):
            local = [every[i] for i in group if rank() in loads[every[i]][1].ranks]
            result |= {name: loads[name][1].target(device) for name in local}
            parts = zip(local, threads.map(read, local), strict=True)
            _share(
                {name: part for name, part in parts if part is not None}, loads, result, plan_for
            )
    if not isinstance(path, Checkpoint):
        opened[0].close()
    for name, (_, array) in loads.items():
        if array.is_meta and array.put is not None:
            array.put(result[name])
    if like is None or isinstance(like, nn.Module):
        return result if like is None else like
    return tree_map_with_path(lambda keys, x: constants.get(leaf_name(keys), x), like)


def _read(checkpoint: Checkpoint, load: Load, array: LocalArray, out: Tensor) -> Tensor | None:
    """Fill a block; return it instead if it is to be shared. Equal bytes are read right into its memory."""
    stored = getattr(torch, load.stored)
    is_plain = out.device.type == "cpu" and not (out.is_conj() or out.is_neg())
    direct = is_plain and not load.is_shared and out.dtype == stored
    read = read_block(checkpoint, load, array.device, _as_numpy(out) if direct else None)
    block = torch.from_numpy(read).view(stored)
    if not (direct or load.is_shared):
        out.copy_(block)
    return block.to(out.device, out.dtype) if load.is_shared else None


def _share(
    blocks: dict[str, Tensor], loads: Loads, result: Mapping[str, Tensor], profile: Profile
) -> None:
    """Send blocks to the other processes that need them."""
    for mesh in dict.fromkeys(loads[name][1].mesh for name in blocks):
        on_mesh = {name: loads[name][0] for name in blocks if loads[name][1].mesh == mesh}
        moves = {
            name: f"{load.source.layout} -> {load.target.layout}" for name, load in on_mesh.items()
        }
        shapes = {name: load.array.shape for name, load in on_mesh.items()}
        some = {name: blocks[name] for name in on_mesh}
        for name, block in redistribute(some, moves, mesh, shape=shapes, profile=profile).items():
            result[name].copy_(block)


def _as_numpy(x: Tensor) -> NDArray[Any]:
    """A tensor on a CPU as numpy has it, in the same memory."""
    return x.detach().view(getattr(torch, dtypes.carrier(dtypes.name_of(x.dtype)).name)).numpy()
