"""Every step under every transformation of torch's. A chain takes the whole array through layouts and back: a
transformation makes the same of it as of the identity. In integers, so that equality is exact."""

from __future__ import annotations

import functools
import itertools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import on_ranks
from torch_bridge.lower.rules import RULES
from xshard.layout.layout import parse_expression

PAIR = xs.Mesh(a=2)
GRID = xs.Mesh(a=2, b=2)
SHAPE = (8, 4)
Map = Callable[[Tensor], Tensor]

# The step that a chain is for, and the layouts it goes through; a bar between two: read as another.
CHAINS = {
    "AllGather": "n d > n/a d > n d",
    "AllGather, to copies": "n d > n/a d > n d | copy(a) > n d",
    "Slice": "n d > n/a d/b > n d",
    "AllReduce": "n d > n d | sum(a) > n d",
    "AllReduce, to copies": "n d > n d | sum(a) > n d | copy(a) > n d",
    "ReduceScatter": "n d > n d | sum(a) > n/a d > n d",
    "AllToAll": "n d > n/a d > n d/a > n d",
    "Permute": "n d > n/a/b d > n/b/a d > n d",
    "Exchange": "n d > n/zigzag(a) d > n/a d > n d",
    "Exchange, uneven": "n d > n/(a,b) d > n d/(b,a) > n d",
    "Exchange, halo": "n d > n/a d > n/a:halo(1,2,periodic) d > n/a d > n d",
    "Exchange, constant": "n d > n/a d > n/a:halo(1,1,constant(5)) d > n/a d > n d",
    "Exchange, fold": "n d > n/a d > n/a:fold(halo(1,1)) d > n/a d > n d",
    "Embed": "n d > n/a d > n d | sum(a) > n d",
    "Mask": "n d > n d | sum(b) > n d",
    "Retag": "n d > n d | copy(a) > n d",
    "Scale": "n d > n d | mean(a) > n d",
    "Transpose": "n d > d/a n > n/a d > n d",
    "max": "n d > n d | copy(a) = n d | max(a) > n d",
    "min, scattered": "n d > n d | copy(a) = n d | min(a) > n/a d > n d",
}


def moves(chain: str) -> list[str]:
    """The expressions of a chain."""
    legs = [leg.split(">") for leg in chain.split("=")]
    return [f"{a.strip()} -> {b.strip()}" for leg in legs for a, b in itertools.pairwise(leg)]


def mesh_of(chain: str) -> xs.Mesh:
    """The smallest mesh that has the axes of a chain."""
    return GRID if re.search(r"\bb\b", chain) else PAIR


def chains_here() -> dict[str, str]:
    """The chains for as many ranks as there are."""
    return {name: c for name, c in CHAINS.items() if mesh_of(c).n_devices == dist.get_world_size()}


def moved(chain: str, shape: tuple[int, ...] = SHAPE) -> Map:
    mesh = mesh_of(chain)

    def whole(x: Tensor) -> Tensor:
        for expression in moves(chain):
            x = xt.redistribute(x, expression, mesh, shape=in_order(shape, expression, 0))
        return x

    return whole


def test_every_step_has_a_chain() -> None:
    for name, chain in CHAINS.items():
        plans = [xs.plan(e, mesh_of(chain), shape_of(name), "float64") for e in moves(chain)]
        steps = {type(step).__name__ for plan in plans for step in plan.steps}
        assert name.split(",")[0] in steps or name.startswith(("max", "min")), f"{name}: {steps}"
    assert {rule.__name__ for rule in RULES} == {name.split(",")[0] for name in CHAINS} - {
        "max",
        "min",
    }


def in_order(shape: tuple[int, ...], expression: str, side: int) -> tuple[int, ...]:
    """The shape of an array of n and d on one side of an expression, where its dims may change places."""
    lengths = dict(zip("nd", shape, strict=True))
    return tuple(lengths[name] for name in parse_expression(expression)[side].names)


def shape_of(name: str) -> tuple[int, ...]:
    return (7, 5) if name.endswith("uneven") else SHAPE


