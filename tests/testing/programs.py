"""Small sharded programs for torch and JAX, each beside mistakes of sharded code that are planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

import jax_bridge as xj
import torch_bridge as xt
from xshard import Mesh


@dataclass(frozen=True)
class Torch:
    """What programs are written with."""

    mesh: Mesh
    np: ModuleType = torch

    def move(self, x: Any, expression: str) -> Any:
        return xt.redistribute(x, expression, self.mesh)

    def detached(self, x: Any) -> Any:
        return x.detach()


@dataclass(frozen=True)
class Jax:
    """The same in JAX."""

    mesh: Mesh
    np: ModuleType = jnp

    def move(self, x: Any, expression: str) -> Any:
        return xj.redistribute(x, expression)

    def detached(self, x: Any) -> Any:
        return lax.stop_gradient(x)


def sharded(library: Callable, programs: dict[str, Callable]) -> Callable:
    """Many programs as one function for the kit: one run for all, sent whole, so that no rank imports JAX."""

    def function(given, mesh):
        return {name: program(library(mesh), *given[name]) for name, program in programs.items()}

    return function


def wide(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return wide(*shape, seed=seed).astype(np.float32)


# Two matrices, cut over tp: columns of the first, rows of the second; both are used by all of dp.
def mlp(f, x, up, down, bias, *, copies=1, shared=True, sums=("tp",)):
    for _ in range(copies):
        x = f.move(x, "b d -> b d | copy(tp)")
    up = f.move(up, "d f -> d f | copy(dp)") if shared else up
    y = f.np.tanh(x @ up) @ f.move(down, "f o -> f o | copy(dp)")
    bias = f.move(bias, "o -> o | copy(dp)")
    for axis in sums:
        y = f.move(y, f"b o | sum({axis}) -> b o")
    return y + bias


def deep(f, *args, **options):
    return f.np.sin(mlp(f, *args, **options))


def sum_left_out(f, x, up, down, bias):
    return mlp(f, x, up, down, bias / f.mesh.size("tp"), sums=())


def bias_before_sum(f, *args):
    return f.move(mlp(f, *args, sums=()), "b o | sum(tp) -> b o")


# A loss over cut and partly masked examples.
def loss(f, x, mask, over="dp"):
    total = f.move((x**2).sum(1) @ mask, f"() | sum({over}) -> ()")
    return total / f.move(mask.sum(), "() | sum(dp) -> ()")


def loss_of_local_counts(f, x, mask):
    return f.move((x**2).sum(1) @ mask / mask.sum(), "() | mean(dp) -> ()")


def loss_over_world(f, x, mask):
    return loss(f, x, mask) / f.mesh.size("dp")


# A loss with a term of the weights that all devices have.
def penalised(f, x, w):
    weights = f.move(w, "d -> d | copy(dp)")
    return f.move(((x * weights) ** 2).sum(), "() | sum(dp) -> ()") + (w**4).sum()


def penalty_before_sum(f, x, w):
    weights = f.move(w, "d -> d | copy(dp)")
    return f.move(((x * weights) ** 2).sum() + (weights**4).sum(), "() | sum(dp) -> ()")


# The norm of parameters, some cut and some replicated.
def norm(f, cut, whole):
    return f.np.sqrt(f.move((cut**2).sum(), "() | sum(tp) -> ()") + (whole**2).sum())


def norm_counts_replicas(f, cut, whole):
    whole = f.move(whole, "m -> m | copy(tp)")
    return f.np.sqrt(f.move((cut**2).sum() + (whole**2).sum(), "() | sum(tp) -> ()"))


# All rows, gathered: every device uses its own columns, or all use the same.
def columns(f, x, w, to="n d | copy(tp)"):
    return f.np.sin(f.move(x, f"n/tp d -> {to}") @ w)


def columns_detached(f, x, w):
    return columns(f, f.detached(x), w)


def rows(f, x):
    return f.np.sin(f.move(x, "n/tp d -> n d"))


def rows_of_copies(f, x):
    return f.np.sin(f.move(f.move(x, "n/tp d -> n d | copy(tp)"), "n d -> n d"))


def transposed_cut(f, x, taken="s/zigzag(tp) d"):
    return f.np.sin(f.move(x, f"{taken} -> s d/tp"))


# A stencil that needs the rows of neighbours.
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


# Batch statistics, and a loss with a term of the means of all rows.
def normed(f, x, own=False):
    def mean(rows):
        if own:
            return rows.mean(0)
        return f.move(f.move(rows.sum(0), "d | sum(dp) -> d"), "d -> d | copy(dp)") / 6

    centred = x - mean(x)
    return centred / f.np.sqrt(mean(centred**2))


def balanced(f, x, own=False):
    means = x.mean(0) if own else f.move(x.sum(0), "d | sum(dp) -> d") / 6
    part = f.move((means**2).sum(), "() | mean(dp) -> ()") if own else (means**2).sum()
    return f.move((x**4).sum(), "() | sum(dp) -> ()") + part


def residual(f, x, w, inside=False):
    copied = f.move(x, "n d -> n d | copy(tp)")
    parts = f.np.tanh(copied @ w) @ w.T
    return (
        f.move(parts + copied, "n d | sum(tp) -> n d")
        if inside
        else f.move(parts, "n d | sum(tp) -> n d") + x
    )


def dropped(f, *args):
    return f.np.nn.functional.dropout(mlp(f, *args), 0.5)


class Program(NamedTuple):
    """A right program, (Torch or Jax, blocks) -> a block; its arguments, their layouts, and the result's."""

    function: Callable
    args: tuple
    layouts: tuple[str, ...]
    result: str


