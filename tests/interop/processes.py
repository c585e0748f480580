"""The program of every process of a test: torch's ranks and JAX's processes are the same."""

from __future__ import annotations

import jax
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_bridge as xt
import xshard as xs
from jax_bridge.torch_interop import from_jax, from_torch, initialize, to_jax, to_torch
from tests.interop.helpers import blocks_of, jax_mesh, logged
from tests.torch_bridge.helpers import error_of

X = np.arange(16.0 * 24, dtype=np.float32).reshape(16, 24) - 100
W = np.arange(24.0 * 8, dtype=np.float32).reshape(24, 8) % 5 - 2
C = np.arange(16.0 * 8, dtype=np.float32).reshape(16, 8) % 7 - 3
THERE = xs.Mesh(dp=4)
HERE = xs.Mesh(a=2, b=2)
MOVES = [
    ("n/dp d", "n/a d/b"),
    ("n/dp d", "n/b d/a"),
    ("n d/zigzag(dp)", "n/a d"),
    ("n d | sum(dp)", "n/(a,b) d"),
    ("n/dp d", "n/(a,b) d"),  # without a copy
]
TORCH_ALONE = [
    ("n d | mean(dp)", "n/a d/b"),
    ("n/sizes(dp,1,7,3,5) d", "n/a d"),
    ("n/dp:halo(1,1) d", "n d/a"),
]
Given = torch.Tensor | list[torch.Tensor]


def listed(x: Given) -> list[torch.Tensor]:
    return x if isinstance(x, list) else [x]


def same(a: Given, b: Given) -> bool:
    return len(listed(a)) == len(listed(b)) and all(map(torch.equal, listed(a), listed(b)))


def mine(layout: str, mesh: xs.Mesh, x: np.ndarray = X) -> Given:
    """The blocks of this process's devices, as torch users have them: a list only if there are several."""
    n = jax.local_device_count()
    me = dist.get_rank()
    own = blocks_of(x, layout, mesh)[me * n : (me + 1) * n]
    return own[0] if n == 1 else own


def held(array: jax.Array) -> list[torch.Tensor]:
    """An array's blocks in this process, in the order of its mesh."""
    at = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return [torch.tensor(at[d]) for d in array.sharding.mesh.devices.flat if d in at]


def moves(mesh: jax.sharding.Mesh, sides: tuple[str, ...]) -> None:
    for i, (src, dst) in enumerate(MOVES):
        before = mine(src, THERE)
        direct = (src, dst) == MOVES[-1]
        for via in (
            sides if direct else sides[i % len(sides) :][:1]
        ):  # JAX moves them all where it has to
            array = to_jax(before, (src, dst), mesh, torch_mesh=THERE, via=via)
            assert same(held(array), mine(dst, HERE)), (src, dst, via)
            back = to_torch(array, (dst, src), THERE, via=via)
            assert "sum" in src or same(back, before), (src, dst, via)
            if direct:
                assert [b.data_ptr() for b in listed(back)] == [
                    b.data_ptr() for b in listed(before)
                ], via
    whole = jax.jit(lambda x: x.sum())(to_jax(mine("n/a d/b", HERE), "n/a d/b", mesh))
    assert float(whole) == X.sum()


