"""Small sharded programs, and the mistakes of sharded code planted in them, written once for torch and JAX.

Long because a program stands beside each of its mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from jax import lax

import jax_bridge as xj
import torch_bridge as xt
from xshard import Mesh


@dataclass(frozen=True)
class Torch:
    """What programs are written with."""

    mesh: Mesh
    np: ModuleType = torch

    def move(self, x: Any, expression: str, shape: Any = None) -> Any:
        return xt.redistribute(x, expression, self.mesh, shape=shape)

    def index(self, axis: str) -> int:
        return self.mesh.index(dist.get_rank(), (axis,))

    def positions(self, layout: str, shape: tuple[int, ...], dim: str) -> Any:
        return xt.positions(layout, self.mesh, shape=shape, dim=dim)

    def detached(self, x: Any) -> Any:
        return x.detach()


@dataclass(frozen=True)
class Jax:
    """The same in JAX."""

    mesh: Mesh
    np: ModuleType = jnp

    def move(self, x: Any, expression: str, shape: Any = None) -> Any:
        return xj.redistribute(x, expression, shape=shape)

    def index(self, axis: str) -> Any:
        return lax.axis_index(axis)

    def positions(self, layout: str, shape: tuple[int, ...], dim: str) -> Any:
        return xj.positions(layout, shape=shape, dim=dim)

    def detached(self, x: Any) -> Any:
        return lax.stop_gradient(x)


@dataclass(frozen=True)
class Whole:
    """The same for unsharded arrays on one device, in JAX: no move changes what an array means."""

    np: ModuleType = jnp

    def move(self, x: Any, expression: str, shape: Any = None) -> Any:
        return jnp.pad(x, ((1, 1), (0, 0))) if expression.endswith(":halo(1,1) d") else x

    def positions(self, layout: str, shape: tuple[int, ...], dim: str) -> Any:
        return jnp.arange(shape[0])


class Program(NamedTuple):
    """A right program, (Torch or Jax, blocks) -> a block; its arguments, their layouts, and the result's.

    whole: the same for unsharded arrays, if it is another function.
    """

    function: Callable
    args: tuple
    layouts: tuple[str, ...]
    result: str
    whole: Callable | None = None


class Mistake(NamedTuple):
    """A wrong twin of a program; what must be said of it.

    array: kind and place of the first mismatch. words: in the text of its cause. first: in the sentence that
    says where the meaning first went wrong. mesh: on which it shows. side: the framework that has it, where
    two are compared.
    """

    program: str
    function: Callable
    array: str
    cause: str
    words: str
    first: str = ""
    mesh: str = "dp=1,tp=2"
    side: str = "torch"


def sharded(library: Callable, program: Callable) -> Callable:
    """The program as a function for the kit; made here, so that it is sent whole and no rank imports JAX."""

    def function(*args, mesh):
        return program(library(mesh), *args)

    return function


def unsharded(program: Callable) -> Callable:
    """The program as a function of unsharded arrays."""
    return lambda *args: program(Whole(), *args)


def together(programs: dict[str, Callable]) -> Callable:
    """Many programs as one, which takes one run for all."""
    return lambda f, given: {name: program(f, *given[name]) for name, program in programs.items()}


def all_of(programs: dict[str, Program]) -> dict[str, Any]:
    """The arguments and layouts of many at once."""
    layouts = {name: list(program.layouts) for name, program in programs.items()}
    return {
        "args": [{name: list(program.args) for name, program in programs.items()}],
        "layouts": ([layouts], {name: program.result for name, program in programs.items()}),
    }


def wide(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return wide(*shape, seed=seed).astype(np.float32)


# Two matrices, cut over tp: columns of the first, rows of the second; both are used by all of dp.
def _mlp(f, x, up, down, bias, *, copied="copy(tp)", into="copy(dp)"):
    x = f.move(x, f"b d -> b d | {copied}") if copied else x
    up = f.move(up, f"d f -> d f | {into}") if into else up
    return f.np.tanh(x @ up) @ f.move(down, "f o -> f o | copy(dp)"), f.move(bias, "o -> o | copy(dp)")


def _summed(f, y, axis="tp"):
    return f.move(y, f"b o | sum({axis}) -> b o")


def mlp(f, *args):
    y, bias = _mlp(f, *args)
    return _summed(f, y) + bias


def copy_forgotten(f, *args):
    y, bias = _mlp(f, *args, copied="")
    return _summed(f, y) + bias


def copied_twice(f, x, *weights):
    return mlp(f, f.move(x, "b d -> b d | copy(tp)"), *weights)


def weight_not_summed(f, *args):
    y, bias = _mlp(f, *args, into="")
    return _summed(f, y) + bias


def deep(f, *args):
    return f.np.sin(mlp(f, *args))


def sum_twice(f, *args):
    y, bias = _mlp(f, *args)
    return f.np.sin(_summed(f, _summed(f, y)) + bias)


def sum_over_other_axis(f, *args):
    y, bias = _mlp(f, *args)
    return f.np.sin(_summed(f, y, "dp") + bias)


def sum_left_out(f, *args):
    y, bias = _mlp(f, *args)
    return y + bias / f.mesh.size("tp")


def bias_before_sum(f, *args):
    y, bias = _mlp(f, *args)
    return _summed(f, y + bias)


# A loss over cut and partly masked examples.
def loss(f, x, mask):
    total = f.move((x**2).sum(1) @ mask, "() | sum(dp) -> ()")
    return total / f.move(mask.sum(), "() | sum(dp) -> ()")


def loss_of_local_counts(f, x, mask):
    return f.move((x**2).sum(1) @ mask / mask.sum(), "() | mean(dp) -> ()")


def loss_over_world(f, x, mask):
    return loss(f, x, mask) / f.mesh.size("dp")


def loss_counted_on_replicas(f, x, mask):
    total = f.move((x**2).sum(1) @ mask, "() | sum(dp,tp) -> ()")
    return total / f.move(mask.sum(), "() | sum(dp) -> ()")


# A loss with a term of the weights that all devices have.
def penalised(f, x, w):
    weights = f.move(w, "d -> d | copy(dp)")
    return f.move(((x * weights) ** 2).sum(), "() | sum(dp) -> ()") + (w**4).sum()


def penalty_before_sum(f, x, w):
    weights = f.move(w, "d -> d | copy(dp)")
    return f.move(((x * weights) ** 2).sum() + (weights**4).sum(), "() | sum(dp) -> ()")


# The norm of parameters, some cut and some replicated; and clipping by it.
def norm(f, cut, whole):
    return f.np.sqrt(f.move((cut**2).sum(), "() | sum(tp) -> ()") + (whole**2).sum())


def norm_counts_replicas(f, cut, whole):
    whole = f.move(whole, "m -> m | copy(tp)")
    return f.np.sqrt(f.move((cut**2).sum() + (whole**2).sum(), "() | sum(tp) -> ()"))


def clipped(f, x):
    return x / f.np.sqrt(f.move(f.move((x**2).sum(), "() | sum(tp) -> ()"), "() -> () | copy(tp)"))


def clipped_by_part(f, x):
    return x / f.np.sqrt((x**2).sum())


def norm_of_cut(f, x):
    return f.np.sqrt(f.move((x**2).sum(), "() | sum(tp) -> ()"))


def norm_of_part(f, x):
    return f.np.sqrt((x**2).sum())


# All rows, gathered: every device uses its own columns, or all use the same.
def columns(f, x, w):
    return f.np.sin(f.move(x, "n/tp d -> n d | copy(tp)") @ w)


def columns_of_replicas(f, x, w):
    return f.np.sin(f.move(x, "n/tp d -> n d") @ w)


def columns_detached(f, x, w):
    return f.np.sin(f.move(f.detached(x), "n/tp d -> n d | copy(tp)") @ w)


def rows(f, x):
    return f.np.sin(f.move(x, "n/tp d -> n d"))


def rows_of_copies(f, x):
    return f.np.sin(f.move(f.move(x, "n/tp d -> n d | copy(tp)"), "n d -> n d"))


# Experts, which each device has some of; the router's weights are used by all of them.
def experts(f, x, router, w, *, copied=True):
    gate = f.np.tanh(x @ router)
    if copied:
        gate = f.move(gate, "t e -> t e | copy(tp)")
    own = f.move(gate, "t e | copy(tp) -> t e/tp")
    x = f.move(x, "t d -> t d | copy(tp)")
    return f.move((own[:, :, None] * (x[:, None, :] * w)).sum(1), "t d | sum(tp) -> t d")


def router_lost(f, x, router, w):
    gate = f.np.tanh(x @ f.detached(router))
    own = f.move(gate, "t e -> t e/tp")
    x = f.move(x, "t d -> t d | copy(tp)")
    return f.move((own[:, :, None] * (x[:, None, :] * w)).sum(1), "t d | sum(tp) -> t d")


def router_not_summed(f, x, router, w):
    return experts(f, x, router, w, copied=False)


# A norm on a cut sequence: its scale is used for all positions.
def scaled(f, x, scale):
    return f.np.tanh(x * f.move(scale, "d -> d | copy(tp)"))


def scale_not_summed(f, x, scale):
    return f.np.tanh(x * scale)


# Positions of a cut sequence.
def rotated(f, x):
    return x * f.np.cos(0.3 * f.positions("s/tp d", (12, 4), "s"))[:, None]


def rotated_locally(f, x):
    return x * f.np.cos(0.3 * f.np.arange(len(x)))[:, None]


def zigzag_rotated(f, x):
    return x * f.np.cos(0.3 * f.positions("s/zigzag(tp) d", (12, 4), "s"))[:, None]


def zigzag_rotated_in_blocks(f, x):
    return rotated(f, x)


def attention(f, q, k, *, rows="s/tp d"):
    keys = f.move(k, "s/tp d -> s d | copy(tp)")
    seen = f.positions(rows, (12, 4), "s")[:, None] >= f.np.arange(12)[None, :]
    weights = f.np.exp(q @ keys.T) * seen
    return weights / weights.sum(1)[:, None] @ keys


def attention_masked_locally(f, q, k):
    keys = f.move(k, "s/tp d -> s d | copy(tp)")
    seen = f.np.arange(len(q))[:, None] >= f.np.arange(12)[None, :]
    weights = f.np.exp(q @ keys.T) * seen
    return weights / weights.sum(1)[:, None] @ keys


def transposed_cut(f, x):
    return f.np.sin(f.move(x, "s/zigzag(tp) d -> s d/tp"))


def contiguous_for_zigzag(f, x):
    return f.np.sin(f.move(x, "s/tp d -> s d/tp"))


# A part of a whole array, and a stencil that needs the rows of neighbours.
def part(f, x):
    return f.np.sin(f.move(x, "n d -> n/tp d"))


def part_of_first(f, x):
    return f.np.sin(x[: len(x) // f.mesh.size("tp")])


def stencil(rows):
    return rows[:-2] + 2 * rows[1:-1] ** 2 + 3 * rows[2:]


def widened_stencil(f, x):
    return stencil(f.move(x, "h/tp d -> h/tp:halo(1,1) d"))


def halo_of_zeros(f, x):
    zeros = 0 * x[:1]
    return stencil(f.np.concatenate([zeros, x, zeros]))


def halo_without_gradient(f, x):
    rows = f.detached(f.move(x, "h/tp d -> h/tp:halo(1,1) d"))
    return stencil(f.np.concatenate([rows[:1], x, rows[-1:]]))


# Mistakes that two frameworks show by blocks that differ between them, on dp=2, tp=4.
def block(f, x, up, down, bias):
    h = f.np.tanh(f.move(x, "b d -> b d | copy(tp)") @ up)
    return f.move(h @ down, "b o | sum(tp) -> b o") + bias


def block_summed_twice(f, x, up, down, bias):
    y = f.move(f.np.tanh(f.move(x, "b d -> b d | copy(tp)") @ up) @ down, "b o | sum(tp) -> b o")
    return f.move(y, "b o | sum(tp) -> b o") + 4 * bias


def block_with_the_bias_of_the_first(f, x, up, down, bias):
    h = f.np.tanh(f.move(x, "b d -> b d | copy(tp)") @ up)
    return f.move(h @ down + bias * (f.index("tp") == 0), "b o | sum(tp) -> b o")


def block_in_bfloat16(f, *args):
    return block(f, *(x.bfloat16() for x in args)).float()


def mean(f, x, kind="mean"):
    return f.move((x**2).mean(), f"() | {kind}(tp) -> ()")


def mean_as_sum(f, x):
    return mean(f, x, "sum")


def mean_of_block(f, x):
    return (x**2).mean()


def scaled_columns(f, x, scale, w, gathered="n d | copy(tp)"):
    x = x * f.move(scale, "d -> d | copy(tp)")
    return f.np.sin(f.move(x, f"n/tp d -> {gathered}") @ w)


def scaled_columns_of_replicas(f, x, scale, w):
    return scaled_columns(f, x, scale, w, "n d")


def scaled_columns_of_own_rows(f, x, scale, w):
    x = x * f.move(scale, "d -> d | copy(tp)")
    rows = list(f.move(x.detach(), "n/tp d -> n d").chunk(f.mesh.size("tp")))
    rows[f.index("tp")] = x  # only these of the gathered rows have a gradient
    return torch.sin(torch.cat(rows) @ w)


def square(f, x, w, v):
    return f.np.tanh(f.np.tanh(x @ w) @ v)


def square_transposed(f, x, w, v):
    return f.np.tanh(f.np.tanh(x @ w.T) @ v)


def chunked(f, x):
    return x * f.np.cos(f.positions("s/zigzag(tp) d", (16, 4), "s"))[:, None]


def chunked_locally(f, x):
    return x * f.np.cos(1.0 * f.np.arange(len(x)))[:, None]


def rows_transposed(f, x):
    return rows(f, x).T


def zigzag(f, x, order="zigzag"):
    return f.np.sin(f.move(x, f"s/tp d -> s/{order}(tp) d"))


def zigzag_as_cyclic(f, x):
    return zigzag(f, x, "cyclic")


def zigzag_swapped(f, x):
    y = zigzag(f, x)
    return f.np.concatenate([y[len(y) // 2 :], y[: len(y) // 2]])


def group(f, x, axes="dp,tp"):
    return 1.0 * f.move(x, f"n/({axes}) d -> n d")


def group_reversed(f, x):
    return group(f, x, "tp,dp")


def eighth(f, x):
    return 1.0 * f.move(x, "n d -> n/(dp,tp) d")


def eighth_of_another(f, x):
    return 1.0 * x.reshape(8, -1, 4)[(4 * f.index("dp") + f.index("tp") + 3) % 8]


def halo(f, x, widths="1,1"):
    return f.move(x, f"h/tp d -> h/tp:halo({widths}) d")


def halo_of_next_dropped(f, x):
    return stencil(f.np.concatenate([halo(f, x)[:-1], 0 * x[:1]]))


def halo_off_by_one(f, x):
    return stencil(halo(f, x, "0,2"))


def halo_ends_swapped(f, x):
    rows = halo(f, x)
    return stencil(f.np.concatenate([rows[-1:], x, rows[:1]]))


def halo_rows_of_zeros(f, x):
    return f.np.concatenate([0 * x[:1], x, 0 * x[:1]])


def halo_rows_off_by_one(f, x):
    rows = halo(f, x, "2,2")
    return f.np.concatenate([rows[:1], x, rows[-1:]])


_MLP = (wide(6, 4), wide(4, 6, seed=1), wide(6, 5, seed=2), wide(5, seed=3))
_SEQUENCE, _MATRIX = wide(12, 4, seed=5), wide(6, 4, seed=6)
_MASK = np.array([1.0, 1, 1, 0, 1, 0])

# fmt: off
PROGRAMS = {
    "mlp": Program(mlp, _MLP, ("b/dp d", "d f/tp", "f/tp o", "o"), "b/dp o"),
    "deep": Program(deep, _MLP, ("b/dp d", "d f/tp", "f/tp o", "o"), "b/dp o"),
    "loss": Program(loss, (_MATRIX, _MASK), ("n/dp d", "n/dp"), "()"),
    "penalised": Program(penalised, (_MATRIX, wide(4, seed=7)), ("n/dp d", "d"), "()"),
    "norm": Program(norm, (wide(6), wide(3, seed=1)), ("n/tp", "m"), "()"),
    "norm of cut": Program(norm_of_cut, (wide(6),), ("n/tp",), "()"),
    "clipped": Program(clipped, (wide(6),), ("n/tp",), "n/tp"),
    "columns": Program(columns, (wide(30, 4), wide(4, 6, seed=1)), ("n/tp d", "d f/tp"), "n f/tp"),
    "rows": Program(rows, (_MATRIX,), ("n/tp d",), "n d"),
    "experts": Program(experts, (wide(5, 3), wide(3, 6, seed=1), wide(6, 3, seed=2)),
        ("t d", "d e", "e/tp d"), "t d"),
    "scaled": Program(scaled, (_MATRIX, wide(4)), ("s/tp d", "d"), "s/tp d"),
    "rotated": Program(rotated, (_SEQUENCE,), ("s/tp d",), "s/tp d"),
    "zigzag": Program(zigzag_rotated, (_SEQUENCE,), ("s/zigzag(tp) d",), "s/zigzag(tp) d"),
    "attention": Program(attention, (_SEQUENCE, wide(12, 4)), ("s/tp d", "s/tp d"), "s/tp d"),
    "sequence": Program(transposed_cut, (wide(12, 6),), ("s/zigzag(tp) d",), "s d/tp"),
    "part": Program(part, (_MATRIX,), ("n d",), "n/tp d"),
    "halo": Program(widened_stencil, (_SEQUENCE,), ("h/tp d",), "h/tp d"),
}
# fmt: on

DP, BOTH = "dp=2,tp=1", "dp=2,tp=3"

# fmt: off
MISTAKES = {
    "copy forgotten": Mistake("mlp", copy_forgotten, "gradient [0]", "not summed",
        "a sum over tp is missing", "after the gradient that comes back to 'd f -> d f"),
    "copied twice": Mistake("mlp", copied_twice, "gradient [0]", "summed", "a gradient added up twice",
        "the gradient that comes back to 'b d -> b d"),
    "weight not summed": Mistake("mlp", weight_not_summed, "gradient [1]", "not summed",
        "a sum over dp is missing", mesh=DP),
    "sum twice": Mistake("deep", sum_twice, "output", "summed", "is the size of tp",
        "what 'b o | sum(tp) -> b o'"),
    "sum over another axis": Mistake("deep", sum_over_other_axis, "output", "another layout",
        "'b/dp o | sum(tp)' are taken for", "what 'b o | sum(dp) -> b o'", mesh=BOTH),
    "sum left out": Mistake("mlp", sum_left_out, "output", "not summed", "a sum over tp is missing",
        "after what"),
    "bias before the sum": Mistake("mlp", bias_before_sum, "output", "counted argument", "[3] is counted",
        "what 'b o | sum(tp) -> b o'"),
    "local counts": Mistake("loss", loss_of_local_counts, "output", "own factors", "own count along dp",
        "what '() | mean(dp) -> ()'", mesh=DP),
    "divided by the world": Mistake("loss", loss_over_world, "output", "averaged", "is the size of dp",
        "after what", mesh=DP),
    "loss counted on replicas": Mistake("loss", loss_counted_on_replicas, "output", "summed",
        "is the size of tp", "what '() | sum(dp,tp) -> ()'"),
    "penalty before the sum": Mistake("penalised", penalty_before_sum, "output", "counted",
        "a part is counted once on every device along dp", "what '() | sum(dp) -> ()'", mesh=DP),
    "norm counts replicas": Mistake("norm", norm_counts_replicas, "output", "counted",
        "of a sum of squares a part", "what '() | sum(tp) -> ()'"),
    "norm of a part": Mistake("norm of cut", norm_of_part, "output", "not summed", "norms of parts"),
    "clipped by a part": Mistake("clipped", clipped_by_part, "output", "own factors",
        "the norm of each one's own part along tp"),
    "gathered as a replica": Mistake("columns", columns_of_replicas, "gradient [0]", "not summed",
        "a sum over tp is missing", "the gradient that comes back to 'n/tp d -> n d'"),
    "gathered without a gradient": Mistake("columns", columns_detached, "gradient [0]", "zero",
        "the path of gradients is cut"),
    "gathered as copies": Mistake("rows", rows_of_copies, "gradient [0]", "summed", "is the size of tp",
        "the gradient that comes back to 'n/tp d -> n d | copy(tp)'"),
    "router lost": Mistake("experts", router_lost, "gradient [1]", "zero", "the path of gradients is cut"),
    "router not summed": Mistake("experts", router_not_summed, "gradient [0]", "not summed",
        "a sum over tp is missing"),
    "scale not summed": Mistake("scaled", scale_not_summed, "gradient [1]", "not summed",
        "a sum over tp is missing"),
    "local positions": Mistake("rotated", rotated_locally, "output", "first only right",
        "right where tp=0"),
    "contiguous positions of a zigzag": Mistake("zigzag", zigzag_rotated_in_blocks, "output", "positions",
        "in place of 's/zigzag(tp)'"),
    "local mask": Mistake("attention", attention_masked_locally, "output", "first only right",
        "right where tp=0", "after what 's/tp d -> s d | copy(tp)'"),
    "contiguous for a zigzag": Mistake("sequence", contiguous_for_zigzag, "output", "moved rows",
        "'s/zigzag(tp)' are taken for 's/tp'", "what 's/tp d -> s d/tp'"),
    "part of the first": Mistake("part", part_of_first, "output", "stale", "the block of the first device"),
    "halo of zeros": Mistake("halo", halo_of_zeros, "output", "seam", "within 1 row of the seams"),
    "halo without a gradient": Mistake("halo", halo_without_gradient, "gradient [0]", "seam",
        "within 1 row of the seams"),
}
# fmt: on

# In JAX all of these are one function: mistakes that leave a trace which needs no other run.
# fmt: off
IN_JAX = (
    "copy forgotten", "weight not summed", "sum left out", "bias before the sum", "divided by the world",
    "gathered as copies", "gathered without a gradient", "router lost", "scale not summed",
    "local positions", "contiguous positions of a zigzag", "contiguous for a zigzag", "halo of zeros",
)
# fmt: on

_BLOCK = (normal(6, 4), normal(4, 8, seed=1), normal(8, 5, seed=2), normal(5, seed=3))
_ROWS = (normal(16, 4),)

# fmt: off
TWINS = {
    "block": Program(block, _BLOCK, ("b d", "d f/tp", "f/tp o", "o"), "b o"),
    "mean": Program(mean, _ROWS, ("n/tp d",), "()"),
    "scaled columns": Program(scaled_columns,
        (normal(32, 4), np.array([1, 0.5, 1, 1.5], np.float32), normal(4, 8, seed=1)),
        ("n/tp d", "d", "d f/tp"), "n f/tp"),
    "square": Program(square, (normal(8, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)),
        ("n/tp d", "d f | copy(tp)", "d f | copy(tp)"), "n/tp f"),
    "chunked": Program(chunked, _ROWS, ("s/zigzag(tp) d",), "s/zigzag(tp) d"),
    "rows": Program(rows, (normal(4, 4),), ("n/tp d",), "n d"),
    "sequence": Program(transposed_cut, _ROWS, ("s/zigzag(tp) d",), "s d/tp"),
    "zigzag": Program(zigzag, _ROWS, ("s/tp d",), "s/zigzag(tp) d"),
    "group": Program(group, _ROWS, ("n/(dp,tp) d",), "n d"),
    "eighth": Program(eighth, _ROWS, ("n d",), "n/(dp,tp) d"),
    "stencil": Program(widened_stencil, _ROWS, ("h/tp d",), "h/tp d"),
    "halo": Program(halo, _ROWS, ("h/tp d",), "h/tp:halo(1,1) d", lambda f, x: 1.0 * x),
}
# fmt: on

# In one of two frameworks: all but `ALONE` are found in one run, on dp=2, tp=4.
# fmt: off
BUGS = {
    "gathered as a replica": Mistake("scaled columns", scaled_columns_of_replicas, "gradient [0]",
        "replica", "'n/tp d -> n d'; by"),
    "own rows alone have a gradient": Mistake("scaled columns", scaled_columns_of_own_rows, "gradient [0]",
        "one addend", "along tp"),
    "transposed weight": Mistake("square", square_transposed, "output", "transposed", "[1] transposed",
        side="jax"),
    "missing 1/n": Mistake("mean", mean_as_sum, "output", "summed", "a mean's 1/n is missing"),
    "mean not taken": Mistake("mean", mean_of_block, "output", "not averaged", "mean over tp"),
    "summed twice": Mistake("block", block_summed_twice, "output", "summed", "4 is the size of tp",
        side="jax"),
    "bias of the first device": Mistake("block", block_with_the_bias_of_the_first, "gradient [3]",
        "only first", "the first device along tp"),
    "computed in bfloat16": Mistake("block", block_in_bfloat16, "output", "rounded", "bfloat16"),
    "contiguous where zigzag": Mistake("sequence", contiguous_for_zigzag, "output", "moved rows",
        "zigzag(tp)", side="jax"),
    "cyclic where zigzag": Mistake("zigzag", zigzag_as_cyclic, "output", "moved rows", "cyclic(tp)"),
    "head and tail swapped": Mistake("zigzag", zigzag_swapped, "output", "moved rows",
        "head and tail swapped"),
    "reversed axis order": Mistake("group", group_reversed, "output", "moved rows", "n/(tp,dp)",
        mesh="dp=2,tp=2"),
    "another rank's block": Mistake("eighth", eighth_of_another, "output", "moved rows",
        "in another order"),
    "local positions of a zigzag": Mistake("chunked", chunked_locally, "output", "positions",
        "the index in the block"),
    "transposed": Mistake("rows", rows_transposed, "output", "transposed", "'n' and 'd'"),
    "halo of the next dropped": Mistake("stencil", halo_of_next_dropped, "output", "seam",
        "at the end of blocks"),
    "halo off by one": Mistake("stencil", halo_off_by_one, "output", "moved rows", "off by 1"),
    "halo off by one, JAX": Mistake("stencil", halo_off_by_one, "output", "moved rows", "off by 1",
        side="jax"),
    "halo ends swapped": Mistake("stencil", halo_ends_swapped, "output", "seam", "wrong neighbour"),
    "halo rows of zeros": Mistake("halo", halo_rows_of_zeros, "output", "halo rows",
        "nothing was exchanged"),
    "halo rows off by one": Mistake("halo", halo_rows_off_by_one, "output", "halo rows", "off by 1"),
}
# fmt: on
# fmt: off
ALONE = (
    "gathered as a replica", "own rows alone have a gradient", "transposed weight", "reversed axis order",
)
# fmt: on
