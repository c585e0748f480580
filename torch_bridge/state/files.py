"""`save` and `load`: trees of blocks on processes <-> files.

Decides who writes and reads when, and that all processes fail together. What is where in files is decided in
`xshard.state.files`.
"""

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

from torch_bridge.many import redistribute_many
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.state.leaves import WHOLE, Leaf, axes_of, leaves_of, processes_of, rank
from torch_bridge.state.processes import together
from xshard import Profile, Rules, XshardError, dtypes, load_profile
from xshard.cost.machine import node_processes
from xshard.errors import located
from xshard.state import Names, files
from xshard.state.files.loading import cast, in_both, load_of, stored_as
from xshard.trees import groups, leaf_name, place_of

BUCKET_BYTES = 256 * 2**20  # how much of what is shared is held at a time
Loads = dict[str, tuple[files.Load, Leaf]]


def save(
    tree: Any,
    path: str | Path,
    rules: Rules | Mapping[Any, Any] | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    shard_bytes: int | str | None = "5GiB",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Blocks on processes -> safetensors files and their index in a folder that all processes can reach.

    Every element is written once, by one of the processes that have it, all of them at once; until the end
    the folder keeps the checkpoint that it had. All processes of the mesh call it.

    tree: a model, a state dict, or any tree of tensors, numbers and texts; parallel models and DTensors bring
    their layouts. rules: layouts of the other tensors, by name; None: they are whole, and equal everywhere.
    mesh: of the processes; None: the world. names: what is stored, of what is here. shard_bytes: of a file.
    shapes: global ones, by name, where blocks differ in size.

    Raises, on all processes: before anything is written, XshardError for a name without a rule, PlanError for
    sums and halos, DtypeError; FileError where the disk is full, with the old checkpoint as it was.

    >>> import tempfile, torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def there_and_back(folder):
    ...     xt.save({"w": torch.full((1, 4), dist.get_rank())}, folder, {"w": "o/tp i"}, Mesh(tp=2))
    ...     return xt.load(folder, {"w": "o i/tp"}, Mesh(tp=2))["w"].tolist()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     xt.testing.run_ranks(2, there_and_back, folder)
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    path, ranks = Path(path), processes_of(mesh)
    leaves: dict[str, Leaf] = {}
    found: list[files.Saving] = []

    def planned() -> dict[str, Any]:
        given, constants = leaves_of(tree, rules, mesh, shapes)
        leaves.update(given)
        sources = {}
        for name, leaf in leaves.items():
            with located(place_of(name)):
                if leaf.is_meta:
                    raise XshardError("it is on the meta device", hint="without values there is no state")
                sources[name] = files.Source(leaf.sharding, dtypes.name_of(leaf.dtype), leaf.ranks)
        found.append(files.plan_save(sources, names, shard_bytes=shard_bytes, constants=constants))
        facts = {name: source.sharding for name, source in sources.items()} | constants
        said = {place_of(name): repr(fact) for name, fact in facts.items()}
        return {"folder": str(path), "files": found[0].digest} | said

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        block = leaves[name].block
        assert block is not None
        return _carried(block.to("cpu", getattr(torch, dtype)).resolve_conj().resolve_neg())

    meet = partial(together, ranks, f"save to {path}")
    meet(planned, agree=True)
    files.save_blocks(found[0], path, block_of, meet, rank(), leads=rank() == ranks[0])


def load(
    path: str | Path | files.Checkpoint,
    rules: Rules | Mapping[Any, Any] | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    into: Any = None,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    profile: str | Path | Profile = "auto",
    verify: bool = False,
) -> Any:
    """Files -> this process's blocks, by name: each process reads the rows that it needs, and no others.

    path: a safetensors file, a folder of them, or an opened checkpoint of any format. rules: layouts, by the
    names that result; None: whole arrays. mesh: of the processes, all of which call it; None: the world.
    names: what results, of what is stored.
    into: a model or a tree whose tensors are filled in place, on their devices and in their dtypes, and which
    is returned; parallel models and DTensors bring their layouts. What a parallel model has on the meta
    device is made on `device`. strict: whether every name has to be in both.
    dtype: of all floats, without `into`. profile: of the machine; if it has a disk, processes that need the
    same rows may read a part each and share it. verify: compare checksums, which reads everything once.

    Raises, on all processes, before anything is read: FileError for files that are not right, XshardError for
    names without a rule and rules without a name, ShapeError.
    """
    ranks, plan_for = processes_of(mesh), load_profile(machine(profile))
    loads: Loads = {}
    opened: list[files.Checkpoint] = []
    constants: dict[str, Any] = {}

    def planned() -> dict[str, Any]:
        opened.append(path if isinstance(path, files.Checkpoint) else files.open_checkpoint(path))
        if into is None:
            given = opened[0], rules or WHOLE, axes_of(mesh), names
            for name, one in files.plan_load(*given, dtype=dtype, profile=plan_for).items():
                kind = getattr(torch, one.made.dtype)
                loads[name] = one, Leaf([name], None, kind, one.target, mesh or axes_of(None), ranks)
        else:
            loads.update(_filling(opened[0], names, strict, plan_for, into, rules, mesh))
            if not isinstance(into, nn.Module):
                named = ((leaf_name(at), x) for at, x in tree_flatten_with_path(into)[0])
                stored = opened[0].constant
                constants.update({name: stored(name, x) for name, x in named if not isinstance(x, Tensor)})
        if verify:
            files.verify(opened[0], ranks.index(rank()), len(ranks))
        return {name: (one.made.shape, str(one.source.layout)) for name, (one, _) in loads.items()}

    together(ranks, f"load {path}", planned, agree=True)
    result: dict[str, Tensor] = {}

    def read(name: str) -> Tensor | None:
        return _read(opened[0], *loads[name], result[name])

    ends = {name: (one.source.max_local_shape, one.stored) for name, (one, _) in loads.items()}
    shared = {name: loads[name][0].is_shared * dtypes.n_bytes(*end) for name, end in ends.items()}
    near = node_processes(len(ranks)) or len(ranks)
    # Disks, and copies in numpy, leave the interpreter to others; more threads than cores only cost memory.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // near)) as threads:
        arrays = list(shared)
        for group in groups(list(shared.values()), BUCKET_BYTES):
            here = [arrays[i] for i in group if rank() in loads[arrays[i]][1].ranks]
            result |= {name: loads[name][1].target(device) for name in here}
            parts = zip(here, threads.map(read, here), strict=True)
            _share({name: part for name, part in parts if part is not None}, loads, result, plan_for)
    if not isinstance(path, files.Checkpoint):
        opened[0].close()
    for name, (_, leaf) in loads.items():
        if leaf.is_meta and leaf.put is not None:
            leaf.put(result[name])
    if into is None or isinstance(into, nn.Module):
        return result if into is None else into
    return tree_map_with_path(lambda at, x: constants.get(leaf_name(at), x), into)


def _filling(
    checkpoint: files.Checkpoint,
    names: Names | None,
    strict: bool,
    profile: Profile,
    tree: Any,
    rules: Any,
    mesh: MeshLike | None,
) -> Loads:
    """What is loaded into the leaves of a tree, each under the first of its names that is stored."""
    made, found = stored_as(checkpoint, names), Loads()
    leaves = leaves_of(tree, rules, mesh, {name: each.shape for name, each in made.items()})[0].values()
    for leaf, name in zip(leaves, in_both(made, [leaf.names for leaf in leaves], strict), strict=True):
        if leaf.is_meta and leaf.put is None:
            raise XshardError(
                f"{leaf.names[0]} is on the meta device",
                hint="xt.parallelize or model.to_empty(device=...) first",
            )
        if name is not None:
            with located(name):
                each = cast(made[name], dtypes.name_of(leaf.dtype))
                found[name] = load_of(checkpoint, each, leaf.sharding, profile), leaf
    return found


def _read(checkpoint: files.Checkpoint, one: files.Load, leaf: Leaf, out: Tensor) -> Tensor | None:
    """Fill a block, in its own memory where files have the same bytes; return what is to be shared."""
    stored = getattr(torch, one.stored)
    is_plain = out.device.type == "cpu" and not (out.is_conj() or out.is_neg())
    direct = is_plain and not one.is_shared and out.dtype == stored
    read = files.read_block(checkpoint, one, leaf.device, _carried(out) if direct else None)
    if direct:
        return None
    block = torch.from_numpy(read).view(stored)
    if one.is_shared:
        return block.to(out.device, out.dtype)
    out.copy_(block)
    return None


def _share(blocks: dict[str, Tensor], loads: Loads, result: Mapping[str, Tensor], profile: Profile) -> None:
    """What processes read for others goes on by the network."""
    together: dict[MeshLike, dict[str, files.Load]] = {}
    for name in blocks:
        one, leaf = loads[name]
        together.setdefault(leaf.mesh, {})[name] = one
    for mesh, ends in together.items():
        moves = {name: f"{one.source.layout} -> {one.target.layout}" for name, one in ends.items()}
        shapes = {name: one.made.shape for name, one in ends.items()}
        some = {name: blocks[name] for name in ends}
        for name, block in redistribute_many(some, moves, mesh, shapes=shapes, profile=profile).items():
            result[name].copy_(block)


def _carried(x: Tensor) -> NDArray[Any]:
    """A tensor on a CPU as numpy has it, sharing its memory."""
    return x.detach().view(getattr(torch, dtypes.carrier(dtypes.name_of(x.dtype)).name)).numpy()