def elsewhere(sides: tuple[str, ...]) -> None:
    """To the devices of the last two processes, or of the last one, and back."""
    me = dist.get_rank()
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))[2:]
    mesh = jax.sharding.Mesh(np.array(devices), ("a",))
    after = zip(blocks_of(X, "n d/a", xs.Mesh(a=2)), devices, strict=True)
    wanted = [block for block, device in after if device.process_index == me]
    ends = [(THERE, mine("n/dp d", THERE))]
    if len(sides) == 2:  # from ranks 1 and 0, in this order
        pair = blocks_of(X, "n/dp d", xs.Mesh(dp=2))
        outside = torch.empty(pair[0].shape, device="meta")
        ends += [
            (DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",)), pair[1 - me] if me < 2 else outside)
        ]
    for torch_mesh, given in ends:
        for via in sides:
            array = to_jax(given, "n/dp d -> n d/a", mesh, torch_mesh=torch_mesh, via=via)
            assert same(held(array), wanted), (torch_mesh, via)
            back = to_torch(array, "n d/a -> n/dp d", torch_mesh, via=via)
            assert back is None if torch_mesh is not THERE and me > 1 else same(back, given), (
                torch_mesh,
                via,
            )


def ranks_alone(mesh: jax.sharding.Mesh) -> None:
    """For one device per process only: moves by torch, and DTensors."""
    for src, dst in TORCH_ALONE:
        with logged() as lines:
            array = to_jax(mine(src, THERE), (src, dst), mesh, torch_mesh=THERE, shape=X.shape)
        assert lines == [f"torch moves the blocks first: {src} -> {dst}"] and same(
            held(array), mine(dst, HERE)
        )
    # The profile says for whom it costs less.
    slow = xs.load_profile("gloo")
    for profile, side in (
        ({"torch": slow, "jax": "h100"}, "jax"),
        ({"torch": "h100", "jax": slow}, "torch"),
    ):
        with logged() as lines:
            to_jax(
                mine("n/dp d", THERE), "n/dp d -> n/a d/b", mesh, torch_mesh=THERE, profile=profile
            )
        assert lines[0].startswith(side)
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placed = (Shard(0), Shard(1))
    local = mine("n/a d/b", HERE)
    x = DTensor.from_local(local, ranks, placed)
    array = to_jax(x, "n/a d/b", mesh)
    assert array.addressable_shards[0].data.unsafe_buffer_pointer() == local.data_ptr()
    back = to_torch(array, "n/a d/b -> n d/(a,b)", ranks, dtensor=True)
    assert torch.equal(back.full_tensor(), torch.tensor(X))
    # Meshes of other axes, and of ranks in another order.
    turned = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    array = to_jax(mine("n/dp d", THERE), "n/dp d -> n d/b", mesh, torch_mesh=turned)
    assert same(held(array), mine("n d/b", HERE))
    leaf = DTensor.from_local(local.clone().requires_grad_(), ranks, placed)
    y = from_jax(lambda x: x * 2, "n/a d/b", "n/a d/b", mesh)(leaf)
    y.sum().backward()
    assert y.placements == placed and torch.equal(y.to_local(), 2 * local)
    name, text = error_of(lambda: to_jax(x, "n/b d/a", mesh))
    assert name == "NotationError" and "the DTensor is placed as" in text


def functions(mesh: jax.sharding.Mesh) -> None:
    """Each inside the other, over all processes."""

    def local(x, w):
        return jax.lax.psum(x @ w, "b")

    specs = jax.P("a", "b"), jax.P("b", None)
    whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("a", None))
    f = from_jax(whole, ("n/a i/b", "i/b o"), "n/a o", mesh)
    x = mine("n/a i/b", HERE)
    w = mine("i/b o", HERE, W)
    leaves = [block.requires_grad_() for block in (*listed(x), *listed(w))]
    gradients = torch.autograd.grad(listed(f(x, w)), leaves, listed(mine("n/a o", HERE, C)))
    expected = mine("n/a i/b", HERE, C @ W.T), mine("i/b o", HERE, X.T @ C)
    assert same([*gradients], [*listed(expected[0]), *listed(expected[1])])

    # torch's own collectives inside a function of JAX, where a process is a rank.
    one = jax.local_device_count() == 1
    src = "n/a/b d"
    dst = "n d/a/b" if one else "n/a/b d"
    g = from_torch(
        lambda x: xt.redistribute(x * 2, f"{src} -> {dst}", HERE) if one else x * 2, src, dst, mesh
    )
    result, pull = jax.vjp(jax.jit(g), to_jax(mine(src, HERE), src, mesh))
    (back,) = pull(to_jax(mine(dst, HERE), dst, mesh))
    for array, layout in ((result, dst), (back, src)):
        assert same(to_torch(array, layout), mine(layout, HERE, 2 * X)), layout


def everything(local_devices: int) -> None:
    """What each process does; a failed assertion in one of them ends all."""
    jax.config.update("jax_platforms", "cpu")
    initialize(local_devices=local_devices)
    initialize(local_devices=local_devices)  # what is set up is left as it is
    assert (jax.process_index(), jax.process_count()) == (dist.get_rank(), dist.get_world_size())
    assert jax.local_device_count() == local_devices
    mesh = jax_mesh(a=2, b=2)
    sides = ("torch", "jax") if local_devices == 1 else ("jax",)
    moves(mesh, sides)
    if local_devices == 1:
        ranks_alone(mesh)
    functions(mesh)
    elsewhere(sides)
    dist.barrier()
    dist.destroy_process_group()