def array(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


# A transformation of a map at x, with a weight or tangent w.
TABLE: dict[str, Callable[[Map, Tensor, Tensor], Any]] = {
    "func_grad": lambda f, x, w: grad(lambda v: (f(v) ** 3 * w).sum())(x),
    "func_jvp": lambda f, x, w: jvp(lambda v: f(v) ** 3, (x,), (w,)),
    "hvp_forward_over_reverse": lambda f, x, w: jvp(grad(lambda v: (f(v) ** 3).sum()), (x,), (w,)),
    "hvp_reverse_over_forward": lambda f, x, w: grad(
        lambda v: jvp(lambda u: (f(u) ** 3).sum(), (v,), (w,))[1]
    )(x),
    "hvp_reverse_over_reverse": lambda f, x, w: grad(
        lambda v: (grad(lambda u: (f(u) ** 3).sum())(v) * w).sum()
    )(x),
    "vmap": lambda f, x, w: [vmap(f, in_dims=d)(torch.stack([x, w, x - w], d)) for d in (0, 1, -1)],
    "vmap_of_vmap": lambda f, x, w: vmap(vmap(f))(
        torch.stack([torch.stack([x, w]), torch.stack([w, x])])
    ),
    "vmap_of_grad": lambda f, x, w: vmap(grad(lambda v: (f(v) ** 3).sum()))(torch.stack([x, w])),
    "vmap_of_jvp": lambda f, x, w: vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.stack([x, w])),
    "grad_of_vmap": lambda f, x, w: grad(lambda v: (vmap(f)(torch.stack([v, v * w])) ** 2).sum())(
        x
    ),
    "gradcheck": lambda f, x, w: gradcheck(
        lambda v: f(v) ** 2, (x + w / 7).requires_grad_(), fast_mode=True
    ),
    "gradgradcheck": lambda f, x, w: gradgradcheck(
        lambda v: f(v) ** 3, (x + w / 7).requires_grad_(), fast_mode=True
    ),
}


def row(function: Callable[[Map, Tensor, Tensor], Any]) -> Callable[[Map, Tensor, Tensor], Any]:
    """A row of more than an expression."""
    TABLE[function.__name__] = function
    return function


@row
def backward(f: Map, x: Tensor, w: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    (f(leaf) ** 2 * w).sum().backward()
    return leaf.grad


@row
def triple_backward(f: Map, x: Tensor, w: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((f(leaf) ** 3 * w).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((f(first) * w * f(leaf)).sum(), leaf, create_graph=True)
    (third,) = torch.autograd.grad((second * w).sum(), leaf)
    return first.detach(), second.detach(), third


@row
def func_vjp(f: Map, x: Tensor, w: Tensor) -> Any:
    y, pull = vjp(lambda v: f(v) ** 2, x)
    return y, *pull(w)


@row
def dual_numbers(f: Map, x: Tensor, w: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, w)) ** 2))


@row
def jacobians(f: Map, x: Tensor, w: Tensor) -> Any:
    def some(v: Tensor) -> Tensor:
        return (f(v) ** 2)[:2, :2]

    return jacrev(some)(x), jacfwd(some)(x)


@row
def reentrant_checkpoint(f: Map, x: Tensor, w: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    (checkpoint(lambda v: f(v * v), leaf, use_reentrant=True) * w).sum().backward()
    return leaf.grad


@row
def checkpoint_that_is_not_reentrant(f: Map, x: Tensor, w: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    loss = (checkpoint(lambda v: f(v * v), leaf, use_reentrant=False) * w).sum()
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return first.detach(), torch.autograd.grad(first.sum(), leaf)[0]


@row
def inference_mode(f: Map, x: Tensor, w: Tensor) -> Any:
    with torch.inference_mode():
        y = f(x + w)
        assert y.is_inference()
    leaf = w.clone().requires_grad_()  # what was kept serves a gradient that comes later
    (f(leaf) * x).sum().backward()
    return y.clone(), leaf.grad


@row
def autocast(f: Map, x: Tensor, w: Tensor) -> Any:
    leaf = x.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = f(leaf @ w.float().T) if x.shape[0] == x.shape[1] else f((leaf * w).bfloat16())
    assert y.dtype == torch.bfloat16, "a move keeps the dtype that it is given"
    y.float().sum().backward()
    return y.detach(), leaf.grad


def _rows() -> dict[tuple[str, str], str]:
    """What went wrong, by transformation and step, on this rank."""
    wrong = {}

    @functools.cache
    def unmoved(name: str, shape: tuple[int, ...]) -> Any:
        return TABLE[name](torch.clone, array(shape, 1), array(shape, 2))

    for (name, transformed), (step, chain) in itertools.product(
        TABLE.items(), chains_here().items()
    ):
        shape = shape_of(step)
        x = array(shape, 1)
        w = array(shape, 2)
        kept = (x.clone(), w.clone())
        versions = (x._version, w._version)
        try:
            found = transformed(moved(chain, shape), x, w)
            torch.testing.assert_close(found, unmoved(name, shape), rtol=0, atol=0)
            assert torch.equal(x, kept[0]) and torch.equal(w, kept[1])
            assert (x._version, w._version) == versions, "an input was written to"
        except Exception:
            wrong[name, step] = traceback.format_exc()
    return wrong


@pytest.fixture(scope="module")
def wrong() -> list[dict[tuple[str, str], str]]:
    """Of every rank. In processes, not threads: forward-mode levels are global to a process."""
    return [*on_ranks(PAIR.n_devices, _rows), *on_ranks(GRID.n_devices, _rows)]


@pytest.mark.parametrize("name", TABLE)
def test_a_moved_array_is_as_good_as_one_that_is_not(
    name: str, wrong: list[dict[tuple[str, str], str]]
) -> None:
    found = {
        step: text for on_rank in wrong for (row, step), text in on_rank.items() if row == name
    }
    assert not found, "\n".join(f"{step}: {text}" for step, text in found.items())
