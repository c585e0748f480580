"""The program of every process of a test: `python -m tests.interop.processes DEVICES FOLDER` under torchrun.

Torch's ranks and JAX's processes are the same; each writes what it found to a file of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_bridge as xt
import xshard as xs

X = np.arange(16.0 * 24, dtype=np.float32).reshape(16, 24) - 100
THERE = xs.Mesh(dp=4)
HERE = xs.Mesh(a=2, b=2)
MOVES = [
    ("n/dp d", "n/a d/b"),
    ("n/dp d", "n/b d/a"),
    ("n d/zigzag(dp)", "n/a d"),
    ("n d | sum(dp)", "n/(a,b) d"),
    ("n/dp d", "n/(a,b) d"),
]
TORCH_ALONE = [
    ("n d | mean(dp)", "n/a d/b"),
    ("n/sizes(dp,1,7,3,5) d", "n/a d"),
    ("n/dp:halo(1,1) d", "n d/a"),
]


def found(local_devices: int) -> dict[str, object]:
    """Statements about this process, all of them to be true, and the ranks of both frameworks."""
    from jax_bridge import torch_interop

    torch_interop.initialize(local_devices=local_devices)
    torch_interop.initialize(local_devices=local_devices)  # what is set up is left as it is
    import jax

    from tests.interop.helpers import blocks_of, jax_mesh

    me, n = dist.get_rank(), dist.get_world_size()
    mesh = jax_mesh(a=2, b=2)

    def mine(blocks: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        own = blocks[me * local_devices : (me + 1) * local_devices]
        return own[0] if len(own) == 1 else own

    def same(a: object, b: object) -> bool:
        a, b = (x if isinstance(x, list) else [x] for x in (a, b))
        return len(a) == len(b) and all(map(torch.equal, a, b))

    facts: dict[str, object] = {"processes": [jax.process_index(), jax.process_count(), me, n]}
    sides = ("torch", "jax") if local_devices == 1 else ("jax",)
    for i, (src, dst) in enumerate(MOVES):
        before, after = blocks_of(X, src, THERE), blocks_of(X, dst, HERE)
        direct = (src, dst) == MOVES[-1]
        for via in sides if direct else sides[i % len(sides) :][:1]:  # JAX moves them all where it has to
            array = torch_interop.to_jax(mine(before), (src, dst), mesh, torch_mesh=THERE, via=via)
            at = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
            own = [torch.tensor(at[d]) for d in mesh.devices.flat if d in at]
            facts[f"{src} -> {dst} by {via}"] = same(own, mine(after)) and len(at) == local_devices
            back = torch_interop.to_torch(array, (dst, src), THERE, via=via)
            if "sum" not in src:
                facts[f"{dst} -> {src} by {via}"] = same(back, mine(before))
            if direct:
                pointers = [b.data_ptr() for b in (back if isinstance(back, list) else [back])]
                given = mine(before)
                given = given if isinstance(given, list) else [given]
                facts[f"no copy, {via}"] = pointers == [b.data_ptr() for b in given]
    whole = jax.jit(lambda x: x.sum())(
        torch_interop.to_jax(mine(blocks_of(X, "n/a d/b", HERE)), "n/a d/b", mesh)
    )
    facts["a global array"] = float(whole) == X.sum()
    if local_devices == 1:
        facts |= ranks_alone(mesh, torch_interop)
    facts |= functions(mesh, mine, torch_interop)
    return facts | elsewhere(sides, mine, same, torch_interop)


def elsewhere(sides, mine, same, torch_interop) -> dict[str, object]:
    """To the devices of the last two processes, or of the last one, and back."""
    import jax

    from tests.interop.helpers import blocks_of

    facts: dict[str, object] = {}
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = jax.sharding.Mesh(np.array(devices[2:]), ("a",))
    ends = [(THERE, THERE, sides)]
    if len(sides) == 2:
        ends.append((DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",)), xs.Mesh(dp=2), sides))
    for torch_mesh, axes, vias in ends:
        before, after = blocks_of(X, "n/dp d", axes), blocks_of(X, "n d/a", xs.Mesh(a=2))
        if axes.n_devices == 4:
            given = mine(before)
        else:
            rank = dist.get_rank()
            given = before[1 - rank] if rank < 2 else torch.empty(before[0].shape, device="meta")
        for via in vias:
            array = torch_interop.to_jax(given, "n/dp d -> n d/a", mesh, torch_mesh=torch_mesh, via=via)
            held = [np.asarray(shard.data) for shard in array.addressable_shards]
            wanted = [
                b.numpy()
                for b, d in zip(after, devices[2:], strict=True)
                if d.process_index == dist.get_rank()
            ]
            facts[f"elsewhere, {axes} by {via}"] = all(map(np.array_equal, held, wanted)) and len(
                held
            ) == len(wanted)
            back = torch_interop.to_torch(array, "n d/a -> n/dp d", torch_mesh, via=via)
            facts[f"back, {axes} by {via}"] = (
                back is None if axes.n_devices == 2 and dist.get_rank() > 1 else same(back, given)
            )
    return facts


def ranks_alone(mesh, torch_interop) -> dict[str, object]:
    """Facts for one device per process only: moves by torch, and DTensors."""
    from tests.interop.helpers import blocks_of, logged
    from tests.torch_bridge.helpers import error_of

    facts: dict[str, object] = {}
    me = dist.get_rank()
    for src, dst in TORCH_ALONE:
        with logged() as lines:
            array = torch_interop.to_jax(
                blocks_of(X, src, THERE)[me], (src, dst), mesh, torch_mesh=THERE, shape=X.shape
            )
        facts[f"{src} -> {dst}"] = lines == [
            f"torch moves the blocks first: {src} -> {dst}"
        ] and np.array_equal(
            np.asarray(array.addressable_shards[0].data), blocks_of(X, dst, HERE)[me].numpy()
        )
    # The profile says for whom it costs less.
    slow = xs.load_profile("gloo")
    for profile, side in (({"torch": slow, "jax": "h100"}, "jax"), ({"torch": "h100", "jax": slow}, "torch")):
        with logged() as lines:
            torch_interop.to_jax(
                blocks_of(X, "n/dp d", THERE)[me],
                "n/dp d -> n/a d/b",
                mesh,
                torch_mesh=THERE,
                profile=profile,
            )
        facts[f"cheaper by {side}"] = lines[0].startswith(side)
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    local = blocks_of(X, "n/a d/b", HERE)[me]
    x = DTensor.from_local(local, ranks, [Shard(0), Shard(1)])
    array = torch_interop.to_jax(x, "n/a d/b", mesh)
    facts["a DTensor without a copy"] = (
        array.addressable_shards[0].data.unsafe_buffer_pointer() == local.data_ptr()
    )
    back = torch_interop.to_torch(array, "n/a d/b -> n d/(a,b)", ranks, dtensor=True)
    facts["a DTensor of another placement"] = torch.equal(back.full_tensor(), torch.tensor(X))
    # Meshes of other axes, and of ranks in another order.
    turned = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    array = torch_interop.to_jax(
        blocks_of(X, "n/dp d", THERE)[me], "n/dp d -> n d/b", mesh, torch_mesh=turned
    )
    facts["a DeviceMesh"] = np.array_equal(
        np.asarray(array.addressable_shards[0].data), blocks_of(X, "n d/b", HERE)[me].numpy()
    )
    double = torch_interop.from_jax(lambda x: x * 2, "n/a d/b", "n/a d/b", mesh)
    leaf = DTensor.from_local(local.clone().requires_grad_(), ranks, [Shard(0), Shard(1)])
    y = double(leaf)
    y.sum().backward()
    facts["a function of DTensors"] = y.placements == (Shard(0), Shard(1)) and torch.equal(
        y.to_local(), 2 * local
    )
    name, text = error_of(lambda: torch_interop.to_jax(x, "n/b d/a", mesh))
    facts["a DTensor placed otherwise"] = name == "NotationError" and "the DTensor is placed as" in text
    return facts


def functions(mesh, mine, torch_interop) -> dict[str, object]:
    """Each inside the other, over all processes."""
    import jax

    from tests.interop.helpers import blocks_of

    facts: dict[str, object] = {}
    W = np.arange(24.0 * 8, dtype=np.float32).reshape(24, 8) % 5 - 2
    C = np.arange(16.0 * 8, dtype=np.float32).reshape(16, 8) % 7 - 3

    def local(x, w):
        return jax.lax.psum(x @ w, "b")

    specs = jax.P("a", "b"), jax.P("b", None)
    whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("a", None))
    f = torch_interop.from_jax(whole, ("n/a i/b", "i/b o"), "n/a o", mesh)

    def leaves(x):
        return [v.requires_grad_() for v in (x if isinstance(x, list) else [x])]

    x, w = (leaves(mine(blocks_of(v, t, HERE))) for v, t in ((X, "n/a i/b"), (W, "i/b o")))
    one = len(x) == 1
    y = f(*(v[0] if one else v for v in (x, w)))
    y = [y] if one else y
    c, gx, gw = (
        mine(blocks_of(v, t, HERE)) for v, t in ((C, "n/a o"), (C @ W.T, "n/a i/b"), (X.T @ C, "i/b o"))
    )
    c, gx, gw = ([v] if one else v for v in (c, gx, gw))
    gradients = torch.autograd.grad(y, [*x, *w], c)
    facts["from_jax"] = all(map(torch.equal, gradients, [*gx, *gw]))

    # torch's own collectives inside a function of JAX, where a process is a rank.
    move = "n/a/b d -> n d/a/b"

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return xt.redistribute(x * 2, move, HERE) if one else x * 2

    out = "n d/a/b" if one else "n/a/b d"
    g = torch_interop.from_torch(torchs, "n/a/b d", out, mesh)
    array = torch_interop.to_jax(mine(blocks_of(X, "n/a/b d", HERE)), "n/a/b d", mesh)
    result, pull = jax.vjp(jax.jit(g), array)
    (back,) = pull(torch_interop.to_jax(mine(blocks_of(X, out, HERE)), out, mesh))
    for name, made, layout in (("from_torch", result, out), ("its gradient", back, "n/a/b d")):
        blocks = torch_interop.to_torch(made, layout)
        expected = mine(blocks_of(2 * X, layout, HERE))
        pairs = zip([blocks] if one else blocks, [expected] if one else expected, strict=True)
        facts[name] = all(torch.equal(a, b) for a, b in pairs)
    return facts


if __name__ == "__main__":
    result = found(int(sys.argv[1]))
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(result, default=bool))
    dist.barrier()
    dist.destroy_process_group()