_MLP = (wide(6, 4), wide(4, 6, seed=1), wide(6, 5, seed=2), wide(5, seed=3))
_WEIGHTS = ("b/dp d", "d f/tp", "f/tp o", "o")
_MATRIX = wide(6, 4, seed=6)
_MASK = np.array([1.0, 1, 1, 0, 1, 0])

PROGRAMS = {
    "mlp": Program(mlp, _MLP, _WEIGHTS, "b/dp o"),
    "deep": Program(deep, _MLP, _WEIGHTS, "b/dp o"),
    "loss": Program(loss, (_MATRIX, _MASK), ("n/dp d", "n/dp"), "()"),
    "penalised": Program(penalised, (_MATRIX, wide(4, seed=7)), ("n/dp d", "d"), "()"),
    "norm": Program(norm, (wide(6), wide(3, seed=1)), ("n/tp", "m"), "()"),
    "columns": Program(columns, (wide(30, 4), wide(4, 6, seed=1)), ("n/tp d", "d f/tp"), "n f/tp"),
    "rows": Program(rows, (_MATRIX,), ("n/tp d",), "n d"),
    "sequence": Program(transposed_cut, (wide(12, 6),), ("s/zigzag(tp) d",), "s d/tp"),
    "normed": Program(normed, (_MATRIX,), ("n/dp d",), "n/dp d"),
    "balanced": Program(balanced, (_MATRIX,), ("n/dp d",), "()"),
    "residual": Program(residual, (_MATRIX, wide(4, 6, seed=1)), ("n d", "d f/tp"), "n d"),
    "halo": Program(widened_stencil, (wide(12, 4, seed=5),), ("h/tp d",), "h/tp d"),
}


class Mistake(NamedTuple):
    """A wrong twin of a program; the kind and place of the array that shows it first; its cause, and words in
    the sentence about it. first: in the sentence that says where the meaning first went wrong, in torch on
    `mesh`. leaves_a_trace: the blocks alone show the cause, in the same run as those of other mistakes.
    """

    program: str
    function: Callable
    array: str
    cause: str
    words: str
    first: str = ""
    mesh: str = "dp=1,tp=2"
    leaves_a_trace: bool = True


# fmt: off
MISTAKES = {
    "copy forgotten": Mistake("mlp", partial(mlp, copies=0), "gradient [0]", "not summed",
        "a sum over tp is missing", "after the gradient that comes back to 'd f -> d f"),
    "copied twice": Mistake("mlp", partial(mlp, copies=2), "gradient [0]", "summed",
        "a gradient added up twice"),
    "weight not summed": Mistake("mlp", partial(mlp, shared=False), "gradient [1]", "not summed",
        "a sum over dp is missing"),
    "sum over another axis": Mistake("deep", partial(deep, sums=("dp",)), "output", "another layout",
        "'b/dp o | sum(tp)' are taken for", "what 'b o | sum(dp) -> b o'", "dp=2,tp=3", False),
    "sum left out": Mistake("mlp", sum_left_out, "output", "not summed", "a sum over tp is missing",
        "after what"),
    "bias before the sum": Mistake("mlp", bias_before_sum, "output", "counted argument", "[3] is counted"),
    "local counts": Mistake("loss", loss_of_local_counts, "output", "own factors", "own count along dp",
        "what '() | mean(dp) -> ()'", "dp=2,tp=1", False),
    "divided by the world": Mistake("loss", loss_over_world, "output", "averaged", "is the size of dp"),
    "loss counted on replicas": Mistake("loss", partial(loss, over="dp,tp"), "output", "summed",
        "is the size of tp"),
    "penalty before the sum": Mistake("penalised", penalty_before_sum, "output", "counted",
        "a part is counted once on every device along dp", "what '() | sum(dp) -> ()'", "dp=2,tp=1", False),
    "norm counts replicas": Mistake("norm", norm_counts_replicas, "output", "counted",
        "of a sum of squares a part", "what '() | sum(tp) -> ()'", leaves_a_trace=False),
    "gathered as a replica": Mistake("columns", partial(columns, to="n d"), "gradient [0]", "not summed",
        "a sum over tp is missing", "the gradient that comes back to 'n/tp d -> n d'", leaves_a_trace=False),
    "gathered without a gradient": Mistake("columns", columns_detached, "gradient [0]", "zero",
        "the path of gradients is cut"),
    "gathered as copies": Mistake("rows", rows_of_copies, "gradient [0]", "summed", "is the size of tp"),
    "contiguous for a zigzag": Mistake("sequence", partial(transposed_cut, taken="s/tp d"), "output",
        "moved rows", "'s/zigzag(tp)' are taken for 's/tp'"),
    "halo of zeros": Mistake("halo", halo_of_zeros, "output", "seam", "within 1 row of the seams"),
    "batch statistics per device": Mistake("normed", partial(normed, own=True), "output", "own statistics",
        "of its own part along dp"),
    "auxiliary loss per device": Mistake("balanced", partial(balanced, own=True), "output", "own statistics",
        "a loss per rank", "what '() | mean(dp) -> ()'", "dp=2,tp=1", False),
    "residual inside the sum": Mistake("residual", partial(residual, inside=True), "output",
        "counted argument", "[0] is counted"),
    "dropout per device": Mistake("mlp", dropped, "output", "random", "F.dropout", "after what",
        "dp=2,tp=1", False),
    "halo without a gradient": Mistake("halo", halo_without_gradient, "gradient [0]", "seam",
        "within 1 row of the seams"),
}
# fmt: on
