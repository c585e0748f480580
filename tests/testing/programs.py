"""Small sharded programs in torch and in JAX, right, and with the classic mistakes planted in one side.

Long because a program stands beside each of its mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from jax import lax

import jax_bridge as xj
import torch_bridge as xt


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Program(NamedTuple):
    """A function in both frameworks, and what `assert_equivalent` needs beside it."""

    torch: Callable
    jax: Callable
    whole: Callable  # of whole arrays, in JAX
    args: tuple
    layouts: tuple
    mesh: str


class Bug(NamedTuple):
    """A mistake in one side of a program: where it shows, and what the kit must call it."""

    program: str
    side: str
    function: Callable
    array: str  # kind and name of the first mismatch on several devices
    cause: str
    words: str  # in the text of the cause


# Two matrices, cut over tp: columns of the first, rows of the second; then a bias.
def mlp_torch(x, up, down, bias, mesh):
    x = xt.ops.copy_to(x, "tp", mesh)
    return xt.ops.all_reduce(torch.tanh(x @ up) @ down, "tp", mesh, grad="replicated") + bias


def mlp_jax(x, up, down, bias):
    return xj.ops.all_reduce(jnp.tanh(xj.ops.copy_to(x, "tp") @ up) @ down, "tp", grad="replicated") + bias


def mlp_bias_before_reduce(x, up, down, bias, mesh):
    x = xt.ops.copy_to(x, "tp", mesh)
    return xt.ops.all_reduce(torch.tanh(x @ up) @ down + bias, "tp", mesh, grad="replicated")


def mlp_no_reduce(x, up, down, bias, mesh):
    return torch.tanh(xt.ops.copy_to(x, "tp", mesh) @ up) @ down + bias / mesh.n_devices


def mlp_no_gradient_reduce(x, up, down, bias, mesh):
    return xt.ops.all_reduce(torch.tanh(x @ up) @ down, "tp", mesh, grad="replicated") + bias


def mlp_gradient_reduced_twice(x, up, down, bias, mesh):
    x = xt.ops.copy_to(xt.ops.copy_to(x, "tp", mesh), "tp", mesh)
    return xt.ops.all_reduce(torch.tanh(x @ up) @ down, "tp", mesh, grad="replicated") + bias


def mlp_detached(x, up, down, bias, mesh):
    return (
        xt.ops.all_reduce(
            torch.tanh(xt.ops.copy_to(x, "tp", mesh) @ up.detach()) @ down, "tp", mesh, grad="replicated"
        )
        + bias
    )


def mlp_bias_on_first(x, up, down, bias, mesh):
    first = bias if dist.get_rank() == 0 else 0 * bias
    return xt.ops.all_reduce(
        torch.tanh(xt.ops.copy_to(x, "tp", mesh) @ up) @ down + first, "tp", mesh, grad="replicated"
    )


def mlp_psum_twice(x, up, down, bias):
    return lax.psum(lax.psum(jnp.tanh(x @ up) @ down, "tp"), "tp") + 4 * bias


def mlp_short_floats(x, up, down, bias, mesh):
    return mlp_torch(x.bfloat16(), up.bfloat16(), down.bfloat16(), bias.bfloat16(), mesh).float()


# The loss of a data-parallel step.
def loss_torch(x, mesh):
    return xt.redistribute((x**2).mean(), "() | mean(dp) -> ()", mesh)


def loss_jax(x):
    return lax.pmean((x**2).mean(), "dp")


def loss_summed(x, mesh):
    return xt.redistribute((x**2).mean(), "() | sum(dp) -> ()", mesh)


def loss_not_averaged(x, mesh):
    return (x**2).mean()


# All rows, gathered: every device uses its own columns, or all use the same.
def columns_torch(x, scale, w, mesh):
    x = x * xt.ops.copy_to(scale, "tp", mesh)
    return torch.sin(xt.redistribute(x, "n/tp d -> n d | copy(tp)", mesh) @ w)


def columns_jax(x, scale, w):
    return jnp.sin(xj.redistribute(x * xj.ops.copy_to(scale, "tp"), "n/tp d -> n d | copy(tp)") @ w)


def columns_replica(x, scale, w, mesh):
    return torch.sin(xt.redistribute(x * xt.ops.copy_to(scale, "tp", mesh), "n/tp d -> n d", mesh) @ w)


def columns_own_gradient(x, scale, w, mesh):
    x = x * xt.ops.copy_to(scale, "tp", mesh)
    rows = list(xt.redistribute(x.detach(), "n/tp d -> n d", mesh).chunk(mesh.n_devices))
    rows[dist.get_rank()] = x  # of the gathered rows these alone have a gradient
    return torch.sin(torch.cat(rows) @ w)


def rows_torch(x, mesh):
    return torch.sin(xt.redistribute(x, "n/tp d -> n d", mesh))


def rows_jax(x):
    return jnp.sin(xj.redistribute(x, "n/tp d -> n d"))


def rows_gradient_summed(x, mesh):
    return torch.sin(xt.redistribute(x, "n/tp d -> n d | copy(tp)", mesh))


def rows_transposed(x, mesh):
    return rows_torch(x, mesh).T


# A zigzag sequence whose whole rows every device gets for some channels, and positions added to it.
def sequence_torch(x, mesh):
    return xt.redistribute(x, "s/zigzag(cp) d -> s d/cp", mesh)


def sequence_jax(x):
    return xj.redistribute(x, "s/zigzag(cp) d -> s d/cp")


def sequence_contiguous(x, mesh):
    return xt.redistribute(x, "s/cp d -> s d/cp", mesh)


def sequence_contiguous_jax(x):
    return xj.redistribute(x, "s/cp d -> s d/cp")


def zigzag_torch(x, mesh):
    return torch.sin(xt.redistribute(x, "s/cp d -> s/zigzag(cp) d", mesh))


def zigzag_jax(x):
    return jnp.sin(xj.redistribute(x, "s/cp d -> s/zigzag(cp) d"))


def zigzag_swapped(x, mesh):
    head, tail = zigzag_torch(x, mesh).chunk(2)
    return torch.cat([tail, head])


def zigzag_cyclic(x, mesh):
    return torch.sin(xt.redistribute(x, "s/cp d -> s/cyclic(cp) d", mesh))


def positions_torch(x, mesh):
    return x * torch.cos(torch.arange(len(x)) + dist.get_rank() * len(x))[:, None]


def positions_jax(x):
    return x * jnp.cos(jnp.arange(len(x)) + lax.axis_index("cp") * len(x))[:, None]


def positions_local(x, mesh):
    return x * torch.cos(torch.arange(len(x)))[:, None]


def positions_local_jax(x):
    return x * jnp.cos(jnp.arange(len(x)))[:, None]


# The same, of a zigzag.
def chunked_torch(x, mesh):
    return x * torch.cos(xt.positions("s/zigzag(cp) d", mesh, (16, 4), "s"))[:, None]


def chunked_jax(x):
    return x * jnp.cos(xj.positions("s/zigzag(cp) d", shape=(16, 4), dim="s"))[:, None]


# Two layers with square weights.
def square_torch(x, w, v, mesh):
    return torch.tanh(torch.tanh(x @ w) @ v)


def square_jax(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)


def square_transposed(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w.T) @ v)


# Two axes as one, and a slice of a whole array.
def group_torch(x, mesh):
    return xt.redistribute(x, "n/(a,b) d -> n d", mesh)


def group_jax(x):
    return xj.redistribute(x, "n/(a,b) d -> n d")


def group_reversed(x, mesh):
    return xt.redistribute(x, "n/(b,a) d -> n d", mesh)


def part_torch(x, mesh):
    return xt.redistribute(x, "n d -> n/(a,b) d", mesh)


def part_jax(x):
    return xj.redistribute(x, "n d -> n/(a,b) d")


def part_of_first(x, mesh):
    return x.chunk(mesh.n_devices)[0]


def part_of_next(x, mesh):
    return xt.redistribute(x, "n d -> n/(a,b) d", mesh) if mesh.n_devices == 1 else _next(x, mesh)


def _next(x, mesh):
    return x.chunk(mesh.n_devices)[(dist.get_rank() + 3) % mesh.n_devices]


# A convolution of three rows, and the halo that it needs.
def stencil(rows):
    return rows[:-2] + 2 * rows[1:-1] ** 2 + 3 * rows[2:]


def halo_torch(x, mesh):
    return stencil(xt.ops.halo_exchange(x, 1, 0, "sp", mesh))


def halo_jax(x):
    return stencil(xj.ops.halo_exchange(x, 1, 0, "sp"))


def halo_dropped(x, mesh):
    return stencil(torch.nn.functional.pad(x, (0, 0, 1, 1)))


def halo_next_dropped(x, mesh):
    wide = xt.ops.halo_exchange(x, (1, 0), 0, "sp", mesh)
    return stencil(torch.nn.functional.pad(wide, (0, 0, 0, 1)))


def halo_off_by_one(x, mesh):
    return stencil(xt.ops.halo_exchange(x, (0, 2), 0, "sp", mesh))


def halo_off_by_one_jax(x):
    return stencil(xj.ops.halo_exchange(x, (2, 0), 0, "sp"))


def halo_ends_swapped(x, mesh):
    wide = xt.ops.halo_exchange(x, 1, 0, "sp", mesh)
    return stencil(torch.cat([wide[-1:], x, wide[:1]]))


def widened_torch(x, mesh):
    return xt.ops.halo_exchange(x, 1, 0, "sp", mesh)


def widened_jax(x):
    return xj.ops.halo_exchange(x, 1, 0, "sp")


def widened_with_zeros(x, mesh):
    return torch.nn.functional.pad(x, (0, 0, 1, 1))


def widened_off_by_one(x, mesh):
    wide = xt.ops.halo_exchange(x, 2, 0, "sp", mesh)
    return torch.cat([wide[:1], x, wide[-1:]])


_MATRIX, _SQUARE = normal(16, 4), normal(4, 4)

PROGRAMS = {
    "mlp": Program(
        mlp_torch,
        mlp_jax,
        lambda x, up, down, bias: jnp.tanh(x @ up) @ down + bias,
        (normal(6, 4), normal(4, 8, seed=1), normal(8, 5, seed=2), normal(5, seed=3)),
        (("b d", "d f/tp", "f/tp o", "o"), "b o"),
        "tp=4",
    ),
    "loss": Program(loss_torch, loss_jax, lambda x: (x**2).mean(), (_MATRIX,), (("n/dp d",), "()"), "dp=4"),
    "columns": Program(
        columns_torch,
        columns_jax,
        lambda x, scale, w: jnp.sin(x * scale @ w),
        (normal(32, 4), np.array([1, 0.5, 1, 1.5], np.float32), normal(4, 8, seed=1)),
        (("n/tp d", "d", "d f/tp"), "n f/tp"),
        "tp=2",
    ),
    "square": Program(
        square_torch,
        square_jax,
        lambda x, w, v: jnp.tanh(jnp.tanh(x @ w) @ v),
        (normal(8, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)),
        (("n/dp d", "d f | copy(dp)", "d f | copy(dp)"), "n/dp f"),
        "dp=2",
    ),
    "chunked": Program(
        chunked_torch,
        chunked_jax,
        lambda x: x * jnp.cos(jnp.arange(len(x)))[:, None],
        (_MATRIX,),
        (("s/zigzag(cp) d",), "s/zigzag(cp) d"),
        "cp=4",
    ),
    "rows": Program(rows_torch, rows_jax, jnp.sin, (_SQUARE,), (("n/tp d",), "n d"), "tp=4"),
    "sequence": Program(
        sequence_torch, sequence_jax, lambda x: 1.0 * x, (_MATRIX,), (("s/zigzag(cp) d",), "s d/cp"), "cp=4"
    ),
    "zigzag": Program(zigzag_torch, zigzag_jax, jnp.sin, (_MATRIX,), (("s/cp d",), "s/zigzag(cp) d"), "cp=4"),
    "positions": Program(
        positions_torch,
        positions_jax,
        lambda x: x * jnp.cos(jnp.arange(len(x)))[:, None],
        (_MATRIX,),
        (("s/cp d",), "s/cp d"),
        "cp=4",
    ),
    "group": Program(
        group_torch, group_jax, lambda x: 1.0 * x, (_MATRIX,), (("n/(a,b) d",), "n d"), "a=2,b=2"
    ),
    "part": Program(part_torch, part_jax, lambda x: 1.0 * x, (_MATRIX,), (("n d",), "n/(a,b) d"), "a=2,b=2"),
    "halo": Program(
        halo_torch,
        halo_jax,
        lambda x: stencil(jnp.pad(x, ((1, 1), (0, 0)))),
        (_MATRIX,),
        (("h/sp d",), "h/sp d"),
        "sp=4",
    ),
    "widened": Program(
        widened_torch, widened_jax, lambda x: 1.0 * x, (_MATRIX,), (("h/sp d",), "h/sp:halo(1,1) d"), "sp=4"
    ),
}

BUGS = {
    "sum instead of slice": Bug(
        "rows", "torch", rows_gradient_summed, "gradient x", "summed", "4 is the size of tp"
    ),
    "gathered as a replica": Bug(
        "columns", "torch", columns_replica, "gradient x", "replica", "'n/tp d -> n d'; by"
    ),
    "own rows alone have a gradient": Bug(
        "columns", "torch", columns_own_gradient, "gradient x", "one addend", "along tp"
    ),
    "missing 1/n": Bug("loss", "torch", loss_summed, "output output", "summed", "a mean's 1/n is missing"),
    "mean not taken": Bug(
        "loss", "torch", loss_not_averaged, "output output", "not averaged", "mean over dp"
    ),
    "all-reduce left out": Bug("mlp", "torch", mlp_no_reduce, "output output", "not summed", "sum over tp"),
    "gradient not reduced": Bug(
        "mlp", "torch", mlp_no_gradient_reduce, "gradient x", "not summed", "sum over tp"
    ),
    "gradient reduced twice": Bug(
        "mlp", "torch", mlp_gradient_reduced_twice, "gradient x", "summed", "a gradient added up twice"
    ),
    "psum twice": Bug("mlp", "jax", mlp_psum_twice, "output output", "summed", "4 is the size of tp"),
    "bias before the all-reduce": Bug(
        "mlp", "torch", mlp_bias_before_reduce, "output output", "counted argument", "bias is counted 4 times"
    ),
    "detached": Bug("mlp", "torch", mlp_detached, "gradient up", "zero", "detach"),
    "bias on the first device": Bug(
        "mlp", "torch", mlp_bias_on_first, "gradient bias", "only first", "only the first device along tp"
    ),
    "computed in bfloat16": Bug("mlp", "torch", mlp_short_floats, "output output", "rounded", "bfloat16"),
    "contiguous where zigzag": Bug(
        "sequence", "torch", sequence_contiguous, "output output", "moved rows", "zigzag(cp)"
    ),
    "contiguous where zigzag, JAX": Bug(
        "sequence", "jax", sequence_contiguous_jax, "output output", "moved rows", "zigzag(cp)"
    ),
    "cyclic where zigzag": Bug("zigzag", "torch", zigzag_cyclic, "output output", "moved rows", "cyclic(cp)"),
    "head and tail swapped": Bug(
        "zigzag", "torch", zigzag_swapped, "output output", "moved rows", "head and tail swapped"
    ),
    "reversed axis order": Bug("group", "torch", group_reversed, "output output", "moved rows", "n/(b,a)"),
    "stale block of rank 0": Bug(
        "part", "torch", part_of_first, "output output", "stale", "hold the block of the first device"
    ),
    "another rank's block": Bug(
        "part", "torch", part_of_next, "output output", "moved rows", "in another order"
    ),
    "local positions": Bug(
        "positions", "torch", positions_local, "output output", "first only right", "right where cp=0"
    ),
    "local positions, JAX": Bug(
        "positions", "jax", positions_local_jax, "output output", "first only right", "right where cp=0"
    ),
    "local positions of a zigzag": Bug(
        "chunked", "torch", positions_local, "output output", "positions", "the index in the block"
    ),
    "contiguous positions of a zigzag": Bug(
        "chunked", "torch", positions_torch, "output output", "positions", "right in rows 0-1, 10-11 of 's'"
    ),
    "contiguous positions of a zigzag, JAX": Bug(
        "chunked", "jax", positions_jax, "output output", "positions", "those of 's/cp' in place of"
    ),
    "transposed weight": Bug(
        "square", "jax", square_transposed, "output output", "transposed", "right with w transposed"
    ),
    "transposed": Bug("rows", "torch", rows_transposed, "output output", "transposed", "'n' and 'd'"),
    "halo dropped": Bug("halo", "torch", halo_dropped, "output output", "seam", "within 1 row of the seams"),
    "halo of the next dropped": Bug(
        "halo", "torch", halo_next_dropped, "output output", "seam", "at the end of blocks"
    ),
    "halo off by one": Bug("halo", "torch", halo_off_by_one, "output output", "moved rows", "off by 1"),
    "halo off by one, JAX": Bug(
        "halo", "jax", halo_off_by_one_jax, "output output", "moved rows", "off by 1"
    ),
    "halo ends swapped": Bug("halo", "torch", halo_ends_swapped, "output output", "seam", "wrong neighbour"),
    "halo rows of zeros": Bug(
        "widened", "torch", widened_with_zeros, "output output", "halo rows", "nothing was exchanged"
    ),
    "halo rows off by one": Bug(
        "widened", "torch", widened_off_by_one, "output output", "halo rows", "off by 1"
    ),
}
