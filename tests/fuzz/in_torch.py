"""The torch side of the chains, in a process that has imported torch and done nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from tests.fuzz.contractions import Product
from tests.fuzz.judge import Arrived, Blocks, Trip
from tests.fuzz.runtimes import laid
from tests.fuzz.trees import Carried
from torch_bridge.autodiff.blocks import array_of, tensor_of
from torch_bridge.testing.launch import run_ranks
from xshard.steps.base import Block

# A rank's blocks after every move, or of a result, and its gradients; None on a mesh that it is not of.
Moved = tuple[list[Block | None], list[Block | None]]


def run(n: int, trips: Sequence[Any], timeout_s: float) -> list[Any]:
    """All trips on `n` ranks."""
    with TemporaryDirectory() as folder:
        by_rank = run_ranks(n, _run_all, trips, folder, timeout_s=timeout_s)
    return [
        (_there if isinstance(trip, Carried) else _arrived)(trip, ranks)
        for trip, ranks in zip(trips, zip(*by_rank, strict=True), strict=True)
    ]


def _run_all(trips: Sequence[Any], folder: str) -> list[Any]:
    torch.use_deterministic_algorithms(True)  # memory that nobody writes to holds no number
    ways: dict[type, Any] = {Product: _contract, Carried: partial(_carry, folder), Trip: _travel}
    return [ways[type(trip)](trip) for trip in trips]


def _carry(folder: str, trip: Carried) -> dict[str, Block] | None:
    """A rank's blocks on the other mesh."""
    case = trip.chain
    rank = dist.get_rank()
    here, there = (
        DeviceMesh("cpu", torch.tensor(numbers).reshape(mesh.sizes), mesh_dim_names=mesh.axes)
        for mesh, numbers in zip((case.mesh, case.there), case.devices, strict=True)
    )
    tree = None
    if rank in case.devices[0]:
        at = case.devices[0].index(rank)
        tree = {name: tensor_of(blocks[at].copy()) for name, blocks in trip.blocks.items()}
    shapes = {n: leaf.shape for n, leaf in case.leaves(0).items()}
    names = case.names
    if not case.by_files:
        rules = (case.rules(0), case.rules(1))
        options = {"shapes": shapes, "bucket_bytes": case.limit}
        found = xt.transfer(tree, rules, src_mesh=here, dst_mesh=there, names=names, **options)
    else:
        path = f"{folder}/{case.seed}"
        told = {case.names_at: names}
        if tree is not None:
            options = {"shapes": shapes, "shard_bytes": case.limit, "names": told.get("save")}
            xt.save(tree, path, case.rules(0), here, **options)
        dist.barrier()
        found = None
        if rank in case.devices[1]:
            found = xt.load(path, case.rules(1), there, names=told.get("load"))
    return found and {name: array_of(x.contiguous()) for name, x in found.items()}


def _contract(product: Product) -> Moved:
    """A rank's block of the result, and of the gradient of every leaf."""
    case = product.chain
    rank = dist.get_rank()
    blocks = [tensor_of(each[rank].copy()) for each in product.blocks]
    for i in product.leaves:
        blocks[i].requires_grad_()
    if case.seed % 4:
        y = xt.einsum(product.plan, *blocks, mesh=case.mesh, save=case.save)
    else:  # each rank plans it, which takes far longer
        options = {
            "sizes": case.sizes,
            "profile": case.profile,
            "overlap": case.overlap,
            "save": case.save,
        }
        y = xt.einsum(case.text, *blocks, mesh=case.mesh, **options)
    if product.cotangents is None or not product.leaves:
        return [array_of(y.detach())], []
    # torch's gradients are conjugated, where plans are linear.
    cotangent = tensor_of(product.cotangents[rank]).conj().resolve_conj()
    gradients = torch.autograd.grad(y, [blocks[i] for i in product.leaves], cotangent)
    return [array_of(y.detach())], [
        array_of(g.conj().resolve_conj().contiguous()) for g in gradients
    ]


def _travel(trip: Trip) -> Moved:
    """Expressions on one mesh, which are planned here, or a plan to another one, where a rank without a block
    has none. Dtypes without autograd go back by the backward plans."""
    chain = trip.chain
    rank = dist.get_rank()
    is_one = trip.chain.there is None

    def own(blocks: Blocks, devices: Sequence[int]) -> torch.Tensor | None:
        return _laid(blocks[devices.index(rank)], chain.strides) if rank in devices else None

    x = own(trip.blocks, trip.plans[0].src_devices)
    kind = getattr(torch, chain.dtype)
    pulls = trip.cotangents is not None and (kind.is_floating_point or kind.is_complex)
    leaf = here = None if x is None else x.requires_grad_(pulls)
    found: list[Block | None] = []
    for i, plan in enumerate(trip.plans):
        if is_one:
            options = {"shape": chain.shape_at(i), "profile": chain.profile}
            here = xt.redistribute(here, chain.layouts[i : i + 2], chain.mesh, **options)
        else:
            here = xt.redistribute(here, plan, requires_grad=pulls)
        has_block = rank in plan.dst_devices
        found.append(array_of(here.detach().contiguous()).copy() if has_block else None)
    if trip.cotangents is None:
        return found, []
    gradient = own(trip.cotangents, trip.plans[-1].dst_devices)
    if pulls:
        here.backward(torch.zeros_like(here) if gradient is None else gradient)
        gradient = None if leaf is None else leaf.grad
    else:
        for plan in reversed(trip.plans):
            gradient = xt.redistribute(gradient, plan.backward, *([chain.mesh] if is_one else []))
    return found, [None if gradient is None else array_of(gradient.contiguous())]


def _laid(block: np.ndarray, strides: str) -> torch.Tensor:
    if strides == "one value" and block.size and (block == block.flat[0]).all():
        return tensor_of(block.ravel()[:1].copy()).reshape(()).expand(block.shape)
    return tensor_of(laid(block, strides))


def _arrived(trip: Trip | Product, ranks: Sequence[Moved]) -> Arrived:
    """The blocks of devices, of what ranks have."""
    src = trip.plans[0].src_devices
    blocks = [[ranks[r][0][i] for r in plan.dst_devices] for i, plan in enumerate(trip.plans)]
    return Arrived(blocks, [list(each) for each in zip(*(ranks[r][1] for r in src), strict=True)])


def _there(trip: Carried, ranks: Sequence[dict[str, Block]]) -> dict[str, Blocks]:
    devices = trip.chain.devices[1]
    return {name: [ranks[r][name] for r in devices] for name in ranks[devices[0]]}
