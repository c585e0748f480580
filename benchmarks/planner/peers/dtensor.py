"""PyTorch DTensor's two planners, greedy (its default) and Dijkstra, without processes or devices.

DTensor's own functions make the plan, for GPUs in hosts of eight and with all flattened submeshes, which its
fused collectives need.
"""

import itertools
import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import xshard as xs
from benchmarks.cases import Case, is_in_order
from benchmarks.planner.peers.base import NotConvertibleError, PeerPlan, Spot

HOST_DEVICES = 8
LARGEST_GROUP = 1024  # ranks of the fake process group: more than any case has
MAX_DIJKSTRA_AXES = 5  # beyond, one search takes minutes


def greedy(case: Case) -> PeerPlan | None:
    """The default planner's plan; None if axes are not in mesh order, which it does not plan."""
    in_order = all(is_in_order(layout, case.mesh) for layout in (case.src, case.dst))
    return _find_plan(case, dijkstra=False) if in_order else None


def dijkstra(case: Case) -> PeerPlan | None:
    """The cheapest plan by DTensor's own model; None on meshes with more axes than MAX_DIJKSTRA_AXES."""
    return _find_plan(case, dijkstra=True) if len(case.mesh.axes) <= MAX_DIJKSTRA_AXES else None


def _find_plan(case: Case, *, dijkstra: bool) -> PeerPlan:
    from torch.distributed.tensor import _redistribute

    mesh = _flattened(case.mesh)
    src, dst = (_spec(end, case, mesh) for end in (case.src, case.dst))
    with _hosts():
        _redistribute.clear_redistribute_planner_cache()
        start = time.perf_counter()
        infos = _redistribute._gen_transform_infos_non_cached(src, dst, dijkstra)
        infos = _redistribute._optimize_transform_infos(infos, mesh, src.placements, dst.placements)
        plan_s = time.perf_counter() - start
    spots = [_spot(case.src)]
    kinds = []
    for info in infos:
        before, after = info.src_dst_placements
        flat = isinstance(info, _redistribute._FlattenedTransformInfo)
        axes = tuple(
            case.mesh.axes[i] for i in (info.original_mesh_dims if flat else (info.mesh_dim,))
        )
        if case.mesh.size(*axes) > 1:
            kinds.append(_kind(before, after))
            spots.append(_moved(spots[-1], axes, before, after))
    return PeerPlan(case.mesh, tuple(spots), tuple(kinds), plan_s)


def _spot(layout: xs.Layout) -> Spot:
    return Spot(tuple(dim.axes for dim in layout.dims), layout.tagged("sum"))


def _kind(before: Any, after: Any) -> str:
    """The collective between two placements of one mesh axis."""
    if before.is_partial():
        return "all_reduce" if after.is_replicate() else "reduce_scatter"
    if after.is_partial():
        return "mask"
    if before.is_replicate():
        return "slice"
    return "all_gather" if after.is_replicate() else "all_to_all"


def _moved(spot: Spot, axes: tuple[str, ...], before: Any, after: Any) -> Spot:
    """Axes change their placement: they leave their dim and become the innermost of another."""
    cuts = [tuple(a for a in cut if a not in axes) for cut in spot.cuts]
    sums = tuple(a for a in spot.sums if a not in axes)
    if after.is_partial():
        return Spot(tuple(cuts), sums + axes)
    if not after.is_replicate():
        cuts[after.dim] += axes
    if not before.is_replicate() and not before.is_partial():
        cut = spot.cuts[before.dim]
        if sorted(cut[-len(axes) :]) != sorted(axes):
            raise NotConvertibleError(
                f"{axes} are not the innermost cuts of dim {before.dim} in {spot}"
            )
    return Spot(tuple(cuts), sums)


def _spec(layout: xs.Layout, case: Case, mesh: Any) -> Any:
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    spot = _spot(layout)
    dim_of = {axis: d for d, cut in enumerate(spot.cuts) for axis in cut}
    placements = tuple(
        Partial("sum")
        if axis in spot.sums
        else Shard(dim_of[axis])
        if axis in dim_of
        else Replicate()
        for axis in case.mesh.axes
    )
    order = tuple(
        ShardOrderEntry(d, tuple(map(case.mesh.position, cut)))
        for d, cut in enumerate(spot.cuts)
        if cut
    )
    strides = tuple(math.prod(case.shape[d + 1 :]) for d in range(len(case.shape)))
    meta = TensorMeta(torch.Size(case.shape), strides, getattr(torch, case.dtype))
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)


@contextmanager
def _hosts() -> Iterator[None]:
    """Let hosts have eight devices: DTensor's cost model asks the device type, and a CPU says one."""
    from torch.distributed.tensor import _collective_utils as utils

    utils.MeshTopoInfo.build_from_mesh.cache_clear()
    with mock.patch.object(
        utils._mesh_resources, "num_devices_per_host", return_value=HOST_DEVICES
    ):
        yield
    utils.MeshTopoInfo.build_from_mesh.cache_clear()


def device_mesh(mesh: xs.Mesh) -> Any:
    """The mesh on a fake process group."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not distributed.is_initialized():
        distributed.init_process_group("fake", rank=0, world_size=LARGEST_GROUP, store=FakeStore())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = torch.arange(mesh.n_devices).reshape(mesh.sizes)
        return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes)


@lru_cache(maxsize=256)
def _flattened(mesh: xs.Mesh) -> Any:
    """The mesh on a fake process group, with all its flattened submeshes."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    full = device_mesh(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(2, len(mesh.axes) + 1):
            for axes in itertools.combinations(mesh.axes, n):
                (full if axes == mesh.axes else full[axes])._flatten("_".join(axes))
    return full
